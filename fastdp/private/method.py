"""What a method supplies to the engine: its budget, what it releases besides training steps, and its policy."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

import fastdp.accounting as accounting
from fastdp.engine.batches import map_tensors
from fastdp.engine.policy import Policy
from fastdp.ops.stream import NoiseStream
from fastdp.private.sampler import PrivateLoader

if TYPE_CHECKING:
    from fastdp.engine.accumulator import Accumulator
    from fastdp.private.run import Private

#: What came out of a method's preparation, by name: masks, a selection. It is what was released, so it may be saved.
Outcome = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class SideRelease:
    """A kind of release besides training steps.

    Args:
        kind: its name in the ledger, such as ``selection``.
        event: the event of one release, as `accounting.EventModel`.
        count: how many the run may make.
    """

    kind: str
    event: accounting.EventModel
    count: int


@dataclass(frozen=True)
class Budget:
    """How a method spends a run's privacy: the noise multiplier of a training step, and the other releases."""

    noise_multiplier: float
    side: tuple[SideRelease, ...] = ()


@dataclass(frozen=True)
class Schedule:
    """What is public about a run before any data are touched.

    Args:
        units: number of units N.
        batch_size: expected units in a logical batch.
        steps, steps_per_epoch: logical steps of the run and of an epoch.
        sampling, adjacency: as in `make_private`.
        target_epsilon, delta: the budget; or None, with a given noise_multiplier.
        noise_multiplier: given by the user instead of a budget.
    """

    units: int
    batch_size: int
    steps: int
    steps_per_epoch: int
    sampling: str
    adjacency: str
    target_epsilon: float | None
    delta: float | None
    noise_multiplier: float | None

    @property
    def sample_rate(self) -> float:
        """Probability with which a unit joins a logical batch."""
        return self.batch_size / self.units

    def step(self, noise_multiplier: float) -> accounting.EventModel:
        """The event of training steps at this multiplier."""
        return accounting.dpsgd_model(
            noise_multiplier,
            self.sample_rate,
            self.sampling,  # type: ignore[arg-type]
            self.steps_per_epoch,
        )

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

        return accounting.calibrate(event, self.target_epsilon, self.delta, adjacency=self.adjacency)  # type: ignore[arg-type]


class Method(ABC):
    """A method as data for the engine; subclasses are frozen dataclasses of public settings.

    A method that needs more than a policy declares its other releases in `budget` and makes them in `prepare`, which runs
    between logical batches, before those steps for which `prepares_at` holds.
    """

    mechanism: str
    adaptive: Any = None
    bias_correction: bool = False
    weight_averaging: float | None = None
    #: Whether `trained` may leave parameters out; the optimizer may then hold no parameter that is frozen.
    freezes: bool = False

    def budget(self, schedule: Schedule) -> Budget:
        """Noise multiplier and other releases; every event in it is paid for before anything is released."""
        return Budget(schedule.multiplier())

    def prepares_at(self, step: int) -> bool:
        """Whether `prepare` runs before logical step ``step``, counted from 0."""
        return False

    def prepare(self, preparation: Preparation) -> Outcome:
        """Make a release besides the training steps; what it returns is kept and handed to `trained` and `policy`."""
        # Reached only by a method whose `prepares_at` promises what it does not define; most prepare nothing.
        raise NotImplementedError(f"{self.mechanism} says when to prepare, but not how")

    def trained(self, parameters: Mapping[str, torch.nn.Parameter], outcome: Outcome) -> Sequence[str]:
        """Names of the parameters to train from here on; the others are frozen and leave the optimizer."""
        return list(parameters)

    @abstractmethod
    def policy(
        self, parameters: Mapping[str, torch.nn.Parameter], noise_multiplier: float, outcome: Outcome | None = None
    ) -> Policy:
        """Groups, bounds and noise for these parameters at a total noise multiplier.

        ``outcome`` is empty before the first preparation.
        """

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """The settings, for the card."""

    def flaws(self) -> Sequence[str]:
        """Why the method as set carries no guarantee; any voids the card's."""
        return ()

    def notes(self, private: Private) -> Sequence[str]:
        """What the card should say beside its own notes."""
        return ()


@dataclass
class Preparation:
    """What a method's `prepare` may use. The model has its plain forward passes meanwhile.

    Attributes:
        model: in the state that training has reached.
        parameters: every parameter that may be trained, by name, the frozen ones included.
        step: logical steps done.
        batch_size, units: expected units in a logical batch, and units in the data set.
        noise_multiplier: of a training step.
        budget: what the method asked for, its other releases among it.
        stream: noise for this preparation alone.
        secure_rounding: whether noise is to be drawn in the form that resists floating-point attacks.
        record: notes one release of a kind in the ledger; call it before the release is made.
        outcome: what the previous preparation returned; empty at the first.
    """

    model: torch.nn.Module
    parameters: Mapping[str, torch.nn.Parameter]
    step: int
    batch_size: int
    units: int
    noise_multiplier: float
    budget: Budget
    stream: NoiseStream
    record: Callable[[str], None]
    outcome: Outcome
    open_loader: Callable[[float], PrivateLoader]
    returns_loss: bool = True
    secure_rounding: bool = False

    def sample(self, rate: float) -> Iterator[tuple[Any, torch.Tensor]]:
        """One Poisson sample of the units at ``rate``, in micro-batches of the model's device.

        Yields each batch with ``weights``, float32 [units in it]: 0 marks the padding row that stands for an empty
        sample and must contribute nothing. Where a unit has several rows, use `differentiate`.
        """
        loader = self.open_loader(rate)
        for batch in loader:
            ticket = loader.tickets.popleft()
            yield self._placed(batch), ticket.weights

    def differentiate(self, rate: float, accumulator: Accumulator, *, check: bool = True) -> None:
        """Run the per-example engine over one Poisson sample at ``rate``, into ``accumulator``.

        ``check`` may be off where an earlier sample was checked with these parameters, or more of them.

        Raises ValueError if the model does not return its loss.
        """
        from fastdp.engine.engine import Engine

        if not self.returns_loss:
            raise ValueError("this method needs a model that returns its loss: leave loss_reduction out")
        loader = self.open_loader(rate)
        engine = Engine(self.model, accumulator.policy, loader.tickets, accumulator=accumulator, check=check)
        try:
            for batch in loader:
                batch = self._placed(batch)
                output = self.model(**batch) if isinstance(batch, Mapping) else self.model(*batch)
                (output["loss"] if isinstance(output, Mapping) else output[0]).backward()
        finally:
            engine.close()

    def _placed(self, batch: Any) -> Any:
        device = next(iter(self.parameters.values())).device
        return map_tensors(batch, lambda tensor: tensor.to(device))
