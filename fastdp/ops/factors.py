"""The contract of a use: two factors over a flat token axis, cut into units by offsets.

The gradient of unit b is ``sum over its tokens t of left[t] right[t]^T``. ``left`` is a matrix [N, m], or int64
ids [N] that stand for one-hot rows (an embedding); ``right`` is a matrix [N, n]; unit b owns the tokens from
``offsets[b]`` to ``offsets[b + 1]``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

import fastdp._native as _native

from .matrices import Matrices, MatrixForm

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
#: The dtypes that sums, and the weights in them, may have.
SUMS = (torch.float32, torch.float64)
#: What the entries of a gradient are reduced to, numbered as in csrc/block.h and kernels/direct.py.
MEASURES = SQUARE, ABSOLUTE, MASKED_SQUARE = (0, 1, 2)
#: A number of tokens that no unit exceeds.
INT64_MAX = 2**63 - 1
ELEMENT = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # as csrc/factor.h numbers them
#: Where torch keeps how exact float32 matrix products are; versions before 2.9 ask nothing of processors.
_MATMULS: list[Any] = [
    backend.matmul
    for backend in (torch.backends.mkldnn, torch.backends.cuda)
    if hasattr(getattr(backend, "matmul", None), "fp32_precision")
]
#: Whether there are kernels for this processor.
HAS_KERNELS = _native.isa() != "portable"
#: What kernels read of ids, which are no matrix.
NO_FACTOR = (0, 0, 0, 0, 0)
#: Products of at most this many columns are taken transposed, which is faster: a step has LoRA's by the hundred.
FEW_COLUMNS = 32
_Function = TypeVar("_Function", bound=Callable[..., Any])


def is_one_hot(left: Tensor) -> bool:
    """Whether a left factor is a vector of ids rather than a matrix."""
    return left.dim() == 1


def accumulator(*factors: Tensor) -> torch.dtype:
    """Dtype of sums over these factors: float32, or float64 once any of them is float64."""
    for factor in factors:
        if factor.dtype == torch.float64:
            return torch.float64
    return torch.float32


def has_kernel(*factors: Tensor) -> bool:
    """Whether the kernels for processors read these factors."""
    for factor in factors:
        if factor.dtype not in ELEMENT and factor.dim() != 1:
            return False
    return HAS_KERNELS


def native_factor(matrix: Tensor) -> tuple[int, int, int, int, int]:
    """What csrc/factor.h reads of a matrix on the CPU; the caller keeps it alive."""
    return matrix.data_ptr(), ELEMENT[matrix.dtype], matrix.shape[1], matrix.stride(0), matrix.stride(1)


def native_factors(matrices: Sequence[Tensor]) -> list[tuple[int, int, int, int, int]]:
    """`native_factor` of each."""
    return [(x.data_ptr(), ELEMENT[x.dtype], x.shape[1], x.stride(0), x.stride(1)) for x in matrices]


def unit_bounds(offsets: Tensor) -> list[int]:
    """The offsets as numbers. Waits for the device when they live on one, so fused GPU kernels never call this."""
    return offsets.tolist()


def unit_lengths(offsets: Tensor) -> np.ndarray:
    """Tokens of each unit, by offsets on the CPU; numpy's own `diff` takes the host as long as a small product."""
    bounds = offsets.numpy()
    return bounds[1:] - bounds[:-1]  # type: ignore[no-any-return]


def common_length(bounds: Sequence[int]) -> int | None:
    """The length of every unit when all are equally long, else None; ``bounds`` begin at 0."""
    if len(bounds) < 2:
        return None
    length = bounds[1]
    # Lists are compared at once: a loop over the units takes as long as multiplying a small matrix.
    return length if bounds == [length * unit for unit in range(len(bounds))] else None


