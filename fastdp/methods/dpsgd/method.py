"""DP-SGD as settings of the engine: which norms are bounded, by how much, and what follows the release."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fastdp.engine.policy import Policy, Unclipped
from fastdp.ops.stream import NoiseStream
from fastdp.private.method import Budget, Method, Outcome, Schedule


@dataclass(frozen=True)
class AdaptiveClipping:
    """A clipping threshold that follows a quantile of the gradient norms (Andrew et al. 2021, arXiv 1905.03871).

    The fraction of unclipped units is released with noise of its own, paid for out of the same budget: the gradient's
    noise grows to z_delta = (z^-2 - (2 sigma_b)^-2)^(-1/2) so that the pair has multiplier z (Theorem 1).

    Args:
        target_quantile: fraction of units whose gradient should stay whole, in (0, 1).
        learning_rate: step of the geometric update of the threshold.
        count_noise_std: sigma_b, noise of the count of unclipped units, in units.
    """

    target_quantile: float = 0.5
    learning_rate: float = 0.2
    count_noise_std: float = 10.0

    def __post_init__(self) -> None:
        if not 0 < self.target_quantile < 1:
            raise ValueError(f"target_quantile is {self.target_quantile}: it must lie between 0 and 1")
        if not (self.learning_rate > 0 and self.count_noise_std > 0):
            raise ValueError("learning_rate and count_noise_std of adaptive clipping must be positive")

    def gradient_multiplier(self, noise_multiplier: float) -> float:
        """z_delta for a total multiplier z; raises ValueError if the count alone would cost more than z allows."""
        rest = noise_multiplier**-2 - (2 * self.count_noise_std) ** -2
        if rest <= 0:
            raise ValueError(
                f"count_noise_std {self.count_noise_std} leaves nothing for the gradient at noise multiplier "
                f"{noise_multiplier}; raise it above {noise_multiplier / 2:.3g}"
            )
        return rest**-0.5

    def updated(
        self, policy: Policy, unclipped: float, units: float, expected_batch_size: float, stream: NoiseStream
    ) -> Policy:
        """The policy of the next step, from this step's count of unclipped units among the ``units`` that took part.

        Each unit reports 1/2 or -1/2, so one unit more or less moves the sum by 1/2 (section 2.2 of the paper); taking
        half the expected batch size off the count instead would let it move by 1, for which the noise is too small.
        """
        import fastdp.ops as ops

        shifted = torch.tensor([unclipped - units / 2], dtype=torch.float32)
        fraction = float(ops.add_noise_(shifted, self.count_noise_std, stream)) / expected_batch_size + 0.5
        factor = math.exp(-self.learning_rate * (min(max(fraction, 0.0), 1.0) - self.target_quantile))
        return replace(
            policy,
            bounds=tuple(bound * factor for bound in policy.bounds),
            stds=tuple(std * factor for std in policy.stds),
        )


@dataclass(frozen=True)
class DPSGD(Method):
    """Per-example clipping and Gaussian noise, for any optimizer.

    Args:
        max_grad_norm: the clipping threshold C; or one threshold a group, by the group's name.
        groups: named groups of parameters, as shell patterns over parameter names (first match wins); each is clipped on
            its own. ``"per_layer"`` makes a group of every module. None: one norm over all parameters (flat).
        adaptive: let the threshold follow a quantile of the norms.
        bias_correction: subtract the noise's known variance from Adam's second moment (DP-AdamBC, arXiv 2312.14334);
            needs `fastdp.optim.Adam` or `AdamW`.
        weight_averaging: decay of an exponential moving average of the weights, kept beside the model; post-processing.

    Raises:
        ValueError: for a threshold that is not positive, or a group without a threshold.
    """

    max_grad_norm: float | Mapping[str, float] = 1.0
    groups: Mapping[str, Sequence[str]] | str | None = None
    adaptive: AdaptiveClipping | None = None
    bias_correction: bool = False
    weight_averaging: float | None = None
    mechanism: str = field(default="DP-SGD", init=False)

    def __post_init__(self) -> None:
        if isinstance(self.groups, str) and self.groups != "per_layer":
            raise ValueError(f"groups is '{self.groups}': give 'per_layer' or a mapping from names to patterns")
        values = self.max_grad_norm.values() if isinstance(self.max_grad_norm, Mapping) else [self.max_grad_norm]
        for bound in values:
            if not (bound > 0 and math.isfinite(bound)):
                raise ValueError(f"max_grad_norm is {bound}: it must be a positive number")
        if self.weight_averaging is not None and not 0 < self.weight_averaging < 1:
            raise ValueError(f"weight_averaging is {self.weight_averaging}: a decay lies between 0 and 1")

    def policy(
        self, parameters: Mapping[str, torch.nn.Parameter], noise_multiplier: float, outcome: Outcome | None = None
    ) -> Policy:
        """The policy for these trained parameters at a total ``noise_multiplier``.

        Every coordinate gets the same noise, noise_multiplier times sqrt(sum_k C_k^2): K groups are one vector whose
        sensitivity is the norm of their bounds.
        """
        group_of, names = self._groups(parameters)
        if isinstance(self.max_grad_norm, Mapping):
            missing = [name for name in names if name not in self.max_grad_norm]
            if missing:
                raise ValueError(f"max_grad_norm has no entry for the group '{missing[0]}'")
            bounds = tuple(float(self.max_grad_norm[name]) for name in names)
        else:
            # One threshold for several groups is the threshold of the whole, shared equally.
            bounds = (float(self.max_grad_norm) / math.sqrt(len(names)),) * len(names)
        multiplier = noise_multiplier
        if self.adaptive is not None and noise_multiplier > 0:
            multiplier = self.adaptive.gradient_multiplier(noise_multiplier)
        std = multiplier * math.sqrt(sum(bound**2 for bound in bounds))
        return Policy(bounds, (std,) * len(bounds), group_of)

    def _groups(self, parameters: Mapping[str, torch.nn.Parameter]) -> tuple[dict[str, int], list[str]]:
        if self.groups is None:
            return dict.fromkeys(parameters, 0), ["all"]
        if self.groups == "per_layer":
            layers = [name.rpartition(".")[0] for name in parameters]
            names = list(dict.fromkeys(layers))
            return {name: names.index(layer) for name, layer in zip(parameters, layers)}, names
        assert isinstance(self.groups, Mapping)
        names = list(self.groups)
        group_of = {}
        for name in parameters:
            found = [
                index
                for index, patterns in enumerate(self.groups.values())
                if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)
            ]
            if not found:
                raise ValueError(f"no group's pattern matches the trained parameter '{name}'; add a group for it")
            group_of[name] = found[0]
        return group_of, names

    def describe(self) -> dict[str, Any]:
        """The settings, for the card."""
        groups = (
            self.groups if isinstance(self.groups, (str, type(None))) else {k: list(v) for k, v in self.groups.items()}
        )
        bound = dict(self.max_grad_norm) if isinstance(self.max_grad_norm, Mapping) else self.max_grad_norm
        return {
            "name": self.mechanism,
            "max_grad_norm": bound,
            "groups": groups,
            "adaptive": None if self.adaptive is None else vars(self.adaptive),
            "bias_correction": self.bias_correction,
            "weight_averaging": self.weight_averaging,
        }


@dataclass(frozen=True)
class NonPrivate(Method):
    """No clipping and no noise: the baseline, on the same per-example objective, sampling and batch size."""

    weight_averaging: float | None = None
    mechanism: str = field(default="non-private", init=False)
    adaptive: None = field(default=None, init=False)
    bias_correction: bool = field(default=False, init=False)

    def budget(self, schedule: Schedule) -> Budget:
        """No noise; raises ValueError if a finite epsilon is asked for."""
        if schedule.target_epsilon is not None and math.isfinite(schedule.target_epsilon):
            raise ValueError(
                f"the non-private method cannot meet target_epsilon {schedule.target_epsilon}; leave it out or choose DPSGD"
            )
        return Budget(0.0)

    def policy(
        self, parameters: Mapping[str, torch.nn.Parameter], noise_multiplier: float, outcome: Outcome | None = None
    ) -> Policy:
        """A policy that neither clips nor adds noise."""
        return Unclipped()

    def describe(self) -> dict[str, Any]:
        """The settings, for the card."""
        return {"name": self.mechanism, "weight_averaging": self.weight_averaging}
