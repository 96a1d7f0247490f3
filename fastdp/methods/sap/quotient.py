"""Contributing tokens as a quotient: what a token tells of the classes is sent by randomised response, and nothing else is.

Public utility importance cuts the vocabulary into K cells of equal mass. A token's cell goes by k-ary randomised response at
epsilon, and the answer's public representative stands in the token's place. Tokens of one cell have the same law and cannot be
told apart at all; any other two, by odds of at most exp(epsilon), however far they lie apart.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fastdp.methods.response import check_response, keep_probability, randomised_response
from fastdp.ops.stream import NoiseStream


def equal_mass_cells(importance: Tensor, mass: Tensor, cells: int) -> Tensor:
    """Cut tokens into cells of like importance and equal mass: int64 [tokens], each cell with a token that has mass.

    The tokens are halved again and again, by mass in the proportion of the numbers of cells, along the class whose importance
    [classes, tokens] varies most among them. For two classes the cells are quantiles. The mass of a token is how often it
    occurs in the texts that were counted.
    """
    mass = torch.as_tensor(mass).double()
    if mass.shape != importance.shape[1:] or not bool((torch.isfinite(mass) & (mass >= 0)).all()):
        raise ValueError("mass must be one number for each token, finite and at least 0")
    if isinstance(cells, bool) or not isinstance(cells, int) or not 2 <= cells <= int((mass > 0).sum()):
        raise ValueError(
            f"cells is {cells!r}: it must be a whole number from 2 to the {int((mass > 0).sum())} tokens that occur in the "
            "texts that were counted"
        )
    found = torch.zeros(len(mass), dtype=torch.int64)
    waiting = [(torch.arange(len(mass)), 0, cells)]
    while waiting:
        tokens, first, count = waiting.pop()
        if count == 1:
            found[tokens] = first
            continue
        left, right = _halves(tokens, importance.double(), mass, count // 2, count)
        waiting += [(left, first, count // 2), (right, first + count // 2, count - count // 2)]
    return found


def informative_cells(counts: Tensor, importance: Tensor, cells: int, epsilon: float) -> Tensor:
    """Cut tokens into cells whose answers, told at epsilon, say most of the classes; otherwise as `equal_mass_cells`.

    The vocabulary is cut into `_BINS` bins of equal mass, which begin in cells of equal mass. A bin moves to another cell if
    that raises the mutual information of class and answer, until none can. So a word that decides, as "not" may, need not
    share its cell with a fifth of all text. Counts and importance are [classes, tokens], public or noised.
    """
    check_response(cells, epsilon)
    counts, mass = counts.double().clamp_min(0.0), counts.double().clamp_min(0.0).sum(0)
    found = equal_mass_cells(importance, mass, cells)
    bins = equal_mass_cells(importance, mass, max(cells, min(_BINS, int((mass > 0).sum()))))
    number = int(bins.max()) + 1
    of_bins = torch.stack([torch.bincount(bins, weights=own, minlength=number) for own in counts])
    # A bin begins in the cell that most of it lies in.
    shares = torch.zeros(number, cells, dtype=torch.float64).index_put_((bins, found), mass, accumulate=True)
    cell_of = shares.argmax(1)
    if len(cell_of.unique()) < cells:
        cell_of = torch.arange(number) * cells // number
    best, moved = _information(of_bins, cell_of, cells, epsilon), True
    while moved:
        moved = False
        for at in range(number):
            for cell in range(cells):
                tried = cell_of.clone()
                tried[at] = cell
                told = _information(of_bins, tried, cells, epsilon)
                if told > best + _GAIN and len(tried.unique()) == cells:
                    best, cell_of, moved = told, tried, True
    return cell_of[bins]


def _information(of_bins: Tensor, cell_of: Tensor, cells: int, epsilon: float) -> float:
    """Mutual information, in nats, of a class and the answer for one of its tokens."""
    joint = torch.zeros(len(of_bins), cells, dtype=torch.float64).index_add_(1, cell_of, of_bins) / of_bins.sum()
    kept = keep_probability(cells, epsilon)
    other = (1 - kept) / (cells - 1)
    classes = joint.sum(1, keepdim=True)
    told = joint * (kept - other) + classes * other
    return float(torch.special.xlogy(told, told / (classes * told.sum(0)).clamp_min(1e-300)).sum())


def _halves(tokens: Tensor, importance: Tensor, mass: Tensor, part: int, count: int) -> tuple[Tensor, Tensor]:
    own, weight = importance[:, tokens], mass[tokens] / mass[tokens].sum()
    mean = (own * weight).sum(1, keepdim=True)
    spread = ((own - mean).square() * weight).sum(1)
    # Of two classes the importances are each other's negatives: rounding must not decide which one counts.
    along = int((spread >= spread.max() * (1 - 1e-9)).nonzero()[0])
    order = torch.argsort(own[along], stable=True)
    sorted_weight = weight[order]
    occurs = (sorted_weight > 0).cumsum(0)
    # A token lies left of the cut if its middle does; either side keeps as many tokens with mass as it needs cells.
    middle = sorted_weight.cumsum(0) - sorted_weight / 2
    cut = int((middle < part / count).sum())
    least = int((occurs < part).sum()) + 1
    most = int((occurs <= int(occurs[-1]) - (count - part)).sum())
    cut = min(max(cut, least), most)
    return tokens[order[:cut]], tokens[order[cut:]]


#: Cells of equal mass that `informative_cells` joins, and the least gain in nats for which it moves one.
_BINS = 64
_GAIN = 1e-9


@dataclass(frozen=True)
class Quotient:
    """A public partition of a vocabulary, what stands for each cell, and the epsilon at which a token's cell is told.

    ``cell_of``, int64 [V], is the cell of every token; ``representatives``, int64 [K], the token that stands for each cell.
    """

    cell_of: Tensor
    representatives: Tensor
    epsilon: float

    def draw(self, ids: Tensor, stream: NoiseStream) -> Tensor:
        """The representatives of the answers, one independent draw for each id: int64 [n] to [n]."""
        answers = randomised_response(self.cell_of[ids], len(self.representatives), self.epsilon, stream)
        return self.representatives[answers]

    def log_probabilities(self, token: int) -> Tensor:
        """The law of a token's replacement: float64 [V], -inf for what never stands for a cell."""
        k = len(self.representatives)
        kept = keep_probability(k, self.epsilon)
        law = torch.full((k,), math.log((1 - kept) / (k - 1)), dtype=torch.float64)
        law[self.cell_of[token]] = math.log(kept)
        return torch.full((len(self.cell_of),), -math.inf, dtype=torch.float64).index_copy(0, self.representatives, law)

    def bound(self, token: int, other: int) -> float:
        """How far, in nats, the laws of two tokens differ: 0 within a cell, epsilon between cells."""
        return 0.0 if self.cell_of[token] == self.cell_of[other] else self.epsilon


def representatives(cell_of: Tensor, importance: Tensor, mass: Tensor, allowed: Tensor) -> Tensor:
    """What stands for each cell: of its allowed tokens the one whose importance differs most surely from the mean, int64 [K].

    A log ratio of counts errs by one over the root of a count, so that is the difference times the root of the mass. Raises
    ValueError for a cell without an allowed token that occurs.
    """
    found, mean = [], (importance * mass).sum(1, keepdim=True) / mass.sum()
    certainty = (importance - mean).norm(dim=0) * mass.sqrt()
    for cell in range(int(cell_of.max()) + 1):
        usable = allowed & (cell_of == cell) & (mass > 0)
        if not bool(usable.any()):
            raise ValueError(
                f"cell {cell} holds no token that may stand for it in a text: count more texts, or ask for fewer cells"
            )
        found.append(int(certainty.masked_fill(~usable, -1.0).argmax()))
    return torch.tensor(found)
