"""Where relevance starts: what of a model's output is to be explained (section V-B of the paper)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fastdp.methods.removed import replace_removed
from fastdp.validate import rate

_LIKELY = 128


@replace_removed
@dataclass(frozen=True)
class Initialisation:
    """The relevance of a language model's output: the likeliest tokens of each position whose probabilities reach p together.

    For classification it is one-hot (`one_hot`).

    Args:
        p: that threshold, in (0, 1]; 1 takes the whole softmax (the paper's naive form).
    """

    p: float = 0.9

    def __post_init__(self) -> None:
        rate(p=self.p)

    def generation(self, logits: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
        """Relevance ``[N, V]`` of the N positions that count, of logits ``[B, T, V]`` and bool ``[B, T]``.

        A position's sum is the probability it keeps.
        """
        probabilities = torch.softmax(logits[counted].float(), -1)
        if self.p == 1:
            return probabilities
        # A few of the likeliest tokens are enough for most positions, and sorting all is most of a map's time.
        out = self._nucleus(probabilities, min(_LIKELY, probabilities.shape[-1]))
        short = out.sum(-1) < self.p
        if bool(short.any()):
            out[short] = self._nucleus(probabilities[short], probabilities.shape[-1])
        return out

    def _nucleus(self, probabilities: torch.Tensor, most: int) -> torch.Tensor:
        ordered, tokens = probabilities.topk(most, -1)
        # The token that carries the sum past p is kept as well.
        inside = ordered.cumsum(-1) - ordered < self.p
        return torch.zeros_like(probabilities).scatter_(-1, tokens, torch.where(inside, ordered, 0.0))


def one_hot(logits: torch.Tensor, labels: torch.Tensor | None) -> torch.Tensor:
    """Relevance ``[B, classes]``: 1 at the label, or at the likeliest class where there are no labels."""
    target = logits.argmax(-1) if labels is None else labels.reshape(-1)
    return torch.nn.functional.one_hot(target, logits.shape[-1]).to(torch.float32)
