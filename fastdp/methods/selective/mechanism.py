"""The exponential mechanism over a vocabulary: as the paper prints it, and in a form whose guarantee holds.

With x the private token, w a candidate, dist their rows' Euclidean distance:

* ``local``: Pr[w | x] ~ exp(-k min(dist, R) / (2 R)) over the whole vocabulary. The weights of any two tokens differ by a
  factor of at most exp(k / 2), and so do their sums: k-local DP at the strength k. On the public table the sums differ by
  less: `TokenMechanism.epsilon` says what a strength costs, and `TokenMechanism.strength` finds the largest that an epsilon
  allows.
* ``paper``: Pr[w | x] ~ exp(-epsilon alpha dist / (4 d)) among the tokens within distance d of x (equations 2 to 5). The
  candidates differ from token to token, so what one can become, another cannot. A token without a neighbour is sent as it
  is. **No epsilon holds**.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fastdp.accounting.weights import named_digest
from fastdp.methods.exact import log_normalisers
from fastdp.methods.response import uniform_fractions
from fastdp.ops.choice import choice_log_probabilities, exponential_choice
from fastdp.ops.stream import NoiseStream
from fastdp.validate import one_of, positive

FORMS = ("local", "paper")
# Rows of distances that one step of the paper's form holds.
_CHUNK = 64
# Strengths tried between an epsilon and twice that, and what was found for a table and an epsilon.
_STEPS = 16
_STRENGTHS: dict[tuple[str, float], float] = {}


def paper_probabilities(
    token: int, table: Tensor, epsilon: float, radius: float, alpha: float = 1.0, candidates: Tensor | None = None
) -> Tensor:
    """The law that the paper prints for one private token: float64 [V], zero outside its radius (equations 2 to 5).

    The table holds rows [V, d], or [V] numbers; the radius is d of equation 2; ``candidates`` [V] may be drawn, None for all.
    """
    positive(epsilon=epsilon, radius=radius, alpha=alpha)
    rows = table.double() if table.dim() > 1 else table.double().unsqueeze(1)
    if not 0 <= token < len(rows):
        raise IndexError(f"token {token} is outside a table of {len(rows)} rows")
    epsilons = torch.tensor([epsilon], dtype=torch.float64)
    return _paper_laws(torch.tensor([token]), rows, epsilons, radius, alpha, candidates)[0]


def _paper_laws(
    tokens: Tensor, rows: Tensor, epsilons: Tensor, radius: float, alpha: float, candidates: Tensor | None
) -> Tensor:
    """Laws of several tokens, [n, V] float64, each at its own epsilon."""
    # By matrix product, a hundred times faster: in float64 it errs near 1e-8, except between a row and itself.
    distances = torch.cdist(rows[tokens], rows, compute_mode="use_mm_for_euclid_dist")
    distances = distances.to(tokens.device)
    distances[torch.arange(len(tokens)), tokens] = 0.0
    outside = distances > radius
    if candidates is not None:
        # The token itself stays a candidate, as printed: otherwise one without a neighbour could not be replaced at all.
        outside |= ~candidates
        outside[torch.arange(len(tokens)), tokens] = False
    weights = -epsilons[:, None] * alpha * distances / (4 * radius)
    return weights.masked_fill(outside, -math.inf).softmax(1)


@dataclass(frozen=True)
class TokenMechanism:
    """One form of the mechanism, ``local`` or ``paper``, on one public table."""

    form: str
    #: Float rows [V, d]; the same for all who train together. Draws are made where it is.
    table: Tensor
    #: R or d above, in the table's unit of distance.
    radius: float
    #: The paper's factor.
    alpha: float = 1.0
    #: Tokens that may be drawn, bool [V], or None for all; public.
    candidates: Tensor | None = None

    def __post_init__(self) -> None:
        one_of(FORMS, mechanism=self.form)
        _check_table(self.table)
        positive(radius=self.radius, alpha=self.alpha)
        if self.candidates is not None and int(self.candidates.sum()) < 2:
            raise ValueError("fewer than two tokens may be drawn: every private token would become the same one")

    def __len__(self) -> int:
        return len(self.table)

    def epsilon(self, strength: float) -> float:
        """What a draw at this strength costs: an upper bound, at most the strength; inf for the paper's form."""
        return self._costs([strength])[0]

    def strength(self, epsilon: float) -> float:
        """The largest strength, of `_STEPS` tried from epsilon to twice that, at which a draw costs at most ``epsilon``.

        One pass over the distances of the table; kept for tables that come again. For the paper's form, which costs more than
        any epsilon, it is epsilon itself.
        """
        if self.form == "paper":
            return epsilon
        key = (self._name, epsilon)
        if key not in _STRENGTHS:
            # At epsilon / 2 each, weights and sums alone cannot pass epsilon; at twice that the weights alone reach it.
            tried = [epsilon * (1 + step / _STEPS) for step in range(_STEPS)]
            costs = self._costs(tried)
            _STRENGTHS[key] = max(k for k, cost in zip(tried, costs) if k == epsilon or cost <= epsilon)
        return _STRENGTHS[key]

    def _costs(self, strengths: Sequence[float]) -> list[float]:
        if self.form == "paper":
            return [math.inf] * len(strengths)
        scales = [k / (2 * self.radius) for k in strengths]
        logs, error = log_normalisers(self.table, scales, self.radius, self._prior)
        spread = (logs.amax(1) - logs.amin(1) + 2 * error).tolist()
        return [min(k, k / 2 + more) for k, more in zip(strengths, spread)]

    @cached_property
    def _name(self) -> str:
        named = {"table": self.table, "candidates": self.candidates}
        return f"{self.radius} {named_digest({name: own for name, own in named.items() if own is not None})}"

    @cached_property
    def _prior(self) -> Tensor | None:
        if self.candidates is None:
            return None
        return torch.zeros(len(self.table), dtype=torch.float64).masked_fill(~self.candidates, -math.inf)

    def log_probabilities(self, token: int, epsilon: float) -> Tensor:
        """Exact law of one private token: log probabilities, float64 [V], -inf for what cannot be drawn."""
        if self.form == "paper":
            return paper_probabilities(token, self.table, epsilon, self.radius, self.alpha, self.candidates).log()
        law = choice_log_probabilities(
            token, self.table, epsilon / (2 * self.radius), self.radius, log_prior=self._prior
        )
        return law.double().cpu()

    def draw(self, ids: Tensor, epsilon: float | Tensor, stream: NoiseStream) -> Tensor:
        """One independent draw for each id, at ``epsilon`` (a number, or float64 like ``ids``): int64 [n] to [n]."""
        epsilons = torch.as_tensor(epsilon, dtype=torch.float64)
        if not bool((torch.isfinite(epsilons) & (epsilons > 0)).all()):
            raise ValueError("every epsilon must be positive and finite")
        if not ids.numel():
            return ids.clone()
        if not 0 <= int(ids.min()) <= int(ids.max()) < len(self.table):
            raise IndexError(f"an id lies outside the table of {len(self.table)} rows")
        if self.form == "paper":
            return self._draw_paper(ids, epsilons.expand(ids.shape), stream)
        scales = epsilons / (2 * self.radius)
        scale = scales if scales.dim() else float(scales)
        return exponential_choice(ids, self.table, scale, stream, self.radius, log_prior=self._prior)

    def _draw_paper(self, ids: Tensor, epsilons: Tensor, stream: NoiseStream) -> Tensor:
        """Draws of the paper's form; the law of ids that share a token and an epsilon is computed once."""
        rows = self.table.double()
        laws, law_of = torch.stack([ids.double(), epsilons]).unique(dim=1, return_inverse=True)
        draws = uniform_fractions(len(ids), stream)
        result = torch.empty_like(ids)
        sharing = torch.argsort(law_of, stable=True).split(torch.bincount(law_of).tolist())
        for start in range(0, laws.shape[1], _CHUNK):
            tokens, strengths = laws[0, start : start + _CHUNK].long(), laws[1, start : start + _CHUNK]
            ends = _paper_laws(tokens, rows, strengths, self.radius, self.alpha, self.candidates).cumsum(1)
            for end, mine in zip(ends, sharing[start : start + _CHUNK]):
                result[mine] = torch.searchsorted(end, draws[mine] * end[-1], right=True)
        return result


