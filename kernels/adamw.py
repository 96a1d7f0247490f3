"""``adamw_noise_step_``: noise and AdamW in one pass over memory, 28 bytes an element in float32."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from fastdp.ops.adamw import Numbers, told
from fastdp.ops.halves import ELEMENT_FACTOR, MIX_FACTOR, STEP_FACTOR, TENSOR_FACTOR

from .chacha import blocks_and_options, normals
from .grid import numbers_of_grid, on_grid
from .groups import first_programs, owner
from .launch import TRITON, beside, cdiv, on_device_of
from .tiles import load_flat, store_flat

_ELEMENT, _TENSOR, _STEP, _MIX = map(tl.constexpr, (ELEMENT_FACTOR, TENSOR_FACTOR, STEP_FACTOR, MIX_FACTOR))


@triton.jit
def _kept_in_half(x, bits):
    # Float32 numbers in bfloat16, rounded up or down by sixteen random bits.
    words = x.to(tl.uint32, bitcast=True) + bits
    rounded = (words >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return tl.where(x != x, x.to(tl.bfloat16), rounded)


@triton.jit
def _random_bits(p_position, o_x):
    # As fastdp/ops/halves.py has them.
    seed = (
        tl.load(p_position + 8).to(tl.uint32, bitcast=True) * _TENSOR
        + tl.load(p_position + 9).to(tl.uint32, bitcast=True) * _STEP
    )
    x = o_x.to(tl.uint32) * _ELEMENT + seed
    x = (x ^ (x >> 15)) * _MIX
    return x ^ (x >> 16)


@triton.jit
def update(
    p_param, p_grad, p_mean, p_square, p_master, o_x, n, inside, z, p_position, block, std, spacing, inverse,
    inverse_divisor, keep, step_size, lerp1, beta2, rest2, inverse_correction2, eps, noise_variance, floor,
    p_rows, p_columns, width,
    CORRECTED: tl.constexpr, ROUNDED: tl.constexpr, MASTER: tl.constexpr, AXES: tl.constexpr,
):  # fmt: skip
    # [b_blocks, 16]
    grad = load_flat(p_grad, o_x, n, inside)
    if ROUNDED:
        g = on_grid(grad, z, p_position, block, std, spacing, inverse) * inverse_divisor
    else:
        g = tl.fma(z, std, grad) * inverse_divisor
    variance = noise_variance
    if AXES:
        m_x = o_x < n
        axes = tl.load(p_rows + o_x // width, m_x, 1.0) * tl.load(p_columns + o_x % width, m_x, 1.0)
        g = g * axes
        variance = noise_variance * axes * axes
    # [b_blocks, 16]
    mean = load_flat(p_mean, o_x, n, inside).to(tl.float32)
    square = load_flat(p_square, o_x, n, inside).to(tl.float32)
    if MASTER:
        param = load_flat(p_master, o_x, n, inside)
    else:
        param = load_flat(p_param, o_x, n, inside).to(tl.float32)
    mean = tl.fma(lerp1, g - mean, mean)
    square = tl.fma(g * g, rest2, square * beta2)
    if CORRECTED:
        under = tl.sqrt(tl.maximum(square * inverse_correction2 - variance, floor))
    else:
        under = tl.sqrt(square * inverse_correction2) + eps
    param = param * keep - step_size * mean / under
    # [b_blocks, 16]
    if p_mean.dtype.element_ty == tl.float32:
        store_flat(p_mean, o_x, n, inside, mean)
        store_flat(p_square, o_x, n, inside, square)
    else:
        bits = _random_bits(p_position, o_x)
        store_flat(p_mean, o_x, n, inside, _kept_in_half(mean, bits >> 16))
        store_flat(p_square, o_x, n, inside, _kept_in_half(square, bits & 0xFFFF))
    if MASTER:
        store_flat(p_master, o_x, n, inside, param)
    store_flat(p_param, o_x, n, inside, param.to(p_param.dtype.element_ty))


@triton.jit(do_not_specialize=["n"])
def _adamw_kernel(
    p_param, p_grad, p_mean, p_square, p_position, n,
    std, spacing, inverse, inverse_divisor, keep, step_size, lerp1, beta2, rest2, inverse_correction2, eps, noise_variance, floor,
    p_rows, p_columns, width,
    b_blocks: tl.constexpr, CORRECTED: tl.constexpr, ROUNDED: tl.constexpr, AXES: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * b_blocks
    block = (first + tl.arange(0, b_blocks)).to(tl.uint32)
    z = normals(p_position, block, ROUNDED)
    o_x = (first + tl.arange(0, b_blocks))[:, None] * 16 + tl.arange(0, 16)[None, :]
    inside = (first + b_blocks) * 16 <= n
    update(p_param, p_grad, p_mean, p_square, p_param, o_x, n, inside, z, p_position, block, std, spacing, inverse,
           inverse_divisor, keep, step_size, lerp1, beta2, rest2, inverse_correction2, eps, noise_variance, floor,
           p_rows, p_columns, width, CORRECTED, ROUNDED, False, AXES)  # fmt: skip


@triton.jit(do_not_specialize=["lines"])
def _adamw_group_kernel(
    p_table, p_positions, lines,
    std, spacing, inverse, inverse_divisor, keep, step_size, lerp1, beta2, rest2, inverse_correction2, eps, noise_variance, floor,
    PARAMETER: tl.constexpr, MOMENTS: tl.constexpr, b_blocks: tl.constexpr, CORRECTED: tl.constexpr, ROUNDED: tl.constexpr,
    MASTER: tl.constexpr, ALIGNED: tl.constexpr, AXES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    line = owner(p_table, 10, lines, program).to(tl.int64)
    p_line = p_table + line * 10
    p_param = tl.load(p_line).to(tl.pointer_type(PARAMETER))
    p_grad = tl.load(p_line + 1).to(tl.pointer_type(tl.float32))
    p_mean = tl.load(p_line + 2).to(tl.pointer_type(MOMENTS))
    p_square = tl.load(p_line + 3).to(tl.pointer_type(MOMENTS))
    p_master = tl.load(p_line + 4).to(tl.pointer_type(tl.float32))
    if ALIGNED:
        p_param = tl.multiple_of(p_param, 16)
        p_grad = tl.multiple_of(p_grad, 16)
        p_mean = tl.multiple_of(p_mean, 16)
        p_square = tl.multiple_of(p_square, 16)
        p_master = tl.multiple_of(p_master, 16)
    p_rows = tl.load(p_line + 5).to(tl.pointer_type(tl.float32))
    p_columns = tl.load(p_line + 6).to(tl.pointer_type(tl.float32))
    width = tl.load(p_line + 7)
    n = tl.load(p_line + 8)
    first = (program - tl.load(p_line + 9)) * b_blocks
    p_position = p_positions + line * 11
    block = (first + tl.arange(0, b_blocks)).to(tl.uint32)
    z = normals(p_position, block, ROUNDED)
    o_x = (first + tl.arange(0, b_blocks))[:, None] * 16 + tl.arange(0, 16)[None, :]
    inside = (first + b_blocks) * 16 <= n
    update(p_param, p_grad, p_mean, p_square, p_master, o_x, n, inside, z, p_position, block, std, spacing, inverse,
           inverse_divisor, keep, step_size, lerp1, beta2, rest2, inverse_correction2, eps, noise_variance, floor,
           p_rows, p_columns, width, CORRECTED, ROUNDED, MASTER, AXES)  # fmt: skip


def _numbers(of: Numbers) -> tuple[float, ...]:
    """What the kernel takes from ``std`` to ``floor``, computed in float64."""
    return (
        *(numbers_of_grid(of.std) if of.rounded else (float(of.std), 0.0, 0.0)),
        1.0 / of.divisor,
        1.0 - of.lr * of.weight_decay,
        of.lr / (1.0 - of.beta1**of.step),
        1.0 - of.beta1,
        float(of.beta2),
        1.0 - of.beta2,
        1.0 / (1.0 - of.beta2**of.step),
        float(of.eps),
        (of.std / of.divisor) ** 2,
        float(of.variance_floor or 0.0),
    )


def adamw_noise_step_(
    param: torch.Tensor,
    grad_sum: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    position: torch.Tensor,
    *rest: Any,
) -> None:
    """One step of AdamW in place on ``g = (grad_sum + std z) / divisor``, z at ``position`` (int32 [11]).

    With ``variance_floor`` the second moment is freed of the noise's variance (DP-AdamBC, arXiv 2312.14334, algorithm
    1). With ``rows`` and ``columns``, g and the deviation of its noise are multiplied by their outer product.
    All tensors have one shape; ``param`` is float32, bfloat16 or float16, the others float32; strided ones are
    copied once. The numbers of a step are computed in float64 and reach the kernel as float32: no step compiles
    another kernel.
    """
    if param.numel() == 0:
        return
    numbers, rows, columns = told(rest)
    b_blocks, options = blocks_and_options(numbers.rounded)
    written = (param, exp_avg, exp_avg_sq)
    flat = [x.contiguous() for x in written]
    with on_device_of(param):
        _adamw_kernel[(cdiv(param.numel(), 16 * b_blocks),)](
            flat[0],
            grad_sum.contiguous(),
            flat[1],
            flat[2],
            beside(position, param),
            param.numel(),
            *_numbers(numbers),
            flat[0] if rows is None else rows,
            flat[0] if columns is None else columns,
            1 if columns is None else columns.numel(),
            b_blocks=b_blocks,
            CORRECTED=numbers.variance_floor is not None,
            ROUNDED=numbers.rounded,
            AXES=rows is not None,
            enable_fp_fusion=True,
            **options,
        )
    for x, result in zip(written, flat):
        if result is not x:
            x.copy_(result)


def adamw_noise_steps_(
    params: Sequence[torch.Tensor],
    grad_sums: Sequence[torch.Tensor],
    exp_avgs: Sequence[torch.Tensor],
    exp_avg_sqs: Sequence[torch.Tensor],
    masters: Sequence[torch.Tensor],
    drawn: torch.Tensor,
    *rest: Any,
) -> None:
    """As `adamw_noise_step_` for k contiguous tensors, moments float32 or bfloat16: a launch for each dtype of parameters."""
    numbers, rows, columns = told(rest)
    b_blocks, options = blocks_and_options(numbers.rounded)
    computed = _numbers(numbers)
    lists = (params, grad_sums, exp_avgs, exp_avg_sqs, masters or grad_sums, *((rows, columns) if rows else ()))
    kinds: dict[torch.dtype, list[int]] = {}
    for i, param in enumerate(params):
        kinds.setdefault(param.dtype, []).append(i)
    for dtype, members in kinds.items():
        own = lists if len(kinds) == 1 else [[tensors[i] for i in members] for tensors in lists]
        lengths = list(map(torch.Tensor.numel, own[0]))
        firsts, programs = first_programs(lengths, 16 * b_blocks)
        if not programs:
            continue
        # A table of hundreds of lines in every step: made by columns, which takes the host a third of the time.
        table = np.empty((len(members), 10), np.int64)
        for column, tensors in enumerate(own):
            table[:, column] = list(map(torch.Tensor.data_ptr, tensors))
        if not rows:
            table[:, 5:7] = 0
        table[:, 7] = list(map(torch.Tensor.numel, own[6])) if rows else 1
        table[:, 8], table[:, 9] = lengths, firsts
        with on_device_of(params[0]):
            _adamw_group_kernel[(programs,)](
                beside(torch.from_numpy(table), params[0]),
                beside(drawn if len(kinds) == 1 else drawn[members], params[0]),
                len(members),
                *computed,
                PARAMETER=TRITON[dtype],
                MOMENTS=TRITON[exp_avgs[0].dtype],
                b_blocks=b_blocks,
                CORRECTED=numbers.variance_floor is not None,
                ROUNDED=numbers.rounded,
                MASTER=bool(masters),
                ALIGNED=not (table[:, :5] % 16).any(),
                AXES=bool(rows),
                enable_fp_fusion=True,
                **options,
            )
