"""Contributing tokens (CTI): how much a token tells about a class, and the eta it gets for that (section 4.4)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import fastdp.accounting as accounting
import fastdp.ops as ops
from fastdp.accounting.event_types import DpEvent
from fastdp.ops.grid import exact_spacing
from fastdp.ops.stream import NoiseStream
from fastdp.validate import positive


def utility_importance(counts: Tensor) -> Tensor:
    """Utility importance of each token to each class, equation (5), in nats: float64 [classes, tokens], as ``counts``.

    ``UI[c, m] = mean over classes c' != c of ln(p(m | c) / p(m | c'))``, with ``p(m | c)`` the share of token m among the
    tokens of class c. One is added to each count, so that a token that a class lacks has a finite importance. Computed from
    private texts it is a release of them: use public texts or `noised_counts`.
    """
    counts = torch.as_tensor(counts).double()
    if counts.dim() != 2 or counts.shape[0] < 2 or counts.shape[1] < 1:
        raise ValueError(
            f"counts have shape {list(counts.shape)}: they must be [classes, tokens], of at least two classes"
        )
    if not bool((torch.isfinite(counts) & (counts >= 0)).all()):
        raise ValueError("counts must be finite and at least 0")
    empty = (counts.sum(1) == 0).nonzero()
    if len(empty):
        raise ValueError(f"class {int(empty[0])} has no tokens: its shares are not defined; leave the class out")
    counts = counts + 1.0
    # In logarithms: a token's share of each class, less the mean over the other classes.
    share = (counts / counts.sum(1, keepdim=True)).log()
    others = counts.shape[0] - 1
    return share - (share.sum(0, keepdim=True) - share) / others


def adaptive_eta(importance: Tensor, eta0: float, c0: float) -> Tensor:
    """The privacy parameter of each token and class, equation (6): ``2 eta0 / (1 + exp(-UI + c0))``, in (0, 2 eta0).

    Float64 [classes, tokens], as ``importance``; an importance of c0 gets eta0 itself (the paper's is `middle_importance`).
    """
    return 2 * eta0 * torch.sigmoid(torch.as_tensor(importance).double() - c0)


def middle_importance(importance: Tensor) -> float:
    """The paper's c0: the middle between the largest and the smallest importance (section 5.1)."""
    low, high = torch.aminmax(torch.as_tensor(importance).double())
    return float(low + high) / 2


def check_eta(eta: float) -> float:
    """``eta`` as a float; raises ValueError unless it is finite and above 0."""
    if isinstance(eta, Tensor) and eta.dim():
        raise ValueError(
            "eta is one number for all tokens: where it depends on the token itself, no bound holds (see CTI)"
        )
    number = eta.item() if isinstance(eta, Tensor) else eta
    positive(eta=number)
    return float(number)


def count_tokens(texts: Sequence[Sequence[int]], labels: Sequence[int], classes: int, vocabulary: int) -> Tensor:
    """Occurrences of each token id in the texts of each class, float64 [classes, vocabulary]."""
    counts = torch.zeros(classes, vocabulary, dtype=torch.float64)
    for ids, label in _labelled_ids(texts, labels, classes, vocabulary):
        counts[label] += torch.bincount(ids, minlength=vocabulary)
    return counts


def noised_counts(
    texts: Sequence[Sequence[int]],
    labels: Sequence[int],
    classes: int,
    vocabulary: int,
    *,
    noise_multiplier: float,
    stream: NoiseStream,
    max_norm: float = 5.0,
) -> tuple[Tensor, DpEvent]:
    """Counts of **private** texts with central differential privacy, and the event to account for.

    Each text's vector of counts, which lies in the row of its label, is clipped to L2 norm ``max_norm``; the sum gets
    normal noise of std ``noise_multiplier * max_norm``, in every class and for every token of the public vocabulary.
    Counts below 0 are raised to 0: float64 [classes, vocabulary]. Raises ValueError as `count_tokens`, and for noise or
    a norm not above 0.
    """
    positive(noise_multiplier=noise_multiplier, max_norm=max_norm)
    counts = torch.zeros(classes, vocabulary, dtype=torch.float64)
    # On a grid, so that no text's count moves where another's is rounded; towards 0, so that none passes its bound.
    spacing = exact_spacing(len(texts), max_norm)
    for ids, label in _labelled_ids(texts, labels, classes, vocabulary):
        tokens, times = ids.unique(return_counts=True)
        times = times.double()
        clipped = times * min(1.0, max_norm / max(float(times.norm()), 1e-12))
        counts[label, tokens] += (clipped / spacing).floor() * spacing
    noisy = ops.add_noise_(counts.float(), noise_multiplier * max_norm, stream)
    return noisy.double().clamp_min(0), accounting.gaussian(noise_multiplier)


def _labelled_ids(
    texts: Sequence[Sequence[int]], labels: Sequence[int], classes: int, vocabulary: int
) -> list[tuple[Tensor, int]]:
    """Each text's ids with its class. Raises ValueError for a class or an id out of range."""
    if len(texts) != len(labels):
        raise ValueError(f"{len(texts)} texts but {len(labels)} labels")
    pairs = []
    for text, label in zip(texts, labels):
        ids = torch.as_tensor(text, dtype=torch.int64).reshape(-1)
        if not 0 <= int(label) < classes:
            raise ValueError(f"label {label} is not one of {classes} classes")
        if ids.numel() and not (int(ids.min()) >= 0 and int(ids.max()) < vocabulary):
            raise ValueError(
                f"a token id of {int(ids.min())} to {int(ids.max())} is outside the vocabulary of {vocabulary}: count over the "
                "rows of the table that the ids belong to"
            )
        pairs.append((ids, int(label)))
    return pairs
