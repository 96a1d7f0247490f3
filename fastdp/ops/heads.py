"""The cross-entropy of a vocabulary's head: losses of tokens, and the gradient of their logits in the logits' own place."""

from __future__ import annotations

import torch
from torch import Tensor

from .factors import FLOATS, accumulator
from .placed import CONSTANTS
from .sums import weighted_sum
from .table import Op

#: Whether this version of torch multiplies 16-bit matrices into float32, on some devices.
_WIDENS = "dtype" in torch.ops.aten.mm.overloads()


def _reference(logits: Tensor, target: Tensor, weights: Tensor, ignored: int, words: int) -> Tensor:
    labelled = target != ignored
    logits[:, words:] = 0
    logits = logits[:, :words]
    wide, place = logits.to(accumulator(logits)), target.where(labelled, 0).unsqueeze(1)
    total = wide.logsumexp(1)
    losses = torch.where(labelled, total - wide.gather(1, place)[:, 0], 0)
    shares = (wide - total.unsqueeze(1)).exp_().scatter_add_(1, place, -torch.ones_like(wide[:, :1]))
    kept = (labelled & (weights != 0)).unsqueeze(1)
    logits.copy_(torch.where(kept, shares * weights.to(shares.dtype).unsqueeze(1), 0))
    return losses


def _check(logits: Tensor, target: Tensor, weights: Tensor, ignored: int, words: int) -> None:
    if logits.dim() != 2 or logits.dtype not in FLOATS or not logits.is_contiguous():
        raise ValueError(
            f"logits are {logits.dtype} {list(logits.shape)}: they must be contiguous floats [tokens, words]"
        )
    if not 0 < words <= logits.shape[1]:
        raise ValueError(f"words is {words}: it must be 1 to {logits.shape[1]}, as many as the logits have columns")
    if target.dtype != torch.int64 or target.shape != logits.shape[:1]:
        raise ValueError(f"target is {target.dtype} {list(target.shape)}: it must be int64 [{logits.shape[0]}]")
    if not weights.is_floating_point() or weights.shape != logits.shape[:1]:
        raise ValueError(f"weights are {weights.dtype} {list(weights.shape)}: they must be float [{logits.shape[0]}]")


CROSS_ENTROPY_GRADIENT = Op(
    "cross_entropy_gradient_(Tensor(a!) logits, Tensor target, Tensor weights, int ignored, int words) -> Tensor",
    reference=_reference,
    fake=lambda logits, *_: logits.new_empty(logits.shape[0], dtype=accumulator(logits)),
    check=_check,
)
CROSS_ENTROPY_GRADIENT.in_family("heads")


def cross_entropy_gradient_(
    logits: Tensor, target: Tensor, weights: Tensor, ignored: int = -100, words: int | None = None
) -> Tensor:
    """Cross-entropies of tokens; the gradient of their weighted sum takes the place of the logits.

    Row t becomes ``weights[t] (softmax(logits[t]) - onehot(target[t]))``, computed in float32 and rounded once. A token that is
    ignored, or has weight 0, gets exact zeros, whatever its logits hold.

    Args:
        logits: [N, V] float, contiguous; written.
        target: int64 [N].
        weights: [N], float.
        ignored: the target of tokens without a label, whose loss is 0.
        words: how many columns are logits, by default all; those behind become zeros.

    Returns:
        [N], float32 (float64 if the logits are).

    Raises:
        ValueError: shapes or dtypes that do not fit.

    >>> logits = torch.zeros(1, 4)
    >>> cross_entropy_gradient_(logits, torch.tensor([2]), torch.ones(1))
    tensor([1.3863])
    >>> logits
    tensor([[ 0.2500,  0.2500, -0.7500,  0.2500]])
    """
    return CROSS_ENTROPY_GRADIENT(logits, target, weights, ignored, logits.shape[1] if words is None else words)


def widens(left: Tensor, right: Tensor) -> bool:
    """Whether torch multiplies these 16-bit factors into float32: from 2.8 on, on NVIDIA's GPUs."""
    both = left.dtype == right.dtype and left.dtype.itemsize == 2
    return both and left.device.type != "cpu" and torch.version.hip is None and _WIDENS


def add_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add the gradient of one unit, ``left^T right`` of [N, m] and [N, n], to ``total`` [m, n], float32."""
    if widens(left, right):
        torch.addmm(total, left.T, right, out_dtype=torch.float32, out=total)
    else:
        offsets = CONSTANTS[(0, left.shape[0]), torch.int64, left.device]
        weighted_sum(left, right, total.new_ones(1), total, offsets=offsets)


def even_rows(weight: Tensor) -> Tensor:
    """A head's weight [V, d], or bias [V], with zeros behind it up to a multiple of 16.

    A GPU's products are several times slower where rows of 16-bit numbers do not begin at every 16 bytes.
    """
    odd = -weight.shape[0] % 16
    return torch.nn.functional.pad(weight, (0, 0) * (weight.dim() - 1) + (0, odd)) if odd else weight


def cuts(tokens: int, weight: Tensor, numbers: int) -> list[tuple[int, int]]:
    """Parts of an axis of tokens, as many at once as `most_tokens` says; they depend on sizes and the device alone."""
    step = most_tokens(weight, numbers)
    return [(a, min(a + step, tokens)) for a in range(0, tokens, step)]


def most_tokens(weight: Tensor, numbers: int) -> int:
    """How many tokens have so many logits by a head's weight [V, d] on a processor.

    On a GPU, where each tile is a few launches, 16 times as many, and 64 at a time.
    """
    if not on_gpu(weight):
        return max(1, numbers // weight.shape[0])
    most = max(1, 16 * numbers // weight.shape[0])
    return most if most < 64 else most // 64 * 64


def on_gpu(weight: Tensor) -> bool:
    """Whether a head's tiles are made by the kernels of a GPU."""
    return weight.device.type != "cpu"
