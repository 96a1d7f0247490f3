"""``adamw_noise_steps_``: noise and AdamW in one pass over memory, 28 bytes an element in float32."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from fastdp.ops.adamw import Numbers, unpack
from fastdp.ops.stochastic_rounding import ELEMENT_FACTOR, MIX_FACTOR, STEP_FACTOR, TENSOR_FACTOR

from .chacha import BLOCKS, POSITION, normals
from .grid import numbers_of_grid, on_grid, settle_element
from .groups import first_programs, owner
from .launch import TRITON_DTYPES, cdiv, on_device_of, registers_of, to_device_of
from .settle import NO_LIST, SETTLE_BLOCK, lowest, new_list, own_entries, put_on_list
from .tiles import load_flat, store_flat

#: Registers of a thread, so that a multiprocessor holds three programs.
REGISTERS = 168

_ELEMENT, _TENSOR, _STEP, _MIX = map(tl.constexpr, (ELEMENT_FACTOR, TENSOR_FACTOR, STEP_FACTOR, MIX_FACTOR))


@triton.jit
def _round_to_bfloat16(x, bits):
    # Float32 numbers in bfloat16, rounded up or down by sixteen random bits.
    words = x.to(tl.uint32, bitcast=True) + bits
    rounded = (words >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return tl.where(x != x, x.to(tl.bfloat16), rounded)


@triton.jit
def _random_bits(p_position, o_x):
    # As fastdp/ops/stochastic_rounding.py has them.
    seed = (
        tl.load(p_position + 8).to(tl.uint32, bitcast=True) * _TENSOR
        + tl.load(p_position + 9).to(tl.uint32, bitcast=True) * _STEP
    )
    x = o_x.to(tl.uint32) * _ELEMENT + seed
    x = (x ^ (x >> 15)) * _MIX
    return x ^ (x >> 16)


@triton.jit
def _addresses(p_table, line, PARAMETER: tl.constexpr, MOMENTS: tl.constexpr, ALIGNED: tl.constexpr):
    # The columns of one line of the table, or of a tile of lines: see `adamw_noise_steps_`.
    p_line = p_table + line * 11
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
    width, n, begin = tl.load(p_line + 7), tl.load(p_line + 8), tl.load(p_line + 9)
    return p_param, p_grad, p_mean, p_square, p_master, p_rows, p_columns, width, n, begin


@triton.jit
def _update(
    p_param, p_mean, p_square, p_master, p_rows, p_columns, width, n, begin, o_x, inside, noised, is_open, p_position,
    inverse_divisor, keep, step_size, lerp1, beta2, rest2, inverse_correction2, eps,
    KEEP_OPEN: tl.constexpr, MASTER: tl.constexpr, AXES: tl.constexpr,
):  # fmt: skip
    # Elements o_x are a tile, or one of each tensor; noise of a tensor begins at block `begin`. With KEEP_OPEN, elements whose
    # noised gradient is not rounded yet stay as they are.
    g = noised * inverse_divisor
    if AXES:
        m_x = o_x < n
        axes = tl.load(p_rows + o_x // width, m_x, 1.0) * tl.load(p_columns + o_x % width, m_x, 1.0)
        g = g * axes
    # [b_blocks, 16], or [b]; so are the others
    mean = load_flat(p_mean, o_x, n, inside).to(tl.float32)
    square = load_flat(p_square, o_x, n, inside).to(tl.float32)
    if MASTER:
        param = load_flat(p_master, o_x, n, inside)
    else:
        param = load_flat(p_param, o_x, n, inside).to(tl.float32)
    new_mean = tl.fma(lerp1, g - mean, mean)
    new_square = tl.fma(g * g, rest2, square * beta2)
    under = tl.sqrt(new_square * inverse_correction2) + eps
    new_param = param * keep - step_size * new_mean / under
    if KEEP_OPEN:
        # Written back unchanged, because stores with a mask are narrow.
        new_mean = tl.where(is_open, mean, new_mean)
        new_square = tl.where(is_open, square, new_square)
        new_param = tl.where(is_open, param, new_param)
    # [b_blocks, 16]
    if p_mean.dtype.element_ty == tl.float32:
        store_flat(p_mean, o_x, n, inside, new_mean)
        store_flat(p_square, o_x, n, inside, new_square)
    else:
        # Moments that are bfloat16 already stay as they are: their low bits are 0, and random bits carry nothing over.
        bits = _random_bits(p_position, begin * 16 + o_x)
        store_flat(p_mean, o_x, n, inside, _round_to_bfloat16(new_mean, bits >> 16))
        store_flat(p_square, o_x, n, inside, _round_to_bfloat16(new_square, bits & 0xFFFF))
    if MASTER:
        store_flat(p_master, o_x, n, inside, new_param)
    store_flat(p_param, o_x, n, inside, new_param.to(p_param.dtype.element_ty))


@triton.jit(do_not_specialize=["capacity", "lines"])
def adamw_kernel(
    p_table, p_positions, p_list, capacity, lines,
    std, spacing, inverse, inverse_divisor, keep, step_size, lerp1, beta2, rest2, inverse_correction2, eps,
    PARAMETER: tl.constexpr, MOMENTS: tl.constexpr, b_blocks: tl.constexpr, ROUNDED: tl.constexpr,
    MASTER: tl.constexpr, ALIGNED: tl.constexpr, AXES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    line = owner(p_table, 11, lines, program).to(tl.int64)
    p_param, p_grad, p_mean, p_square, p_master, p_rows, p_columns, width, n, begin = _addresses(
        p_table, line, PARAMETER, MOMENTS, ALIGNED
    )
    first = (program - tl.load(p_table + line * 11 + 10)) * b_blocks
    block = first + tl.arange(0, b_blocks)
    p_position = p_positions + line * POSITION
    z = normals(p_position, (begin + block).to(tl.uint32), ROUNDED)
    o_x = block[:, None] * 16 + tl.arange(0, 16)[None, :]
    inside = (first + b_blocks) * 16 <= n
    # [b_blocks, 16]
    grad = load_flat(p_grad, o_x, n, inside)
    if ROUNDED:
        noised, is_open = on_grid(grad, z, std, spacing, inverse)
        put_on_list(p_list, capacity, line, block, n, is_open)
    else:
        noised, is_open = tl.fma(z, std, grad), False
    _update(p_param, p_mean, p_square, p_master, p_rows, p_columns, width, n, begin, o_x, inside, noised, is_open, p_position,
            inverse_divisor, keep, step_size, lerp1, beta2, rest2, inverse_correction2, eps,
            ROUNDED, MASTER, AXES)  # fmt: skip


@triton.jit(do_not_specialize=["capacity"])
def settle_adamw_kernel(
    p_table, p_positions, p_list, capacity,
    std, spacing, inverse, inverse_divisor, keep, step_size, lerp1, beta2, rest2, inverse_correction2, eps,
    PARAMETER: tl.constexpr, MOMENTS: tl.constexpr, b: tl.constexpr, MASTER: tl.constexpr,
    AXES: tl.constexpr,
):  # fmt: skip
    _, line, block, bits = own_entries(p_list, capacity, b)
    is_full = tl.load(p_list) > capacity
    p_position = p_positions + line * POSITION
    p_param, p_grad, p_mean, p_square, p_master, p_rows, p_columns, width, n, begin = _addresses(
        p_table, line, PARAMETER, MOMENTS, False
    )
    # One open element of each block in a turn; few blocks have a second.
    while tl.max(bits, 0) > 0:
        element = lowest(bits)
        o_x = tl.where(bits != 0, block.to(tl.int64) * 16 + element, n)
        # [b]
        grad = load_flat(p_grad, o_x, n, False)
        noised = settle_element(grad, p_position, (begin + block).to(tl.uint32), element, std, spacing, inverse)
        # What the list had no room for was not updated, and nobody knows where it is: the step shall not go on.
        noised = tl.where(is_full, float("nan"), noised)
        _update(p_param, p_mean, p_square, p_master, p_rows, p_columns, width, n, begin, o_x, False, noised, False, p_position,
                inverse_divisor, keep, step_size, lerp1, beta2, rest2, inverse_correction2, eps,
                False, MASTER, AXES)  # fmt: skip
        bits &= bits - 1


def _numbers(of: Numbers) -> tuple[float, ...]:
    """What the kernel takes from ``std`` to ``eps``, computed in float64."""
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
    )


def adamw_noise_steps_(
    params: Sequence[torch.Tensor],
    grad_sums: Sequence[torch.Tensor],
    exp_avgs: Sequence[torch.Tensor],
    exp_avg_sqs: Sequence[torch.Tensor],
    masters: Sequence[torch.Tensor],
    drawn: torch.Tensor,
    *rest: Any,
) -> None:
    """One step of AdamW in place on ``g = (grad_sum + std z) / divisor`` of k contiguous tensors: a launch for each dtype.

    Where noise is rounded, another settles what it left open. The numbers of a step are computed in float64 and reach the kernel
    as float32: no step compiles another kernel.
    """
    numbers, rows, columns, starts = unpack(rest, len(params))
    computed = _numbers(numbers)
    lists = (params, grad_sums, exp_avgs, exp_avg_sqs, masters or grad_sums, *((rows, columns) if rows else ()))
    kinds: dict[torch.dtype, list[int]] = {}
    for i, param in enumerate(params):
        # A piece may be empty.
        if param.numel():
            kinds.setdefault(param.dtype, []).append(i)
    for dtype, members in kinds.items():
        own = lists if len(members) == len(params) else [[tensors[i] for i in members] for tensors in lists]
        lengths = list(map(torch.Tensor.numel, own[0]))
        firsts, programs = first_programs(lengths, 16 * BLOCKS)
        # A table of hundreds of lines in every step: made by columns, which takes the host a third of the time.
        table = np.empty((len(members), 11), np.int64)
        for column, tensors in enumerate(own):
            table[:, column] = list(map(torch.Tensor.data_ptr, tensors))
        if not rows:
            table[:, 5:7] = 0
        table[:, 7] = list(map(torch.Tensor.numel, own[6])) if rows else 1
        table[:, 8], table[:, 9], table[:, 10] = lengths, [starts[i] // 16 for i in members], firsts
        kind: dict[str, Any] = {
            "PARAMETER": TRITON_DTYPES[dtype],
            "MOMENTS": TRITON_DTYPES[exp_avgs[0].dtype],
            "MASTER": bool(masters),
            "AXES": bool(rows),
            "enable_fp_fusion": True,
        }
        with on_device_of(params[0]):
            lines = to_device_of(torch.from_numpy(table), params[0])
            positions = to_device_of(drawn if len(members) == len(params) else drawn[members], params[0])
            opened = new_list(sum(lengths), params[0].device, with_sums=False) if numbers.rounded else NO_LIST
            adamw_kernel[(programs,)](
                lines, positions, opened.entries, opened.capacity, len(members), *computed,
                b_blocks=BLOCKS, ROUNDED=numbers.rounded, ALIGNED=not (table[:, :5] % 16).any(), **kind,
                num_warps=4, **registers_of(REGISTERS),
            )  # fmt: skip
            if numbers.rounded:
                settle_adamw_kernel[(cdiv(opened.capacity, SETTLE_BLOCK),)](
                    lines, positions, opened.entries, opened.capacity, *computed, b=SETTLE_BLOCK, **kind, num_warps=1
                )
