"""DP-SGD as settings of the engine: which norms are bounded, by how much, and what follows the release."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fastdp.engine.clip.policy import Policy, Unclipped
from fastdp.methods.geometry import Bounds, Groups, check_clipping, clip_groups, describe_clipping
from fastdp.methods.options import AdaptiveClipping as AdaptiveClipping, Options
from fastdp.private.method import Method
from fastdp.private.plan import Budget, Plan
from fastdp.private.preparation import Outcome


@dataclass(frozen=True)
class DPSGD(Options):
    """Per-example clipping and Gaussian noise, for any optimizer.

    Args:
        max_grad_norm: the clipping threshold C; or one threshold a group, by the group's name.
        groups: named groups of parameters, as shell patterns over parameter names (first match wins); each is clipped on
            its own. ``"per_layer"`` makes a group of every module. None: one norm over all parameters (flat).
        adaptive, noise_schedule, clipping_schedule: as in `Options`.

    Raises ValueError for a threshold that is not positive, or a group without a threshold.
    """

    max_grad_norm: Bounds = 1.0
    groups: Groups = None
    mechanism: str = field(default="DP-SGD", init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_clipping(self.max_grad_norm, self.groups)

    def policy(
        self, parameters: Mapping[str, torch.nn.Parameter], noise_multiplier: float, outcome: Outcome | None = None
    ) -> Policy:
        return clip_groups(parameters, self.gradient_multiplier(noise_multiplier), self.max_grad_norm, self.groups)

    def describe(self) -> dict[str, Any]:
        return {"name": self.mechanism, **describe_clipping(self.max_grad_norm, self.groups), **self.describe_options()}


@dataclass(frozen=True)
class NonPrivate(Method):
    """No clipping and no noise: the baseline, on the same per-example objective, sampling and batch size.

    Attributes:
        mechanism: its name on cards.

    Raises ValueError when the run is made, if it asks for a finite epsilon.

    >>> NonPrivate().describe()
    {'name': 'non-private'}
    """

    mechanism: str = field(default="non-private", init=False)

    def budget(self, plan: Plan) -> Budget:
        """No noise; raises ValueError if a finite epsilon is asked for."""
        if plan.target_epsilon is not None and math.isfinite(plan.target_epsilon):
            raise ValueError(
                f"the non-private method cannot meet target_epsilon {plan.target_epsilon}; leave it out or choose DPSGD"
            )
        return Budget(0.0)

    def policy(
        self, parameters: Mapping[str, torch.nn.Parameter], noise_multiplier: float, outcome: Outcome | None = None
    ) -> Policy:
        return Unclipped()

    def describe(self) -> dict[str, Any]:
        return {"name": self.mechanism}
