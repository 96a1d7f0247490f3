"""The loss of each example under a model: what a black-box attacker sees of a language model or classifier."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from fastdp.calls.modes import in_mode
from fastdp.data import IGNORED, Collator

#: Told how many of how many are done.
Progress = Callable[[int, int], None]


def silent(done: int, total: int) -> None:
    """Progress that nobody watches."""


def example_losses(
    model: nn.Module,
    examples: Sequence[dict[str, Any]],
    collator: Collator,
    batch_size: int = 32,
    progress: Progress = silent,
) -> torch.Tensor:
    """Mean cross-entropy over each example's labelled tokens, or its label, in nats: float64 [N], on the CPU.

    The perplexity of a text is its exponential. Without gradients and dropout; the model's mode is put back.

    Args:
        model: gives ``logits``, [N, T, V] of tokens or [N, classes], as transformers' models do.
        examples: as `fastdp.data.causal_examples` or `classification_examples` make them.
        collator: with the padding token of the model.
        batch_size: examples that go through the model together.
        progress: told how many of how many examples are done.

    Raises ValueError for no examples, or one without a labelled token.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> from fastdp.audit import example_losses, random_sequences
    >>> from fastdp.data import Collator
    >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=50))
    >>> example_losses(model, random_sequences(3, 8, vocabulary=50), Collator(0)).shape
    torch.Size([3])
    """
    if not len(examples):
        raise ValueError("there are no examples to attack")
    device = next(model.parameters()).device
    # By length, which spares padding and changes no example's loss.
    order = sorted(range(len(examples)), key=lambda index: len(examples[index]["input_ids"]))
    losses = torch.zeros(len(examples), dtype=torch.float64)
    with in_mode(model, training=False), torch.inference_mode():
        for start in range(0, len(order), batch_size):
            chosen = order[start : start + batch_size]
            batch = {key: value.to(device) for key, value in collator([examples[i] for i in chosen]).items()}
            labels = batch.pop("labels")
            losses[torch.tensor(chosen)] = _losses(model(**batch).logits.float(), labels).double().cpu()
            progress(min(start + batch_size, len(order)), len(order))
    if bool(torch.isnan(losses).any()):
        raise ValueError(f"example {int(torch.isnan(losses).nonzero()[0])} has no labelled token, and so no loss")
    return losses


def _losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    if labels.dim() == 1:
        return F.cross_entropy(logits, labels, reduction="none")
    # Soft prompts put their own positions in front: the text's are the last ones.
    logits, labels = logits[:, -labels.shape[1] :][:, :-1], labels[:, 1:]
    each = F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=IGNORED, reduction="none")
    return each.sum(1) / (labels != IGNORED).sum(1)
