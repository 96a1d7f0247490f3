"""``adamw_noise_steps_``: the noise of a private step and AdamW in one pass over memory."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

import fastdp._native as _native
from fastdp.ops.grid import on_grid
from fastdp.ops.noise import NOISE_DTYPES, check_grid, check_position, check_tensor, standard_normals
from fastdp.ops.stochastic_rounding import float32_moments
from fastdp.ops.stream import MAX_ELEMENTS, POSITION_WORDS, Draw, NoiseStream, check_positions, native_threads
from fastdp.ops.table import Op
from fastdp.validate import at_least, positive

#: What parameters may be, as `fastdp.ops.noise.check_tensor` has it.
_KINDS = {(dtype, torch.strided) for dtype in NOISE_DTYPES}
_SHAPE, _DTYPE, _LAID = (
    operator.attrgetter("shape"),
    operator.attrgetter("dtype"),
    operator.attrgetter("dtype", "layout"),
)


class Numbers(NamedTuple):
    """What a step is told beside tensors, in the order of the schema; fields as in `adamw_noise_steps_`."""

    std: float
    divisor: float
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    secure_rounding: bool

    @property
    def rounded(self) -> bool:
        """Whether what is applied lies on a grid."""
        return self.secure_rounding and self.std > 0.0


def unpack(rest: Sequence[Any], count: int) -> tuple[Numbers, Sequence[Any], Sequence[Any], Sequence[int]]:
    """The last arguments of the op: its numbers, rows, columns, and the first element of each of ``count`` tensors."""
    return Numbers(*rest[:9]), rest[9], rest[10], (rest[11] if len(rest) > 11 else ()) or [0] * count


def _check_numbers(numbers: Numbers) -> None:
    least = {"std": numbers.std, "lr": numbers.lr, "eps": numbers.eps, "weight_decay": numbers.weight_decay}
    at_least(0.0, **least, **{"betas[0]": numbers.beta1, "betas[1]": numbers.beta2})
    positive(divisor=numbers.divisor)
    if numbers.beta1 >= 1.0 or numbers.beta2 >= 1.0:
        raise ValueError(f"betas must be below 1, got ({numbers.beta1}, {numbers.beta2})")
    if not isinstance(numbers.step, int) or numbers.step < 1:
        raise ValueError(f"step counts from 1, got {numbers.step!r}")


def _check_axes(param: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> None:
    for name, axis in (("rows", rows), ("columns", columns)):
        check_tensor(name, axis, (torch.float32,))
        if axis.dim() != 1 or not axis.is_contiguous():
            raise ValueError(f"{name} must be a contiguous vector")
    if rows.numel() * columns.numel() != param.numel():
        raise ValueError(
            f"{rows.numel()} rows and {columns.numel()} columns are no axes of a parameter of {param.numel()} elements"
        )


def _check_steps(
    params: Sequence[torch.Tensor],
    grad_sums: Sequence[torch.Tensor],
    exp_avgs: Sequence[torch.Tensor],
    exp_avg_sqs: Sequence[torch.Tensor],
    masters: Sequence[torch.Tensor],
    drawn: torch.Tensor | NoiseStream | Draw,
    *rest: Any,
) -> None:
    count = len(params)
    numbers, rows, columns, firsts = unpack(rest, count)
    if {len(rows) or count, len(columns) or count, len(rows) - len(columns) + count} != {count}:
        raise ValueError(f"rows and columns must be as many as params, {count}, or none")
    if not count or {len(grad_sums), len(exp_avgs), len(exp_avg_sqs), len(masters) or count} != {count}:
        raise ValueError(
            "params, grad_sums, exp_avgs, exp_avg_sqs and masters (if any) must be as many, and at least one"
        )
    if not isinstance(drawn, torch.Tensor):
        if count != 1:
            raise ValueError(
                f"a stream or draw serves one tensor, not {count}: give positions int32 [{count}, {POSITION_WORDS}]"
            )
        check_position(drawn)
    else:
        check_positions(drawn, count)
    _check_numbers(numbers)
    if len(firsts) != count or any(first < 0 or first % 16 for first in firsts):
        raise ValueError(f"firsts must be multiples of 16, none or one for each of {count} params, got {list(firsts)}")
    at = max(range(count), key=lambda at: firsts[at] + params[at].numel()) if any(firsts) else 0
    check_tensor("param", params[at], first=firsts[at])
    if numbers.secure_rounding:
        check_grid("param", params[at], numbers.std, firsts[at])
    of_moments = torch.bfloat16 if exp_avgs[0].dtype == torch.bfloat16 else torch.float32
    kinds = {*map(_LAID, params)}
    if not kinds <= _KINDS or max(map(torch.Tensor.numel, params)) > MAX_ELEMENTS:
        for param in params:
            check_tensor("param", param)
    shapes = [*map(_SHAPE, params)]
    # A property of all tensors of a list is looked at in one go: there are hundreds of them, in every step.
    lists = ((grad_sums, torch.float32), (exp_avgs, of_moments), (exp_avg_sqs, of_moments), (masters, torch.float32))
    for xs, dtype in lists:
        if not xs or ({*map(_DTYPE, xs)} == {dtype} and [*map(_SHAPE, xs)] == shapes and _contiguous(xs)):
            continue
        good = [x.dtype is dtype and x.is_contiguous() for x in xs]
        x, shape = next((x, shape) for x, shape, fine in zip(xs, shapes, good) if not fine or x.shape != shape)
        raise ValueError(
            f"sums and masters must be contiguous float32 {list(shape)}, moments all float32 or all bfloat16, "
            f"got {x.dtype} {list(x.shape)}"
        )
    if not _contiguous(params):
        raise ValueError("params must be contiguous")
    for param, *axes in zip(params, rows, columns):
        _check_axes(param, *axes)


def _contiguous(tensors: Sequence[torch.Tensor]) -> bool:
    return all(map(torch.Tensor.is_contiguous, tensors))


def _step(
    param: torch.Tensor,
    grad_sum: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    position: torch.Tensor,
    first: int,
    numbers: Numbers,
    rows: torch.Tensor | None,
    columns: torch.Tensor | None,
) -> None:
    """The definition of one parameter's step."""
    if numbers.rounded:
        g = on_grid(grad_sum, numbers.std, position, first).div_(numbers.divisor)
    else:
        z = standard_normals(position, param.numel(), first).to(param.device, torch.float32)
        g = torch.add(grad_sum, z.reshape(param.shape), alpha=numbers.std).div_(numbers.divisor)
    if rows is not None and columns is not None:
        g.mul_(torch.outer(rows, columns).view(param.shape))
    adamw_update_(param, g, exp_avg, exp_avg_sq, numbers)


