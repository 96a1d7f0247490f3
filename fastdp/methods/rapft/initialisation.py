"""Where relevance starts: what of a model's output is to be explained (section V-B of the paper)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

KINDS = ("naive", "top_k", "top_p", "beam")
_LIKELY = 128


@dataclass(frozen=True)
class Initialisation:
    """The relevance of the output: one-hot for classification, (part of) the distribution of the next token otherwise.

    Args:
        kind: ``naive`` takes the whole softmax; ``top_k`` the k likeliest tokens of each position; ``top_p`` the likeliest
            whose probabilities reach p together; ``beam`` the tokens on the b likeliest paths through the sentence.
        k, p, beams: those thresholds.

    Raises ValueError for an unknown kind or a threshold out of range.
    """

    kind: str = "top_p"
    k: int = 5
    p: float = 0.9
    beams: int = 5

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"the initialisation of relevance is '{self.kind}': choose one of {', '.join(KINDS)}")
        if self.k < 1 or self.beams < 1:
            raise ValueError(f"k and beams must be at least 1, not {self.k} and {self.beams}")
        if not 0 < self.p <= 1:
            raise ValueError(f"p is {self.p}: it must lie in (0, 1]")

    def generation(self, logits: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
        """Relevance of the positions that count.

        Args:
            logits: ``[B, T, V]``.
            counted: bool ``[B, T]``, which positions are explained; N of them.

        Returns:
            ``[N, V]``, in the order of ``logits[counted]``; a position's sum is the probability it keeps.
        """
        probabilities = torch.softmax(logits[counted].float(), -1)
        if self.kind == "naive":
            return probabilities
        if self.kind == "top_p":
            return self._nucleus(probabilities)
        if self.kind == "top_k":
            return _kept(probabilities, probabilities.topk(min(self.k, logits.shape[-1]), -1).indices)
        return _kept(probabilities, self._beams(probabilities, counted))

    def _nucleus(self, probabilities: torch.Tensor) -> torch.Tensor:
        # A few of the likeliest tokens are enough for most positions, and sorting all is most of a map's time.
        out = self._nucleus_of(probabilities, min(_LIKELY, probabilities.shape[-1]))
        short = out.sum(-1) < self.p
        if bool(short.any()):
            out[short] = self._nucleus_of(probabilities[short], probabilities.shape[-1])
        return out

    def _nucleus_of(self, probabilities: torch.Tensor, most: int) -> torch.Tensor:
        ordered, tokens = probabilities.topk(most, -1)
        # The token that carries the sum past p is kept as well.
        inside = ordered.cumsum(-1) - ordered < self.p
        return torch.zeros_like(probabilities).scatter_(-1, tokens, torch.where(inside, ordered, 0.0))

    def _beams(self, probabilities: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
        """Tokens ``[N, b]`` of the b paths of greatest probability, extended position by position along the given text."""
        b = min(self.beams, probabilities.shape[-1])
        values, found = probabilities.log().topk(b, -1)
        rows, length = counted.shape
        # Where nothing is explained there is one way on, at no cost.
        choices = values.new_full((rows, length, b), -torch.inf)
        choices[..., 0] = 0.0
        choices[counted] = values
        tokens = found.new_zeros((rows, length, b))
        tokens[counted] = found
        scores = values.new_full((rows, b), -torch.inf)
        scores[:, 0] = 0.0
        parents, picked = [], []
        for t in range(length):
            extended = (scores.unsqueeze(2) + choices[:, t].unsqueeze(1)).flatten(1)
            scores, index = extended.topk(b, -1)
            parents.append(index // b)
            picked.append(tokens[:, t].gather(1, index % b))
        paths = []
        beam = torch.arange(b, device=values.device).expand(rows, b)
        for parent, tokens_at in zip(reversed(parents), reversed(picked)):
            paths.append(tokens_at.gather(1, beam))
            beam = parent.gather(1, beam)
        return torch.stack(paths[::-1], 1)[counted]


def _kept(probabilities: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(probabilities).scatter(-1, tokens, probabilities.gather(-1, tokens))


def one_hot(logits: torch.Tensor, labels: torch.Tensor | None) -> torch.Tensor:
    """Relevance ``[B, classes]``: 1 at the label, or at the likeliest class where there are no labels."""
    target = logits.argmax(-1) if labels is None else labels.reshape(-1)
    return torch.nn.functional.one_hot(target, logits.shape[-1]).to(torch.float32)
