"""Reconstruction: can a model fill in the name that was struck out of a training sentence? (Rap-FT, section VII.)"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from fastdp.audit.losses import Progress, example_losses, silent
from fastdp.data import Collator, causal_examples


@dataclass(frozen=True)
class Target:
    """A sentence of the training data without a name.

    Attributes:
        before, after, answer: its parts, and the name that stood between them.
    """

    before: str
    after: str
    answer: str

    def filled(self, candidate: str) -> str:
        """The sentence with a candidate in the place of the name."""
        return self.before + candidate + self.after


@dataclass(frozen=True)
class ReconstructionResult:
    """How often the right name came first.

    Attributes:
        top1: share of targets whose likeliest candidate is the answer.
        chance: what choosing a candidate blindly would give.
        targets: how many sentences were attacked.
    """

    top1: float
    chance: float
    targets: int


def strike_out(text: str, name: str) -> Target:
    """The text without the first occurrence of a name.

    Args:
        text, name: a sentence of the training data, and what is struck out of it. Raises ValueError unless it is in the text.

    >>> from fastdp.audit import strike_out
    >>> strike_out("Alma has asthma.", "Alma")
    Target(before='', after=' has asthma.', answer='Alma')
    """
    if not name or name not in text:
        raise ValueError(f"the name {name!r} is not in its text")
    before, _, after = text.partition(name)
    return Target(before, after, name)


def reconstruction(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    targets: Sequence[Target],
    candidates: Sequence[Sequence[str]],
    *,
    max_length: int = 128,
    batch_size: int = 32,
    progress: Progress = silent,
) -> ReconstructionResult:
    """Fill each gap with each of its candidates and choose the one of lowest perplexity.

    A target without candidates, or whose candidates lack the answer, is a failure of the attack. Of equal perplexities
    the candidate that comes first in the alphabet is chosen.

    Args:
        model, tokenizer: of a causal language model.
        targets: sentences with their gaps.
        candidates: for each target, names to try.
        max_length: in tokens, of a filled sentence; longer ones are cut.
        batch_size: filled sentences that go through the model together.
        progress: told how many of how many targets are done.

    Raises ValueError for no targets, or not one list of candidates for each.

    >>> from importlib import resources
    >>> from transformers import AutoModelForCausalLM, AutoTokenizer
    >>> from fastdp.audit import reconstruction, strike_out
    >>> folder = str(resources.files("fastdp.quickstart") / "model")
    >>> model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    >>> target = strike_out("Patient: Anna McCray, aged 52.", "aged")
    >>> reconstruction(model, tokenizer, [target], [["aged", "the", "zebra"]]).top1
    1.0
    """
    if not targets or len(candidates) != len(targets):
        raise ValueError(f"{len(candidates)} lists of candidates for {len(targets)} targets: give one for each")
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    right, chance = 0, 0.0
    for done, (target, names) in enumerate(zip(targets, candidates), start=1):
        tried = sorted(set(names))
        if tried:
            filled = causal_examples(tokenizer, [target.filled(name) for name in tried], max_length)
            losses = example_losses(model, filled.items, Collator(int(pad or 0)), batch_size)
            right += tried[int(torch.argmin(losses))] == target.answer
            chance += (target.answer in tried) / len(tried)
        progress(done, len(targets))
    return ReconstructionResult(right / len(targets), chance / len(targets), len(targets))
