"""Embedding inversion: from the representations that leave a customer back to tokens (SAP, section 4.1).

Nearest row of the embedding table where embeddings themselves are released (Qu et al. 2021); after encoder blocks, the
optimisation of word selection vectors of C. Song and A. Raghunathan, "Information leakage in embedding models" (2020).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

import fastdp.ops as ops
from fastdp.audit.losses import Progress, silent
from fastdp.validate import positive

#: The softmax cools to it geometrically, from 1.
_LAST_TEMPERATURE = 0.05


@dataclass(frozen=True)
class InversionResult:
    """What an attack recovered.

    Attributes:
        recovered, empirical_privacy: share of the tokens that were guessed right; and the rest, the paper's EP.
        tokens: how many were attacked.
    """

    recovered: float
    empirical_privacy: float
    tokens: int


def inversion(guessed: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor | None = None) -> InversionResult:
    """Judge guesses of tokens, as `nearest_tokens` and `optimised_tokens` make them.

    Args:
        guessed: int64 [...].
        ids: the tokens, of the same shape.
        mask: bool of that shape, which of them count; by default all.

    Raises ValueError for shapes that differ, or no token that counts.

    >>> import torch
    >>> from fastdp.audit import inversion
    >>> inversion(torch.tensor([0, 2, 1, 4]), torch.tensor([0, 2, 2, 4])).recovered
    0.75
    """
    if guessed.shape != ids.shape or (mask is not None and mask.shape != ids.shape):
        raise ValueError(f"guesses have shape {list(guessed.shape)} and tokens {list(ids.shape)}: they must be equal")
    hits = (guessed == ids)[torch.ones_like(ids, dtype=torch.bool) if mask is None else mask]
    if not hits.numel():
        raise ValueError("no token was attacked")
    share = float(hits.double().mean())
    return InversionResult(share, 1 - share, hits.numel())


def nearest_tokens(released: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The attack on released embeddings: the nearest row of the table for each, int64 of ``released``'s leading shape.

    Args:
        released: [..., d].
        table: [V, d], the embeddings that the attacker knows.

    Raises ValueError for a table of another width, or rows that are not finite.

    >>> import torch
    >>> from fastdp.audit import nearest_tokens
    >>> nearest_tokens(torch.tensor([[0.9, 0.2, 0.0], [0.0, 0.1, 0.7]]), torch.eye(3))
    tensor([0, 2])
    """
    rows = released.detach().reshape(-1, released.shape[-1])
    return ops.snap(rows, table.detach()).view(released.shape[:-1])


def from_embeddings(
    bottom: Callable[[torch.Tensor], torch.Tensor], embedding: nn.Module
) -> Callable[[torch.Tensor], torch.Tensor]:
    """A bottom model of ids as one of embeddings: the output of its embedding layer is replaced.

    Args:
        bottom: ids int64 [B, T] -> representations [B, T, d].
        embedding: the module inside it that looks the ids up, called once.

    The result takes embeddings [B, T, e], and gradients flow through it. Raises nothing of its own.

    >>> import torch
    >>> from fastdp.audit import from_embeddings
    >>> embedding = torch.nn.Embedding(5, 3)
    >>> bottom = torch.nn.Sequential(embedding, torch.nn.Linear(3, 3))
    >>> torch.equal(from_embeddings(bottom, embedding)(embedding.weight[None]), bottom(torch.arange(5)[None]))
    True
    """

    def run(embeddings: torch.Tensor) -> torch.Tensor:
        handle = embedding.register_forward_hook(lambda module, arguments, output: embeddings.to(output.dtype))
        try:
            return bottom(torch.zeros(embeddings.shape[:2], dtype=torch.int64, device=embeddings.device))
        finally:
            handle.remove()

    return run


def optimised_tokens(
    released: torch.Tensor,
    bottom: Callable[[torch.Tensor], torch.Tensor],
    table: torch.Tensor,
    *,
    steps: int = 200,
    learning_rate: float = 0.3,
    progress: Progress = silent,
) -> torch.Tensor:
    """The attack on deeper splits: word selection vectors that reproduce what was released, int64 [B, T].

    Each token is a softmax over the vocabulary; the mix of embeddings that it selects goes through the bottom model, and
    the squared distance to what was released is minimised by Adam. The softmax cools from step to step: at one temperature
    a mix of several words can reproduce a representation as well as the word itself. The likeliest word is the guess.

    Args:
        released: [B, T, d], of sequences of one length without padding.
        bottom: embeddings [B, T, e] -> representations [B, T, d], as `from_embeddings` makes it; deterministic.
        table: [V, e], the embedding layer's rows. Memory is that of B T V numbers, four times.
        steps, learning_rate: of Adam.
        progress: told how many of how many steps are done.

    Raises ValueError for a released tensor that is not [B, T, d], or a setting that is not positive.

    >>> import torch
    >>> from fastdp.audit import from_embeddings, optimised_tokens
    >>> embedding = torch.nn.Embedding.from_pretrained(torch.eye(3))
    >>> bottom = torch.nn.Sequential(embedding, torch.nn.Tanh())
    >>> secret = bottom(torch.tensor([[2, 0, 1]]))
    >>> optimised_tokens(secret, from_embeddings(bottom, embedding), embedding.weight, steps=50)
    tensor([[2, 0, 1]])
    """
    if released.dim() != 3:
        raise ValueError(f"released has shape {list(released.shape)}: it must be [sequences, tokens, width]")
    positive(steps=steps, learning_rate=learning_rate)
    table, released = table.detach().float(), released.detach().float()
    selection = torch.zeros(*released.shape[:2], table.shape[0], device=released.device, requires_grad=True)
    optimizer = torch.optim.Adam([selection], lr=learning_rate)
    for step in range(steps):
        temperature = _LAST_TEMPERATURE ** (step / steps)
        mixed = torch.softmax(selection / temperature, -1) @ table
        distance = (bottom(mixed).float() - released).square().sum()
        (selection.grad,) = torch.autograd.grad(distance, [selection])
        optimizer.step()
        progress(step + 1, steps)
    return selection.detach().argmax(-1)
