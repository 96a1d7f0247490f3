"""What every central method offers beside its own idea: a threshold that adapts, and how its releases are applied."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastdp.engine.policy import Policy
from fastdp.private.method import Method
from fastdp.private.parts import BiasCorrection, Following, Part, WeightAveraging


@dataclass(frozen=True)
class AdaptiveClipping(Part):
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

    def updated(self, policy: Policy, fraction: float) -> Policy:
        """The policy of the next step, from the noised share of units that were left whole."""
        factor = math.exp(-self.learning_rate * (min(max(fraction, 0.0), 1.0) - self.target_quantile))
        return replace(
            policy,
            bounds=tuple(bound * factor for bound in policy.bounds),
            stds=tuple(std * factor for std in policy.stds),
        )

    def follow(self) -> Following:
        """Updates the policy after each release."""
        return _Adapting(self)


class _Adapting(Following):
    def __init__(self, settings: AdaptiveClipping):
        self.settings = settings
        self.count_noise_std = settings.count_noise_std

    def adapted(self, policy: Policy, fraction: float) -> Policy:
        return self.settings.updated(policy, fraction)


@dataclass(frozen=True, kw_only=True)
class Options(Method):
    """Options that go with any way of choosing what is trained, and of clipping it.

    Args:
        adaptive: let the thresholds follow a quantile of the norms, all in proportion.
        bias_correction: subtract the noise's known variance from Adam's second moment (DP-AdamBC, arXiv 2312.14334);
            needs `fastdp.optim.Adam` or `AdamW`.
        weight_averaging: decay of an exponential moving average of the weights, kept beside the model; post-processing.

    Raises:
        ValueError: for a decay outside (0, 1).
    """

    adaptive: AdaptiveClipping | None = None
    bias_correction: bool = False
    weight_averaging: float | None = None

    def __post_init__(self) -> None:
        self.parts()

    def parts(self) -> Sequence[Part]:
        """Those that are switched on."""
        parts: list[Part] = [] if self.adaptive is None else [self.adaptive]
        if self.bias_correction:
            parts.append(BiasCorrection())
        if self.weight_averaging is not None:
            parts.append(WeightAveraging(self.weight_averaging))
        return parts

    def gradient_multiplier(self, noise_multiplier: float) -> float:
        """What is left of a step's noise multiplier for the gradient, once what adapts is paid for."""
        if self.adaptive is None or noise_multiplier == 0:
            return noise_multiplier
        return self.adaptive.gradient_multiplier(noise_multiplier)

    def describe_options(self) -> dict[str, Any]:
        """For the card."""
        return {
            "adaptive": None if self.adaptive is None else vars(self.adaptive),
            "bias_correction": self.bias_correction,
            "weight_averaging": self.weight_averaging,
        }
