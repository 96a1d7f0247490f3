"""What a method supplies: its budget, what it releases besides training steps, and its policy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

import fastdp.accounting as accounting
from fastdp.accounting.events import CONSTANT, NoiseFactors
from fastdp.engine.clip.policy import Policy
from fastdp.private.plan import Budget, Plan
from fastdp.private.preparation import Findings, Outcome, Preparation, RunState


class Installed(Protocol):
    """What a method puts into a model and its optimizer, where it trains something else than the model's own parameters.

    Attributes:
        trained: the model's own parameters that releases move, by name.
        number: the number of the release to come.
    """

    trained: Mapping[str, torch.nn.Parameter]
    number: int

    def plain(self, twin: torch.nn.Module) -> None:
        """Take it out of a copy of the model."""

    def remove(self) -> None:
        """Give model and optimizer back, with the weights as they are."""


class Method(ABC):
    """A method as data for the engine; subclasses are frozen dataclasses of public settings.

    A method that needs more than a policy declares its other releases in `budget` and makes them in `prepare`, which runs
    between logical batches, before those steps for which `prepares_at` holds; what follows from them `conclude` says.
    """

    mechanism: str

    def budget(self, plan: Plan) -> Budget:
        """Noise multiplier and other releases; every event in it is paid for before anything is released."""
        return Budget(plan.multiplier())

    @property
    def count_noise_std(self) -> float | None:
        """Deviation of the noise on a count of units left whole, which the policy pays for; None makes no such count."""
        return None

    def adapted(self, policy: Policy, fraction: float) -> Policy:
        """The policy of the next step, from the noised share of units that were left whole."""
        return policy

    @property
    def noise_factors(self) -> NoiseFactors:
        """What a step's noise multiplier is multiplied with, by the step from which on."""
        return CONSTANT

    def gradient_multiplier(self, noise_multiplier: float) -> float:
        """What a step's noise multiplier leaves for the gradient, where something else is released with it."""
        return noise_multiplier

    @property
    def follows_schedule(self) -> bool:
        """Whether `scheduled` may change a policy."""
        return type(self).scheduled is not Method.scheduled

    def scheduled(self, policy: Policy, begun: Policy, noise_multiplier: float, step: int) -> Policy:
        """The policy of training step ``step``, whose multiplier is ``noise_multiplier``.

        From the policy as it is now, and the one with which its stage began.
        """
        return policy

    @property
    def needs_public_shapes(self) -> bool:
        """Whether what a neighbour's shape changes of a loss's rounding would count many times over."""
        return False

    @property
    def selects(self) -> bool:
        """Whether `trained` may leave parameters out; the optimizer may then hold no parameter that is frozen."""
        return type(self).trained is not Method.trained

    @property
    def takes_losses(self) -> bool:
        """Whether `prepare` differentiates losses, which the model or a criterion must then give."""
        return False

    def try_passes(self, moment: RunState, one: Callable[[], Any]) -> None:  # noqa: B027 (most methods run no model)
        """Raise if passes of the method's own would fail; ``one`` collates one example. Nothing of it may be kept."""

    def install(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Installed | None:
        """Put into model and optimizer what the engine trains in the place of the model's own parameters; None for nothing."""
        return None

    def prepares_at(self, step: int) -> bool:
        """Whether `prepare` runs before logical step ``step``, counted from 0."""
        return False

    def prepare(self, preparation: Preparation) -> None:  # noqa: B027 (most methods prepare nothing)
        """Make the releases besides the training steps. Nothing else may come of it: it runs on a copy of the method."""

    def conclude(self, findings: Findings) -> Outcome:
        """What follows from what `prepare` released; it is kept and handed to `trained` and `policy`."""
        # Reached only by a method whose `prepares_at` promises what it does not define.
        raise NotImplementedError(f"{self.mechanism} says when to prepare, but not what comes of it")

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

    def notes(self, plan: Plan, ledger: accounting.Ledger) -> Sequence[str]:
        """What the card should say beside its own notes."""
        return ()
