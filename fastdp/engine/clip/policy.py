"""What a method decides: the groups whose norms are bounded, the bounds, the noise, and the sensitivity they imply."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from fastdp.engine.bounds import UpperNorms
from fastdp.engine.clip.axes import RankOne
from fastdp.ops.placed import CONSTANTS

#: How far around the bound, against it, a norm counts in part as below it.
_RAMP = 2.0**-4


@dataclass(frozen=True)
class Policy:
    """Clipping by groups: what a unit adds in group k is scaled to norm at most ``bounds[k]``, rounding included.

    The released vector is the sum of the scaled gradients plus Gaussian noise of standard deviation ``stds[k]`` on every
    coordinate of group k. Dividing each group by its own std gives a query of L2 sensitivity
    sqrt(sum_k (bounds[k] / stds[k])^2) under unit noise, hence `noise_multiplier`.

    Args:
        bounds: C_k, one a group, > 0.
        stds: noise standard deviation of each group, in the units of the summed gradient, >= 0.
        group_of: the group of each trained parameter by name; a pair (inside, outside) for a masked parameter.
        masks: boolean masks, of the parameter's shape, for the parameters whose group is a pair.
        axes: public scales of parameters' coordinates. Their gradients are divided by them before anything else, so that
            bounds and stds are those of what is left; what is released is multiplied by them, which costs nothing.
    """

    bounds: tuple[float, ...]
    stds: tuple[float, ...]
    group_of: Mapping[str, int | tuple[int, int]]
    masks: Mapping[str, torch.Tensor] = field(default_factory=dict)
    axes: Mapping[str, RankOne] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.bounds) != len(self.stds):
            raise ValueError(f"{len(self.bounds)} clipping bounds but {len(self.stds)} noise levels")
        for bound in self.bounds:
            if not (bound > 0 and math.isfinite(bound)):
                raise ValueError(f"max_grad_norm is {bound}: it must be a positive number")
        for name, group in self.group_of.items():
            if isinstance(group, tuple) != (name in self.masks):
                raise ValueError(f"{name} needs a mask exactly if it lies in two groups")
            if name in self.masks and name in self.axes:
                raise ValueError(f"{name} has both a mask and axes: axes are of whole parameters")

    @property
    def noise_multiplier(self) -> float:
        """The multiplier of the equivalent single Gaussian mechanism, 1 / sqrt(sum (C_k / std_k)^2)."""
        if any(std == 0 for std in self.stds):
            return 0.0
        return 1 / math.sqrt(sum((c / s) ** 2 for c, s in zip(self.bounds, self.stds)))

    def groups(self, names: Iterable[str]) -> list[int]:
        """The group of each parameter without a mask among these."""
        return [group for name in names if isinstance(group := self.group_of[name], int)]

    def std_of(self, name: str, device: torch.device) -> torch.Tensor:
        """The standard deviation of a parameter's noise: a scalar, or of the parameter's shape where it is masked."""
        group = self.group_of.get(name, 0)
        stds = [torch.tensor(float(std), device=device) for std in self.stds]
        if isinstance(group, tuple):
            return torch.where(self.masks[name].to(device), stds[group[0]], stds[group[1]])
        return stds[group]

    def unclipped(self, upper: UpperNorms) -> torch.Tensor:
        """How nearly each unit keeps its whole gradient, float64 ``[units]`` in [0, 1]: what an adaptive bound counts.

        1 up to 15/16 of the bound, 0 from 17/16, and a line between, by the *computed* norm. One unit more or less moves the
        sum by at most 1, and a change of the others' norms by a relative e moves it by at most 8 e a unit: a step at the
        bound itself would let a last bit turn all of them.
        """
        return (0.5 + (1 - self.ratios(upper)) / (2 * _RAMP)).clamp(0, 1).nan_to_num(0)

    def ratios(self, upper: UpperNorms) -> torch.Tensor:
        """The computed norms over their bounds, float64 ``[units]``: the largest of all groups."""
        if not self.bounds:
            return torch.zeros(upper.measured.shape[1], dtype=torch.float64, device=upper.measured.device)
        limits = CONSTANTS[self.bounds, torch.float64, upper.measured.device].unsqueeze(1)
        return (upper.measured.clamp(min=0).sqrt() / limits).amax(0)

    def scales(self, upper: UpperNorms) -> torch.Tensor:
        """Upper bounds of the units' norms -> float32 factors ``[groups, units]`` in [0, 1].

        A unit with a norm that is not finite, or beyond 2^40 times its bound, in any group gets 0 in all of them.
        """
        return upper.weights(self.bounds)


@dataclass(frozen=True)
class Unclipped(Policy):
    """No clipping and no noise: ordinary training on the same per-example objective."""

    bounds: tuple[float, ...] = ()
    stds: tuple[float, ...] = ()
    group_of: Mapping[str, int | tuple[int, int]] = field(default_factory=dict)
