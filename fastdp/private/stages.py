"""A run's stages: between two preparations of its method, one set of trained parameters, one policy, one engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file

import fastdp.files as files
from fastdp.engine.engine import Engine
from fastdp.engine.policy import Policy
from fastdp.private.method import Method, Outcome, Preparation
from fastdp.private.release import Release

#: What each preparation released, by the step it ran before.
_OUTCOME_FILE = "preparation-{step:08d}.safetensors"


class Stages:
    """Opens the engine of each stage, and lets the method prepare the next one.

    Args:
        model, optimizer: the user's own; parameters that a stage does not train are frozen and leave the optimizer.
        method: says when to prepare, and what follows from the outcome.
        noise_multiplier: of a training step.
        release: receives the trained parameters of each stage.
        open_engine: an engine for a policy over the parameters that are trained just then.
        folder: where outcomes are kept for a resumed run; None keeps them in memory.
        resume: take outcomes found in the folder instead of releasing them again.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        method: Method,
        noise_multiplier: float,
        release: Release,
        open_engine: Callable[[Policy], Engine],
        folder: Path | None,
        resume: bool = False,
    ):
        self.model = model
        self.optimizer = optimizer
        self.method = method
        self.noise_multiplier = noise_multiplier
        self.release = release
        self.parameters: Mapping[str, torch.nn.Parameter] = dict(release.parameters)
        self.outcome: Outcome = {}
        #: The step before which the latest preparation ran; -1 before the first.
        self.prepared_step = -1
        self._open_engine = open_engine
        self._folder = folder
        self._resume = resume
        self._groups = [list(group["params"]) for group in optimizer.param_groups]
        self.engine = self._open()

    def due(self, step: int) -> bool:
        """Whether a preparation belongs before ``step``. One that a crash jumped over is still due."""
        return any(self.method.prepares_at(earlier) for earlier in range(self.prepared_step + 1, step + 1))

    def prepare(self, preparation: Preparation) -> None:
        """Let the method make its release, keep the outcome, and open the next stage.

        A release that an earlier process made and kept is not made again. A method that fails leaves the stage as it was.
        """
        if self._resume and self._adopt_stored(preparation.step):
            return
        self.engine.close()
        training = self.model.training
        self._train(self.parameters)
        # After a step its gradients are still there, and would be taken for ones that nothing has clipped.
        self.model.zero_grad(set_to_none=True)
        try:
            outcome = dict(self.method.prepare(preparation))
            self._save(outcome, preparation.step)
            self.outcome, self.prepared_step = outcome, preparation.step
        finally:
            self.model.zero_grad(set_to_none=True)
            self.model.train(training)
            self.engine = self._open()

    def adopt(self, outcome: Outcome, step: int) -> None:
        """Go on from an outcome of an earlier process."""
        self.engine.close()
        self.outcome, self.prepared_step = dict(outcome), step
        self.engine = self._open()

    def close(self) -> None:
        """Give model and optimizer back as they were."""
        self.engine.close()
        self._train(self.parameters)

    def _adopt_stored(self, step: int) -> bool:
        assert self._folder is not None
        for earlier in range(step, self.prepared_step, -1):
            path = self._folder / _OUTCOME_FILE.format(step=earlier)
            if path.exists():
                self.adopt(load_file(path), earlier)
                return True
        return False

    def _open(self) -> Engine:
        names = self.method.trained(self.parameters, self.outcome) if self.outcome else list(self.parameters)
        if not names:
            raise ValueError(f"{self.method.mechanism} chose no parameter to train")
        trained = {name: self.parameters[name] for name in names}
        self._train(trained)
        self.release.parameters = trained
        return self._open_engine(self.method.policy(trained, self.noise_multiplier, self.outcome))

    def _train(self, trained: Mapping[str, torch.nn.Parameter]) -> None:
        kept = {id(p) for p in trained.values()}
        known = {id(p) for p in self.parameters.values()}
        for parameter in self.parameters.values():
            parameter.requires_grad_(id(parameter) in kept)
        for group, everything in zip(self.optimizer.param_groups, self._groups):
            group["params"] = [p for p in everything if id(p) in kept or id(p) not in known]

    def _save(self, outcome: Outcome, step: int) -> None:
        if self._folder is None:
            return
        files.save_tensors(self._folder / _OUTCOME_FILE.format(step=step), outcome)
