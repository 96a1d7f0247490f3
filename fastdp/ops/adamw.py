"""``adamw_noise_step_``: the noise of a private step and AdamW in one pass over memory."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from fastdp.ops.grid import on_grid
from fastdp.ops.halves import keep_moments
from fastdp.ops.noise import NOISE_DTYPES, check_grid, check_position, check_tensor, standard_normals
from fastdp.ops.stream import MAX_ELEMENTS, POSITION_WORDS, Draw, NoiseStream, check_rounds
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
    """What a step is told beside tensors, in the order of the schemas; fields as in `adamw_noise_step_`."""

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


def unpack_numbers(rest: Sequence[Any]) -> tuple[Numbers, Any, Any]:
    """The last arguments of either op: its numbers, rows and columns."""
    return Numbers(*rest[:9]), *(rest[9:11] or (None, None))  # type: ignore[return-value]


def firsts_of(rest: Sequence[Any], count: int) -> Sequence[int]:
    """The last argument of `adamw_noise_steps_`, or as many zeros as there are tensors."""
    return (rest[11] if len(rest) > 11 else ()) or [0] * count  # type: ignore[no-any-return]


def _check(
    param: torch.Tensor,
    grad_sum: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    position: torch.Tensor | NoiseStream | Draw,
    *rest: Any,
) -> None:
    numbers, rows, columns = unpack_numbers(rest)
    check_tensor("param", param)
    for name, x in (("grad_sum", grad_sum), ("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
        check_tensor(name, x, (torch.float32,))
        if x.shape != param.shape:
            raise ValueError(f"{name} must have the shape of param, {list(param.shape)}, got {list(x.shape)}")
    least = {"std": numbers.std, "lr": numbers.lr, "eps": numbers.eps, "weight_decay": numbers.weight_decay}
    at_least(0.0, **least, **{"betas[0]": numbers.beta1, "betas[1]": numbers.beta2})
    positive(divisor=numbers.divisor)
    if numbers.beta1 >= 1.0 or numbers.beta2 >= 1.0:
        raise ValueError(f"betas must be below 1, got ({numbers.beta1}, {numbers.beta2})")
    if not isinstance(numbers.step, int) or numbers.step < 1:
        raise ValueError(f"step counts from 1, got {numbers.step!r}")
    check_position(position)
    if numbers.secure_rounding:
        check_grid("param", param, numbers.std)
    _check_axes(param, rows, columns)


def _check_axes(param: torch.Tensor, rows: torch.Tensor | None, columns: torch.Tensor | None) -> None:
    if rows is None and columns is None:
        return
    if rows is None or columns is None:
        raise ValueError("rows and columns go together: give both, or neither")
    for name, axis in (("rows", rows), ("columns", columns)):
        check_tensor(name, axis, (torch.float32,))
        if axis.dim() != 1 or not axis.is_contiguous():
            raise ValueError(f"{name} must be a contiguous vector")
    if rows.numel() * columns.numel() != param.numel():
        raise ValueError(
            f"{rows.numel()} rows and {columns.numel()} columns are no axes of a parameter of {param.numel()} elements"
        )


def _reference(
    param: torch.Tensor,
    grad_sum: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    position: torch.Tensor,
    *rest: Any,
    first: int = 0,
) -> None:
    numbers, rows, columns = unpack_numbers(rest)
    std, divisor, lr, beta1, beta2, eps, weight_decay, step, _ = numbers
    if numbers.rounded:
        g = on_grid(grad_sum, std, position, first).div_(divisor)
    else:
        z = standard_normals(position, param.numel(), first).to(param.device, torch.float32)
        g = torch.add(grad_sum, z.reshape(param.shape), alpha=std).div_(divisor)
    if rows is not None and columns is not None:
        g.mul_(torch.outer(rows, columns).view(param.shape))
    exp_avg.lerp_(g, 1.0 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(g, g, value=1.0 - beta2)
    update = exp_avg / (exp_avg_sq / (1.0 - beta2**step)).sqrt_().add_(eps)
    param.copy_(param.float().mul_(1.0 - lr * weight_decay).add_(update, alpha=-lr / (1.0 - beta1**step)))


_ADAMW = Op(
    "adamw_noise_step_(Tensor(a!) param, Tensor grad_sum, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor position, "
    "float std, float divisor, float lr, float beta1, float beta2, float eps, float weight_decay, int step, "
    "bool secure_rounding, Tensor? rows, Tensor? columns) -> ()",
    reference=_reference,
    fake=lambda *args: None,
    check=_check,
)
_ADAMW.implement("cpu", "fastdp.ops.cpu.adamw")
_ADAMW.in_family("adamw")


def adamw_noise_step_(
    param: torch.Tensor,
    grad_sum: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    std: float,
    stream: NoiseStream | Draw,
    *,
    divisor: float,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    step: int,
    secure_rounding: bool = True,
    rows: torch.Tensor | None = None,
    columns: torch.Tensor | None = None,
) -> None:
    """One private step of AdamW in place, on ``g = (grad_sum + std z) / divisor``; the noise never reaches memory.

    ``param``, ``exp_avg`` and ``exp_avg_sq`` are updated as ``torch.optim.AdamW`` would with ``g`` as gradient, in
    float32; ``grad_sum`` is left as it is. 28 bytes an element in float32.

    Args:
        param: float32, bfloat16 or float16, any shape and strides.
        grad_sum: the sum of clipped per-unit gradients, float32, of that shape.
        exp_avg: first moment, float32, of that shape.
        exp_avg_sq: second moment, float32, of that shape.
        std: of the noise on the sum, in the units of ``grad_sum``.
        stream: a ``NoiseStream`` or one position of it; element i of the flattened parameter gets normal i.
        divisor: the expected number of units in a batch.
        lr: learning rate.
        betas: decay of the moments.
        eps: added to the root of the second moment.
        weight_decay: decoupled; the parameter is first multiplied by ``1 - lr weight_decay``.
        step: this step's number, from 1.
        secure_rounding: as in ``add_noise_``.
        rows, columns: a and b, float32 vectors, of axes a_i b_j of the parameter as a matrix of as many rows and columns.
            ``grad_sum`` and ``std`` are then of the gradient over these axes, and g is multiplied by them.

    Raises:
        ValueError: if a number is out of range, or shapes or devices differ.
        TypeError: if a dtype or layout is another, or ``stream`` is no stream.
        RuntimeError: if a tensor to be written requires grad and grad mode is on, or the position was drawn before.

    >>> import torch
    >>> from fastdp import NoiseStream
    >>> from fastdp.ops import adamw_noise_step_
    >>> weight, total = torch.ones(2), torch.full((2,), 4.0)
    >>> moments = torch.zeros(2), torch.zeros(2)
    >>> adamw_noise_step_(weight, total, *moments, 0.0, NoiseStream(), divisor=8.0, lr=0.1, step=1)  # without noise
    >>> weight
    tensor([0.8990, 0.8990])
    """
    numbers = (std, divisor, lr, *betas, eps, weight_decay)
    _ADAMW(param, grad_sum, exp_avg, exp_avg_sq, stream, *numbers, step, secure_rounding, rows, columns)
    for x in (param, exp_avg, exp_avg_sq):
        torch.autograd.graph.increment_version(x)


def _check_steps(
    params: Sequence[torch.Tensor],
    grad_sums: Sequence[torch.Tensor],
    exp_avgs: Sequence[torch.Tensor],
    exp_avg_sqs: Sequence[torch.Tensor],
    masters: Sequence[torch.Tensor],
    drawn: torch.Tensor,
    *rest: Any,
) -> None:
    numbers, rows, columns = unpack_numbers(rest)
    count = len(params)
    if {len(rows) or count, len(columns) or count, len(rows) - len(columns) + count} != {count}:
        raise ValueError(f"rows and columns must be as many as params, {count}, or none")
    if not count or {len(grad_sums), len(exp_avgs), len(exp_avg_sqs), len(masters) or count} != {count}:
        raise ValueError(
            "params, grad_sums, exp_avgs, exp_avg_sqs and masters (if any) must be as many, and at least one"
        )
    if drawn.dtype != torch.int32 or drawn.shape != (count, POSITION_WORDS):
        raise ValueError(f"drawn is {drawn.dtype} {list(drawn.shape)}: positions are int32 [{count}, {POSITION_WORDS}]")
    check_rounds(drawn)
    _check(params[0], grad_sums[0], grad_sums[0], grad_sums[0], drawn[0], *numbers)
    firsts = firsts_of(rest, count)
    if len(firsts) != count or any(first < 0 or first % 16 for first in firsts):
        raise ValueError(f"firsts must be multiples of 16, none or one for each of {count} params, got {list(firsts)}")
    if any(firsts):
        at = max(range(count), key=lambda at: firsts[at] + params[at].numel())
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


def _reference_steps(
    params: Sequence[torch.Tensor],
    grad_sums: Sequence[torch.Tensor],
    exp_avgs: Sequence[torch.Tensor],
    exp_avg_sqs: Sequence[torch.Tensor],
    masters: Sequence[torch.Tensor],
    drawn: torch.Tensor,
    *rest: Any,
) -> None:
    numbers, rows, columns = unpack_numbers(rest)
    for i, (param, first) in enumerate(zip(params, firsts_of(rest, len(params)))):
        target, axes = masters[i] if masters else param, (rows[i], columns[i]) if rows else ()
        with float32_moments(exp_avgs[i], exp_avg_sqs[i], drawn[i], first) as moments:
            _reference(target, grad_sums[i], *moments, drawn[i], *numbers, *axes, first=first)
        if masters:
            param.copy_(target)


@contextlib.contextmanager
def float32_moments(
    exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, position: torch.Tensor, first: int = 0
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Both moments in float32 for an update from element ``first`` on; afterwards those in bfloat16 hold it."""
    if exp_avg.dtype == torch.float32:
        yield exp_avg, exp_avg_sq
        return
    wide = exp_avg.float(), exp_avg_sq.float()
    yield wide
    tensor, step = (int(word) & 0xFFFFFFFF for word in position[8:10])
    keep_moments((exp_avg, exp_avg_sq), wide, tensor, step, first)


