"""The one place where something leaves the private side: ledger first, then noise, then `.grad` or the parameter itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

import fastdp.ops as ops
from fastdp.engine.policy import Policy
from fastdp.ops.stream import Draw, NoiseStream


class Update(Protocol):
    """An optimizer's own step on ``(total + std z) / divisor``, which need not make that gradient."""

    def __call__(
        self,
        parameter: torch.nn.Parameter,
        total: torch.Tensor,
        std: float,
        draw: Draw,
        *,
        divisor: float,
        secure_rounding: bool,
    ) -> bool:
        """Update the parameter with the noise of ``draw``; False, and nothing done, if this one needs its gradient."""


class Recorder(Protocol):
    """What a release needs of a ledger."""

    def record(self, kind: str = "step") -> None:
        """Note one release before it happens; raises if the budget does not hold it."""


class Release:
    """Turns the clipped sums of a logical batch into noisy mean gradients.

    Args:
        parameters: the trained parameters by name; all of them receive noise, whether or not a gradient reached them.
        ledger: notes each release before it happens.
        stream: the noise; tensor i of release s takes position (s, i), whatever the number of threads or micro-batches.
        expected_batch_size: the divisor, which does not depend on the batch that was drawn.
        secure_rounding: round noised sums to a grid, exactly (docs/noise.md).
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        ledger: Recorder,
        stream: NoiseStream,
        expected_batch_size: float,
        *,
        secure_rounding: bool = True,
    ):
        self.parameters = parameters
        self.ledger = ledger
        self.stream = stream
        self.expected_batch_size = expected_batch_size
        self.secure_rounding = secure_rounding
        self._count = 0

    def __call__(
        self,
        sums: dict[str, torch.Tensor],
        policy: Policy,
        *,
        kind: str = "step",
        update: Update | None = None,
    ) -> None:
        """Record, add noise and set `.grad`, rounded to the parameter's dtype only after the noise is in.

        ``update`` takes the parameters it can; their `.grad` stays None. ``sums`` is emptied: each other buffer becomes a
        gradient.
        """
        self.ledger.record(kind)
        for index, (name, parameter) in enumerate(self.parameters.items()):
            total = sums.pop(name, None)
            if total is None:
                total = torch.zeros(parameter.shape, device=parameter.device)
            total = total.contiguous()
            if update is not None and self._updated(name, total, policy, index, update):
                continue
            self._add_noise(name, total, policy, index)
            parameter.grad = total.div_(self.expected_batch_size).to(parameter.dtype)
        self._count += 1

    def _updated(self, name: str, total: torch.Tensor, policy: Policy, index: int, update: Update) -> bool:
        group = policy.group_of.get(name, 0)
        if isinstance(group, tuple):
            return False
        return update(
            self.parameters[name],
            total,
            (policy.stds or (0.0,))[group],
            self.stream.at(self._count, index),
            divisor=self.expected_batch_size,
            secure_rounding=self.secure_rounding,
        )

    def _add_noise(self, name: str, total: torch.Tensor, policy: Policy, index: int) -> None:
        group = policy.group_of.get(name, 0)
        stds = policy.stds or (0.0,)
        if isinstance(group, tuple):
            # Each side's noised sum lies on a grid of its own: both are drawn whole, and each gives the elements it has.
            outside = total.clone()
            self._draw(total, stds[group[0]], index)
            self._draw(outside, stds[group[1]], index + len(self.parameters))
            torch.where(policy.masks[name], total, outside, out=total)
        elif stds[group] > 0:
            self._draw(total, stds[group], index)

    def _draw(self, total: torch.Tensor, std: float, index: int) -> None:
        ops.add_noise_(total, std, self.stream.at(self._count, index), secure_rounding=self.secure_rounding)