def per_token(weights: Tensor, offsets: Tensor | None, tokens: int) -> Tensor:
    """Weights of units repeated for each of their tokens, without asking a device; as they are without ``offsets``."""
    if offsets is None:
        return weights
    if weights.device.type == offsets.device.type == "cpu":
        # Torch's own starts threads even for a few units, which a forked process waits for without end.
        return torch.from_numpy(weights.detach().numpy().repeat(unit_lengths(offsets)))
    length = common_length(offsets.tolist()) if offsets.device.type == "cpu" else None
    lengths = torch.diff(offsets.to(weights.device)) if length is None else length
    return weights.repeat_interleave(lengths, output_size=tokens)


def in_full_precision(function: _Function) -> _Function:
    """Run without autograd, outside autocast, and with float32 products that are float32.

    Autocast would round the products of a norm to 16 bits, and so would ``torch.set_float32_matmul_precision``, on
    processors too.
    """

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
                return run(*args)
        if torch.is_grad_enabled():
            with torch.no_grad():
                return run(*args)
        lowered = [(b, b.fp32_precision) for b in _MATMULS if b.fp32_precision not in ("ieee", "none")]
        if not lowered:
            return function(*args)
        try:
            for backend, _ in lowered:
                backend.fp32_precision = "ieee"
            return function(*args)
        finally:
            for backend, precision in lowered:
                backend.fp32_precision = precision

    return run  # type: ignore[return-value]


def check_left(left: Tensor, name: str = "left") -> None:
    """Raise TypeError or ValueError unless this is a float matrix or a vector of int64 ids."""
    if left.dim() == 1:
        if left.dtype != torch.int64:
            raise TypeError(f"{name} is a vector of {left.dtype}: one-hot factors are int64 ids")
    elif left.dim() != 2:
        raise ValueError(f"{name} has {left.dim()} dimensions: it must be [tokens, m], or ids [tokens]")
    elif left.dtype not in FLOATS:
        raise TypeError(f"{name} is {left.dtype}: a matrix must be float32, bfloat16, float16 or float64")


def _are_matrices(left: Tensor, right: Tensor) -> bool:
    """Whether two factors are float matrices of the same tokens."""
    floats = left.dim() == right.dim() == 2 and left.dtype in FLOATS and right.dtype in FLOATS
    return floats and left.shape[0] == right.shape[0]


def check_pair(left: Tensor, right: Tensor, names: tuple[str, str] = ("left", "right")) -> None:
    """Raise TypeError or ValueError unless two factors describe the same tokens."""
    # A step asks this of hundreds of pairs, which are good: one look at each, and what is wrong is only then looked for.
    if _are_matrices(left, right):
        return
    check_left(left, names[0])
    if right.dim() != 2:
        raise ValueError(f"{names[1]} has {right.dim()} dimensions: it must be [tokens, n]")
    if right.dtype not in FLOATS:
        raise TypeError(f"{names[1]} is {right.dtype}: it must be float32, bfloat16, float16 or float64")
    if left.shape[0] != right.shape[0]:
        raise ValueError(f"{names[0]} has {left.shape[0]} tokens and {names[1]} has {right.shape[0]}")


def check_group(lefts: Sequence[Tensor], rights: Sequence[Tensor], offsets: Tensor, counts: Sequence[int] = ()) -> None:
    """Raise TypeError or ValueError unless they are pairs of matrices, over the same tokens, cut by offsets.

    With ``counts`` each of the rights has so many lefts.
    """
    if len(lefts) == len(rights) == 1 and _are_matrices(lefts[0], rights[0]):
        check_offsets(offsets, rights[0].shape[0])
        return
    lefts, rights = Matrices.of(lefts), Matrices.of(rights)
    if not lefts or (len(lefts) != len(rights) and not counts):
        raise ValueError(f"there are {len(lefts)} lefts and {len(rights)} rights: give as many of each, at least one")
    first, tokens = rights[0], rights.rows
    if not (tokens is not None and tokens == lefts.rows and _floats(lefts.form) and _floats(rights.form)):
        each = [right for right, count in zip(rights, counts) for _ in range(count)] if counts else rights
        for number, (left, right) in enumerate(zip(lefts, each)):
            check_pair(left, right, (f"lefts[{number}]", f"rights[{number}]"))
            if is_one_hot(left):
                raise ValueError(
                    f"lefts[{number}] is a vector of ids: one-hot factors are in no group, use sqnorm and weighted_sum"
                )
            if right.shape[0] != first.shape[0]:
                raise ValueError(
                    f"rights[{number}] has {right.shape[0]} tokens and rights[0] {first.shape[0]}: all of a group belong "
                    "to the same tokens"
                )
    check_offsets(offsets, first.shape[0])


