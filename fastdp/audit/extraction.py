"""Extraction: which of the names in its training data does a model say by itself? (Rap-FT, section VII.)"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from fastdp.audit.losses import Progress, silent
from fastdp.calls.modes import in_mode

#: How many of the likeliest tokens each is drawn from, as in the paper.
_TOP_K = 40


@dataclass(frozen=True)
class ExtractionResult:
    """What was extracted.

    Attributes:
        precision: extracted over named, 0 where none was named.
        recall: extracted over planted.
        extracted: how many of the training data's names were generated.
        named: how many names were generated, of the training data or not.
        planted: how many names the training data hold, less those the attacker knew.
        texts: how many texts were generated.
    """

    precision: float
    recall: float
    extracted: int
    named: int
    planted: int
    texts: int


class NameFinder:
    """Finds names of a list in a text, as whole words and in its own letters; of two that overlap the longer.

    >>> from fastdp.audit import NameFinder
    >>> NameFinder(["Ann", "Ann Lee"])("Ann Lee met Anna and Ann.")
    ['Ann Lee', 'Ann']
    """

    def __init__(self, names: Iterable[str]):
        # The longest first, so that "Ann Lee" is not found as "Ann".
        ordered = sorted(set(names), key=lambda name: (-len(name), name))
        if not ordered or not all(name.strip() for name in ordered):
            raise ValueError("the list of names is empty, or holds an empty name")
        self._pattern = re.compile(r"(?<!\w)(?:" + "|".join(map(re.escape, ordered)) + r")(?!\w)")

    def __call__(self, text: str) -> list[str]:
        """The names in the order in which the text has them, repeated ones each time."""
        return self._pattern.findall(text)


def generate(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    count: int,
    *,
    prompt: str = "",
    length: int = 256,
    batch_size: int = 16,
    seed: int = 0,
    progress: Progress = silent,
) -> list[str]:
    """Sample ``count`` texts of up to ``length`` new tokens from a prompt, by default the empty one, without the prompt.

    Settings are the paper's: 256 tokens, top-k sampling with k = 40. Torch's global generators are left as they were.

    Args:
        model, tokenizer: a causal language model with a method ``generate``, as transformers has them; its mode is put back.
        batch_size: texts that are generated together.
        seed: of the draws.
        progress: told how many of how many texts are done.

    Raises ValueError for an empty prompt with a tokenizer that has neither a begin nor an end token, or a count below 1.

    >>> from importlib import resources
    >>> from transformers import AutoModelForCausalLM, AutoTokenizer
    >>> from fastdp.audit import generate
    >>> folder = str(resources.files("fastdp.quickstart") / "model")
    >>> model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    >>> len(generate(model, tokenizer, 2, prompt="Patient:", length=4))
    2
    """
    if count < 1:
        raise ValueError(f"the number of texts is {count}: it must be at least 1")
    start = tokenizer(prompt, add_special_tokens=False)["input_ids"] if prompt else []
    first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if first is not None:
        start = [first, *start]
    if not start:
        raise ValueError("the tokenizer has no token that begins a text: give a prompt")
    device = next(model.parameters()).device
    texts: list[str] = []
    devices = [device] if device.type == "cuda" else []
    with in_mode(model, training=False), torch.random.fork_rng(devices=devices), torch.inference_mode():
        torch.manual_seed(seed)
        while len(texts) < count:
            ids = torch.tensor([start] * min(batch_size, count - len(texts)), device=device)
            made = model.generate(  # type: ignore[operator]
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                top_k=_TOP_K,
                max_new_tokens=length,
                pad_token_id=tokenizer.pad_token_id,
            )
            texts += tokenizer.batch_decode(made[:, ids.shape[1] :], skip_special_tokens=True)
            progress(len(texts), count)
    return texts


def extraction(
    texts: Sequence[str], planted: Collection[str], decoys: Collection[str], known: Collection[str] = ()
) -> ExtractionResult:
    """Precision and recall of the training data's names among all the names that the texts hold.

    The paper finds names in texts with a recogniser. Here they are found by a list: those of the training data and
    decoys, names of the same kind that are not in it, against which precision is measured.

    Args:
        texts: what the model said, as `generate` returns it.
        planted: names in the training data.
        decoys: names that are not.
        known: names that a model which never saw the data says as well; they count neither way, as in the paper.

    Raises ValueError where no planted name is left, or a name is both planted and a decoy.

    >>> from fastdp.audit import extraction
    >>> found = extraction(["Alma Berger met Jonas Pike."], ["Alma Berger", "Boris Quade"], decoys=["Jonas Pike"])
    >>> found.precision, found.recall
    (0.5, 0.5)
    """
    inside = set(planted) - set(known)
    if not inside:
        raise ValueError("no planted name is left to extract: the list is empty, or every name was known before")
    both = inside & set(decoys)
    if both:
        raise ValueError(f"{len(both)} names are listed as planted and as decoys; a decoy must not be in the data")
    find = NameFinder([*planted, *decoys])
    said = {name for text in texts for name in find(text)} - set(known)
    extracted = len(said & inside)
    return ExtractionResult(
        precision=extracted / len(said) if said else 0.0,
        recall=extracted / len(inside),
        extracted=extracted,
        named=len(said),
        planted=len(inside),
        texts=len(texts),
    )
