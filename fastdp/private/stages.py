"""A run's stages: between two preparations of its method, one set of trained parameters, one policy, one engine."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Set
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file

import fastdp.files as files
from fastdp.accounting import Ledger, LedgerError
from fastdp.accounting.weights import named_digest
from fastdp.calls.modes import kept_modes
from fastdp.distributed.ranks import ONE, Ranks
from fastdp.distributed.shards import weights_of
from fastdp.engine.clip.policy import Policy
from fastdp.engine.engine import Engine
from fastdp.private.method import Method
from fastdp.private.plan import Plan
from fastdp.private.preparation import Outcome, Preparation
from fastdp.private.release import Release
from fastdp.verify import Checks
from fastdp.verify.state import StateCheck

#: What each preparation released, by the step it ran before.
_OUTCOME_FILE = "preparation-{step:08d}.safetensors"
#: Where the ledger keeps the outcome's digest.
_NOTE = "preparation-{step:08d}"


class Stages:
    """Opens the engine of each stage, and lets the method prepare the next one.

    Parameters that a stage does not train are frozen and leave the optimizer. The ledger keeps a digest of each outcome, by which
    a resumed run knows it.

    Args:
        open_engine: an engine for a policy over the parameters that are trained just then.
        folder: where outcomes are kept for a resumed run, by the first rank; None keeps them in memory.
        resume: take outcomes found in the folder instead of releasing them again.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        method: Method,
        plan: Plan,
        release: Release,
        ledger: Ledger,
        open_engine: Callable[[Policy], Engine],
        folder: Path | None,
        resume: bool = False,
        ranks: Ranks = ONE,
    ):
        self.model, self.optimizer, self.method, self.plan = model, optimizer, method, plan
        self.release, self.ledger, self.ranks = release, ledger, ranks
        #: All that the run may train, by name; it grows by what the loop unfreezes.
        self.parameters = dict(release.parameters)
        #: Their identities.
        self.known = {*map(id, self.parameters.values())}
        self.outcome: Outcome = {}
        self._chosen: tuple[Outcome, str] = self.outcome, ""
        #: What the loop froze, by identity: it stays frozen in the stages to come.
        self._frozen: frozenset[int] = frozenset()
        #: What earlier stages' checks assumed, for the card.
        self._assumed: dict[str, None] = {}
        #: The step before which the latest preparation ran; -1 before the first.
        self.prepared_step = -1
        #: The step up to which no preparation has been due since the latest one.
        self._idle = -1
        #: Whether the method ever prepares.
        self.prepares = type(method).prepares_at is not Method.prepares_at
        self._open_engine = open_engine
        self._folder = folder
        self._resume = resume
        #: The run: each stage's engine holds it.
        self.holder: Any = None
        self._groups = [list(group["params"]) for group in optimizer.param_groups]
        self.engine = self._open()

    def due(self, step: int) -> bool:
        """Whether a preparation belongs before ``step``. One that a crash jumped over is still due."""
        found = any(map(self.method.prepares_at, range(self._idle + 1, step + 1)))
        if not found:
            self._idle = max(self._idle, step)
        return found

    def prepare(self, preparation: Preparation) -> None:
        """Let the method make its release, keep the outcome, and open the next stage.

        A release that an earlier process made and kept is not made again. A method that fails leaves the stage as it was.
        """
        if self._resume and (stored := self.ranks.first(lambda: self._stored(preparation.step))) is not None:
            self.adopt(*stored)
            return
        self._close_stage()
        self._train(self.parameters)
        # After a step its gradients are still there, and would be taken for ones that nothing has clipped.
        self.model.zero_grad(set_to_none=True)
        preparation.weights = weights_of(self.model, self.ranks)
        try:
            with kept_modes(self.model):
                self._release(preparation)
            outcome = dict(self.method.conclude(preparation.findings()))
            self._save(outcome, preparation.step)
            self.outcome, self.prepared_step = outcome, preparation.step
            self._idle = preparation.step
        finally:
            preparation.end()
            preparation.weights.release()
            self.model.zero_grad(set_to_none=True)
            self.engine = self._open()
        # What comes between two stages comes between two releases.
        cast(Checks, self.engine.checks).state.settle()

    def include(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Open the stage anew, with these parameters trained as well. Adaptive bounds go on from where they are."""
        policy = self.engine.accumulator.policy
        cast(Checks, self.engine.checks).state.require_parameters()
        self._close_stage()
        self.parameters |= parameters
        self.known.update(map(id, parameters.values()))
        self.release.include(parameters)
        self._groups = [list(group["params"]) for group in self.optimizer.param_groups]
        self.engine = self._open()
        opened = self.engine.accumulator.policy
        if len(opened.bounds) == len(policy.bounds):
            self.engine.accumulator.policy = replace(opened, bounds=policy.bounds, stds=policy.stds)
        cast(Checks, self.engine.checks).state.settle()

    def _release(self, preparation: Preparation) -> None:
        """Let a copy of the method make its releases: what it keeps, or writes into the model, has no noise."""
        state = StateCheck(self.model)
        state.settle()
        returned: Any = copy.copy(self.method).prepare(preparation)  # type: ignore[func-returns-value]
        if returned is not None:
            raise TypeError(
                f"{self.method.mechanism} returned something from prepare(), which no noise was added to: make releases "
                "there, and let conclude() say what follows from them"
            )
        state.require_settled()

    @property
    def chosen(self) -> str:
        """What tells outcomes apart: empty before the first."""
        if self._chosen[0] is not self.outcome:
            self._chosen = self.outcome, named_digest(self.outcome)
        return self._chosen[1]

    def adopt(self, outcome: Outcome, step: int, name: str = "the checkpoint's outcome") -> None:
        """Go on from an outcome of an earlier process.

        Raises LedgerError for one that the ledger does not vouch for; a ledger in memory knows none but its own.
        """
        known = self.ledger.noted(_NOTE.format(step=step))
        if known != named_digest(outcome) and (known is not None or self._folder is not None):
            raise LedgerError(
                f"{name} is not what this run's ledger says was released: it was edited, or is another run's"
            )
        self._close_stage()
        self.outcome, self.prepared_step = dict(outcome), step
        self._idle = step
        self.engine = self._open()
        cast(Checks, self.engine.checks).state.settle()

    def close(self) -> None:
        """Give model and optimizer back as they were; what the loop froze stays frozen."""
        self._close_stage()
        self._train(self.parameters, self._frozen)

    def _close_stage(self) -> None:
        self.engine.close()
        self._assumed |= dict.fromkeys(cast(Checks, self.engine.checks).sentences())
        stage = self.release.parameters.values()
        frozen = {id(p) for p in stage if not p.requires_grad}
        self._frozen = self._frozen.difference(map(id, stage)) | frozen

    def _stored(self, step: int) -> tuple[Outcome, int, str] | None:
        """The latest outcome that an earlier process kept up to a step, with its own step and its file."""
        assert self._folder is not None
        for earlier in range(step, self.prepared_step, -1):
            path = self._folder / _OUTCOME_FILE.format(step=earlier)
            if path.exists():
                return load_file(path), earlier, str(path)
        return None

    def _open(self) -> Engine:
        names = self.method.trained(self.parameters, self.outcome) if self.outcome else list(self.parameters)
        if not names:
            raise ValueError(f"{self.method.mechanism} chose no parameter to train")
        trained = {name: self.parameters[name] for name in names}
        self._train(trained)
        self.release.parameters = trained
        self.first_policy = self.method.policy(trained, self.plan.sigma, self.outcome)
        engine = self._open_engine(self.first_policy)
        engine.holder = self
        cast(Checks, engine.checks).assumptions |= self._assumed
        for parameter in trained.values():
            parameter.requires_grad_(id(parameter) not in self._frozen)
        return engine

    def _train(self, trained: Mapping[str, torch.nn.Parameter], frozen: Set[int] = frozenset()) -> None:
        kept = {id(p) for p in trained.values()}
        known = {id(p) for p in self.parameters.values()}
        for parameter in self.parameters.values():
            parameter.requires_grad_(id(parameter) in kept - frozen)
        for group, everything in zip(self.optimizer.param_groups, self._groups):
            group["params"] = [p for p in everything if id(p) in kept or id(p) not in known]

    def _save(self, outcome: Outcome, step: int) -> None:
        chosen = named_digest(outcome)
        with self.ranks.together({f"what {self.method.mechanism} chose": chosen}):
            self.ledger.note(_NOTE.format(step=step), chosen)
        if self._folder is not None and self.ranks.leads:
            files.save_tensors(self._folder / _OUTCOME_FILE.format(step=step), outcome)
