"""One customer's run: its own adapter and optimizer over the shared top, the step it is at, and what is kept on disk."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fastdp.files as files
from fastdp.accounting.serialisation import canonical

RUN_FILE = "run.safetensors"


def mixed_seed(seed: int, number: int) -> int:
    """A seed of torch's generator for step or epoch ``number`` of a run's seed: a prime keeps those of two runs apart."""
    return (seed * 1_000_003 + number) % (1 << 63)


class Run:
    """Adapter parameters, AdamW's state, and the number of steps taken.

    Args:
        parameters: by name; they are copied.
        settings: what the customer opened the run with: learning_rate, weight_decay, seed and others.

    Attributes:
        step: steps taken.
        digest: of the message of the last one, by which its replay is recognised.
    """

    def __init__(self, parameters: Mapping[str, Tensor], settings: Mapping[str, Any]):
        self.settings = dict(settings)
        self.parameters = {name: p.detach().clone().requires_grad_() for name, p in parameters.items()}
        self.optimizer = torch.optim.AdamW(
            list(self.parameters.values()), lr=settings["learning_rate"], weight_decay=settings["weight_decay"]
        )
        self.step, self.digest = 0, ""

    def take_step(self, logits: Tensor, gradient: Tensor, digest: str) -> None:
        """Backward from the logits' gradient, and the optimizer's step."""
        logits.backward(gradient.to(logits.device, logits.dtype))
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        self.digest = digest

    def save(self, folder: Path) -> None:
        """Keep the state on disk: a kill leaves the previous one or this one."""
        tensors: dict[str, Tensor] = {f"parameter/{name}": p for name, p in self.parameters.items()}
        for name, p in self.parameters.items():
            tensors |= {f"{key}/{name}": value for key, value in self.optimizer.state[p].items()}
        metadata = {"settings": canonical(self.settings), "step": str(self.step), "digest": self.digest}
        files.save_tensors(folder / RUN_FILE, tensors, metadata)

    @staticmethod
    def is_in(folder: Path) -> bool:
        return (folder / RUN_FILE).exists()

    @classmethod
    def load(cls, folder: Path, template: Mapping[str, Tensor]) -> Run | None:
        """The run kept in ``folder``, or None if there is none.

        Raises:
            ValueError: if it is damaged, or its parameters have other names or shapes than ``template``.
        """
        if not cls.is_in(folder):
            return None
        with files.kept_tensors(folder / RUN_FILE, "run that can be taken up") as (tensors, metadata):
            parameters = {name: tensors[f"parameter/{name}"].to(own) for name, own in template.items()}
            if any(parameters[name].shape != own.shape for name, own in template.items()):
                raise ValueError("it was made with another model or adapter")
            run = cls(parameters, json.loads(metadata["settings"]))
            run.step, run.digest = int(metadata["step"]), metadata["digest"]
        state: dict[int, dict[str, Tensor]] = {}
        for number, name in enumerate(template):
            keys = [key for key in ("step", "exp_avg", "exp_avg_sq") if f"{key}/{name}" in tensors]
            if keys:
                state[number] = {key: tensors[f"{key}/{name}"] for key in keys}
        groups = run.optimizer.state_dict()["param_groups"]
        run.optimizer.load_state_dict({"state": state, "param_groups": groups})
        return run
