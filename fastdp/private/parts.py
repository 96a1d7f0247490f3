"""What a method may do around each release, apart from how it clips: how the release is applied, and what is adapted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

import fastdp.distributed.pieces as pieces
import fastdp.ops as ops
from fastdp.engine.axes import RankOne
from fastdp.engine.policy import Policy
from fastdp.ops.stream import NoiseStream


class Part:
    """Follows the releases of one run; override what is of interest. Nothing that it is handed is without noise.

    Several methods may have the same one, which is settings alone; what keeps something is made for each run, by `follow`.

    Attributes:
        count_noise_std: with it `adapted` is called, with a count that has noise of this standard deviation. The method's
            policy pays for it (see `AdaptiveClipping`).
    """

    count_noise_std: float | None = None

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise ValueError for an optimizer that it does not go with."""

    def follow(self) -> Part:
        """What follows one run: itself, unless it keeps something."""
        return self

    def before_release(
        self,
        policy: Policy,
        parameters: Mapping[str, torch.nn.Parameter],
        divisor: float,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        """A logical batch is about to be released: its noisy sum over ``divisor``, as the policy says."""

    def adapted(self, policy: Policy, fraction: float) -> Policy:
        """The policy of the next step, from the noised share of units that were left whole."""
        return policy

    def after_step(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """The optimizer has applied the release."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, by names of its own."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`."""


@dataclass(frozen=True)
class ScaledVariance:
    """The variance of noise whose deviation follows a parameter's axes."""

    variance: float
    axes: RankOne

    def whole(self, shape: torch.Size) -> torch.Tensor:
        """Of each coordinate."""
        return self.variance * self.axes.whole(shape).square()


class BiasCorrection(Part):
    """Tells `fastdp.optim.Adam` or `AdamW` the noise's variance, which they subtract from the second moment.

    DP-AdamBC, arXiv 2312.14334, algorithm 1. Where the noise differs from coordinate to coordinate, so does the variance.
    """

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise ValueError for an optimizer that cannot subtract it."""
        if not hasattr(optimizer, "noise_variance"):
            raise ValueError(
                "bias_correction needs fastdp.optim.Adam or fastdp.optim.AdamW: other optimizers cannot apply it"
            )

    def before_release(
        self, policy: Policy, parameters: Mapping[str, torch.nn.Parameter], divisor: float, optimizer: Any
    ) -> None:
        variances = [(std / divisor) ** 2 for std in policy.stds or (0.0,)]
        if len(set(variances)) == 1 and not policy.axes:
            optimizer.noise_variance = variances[0]
            return
        found: dict[torch.Tensor, float | torch.Tensor | ScaledVariance] = {}
        for name, parameter in parameters.items():
            group = policy.group_of.get(name, 0)
            if isinstance(group, tuple):
                whole = torch.where(policy.masks[name], variances[group[0]], variances[group[1]])
                found[parameter] = pieces.from_piece(pieces.part(whole, parameter), parameter)
            elif name in policy.axes:
                found[parameter] = ScaledVariance(variances[group], policy.axes[name])
            else:
                found[parameter] = variances[group]
        optimizer.noise_variance = found


@dataclass(frozen=True)
class WeightAveraging(Part):
    """An exponential moving average of the weights, kept beside the model; post-processing.

    Args:
        decay: in (0, 1).
    """

    decay: float

    def __post_init__(self) -> None:
        if not 0 < self.decay < 1:
            raise ValueError(f"weight_averaging is {self.decay}: a decay lies between 0 and 1")

    def follow(self) -> Average:
        """A new average."""
        return Average(self.decay)


class Average(Part):
    """The averaged weights of one run."""

    def __init__(self, decay: float):
        self.decay = decay
        self.values: dict[str, torch.Tensor] | None = None

    def after_step(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Take in the latest weights."""
        if self.values is None:
            self.values = {name: p.detach().clone() for name, p in parameters.items()}
            return
        for name, average in self.values.items():
            if name in parameters:
                average.lerp_(parameters[name].detach().to(average.dtype), 1 - self.decay)

    @contextmanager
    def applied(self, parameters: Mapping[str, torch.nn.Parameter]) -> Iterator[None]:
        """The averaged weights in place of the latest. Raises RuntimeError before the first step."""
        if self.values is None:
            raise RuntimeError("there is no average yet: set weight_averaging in the method and take a step")
        held = {name: parameters[name] for name in self.values}
        latest = {name: p.detach().clone() for name, p in held.items()}
        with torch.no_grad():
            for name, parameter in held.items():
                parameter.copy_(self.values[name])
        try:
            yield
        finally:
            with torch.no_grad():
                for name, parameter in held.items():
                    parameter.copy_(latest[name])

    def state(self) -> dict[str, Any]:
        return {"average": self.values}

    def load(self, state: Mapping[str, Any]) -> None:
        self.values = state["average"]


def noised_fraction(unclipped: float, units: float, std: float, divisor: float, stream: NoiseStream) -> float:
    """The share of units that were left whole, with noise of standard deviation ``std`` on their count.

    Each unit reports 1/2 or -1/2, so one unit more or less moves the sum by 1/2 (Andrew et al. 2021, section 2.2); taking half
    the expected batch size off the count instead would let it move by 1, for which the noise is too small.

    Args:
        unclipped, units: of the units that took part, those left whole and all.
        divisor: the expected batch size.
    """
    shifted = torch.tensor([unclipped - units / 2], dtype=torch.float32)
    return float(ops.add_noise_(shifted, std, stream)) / divisor + 0.5
