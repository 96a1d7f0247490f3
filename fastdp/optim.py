"""Drop-in optimizers: `torch.optim`'s own classes, made private on construction from the model *and* the loader."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

import fastdp.ops as ops
from fastdp.entry import make_private
from fastdp.ops.stream import Draw
from fastdp.private.release import Update
from fastdp.private.run import Private


class _Private:
    """Common to the three: builds torch's optimizer over the model's trained parameters, then makes it private."""

    private: Private

    def _start(self, model: torch.nn.Module, data_loader: DataLoader, options: dict[str, Any]) -> None:
        self.private = make_private(model, self, data_loader, **options)  # type: ignore[arg-type]

    @property
    def data_loader(self) -> Any:
        """The private loader; iterate over this one."""
        return self.private.data_loader


def _trained(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise ValueError("the model has no trained parameter: every requires_grad is False")
    return trained


class SGD(_Private, torch.optim.SGD):
    """`torch.optim.SGD` with private gradients.

    Args:
        model: its parameters with ``requires_grad`` are trained.
        data_loader: a DataLoader; iterate over ``optimizer.data_loader`` afterwards.
        lr, momentum, dampening, weight_decay, nesterov: as in torch.
        privacy: keyword arguments of `fastdp.make_private`.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        data_loader: DataLoader,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        **privacy: Any,
    ):
        torch.optim.SGD.__init__(self, _trained(model), lr, momentum, dampening, weight_decay, nesterov)
        self._start(model, data_loader, privacy)


class CorrectedAdam(torch.optim.AdamW):
    """AdamW whose second moment has the noise's known variance subtracted (DP-AdamBC, arXiv 2312.14334, algorithm 1).

    With ``noise_variance`` at 0 it is torch's AdamW. The denominator is sqrt(max(v_hat - noise_variance, floor)): the
    floor keeps coordinates whose signal is below the noise from exploding.
    """

    noise_variance: float = 0.0
    floor: float = 5e-8
    fused: bool = True

    def noisy_update(self) -> Update | None:
        """What takes this step on a sum and its noise in one pass, as the groups are now; None with ``fused`` off."""
        if not self.fused:
            return None
        return partial(self._noisy_update, {id(p): group for group in self.param_groups for p in group["params"]})

    @torch.no_grad()
    def _noisy_update(
        self,
        group_of: dict[int, dict[str, Any]],
        parameter: torch.nn.Parameter,
        total: torch.Tensor,
        std: float,
        draw: Draw,
        *,
        divisor: float,
        secure_rounding: bool,
    ) -> bool:
        """As `Update`, by `fastdp.ops.adamw_noise_step_`.

        False for a parameter that is not float32, or with weight decay of Adam's kind or another option that the op lacks.
        """
        group = group_of.get(id(parameter))
        if group is None or parameter.dtype != torch.float32:
            return False
        if group["amsgrad"] or group["maximize"] or group["differentiable"]:
            return False
        if group["weight_decay"] and not group["decoupled_weight_decay"]:
            return False
        if self.noise_variance > 0 and not math.isclose((std / divisor) ** 2, self.noise_variance):
            return False
        state = self._state_of(parameter)
        state["step"] += 1
        ops.adamw_noise_step_(
            parameter,
            total,
            state["exp_avg"],
            state["exp_avg_sq"],
            std,
            draw,
            divisor=divisor,
            lr=float(group["lr"]),
            betas=(float(group["betas"][0]), float(group["betas"][1])),
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            step=int(state["step"]),
            variance_floor=self.floor if self.noise_variance > 0 else None,
            secure_rounding=secure_rounding,
        )
        return True

    def _state_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        """Torch's own state of a parameter, begun if it is new."""
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        return state

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step; the correction applies when ``noise_variance`` is positive."""
        if self.noise_variance <= 0:
            plain = torch.optim.AdamW.step
            # torch wraps `step` of a class whose instances have hooks; going through that wrapper would run ours twice.
            return (plain.__wrapped__ if getattr(plain, "hooked", False) else plain)(self, closure)  # type: ignore[attr-defined]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._corrected(parameter, group, beta1, beta2)
        return None

    def _corrected(self, parameter: torch.Tensor, group: dict[str, Any], beta1: float, beta2: float) -> None:
        state = self._state_of(parameter)
        gradient = parameter.grad
        assert gradient is not None
        state["step"] += 1
        step = float(state["step"])
        if group["decoupled_weight_decay"]:
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
        elif group["weight_decay"]:
            gradient = gradient.add(parameter, alpha=group["weight_decay"])
        state["exp_avg"].lerp_(gradient, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        second = state["exp_avg_sq"] / (1 - beta2**step) - self.noise_variance
        denominator = second.clamp_(min=self.floor).sqrt_()
        parameter.addcdiv_(state["exp_avg"], denominator, value=-group["lr"] / (1 - beta1**step))


class AdamW(_Private, CorrectedAdam):
    """`torch.optim.AdamW` with private gradients; ``DPSGD(bias_correction=True)`` corrects its second moment.

    Args:
        model: its parameters with ``requires_grad`` are trained.
        data_loader: a DataLoader; iterate over ``optimizer.data_loader`` afterwards.
        lr, betas, eps, weight_decay: as in torch.
        fused: draw the noise within the update, in one pass over memory; the gradients of `float32` parameters then stay
            None. False, or a hook of yours before the step: noisy gradients are set first, as by any other optimizer.
        privacy: keyword arguments of `fastdp.make_private`.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        data_loader: DataLoader,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        fused: bool = True,
        **privacy: Any,
    ):
        torch.optim.AdamW.__init__(self, _trained(model), lr, betas, eps, weight_decay)
        self.fused = fused
        self._start(model, data_loader, privacy)


class Adam(_Private, CorrectedAdam):
    """`torch.optim.Adam` with private gradients: AdamW's arithmetic with weight decay added to the gradient.

    Args as for `AdamW`; ``weight_decay`` is 0 by default; above 0 the update is not fused.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        data_loader: DataLoader,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        fused: bool = True,
        **privacy: Any,
    ):
        torch.optim.AdamW.__init__(self, _trained(model), lr, betas, eps, weight_decay)
        self.fused = fused
        for group in self.param_groups:
            group["decoupled_weight_decay"] = False
        self.defaults["decoupled_weight_decay"] = False
        self._start(model, data_loader, privacy)
