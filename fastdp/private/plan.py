"""The plan of a private run, all of it public: one frozen object from which its events, samplers, ledger and card come."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

import fastdp.accounting as accounting
from fastdp.accounting.events import CONSTANT, NoiseFactors, Sampling
from fastdp.accounting.ledger import STEP
from fastdp.accounting.pld import Adjacency
from fastdp.ops.stream import NoiseStream
from fastdp.private.sampler import PoissonSampler, Sampler, ShuffledSampler

SAMPLINGS: tuple[Sampling, ...] = ("poisson", "shuffled")
ADJACENCIES: tuple[Adjacency, ...] = ("add_remove", "replace_one", "zero_out")


@dataclass(frozen=True)
class SideRelease:
    """A kind of release besides training steps: a Gaussian release of a Poisson sample of the units.

    Args:
        kind: its name in the ledger, such as ``selection``.
        noise_multiplier: noise standard deviation over the sensitivity of what is released; 0 protects nothing.
        sample_rate: the probability with which a unit joins the sample, in (0, 1].
        count: how many the run may make.
    """

    kind: str
    noise_multiplier: float
    sample_rate: float
    count: int

    @property
    def event(self) -> accounting.EventModel:
        """The event of so many of these releases."""
        return accounting.EventModel(accounting.poisson_gaussian(self.noise_multiplier, self.sample_rate))


@dataclass(frozen=True)
class Budget:
    """How a method spends a run's privacy: the noise multiplier of a training step, and the other releases."""

    noise_multiplier: float
    side: tuple[SideRelease, ...] = ()


@dataclass(frozen=True)
class Plan:
    """What a private run will do, settled before any data are touched.

    The event of a release, the sampler that draws for it, the ledger's header and what the card says of the run are all
    made here from the same fields, so that they cannot disagree.

    Args:
        units: number of units of privacy, N.
        batch_size: expected units in a logical batch, B.
        steps, steps_per_epoch: logical steps of the run and of an epoch.
        sampling: ``poisson``; or ``shuffled``, accounted without amplification.
        adjacency: what a neighbouring data set is: ``add_remove`` or ``replace_one`` of a unit, or ``zero_out``, which
            leaves the unit's place empty. Shuffled batches know no ``add_remove``: the cut into batches would shift.
        target_epsilon, delta: the budget; or None, with a given noise_multiplier.
        noise_multiplier: of a training step: given by the user instead of a budget, or settled from it.
        unit: what is protected, in words.
        side: the releases besides training steps.
        factors: (step, factor of the noise multiplier from that step on), in order.

    Raises:
        ValueError: for a sampling or an adjacency that is unknown or does not go with the other, and for a batch larger
            than the data.
    """

    units: int
    batch_size: int
    steps: int
    steps_per_epoch: int
    sampling: Sampling
    adjacency: Adjacency
    target_epsilon: float | None
    delta: float | None
    noise_multiplier: float | None
    unit: str = "example"
    side: tuple[SideRelease, ...] = ()
    factors: NoiseFactors = CONSTANT

    def __post_init__(self) -> None:
        if self.sampling not in SAMPLINGS:
            raise ValueError(f"sampling is '{self.sampling}': use 'poisson' or 'shuffled'")
        if self.adjacency not in ADJACENCIES:
            raise ValueError(f"adjacency is '{self.adjacency}': use 'add_remove', 'replace_one' or 'zero_out'")
        if self.sampling == "shuffled" and self.adjacency == "add_remove":
            raise ValueError(
                "shuffled batches hold nothing for adjacency='add_remove': a unit more or less would move others from batch "
                "to batch; use 'zero_out' or 'replace_one', or sampling='poisson'"
            )
        if self.batch_size > self.units:
            raise ValueError(
                f"batch_size {self.batch_size} exceeds the {self.units} units: the sample rate would pass 1"
            )

    @property
    def sample_rate(self) -> float:
        """Probability with which a unit joins a logical batch."""
        return self.batch_size / self.units

    @property
    def sigma(self) -> float:
        """The settled noise multiplier of a training step, before the factor of that step."""
        if self.noise_multiplier is None:
            raise ValueError("the noise multiplier of this plan is not settled yet: settle(budget) does that")
        return float(self.noise_multiplier)

    def sigma_at(self, step: int) -> float:
        """The settled noise multiplier of training step ``step``, counted from 0."""
        return self.sigma * next(factor for start, factor in reversed(self.factors) if start <= step)

    def settle(self, budget: Budget) -> Plan:
        """The plan with what a method makes of its budget."""
        return replace(self, noise_multiplier=float(budget.noise_multiplier), side=tuple(budget.side))

    def kind(self, name: str) -> SideRelease:
        """A declared kind of release besides training steps; raises ValueError for one that was not declared."""
        for side in self.side:
            if side.kind == name:
                return side
        raise ValueError(f"no release of kind '{name}' was declared: name it in the method's budget, which pays for it")

    def step(self, noise_multiplier: float) -> accounting.EventModel:
        """The event of training steps at this multiplier."""
        return accounting.dpsgd_model(
            noise_multiplier, self.sample_rate, self.sampling, self.steps_per_epoch, self.factors
        )

    def event(self, kind: str = STEP) -> accounting.EventModel:
        """The event of a kind of release: of training steps, or of one declared besides them."""
        return self.step(self.sigma) if kind == STEP else self.kind(kind).event

    def sampler(self, stream: NoiseStream, kind: str = STEP) -> Sampler:
        """What draws the units of a kind of release, as its event says."""
        if kind == STEP and self.sampling == "shuffled":
            return ShuffledSampler(self.units, self.batch_size, stream)
        rate = self.sample_rate if kind == STEP else self.kind(kind).sample_rate
        return PoissonSampler(self.units, rate, stream)

    def multiplier(self, side: Sequence[SideRelease] = ()) -> float:
        """The noise multiplier of a training step that the budget allows after ``side`` is paid for.

        Raises ValueError if the budget cannot be met at all.
        """
        if self.noise_multiplier is not None:
            return float(self.noise_multiplier)
        assert self.target_epsilon is not None
        if math.isinf(self.target_epsilon):
            return 0.0
        assert self.delta is not None

        def event(noise_multiplier: float) -> Any:
            others = (release.event.event(release.count) for release in side)
            return accounting.compose(self.step(noise_multiplier).event(self.steps), *others)

        return accounting.calibrate(event, self.target_epsilon, self.delta, adjacency=self.adjacency)

    def header(self, mechanism: Mapping[str, Any], fingerprint: str) -> dict[str, Any]:
        """What the ledger keeps of the run, and compares when the run is continued."""
        return {
            "mechanism": dict(mechanism),
            "fingerprint": fingerprint,
            "unit": self.unit,
            "adjacency": self.adjacency,
            "sampling": self.sampling,
            "sample_rate": self.sample_rate,
            "dataset_size": self.units,
            "noise_multiplier": self.noise_multiplier,
        }


def fingerprint(parameters: Mapping[str, torch.Tensor]) -> str:
    """A digest of the trained parameters' names and shapes, by which a checkpoint knows its model."""
    text = "\n".join(f"{name} {list(p.shape)}" for name, p in parameters.items())
    return hashlib.sha256(text.encode()).hexdigest()