def adamw_update_(
    param: torch.Tensor, g: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, numbers: Numbers
) -> None:
    """AdamW's step by a gradient ``g``, in float32 as both moments are; ``param`` of any dtype is rounded once."""
    _, _, lr, beta1, beta2, eps, weight_decay, step, _ = numbers
    exp_avg.lerp_(g, 1.0 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(g, g, value=1.0 - beta2)
    update = exp_avg / (exp_avg_sq / (1.0 - beta2**step)).sqrt_().add_(eps)
    param.copy_(param.float().mul_(1.0 - lr * weight_decay).add_(update, alpha=-lr / (1.0 - beta1**step)))


def _by_parameter(
    step: Callable[..., None],
    params: Sequence[torch.Tensor],
    grad_sums: Sequence[torch.Tensor],
    exp_avgs: Sequence[torch.Tensor],
    exp_avg_sqs: Sequence[torch.Tensor],
    masters: Sequence[torch.Tensor],
    drawn: torch.Tensor,
    *rest: Any,
) -> None:
    numbers, rows, columns, firsts = unpack(rest, len(params))
    for i, (param, first) in enumerate(zip(params, firsts)):
        target, axes = masters[i] if masters else param, (rows[i], columns[i]) if rows else (None, None)
        with float32_moments(exp_avgs[i], exp_avg_sqs[i], drawn[i][8:10], first) as moments:
            step(target, grad_sums[i], *moments, drawn[i], first, numbers, *axes)
        if masters:
            param.copy_(target)


_STEPS = Op(
    "adamw_noise_steps_(Tensor(a!)[] params, Tensor[] grad_sums, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
    "Tensor(d!)[] masters, Tensor drawn, float std, float divisor, float lr, float beta1, float beta2, float eps, "
    "float weight_decay, int step, bool secure_rounding, Tensor[] rows, Tensor[] columns, int[] firsts=[]) -> ()",
    reference=functools.partial(_by_parameter, _step),
    fake=lambda *args: None,
    check=_check_steps,
)
_STEPS.in_family("adamw")


def adamw_noise_steps_(
    params: Sequence[torch.Tensor],
    grad_sums: Sequence[torch.Tensor],
    exp_avgs: Sequence[torch.Tensor],
    exp_avg_sqs: Sequence[torch.Tensor],
    std: float,
    drawn: torch.Tensor | NoiseStream | Draw,
    *,
    masters: Sequence[torch.Tensor] = (),
    divisor: float,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    step: int,
    secure_rounding: bool = True,
    rows: Sequence[torch.Tensor] = (),
    columns: Sequence[torch.Tensor] = (),
    firsts: Sequence[int] = (),
) -> None:
    """One private step of AdamW in place, on ``g = (grad_sum + std z) / divisor``, of many parameters that share its numbers.

    Parameters and moments are updated as ``torch.optim.AdamW`` would with ``g`` as gradient, in float32; ``grad_sums`` stay as
    they are, and the noise never reaches memory: 28 bytes an element in float32. On a GPU one launch serves each dtype.

    Args:
        params: k contiguous tensors, float32, bfloat16 or float16.
        grad_sums, exp_avgs, exp_avg_sqs: k contiguous float32 tensors each, of their shapes. Moments may all be bfloat16 instead:
            they are then rounded up or down at random, by bits that the position's tensor and step say.
        std: of the noise on the sums, in their units.
        drawn: int32 [k, 12], a position for each, of `NoiseStream.take_at`: element i of a tensor gets normal i. A stream, or one
            position of it, for one tensor.
        masters: k float32 copies that are updated in the parameters' place; these become the copies, rounded. Or none.
        divisor: the expected number of units in a batch.
        lr: learning rate.
        betas: decay of the moments.
        eps: added to the root of the second moment.
        weight_decay: decoupled; a parameter is first multiplied by ``1 - lr weight_decay``.
        step: this step's number, from 1.
        secure_rounding: as in ``add_noise_``.
        rows, columns: k float32 vectors a and b each, of axes a_i b_j of a parameter as a matrix of as many rows and columns.
            Its sum and ``std`` are then of the gradient over these axes, and g is multiplied by them. Or none.
        firsts: where each of the tensors begins in the one that its position is of, multiples of 16; or none. Processes that hold
            a piece each add the noise that the whole would get.

    Raises:
        ValueError: if a number is out of range, or numbers of tensors, shapes, dtypes or devices differ.
        TypeError: if a parameter has another dtype or layout, or ``drawn`` is no stream.
        RuntimeError: if a tensor to be written requires grad and grad mode is on, or the position was drawn before.

    >>> weights, totals = [torch.ones(2), torch.ones(3)], [torch.full((2,), 4.0), torch.zeros(3)]
    >>> means, squares = ([torch.zeros(2), torch.zeros(3)] for _ in range(2))
    >>> drawn = NoiseStream().take_at(0, [0, 1])
    >>> adamw_noise_steps_(weights, totals, means, squares, 0.0, drawn, divisor=8.0, lr=0.1, step=1)
    >>> weights
    [tensor([0.8990, 0.8990]), tensor([0.9990, 0.9990, 0.9990])]
    """
    numbers = (std, divisor, lr, *betas, eps, weight_decay)
    tensors = (list(params), list(grad_sums), list(exp_avgs), list(exp_avg_sqs), list(masters))
    _STEPS(*tensors, drawn, *numbers, step, secure_rounding, list(rows), list(columns), list(firsts))
    torch.autograd.graph.increment_version((*params, *exp_avgs, *exp_avg_sqs, *masters))


def adamw_noise_step_(
    param: torch.Tensor,
    grad_sum: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    std: float,
    stream: NoiseStream | Draw,
    *,
    rows: torch.Tensor | None = None,
    columns: torch.Tensor | None = None,
    **numbers: Any,
) -> None:
    """`adamw_noise_steps_` of one parameter, with the next noise of a stream.

    Args:
        param, grad_sum, exp_avg, exp_avg_sq, std, rows, columns: as there, one of each.
        stream: a ``NoiseStream`` or one position of it.
        numbers: ``divisor``, ``lr``, ``step`` and the others of them.

    Raises:
        ValueError, TypeError, RuntimeError: as there.

    >>> weight, total = torch.ones(2), torch.full((2,), 4.0)
    >>> moments = torch.zeros(2), torch.zeros(2)
    >>> adamw_noise_step_(weight, total, *moments, 0.0, NoiseStream(), divisor=8.0, lr=0.1, step=1)  # without noise
    >>> weight
    tensor([0.8990, 0.8990])
    """
    check_position(stream)
    axes: dict[str, Any] = {name: [x] for name, x in (("rows", rows), ("columns", columns)) if x is not None}
    adamw_noise_steps_([param], [grad_sum], [exp_avg], [exp_avg_sq], std, stream, **axes, **numbers)


# On processors: csrc/adamw.cpp.


def _step_on_cpu(
    param: torch.Tensor,
    grad_sum: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    position: torch.Tensor,
    first: int,
    numbers: Numbers,
    rows: torch.Tensor | None,
    columns: torch.Tensor | None,
) -> None:
    sizes = param.numel(), first
    width = 1 if columns is None else columns.numel()
    given = param, NOISE_DTYPES[param.dtype], grad_sum, exp_avg, exp_avg_sq, *sizes, position, numbers.secure_rounding
    _native.adamw_noise_step(*given, *numbers[:8], rows, columns, width, native_threads())


_STEPS.implement("cpu", functools.partial(_by_parameter, _step_on_cpu))