_STEPS = Op(
    "adamw_noise_steps_(Tensor(a!)[] params, Tensor[] grad_sums, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
    "Tensor(d!)[] masters, Tensor drawn, float std, float divisor, float lr, float beta1, float beta2, float eps, "
    "float weight_decay, int step, bool secure_rounding, Tensor[] rows, Tensor[] columns, int[] firsts=[]) -> ()",
    reference=_reference_steps,
    fake=lambda *args: None,
    check=_check_steps,
)
_STEPS.implement("cpu", "fastdp.ops.cpu.adamw")
_STEPS.in_family("adamw")


def adamw_noise_steps_(
    params: Sequence[torch.Tensor],
    grad_sums: Sequence[torch.Tensor],
    exp_avgs: Sequence[torch.Tensor],
    exp_avg_sqs: Sequence[torch.Tensor],
    std: float,
    drawn: torch.Tensor,
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
    """`adamw_noise_step_` of many parameters that share its numbers: on a GPU one launch for each dtype of theirs.

    Args:
        params: k contiguous tensors, float32, bfloat16 or float16.
        grad_sums, exp_avgs, exp_avg_sqs: k contiguous float32 tensors each, of their shapes. Moments may all be bfloat16 instead:
            they are then rounded up or down at random, by bits that the position's tensor and step say.
        std, divisor, lr, betas, eps, weight_decay, step, secure_rounding: as there, for all of them.
        drawn: int32 [k, 12], a position for each, of `NoiseStream.take_at`.
        masters: k float32 copies that are updated in the parameters' place; these become the copies, rounded. Or none.
        rows, columns: k of each, as there; or none.
        firsts: where each of the tensors begins in the one that its position is of, multiples of 16; or none. Processes that hold
            a piece each add the noise that the whole would get.

    Raises:
        ValueError: if a number is out of range, or numbers of tensors, shapes, dtypes or devices differ.
        TypeError: if a parameter has another dtype or layout.
        RuntimeError: if a parameter requires grad and grad mode is on.

    >>> import torch
    >>> from fastdp import NoiseStream
    >>> from fastdp.ops import adamw_noise_steps_
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
