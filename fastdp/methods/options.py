"""What every central method offers beside its own idea: a threshold that adapts, and how its releases are applied."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fastdp.accounting.events import NoiseFactors
from fastdp.engine.clip.policy import Policy
from fastdp.private.method import Method
from fastdp.validate import fraction, instance, number, positive

#: Accounting takes a third of a second for each.
_MOST_FACTORS = 64


@dataclass(frozen=True)
class AdaptiveClipping:
    """A clipping threshold that follows a quantile of the gradient norms (Andrew et al. 2021, arXiv 1905.03871).

    The fraction of unclipped units is released with noise of its own, paid for out of the same budget: the gradient's
    noise grows to z_delta = (z^-2 - (2 sigma_b)^-2)^(-1/2) so that the pair has multiplier z (Theorem 1).

    Args:
        target_quantile: fraction of units whose gradient should stay whole, in (0, 1).
        learning_rate: step of the geometric update of the threshold.
        count_noise_std: sigma_b, noise of the count of unclipped units, in units.

    Raises ValueError for a value out of range.

    >>> AdaptiveClipping(target_quantile=0.7).learning_rate
    0.2
    """

    target_quantile: float = 0.5
    learning_rate: float = 0.2
    count_noise_std: float = 10.0

    def __post_init__(self) -> None:
        fraction(target_quantile=self.target_quantile)
        positive(learning_rate=self.learning_rate, count_noise_std=self.count_noise_std)

    def gradient_multiplier(self, noise_multiplier: float) -> float:
        """z_delta for a total multiplier z; raises ValueError if the count alone would cost more than z allows."""
        rest = noise_multiplier**-2 - (2 * self.count_noise_std) ** -2
        if rest <= 0:
            raise ValueError(
                f"count_noise_std {self.count_noise_std} leaves nothing for the gradient at noise multiplier "
                f"{noise_multiplier}; raise it above {noise_multiplier / 2:.3g}"
            )
        return rest**-0.5

    def adapted(self, policy: Policy, fraction: float) -> Policy:
        factor = math.exp(-self.learning_rate * (min(max(fraction, 0.0), 1.0) - self.target_quantile))
        return replace(
            policy,
            bounds=tuple(bound * factor for bound in policy.bounds),
            stds=tuple(std * factor for std in policy.stds),
        )


@dataclass(frozen=True, kw_only=True)
class Options(Method):
    """Options that go with any way of choosing what is trained, and of clipping it.

    Args:
        adaptive: let the thresholds follow a quantile of the norms, all in proportion.
        noise_schedule: what the noise multiplier of a step is multiplied with, by the number of the step from which on, as
            ``{0: 1.0, 500: 0.8}``; 1 before the first. The budget, the ledger and the card count each step at its own. Every
            entry is accounted on its own, so at most 64.
        clipping_schedule: the same for the thresholds; the noise follows them, so this costs nothing.
    """

    adaptive: AdaptiveClipping | None = None
    noise_schedule: Mapping[int, float] | None = None
    clipping_schedule: Mapping[int, float] | None = None

    def __post_init__(self) -> None:
        instance(AdaptiveClipping | None, "fastdp.AdaptiveClipping(...)", adaptive=self.adaptive)
        _factors("noise_schedule", self.noise_schedule)
        _factors("clipping_schedule", self.clipping_schedule)
        if self.clipping_schedule is not None and self.adaptive is not None:
            raise ValueError("thresholds cannot follow both clipping_schedule and adaptive: leave one of them out")

    @property
    def count_noise_std(self) -> float | None:
        return None if self.adaptive is None else self.adaptive.count_noise_std

    def adapted(self, policy: Policy, fraction: float) -> Policy:
        return policy if self.adaptive is None else self.adaptive.adapted(policy, fraction)

    def gradient_multiplier(self, noise_multiplier: float) -> float:
        """What is left of a step's noise multiplier for the gradient, once what adapts is paid for."""
        if self.adaptive is None or noise_multiplier == 0:
            return noise_multiplier
        return self.adaptive.gradient_multiplier(noise_multiplier)

    @property
    def noise_factors(self) -> NoiseFactors:
        return _factors("noise_schedule", self.noise_schedule)

    @property
    def follows_schedule(self) -> bool:
        return self.noise_schedule is not None or self.clipping_schedule is not None

    def scheduled(self, policy: Policy, begun: Policy, noise_multiplier: float, step: int) -> Policy:
        """The policy of a step: thresholds as scheduled, or as they adapted, and noise for the step's multiplier."""
        if not self.follows_schedule:
            return policy
        clipping = _factors("clipping_schedule", self.clipping_schedule)
        scale = next(factor for start, factor in reversed(clipping) if start <= step)
        if self.adaptive is not None:
            # All adapt in proportion.
            scale = policy.bounds[0] / begun.bounds[0]
        known = begun.noise_multiplier
        noise = self.gradient_multiplier(noise_multiplier) / known if known else 1.0
        return replace(
            begun,
            bounds=tuple(bound * scale for bound in begun.bounds),
            stds=tuple(std * scale * noise for std in begun.stds),
        )

    def describe_options(self) -> dict[str, Any]:
        """For the card."""
        return {
            "adaptive": None if self.adaptive is None else vars(self.adaptive),
            **{
                name: [list(entry) for entry in _factors(name, schedule)]
                for name in ("noise_schedule", "clipping_schedule")
                if (schedule := getattr(self, name)) is not None
            },
        }


def _factors(name: str, schedule: Mapping[int, float] | None) -> NoiseFactors:
    """A schedule in order, from step 0 on; raises ValueError for one that is out of range."""
    if not isinstance(schedule, Mapping | None):
        raise ValueError(
            f"{name} is {schedule!r}: give factors by the number of the step, such as {{0: 1.0, 500: 0.8}}"
        )
    given = dict(sorted((schedule or {}).items()))
    if len(given) > _MOST_FACTORS:
        raise ValueError(
            f"{name} has {len(given)} entries: give at most {_MOST_FACTORS}, as each is accounted on its own"
        )
    for step, factor in given.items():
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise ValueError(f"{name} has the step {step!r}: steps are whole numbers, counted from 0")
        number(**{f"the factor of {name} at step {step}": factor})
        if not (factor > 0 and math.isfinite(factor)):
            raise ValueError(f"{name} has the factor {factor} at step {step}: factors are positive numbers")
    return tuple((step, float(factor)) for step, factor in ({0: 1.0} | given).items())