def public_radius(table: Tensor) -> float:
    """The median distance between some 512 evenly spaced rows of a public table: the radius where none is given.

    Computed from public data alone and without randomness, so that all who hold the table agree on it.
    """
    _check_table(table)
    step = max(1, len(table) // 512)
    # On a processor, whatever the table's device: all who hold it must find the same number.
    sample = table[::step].cpu().double()
    distances = torch.pdist(sample)
    positive = distances[distances > 0]
    if not len(positive):
        farthest = table[(table - table[0]).norm(dim=1).argmax()]
        sample = torch.stack([sample[0], farthest.cpu().double()])
        positive = torch.pdist(sample)
    return float(positive.median())


def diameter_bound(table: Tensor) -> float:
    """An upper bound of the distance between any two rows: twice the largest distance from their mean."""
    wide = table.double()
    return 2 * float((wide - wide.mean(0)).norm(dim=1).max())


def _check_table(table: Tensor) -> None:
    if table.dim() != 2 or len(table) < 2 or not table.is_floating_point():
        raise ValueError("the table must be a matrix of floating-point rows, one a token, at least two of them")
    if not bool(torch.isfinite(table).all()):
        raise ValueError("the table holds a NaN or an infinity: take another model's embedding")
    if bool((table == table[0]).all()):
        raise ValueError("all rows of the table are equal: it says nothing about tokens; take a trained embedding")