@functools.lru_cache(maxsize=256)
def _floats(form: MatrixForm) -> bool:
    return {*form.dtypes} <= {*FLOATS}


def check_offsets(offsets: Tensor, tokens: int, name: str = "offsets") -> None:
    """Raise TypeError or ValueError unless offsets cut ``tokens`` tokens into units.

    The values are read only where that costs no wait for a device: when the offsets live on the CPU.
    """
    if offsets.dtype != torch.int64:
        raise TypeError(f"{name} are {offsets.dtype}: they must be int64")
    if offsets.dim() != 1 or offsets.shape[0] < 1:
        raise ValueError(f"{name} have shape {tuple(offsets.shape)}: they must be a vector of units + 1 numbers")
    if offsets.device.type != "cpu":
        return
    bounds = offsets.tolist()
    if bounds[0] != 0 or bounds[-1] != tokens:
        raise ValueError(f"{name} run from {bounds[0]} to {bounds[-1]}: they must run from 0 to the {tokens} tokens")
    if bounds != sorted(bounds):
        unit = next(unit for unit, (start, end) in enumerate(zip(bounds, bounds[1:])) if end < start)
        raise ValueError(f"{name} decrease from {bounds[unit]} to {bounds[unit + 1]} at unit {unit}")


def check_ids(ids: Tensor, rows: int, name: str = "left") -> None:
    """Raise ValueError for an id below 0 or not below ``rows``; only on the CPU, where looking costs no wait."""
    if ids.device.type != "cpu" or ids.numel() == 0:
        return
    least, most = (int(bound) for bound in torch.aminmax(ids))
    if least < 0 or most >= rows:
        raise ValueError(f"{name} has id {least if least < 0 else most}: ids run from 0 to {rows - 1}")


def check_mask(mask: Tensor, left: Tensor, right: Tensor) -> None:
    """Raise TypeError or ValueError unless there is one bool an entry of the gradient."""
    if mask.dtype != torch.bool:
        raise TypeError(f"mask is {mask.dtype}: it must be bool")
    rows = mask.shape[0] if is_one_hot(left) and mask.dim() == 2 else left.shape[-1]
    if mask.shape != (rows, right.shape[1]):
        raise ValueError(f"mask has shape {tuple(mask.shape)}: the gradient has {(rows, right.shape[1])}")
    if is_one_hot(left):
        check_ids(left, mask.shape[0])


def check_measure(measure: int, mask: Tensor | None) -> None:
    """Raise ValueError for an unknown measure, and for a mask without use or missing."""
    if measure not in MEASURES or (measure == MASKED_SQUARE) != (mask is not None):
        raise ValueError(f"measure is {measure}: 0 squares, 1 takes absolute values, 2 squares under a mask")


def check_weights(
    weights: Tensor, summed: Tensor, each: str, name: str = "weights", *, count: int | None = None
) -> None:
    """Raise TypeError or ValueError unless there is one float32 or float64 weight a row of what is summed.

    Or ``count`` of them, where rows are not what they belong to.
    """
    count = summed.shape[0] if count is None else count
    if weights.dtype not in SUMS:
        raise TypeError(f"{name} are {weights.dtype}: they must be float32 or float64")
    if weights.dim() != 1 or weights.shape[0] != count:
        raise ValueError(f"{name} have shape {tuple(weights.shape)}: one a {each} is ({count},)")
