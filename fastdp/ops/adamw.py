"""``adamw_noise_step_``: the noise of a private step and AdamW in one pass over memory."""

from __future__ import annotations

import torch

from fastdp.ops.grid import check_grid, on_grid
from fastdp.ops.noise import check_in_place, check_position, check_tensor, standard_normals
from fastdp.ops.stream import Draw, NoiseStream
from fastdp.ops.table import Op
from fastdp.validate import at_least, positive


def _check(
    param: torch.Tensor,
    grad_sum: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    position: torch.Tensor | NoiseStream | Draw,
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
    check_tensor("param", param)
    check_in_place("param", param)
    for name, x in (("grad_sum", grad_sum), ("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
        check_tensor(name, x, (torch.float32,))
        if name != "grad_sum":
            check_in_place(name, x)
        if x.shape != param.shape or x.device != param.device:
            raise ValueError(
                f"{name} must have the shape and device of param, {list(param.shape)} on {param.device}, "
                f"got {list(x.shape)} on {x.device}"
            )
    at_least(0.0, std=std, lr=lr, eps=eps, weight_decay=weight_decay, **{"betas[0]": beta1, "betas[1]": beta2})
    positive(divisor=divisor)
    if beta1 >= 1.0 or beta2 >= 1.0:
        raise ValueError(f"betas must be below 1, got ({beta1}, {beta2})")
    if not isinstance(step, int) or step < 1:
        raise ValueError(f"step counts from 1, got {step!r}")
    if variance_floor is not None:
        positive(variance_floor=variance_floor)
    check_position(position)
    if secure_rounding:
        check_grid("param", param, std)


def _reference(
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
    if secure_rounding and std > 0.0:
        g = on_grid(grad_sum, std, position).div_(divisor)
    else:
        z = standard_normals(position, param.numel()).to(param.device, torch.float32)
        g = torch.add(grad_sum, z.reshape(param.shape), alpha=std).div_(divisor)
    exp_avg.lerp_(g, 1.0 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(g, g, value=1.0 - beta2)
    unbiased = exp_avg_sq / (1.0 - beta2**step)
    if variance_floor is None:
        under = unbiased.sqrt_().add_(eps)
    else:
        under = unbiased.sub_((std / divisor) ** 2).clamp_min_(variance_floor).sqrt_()
    update = exp_avg / under
    param.copy_(param.float().mul_(1.0 - lr * weight_decay).add_(update, alpha=-lr / (1.0 - beta1**step)))


_ADAMW = Op(
    "adamw_noise_step_(Tensor(a!) param, Tensor grad_sum, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor position, "
    "float std, float divisor, float lr, float beta1, float beta2, float eps, float weight_decay, int step, "
    "float? variance_floor, bool secure_rounding) -> ()",
    reference=_reference,
    fake=lambda *args: None,
    check=_check,
)
_ADAMW.implement("cpu", "fastdp.ops.cpu.adamw")
_ADAMW.implement("cuda", "fastdp.kernels.adamw")


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
    variance_floor: float | None = None,
    secure_rounding: bool = True,
) -> None:
    """One private step of AdamW in place, on ``g = (grad_sum + std z) / divisor``; the noise never reaches memory.

    ``param``, ``exp_avg`` and ``exp_avg_sq`` are updated as ``torch.optim.AdamW`` would with ``g`` as gradient, in
    float32; ``grad_sum`` is left as it is. 28 bytes an element in float32.

    With ``variance_floor`` the second moment is freed of what noise adds to it, as in DP-AdamBC (Tang, Shpilevskiy and
    Lecuyer 2023, arXiv 2312.14334, algorithm 1): the update is divided by
    ``sqrt(max(v / (1 - beta2^step) - (std / divisor)^2, variance_floor))``, and ``eps`` is not used.

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
        variance_floor: gamma' of DP-AdamBC, in the units of a squared gradient; None for plain AdamW.
        secure_rounding: as in ``add_noise_``.

    Raises:
        ValueError: if a number is out of range, or shapes or devices differ.
        TypeError: if a dtype or layout is another, or ``stream`` is no stream.
        RuntimeError: if a tensor to be written requires grad and grad mode is on, or the position was drawn before.
    """
    numbers = (std, divisor, lr, *betas, eps, weight_decay)
    _ADAMW(param, grad_sum, exp_avg, exp_avg_sq, stream, *numbers, step, variance_floor, secure_rounding)
    for x in (param, exp_avg, exp_avg_sq):
        torch.autograd.graph.increment_version(x)
