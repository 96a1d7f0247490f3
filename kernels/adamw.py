"""``adamw_noise_step_``: noise and AdamW in one pass over memory, 28 bytes an element in float32."""

import torch
import triton
import triton.language as tl

from .chacha import BLOCKS, normals
from .grid import numbers_of_grid, on_grid
from .launch import beside, on_device_of
from .tiles import load_flat, store_flat


@triton.jit(do_not_specialize=["n"])
def _adamw_kernel(
    p_param, p_grad, p_mean, p_square, p_position, n,
    std, spacing, inverse, inverse_divisor, keep, step_size, lerp1, beta2, rest2, inverse_correction2, eps, noise_variance, floor,
    b_blocks: tl.constexpr, CORRECTED: tl.constexpr, ROUNDED: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * b_blocks
    block = (first + tl.arange(0, b_blocks)).to(tl.uint32)
    z = normals(p_position, block, ROUNDED)
    o_x = (first + tl.arange(0, b_blocks))[:, None] * 16 + tl.arange(0, 16)[None, :]
    inside = (first + b_blocks) * 16 <= n
    # [b_blocks, 16]
    grad = load_flat(p_grad, o_x, n, inside)
    if ROUNDED:
        g = on_grid(grad, z, p_position, block, std, spacing, inverse) * inverse_divisor
    else:
        g = tl.fma(z, std, grad) * inverse_divisor
    # [b_blocks, 16]
    mean = load_flat(p_mean, o_x, n, inside)
    square = load_flat(p_square, o_x, n, inside)
    param = load_flat(p_param, o_x, n, inside).to(tl.float32)
    mean = tl.fma(lerp1, g - mean, mean)
    square = tl.fma(g * g, rest2, square * beta2)
    if CORRECTED:
        under = tl.sqrt(tl.maximum(square * inverse_correction2 - noise_variance, floor))
    else:
        under = tl.sqrt(square * inverse_correction2) + eps
    param = param * keep - step_size * mean / under
    # [b_blocks, 16]
    store_flat(p_mean, o_x, n, inside, mean)
    store_flat(p_square, o_x, n, inside, square)
    store_flat(p_param, o_x, n, inside, param.to(p_param.dtype.element_ty))


def adamw_noise_step_(
    param: torch.Tensor,
    grad_sum: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    position: torch.Tensor,
    std: float,
    divisor: float,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    variance_floor: float | None,
    secure_rounding: bool,
) -> None:
    """One step of AdamW in place on ``g = (grad_sum + std z) / divisor``, z at ``position`` (int32 [11]).

    With ``variance_floor`` the second moment is freed of the noise's variance (DP-AdamBC, arXiv 2312.14334, algorithm
    1). All tensors have one shape; ``param`` is float32, bfloat16 or float16, the others float32; strided ones are
    copied once. The numbers of a step are computed in float64 and reach the kernel as float32: no step compiles
    another kernel.
    """
    if param.numel() == 0:
        return
    written = (param, exp_avg, exp_avg_sq)
    flat = [x.contiguous() for x in written]
    with on_device_of(param):
        _adamw_kernel[(triton.cdiv(param.numel(), 16 * BLOCKS),)](
            flat[0],
            grad_sum.contiguous(),
            flat[1],
            flat[2],
            beside(position, param),
            param.numel(),
            *(numbers_of_grid(std) if secure_rounding and std > 0.0 else (float(std), 0.0, 0.0)),
            1.0 / divisor,
            1.0 - lr * weight_decay,
            lr / (1.0 - beta1**step),
            1.0 - beta1,
            float(beta2),
            1.0 - beta2,
            1.0 / (1.0 - beta2**step),
            float(eps),
            (std / divisor) ** 2,
            float(variance_floor or 0.0),
            b_blocks=BLOCKS,
            CORRECTED=variance_floor is not None,
            ROUNDED=secure_rounding and std > 0.0,
            enable_fp_fusion=True,
            num_warps=4,
        )
    for x, result in zip(written, flat):
        if result is not x:
            x.copy_(result)
