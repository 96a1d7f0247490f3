"""The libraries that the attacks run against, each behind the same small face. None but fastdp has to be installed."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from .kit import Net, NotApplicable, Record, Release, System, Task, records as examples


def installed() -> list[System]:
    """Every system that can be imported here, fastdp first."""
    found: list[System] = [FastDP()]
    made: type[System]
    for made in (Opacus, OpacusGhost, Opake):
        try:
            importlib.import_module(made.module)
        except Exception:  # an installation that is broken is one that is not there
            continue
        found.append(made())
    return found


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def _rest(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def _loss(task: Task, output: Any, batch: Any) -> torch.Tensor:
    return output["loss"] if task.criterion is None else task.criterion(output, batch)


class FastDP(System):
    """This library."""

    name, module, package = "fastdp", "fastdp", "fastdp"

    def start(self, task: Task, records: Sequence[Record], bound: float, **options: Any) -> Any:
        """A private run that takes every record in every step, without noise, unless the options say otherwise."""
        import fastdp

        model = task.model().train()
        options = {**options, **task.options}
        if task.criterion is not None:
            options = {"loss_reduction": "mean", **options}
        batch_size = options.pop("batch_size", len(set(map(str, options.get("user_ids", range(len(records)))))))
        return fastdp.make_private(
            model,
            torch.optim.SGD(_trained(model).values(), lr=0.0),
            DataLoader(list(records), batch_size=batch_size, collate_fn=task.collate),  # type: ignore[arg-type]
            method=options.pop("method", fastdp.DPSGD(max_grad_norm=bound)),
            max_physical_batch_size=task.physical,
            **{"noise_multiplier": 0.0, "epochs": 1, **options},
        )

    def steps(self, private: Any, task: Task, most: int | None = None) -> Iterator[dict[str, torch.Tensor]]:
        """Train to the end of an epoch, or for so many logical steps; the released sums of each."""
        for batch in private.data_loader:
            private.optimizer.zero_grad()
            _loss(task, private.model(**task.loop(batch)), batch).backward()
            private.optimizer.step()
            if private.last_step_done:
                rows = private.data_loader.batch_size
                grads = {n: p.grad for n, p in _trained(private.model).items() if p.grad is not None}
                yield {name: grad.detach().float() * rows for name, grad in grads.items()}
                if most is not None and (most := most - 1) <= 0:
                    return

    def go_on(self, folder: Path, steps: int, *, resume: bool) -> int:
        """Begin or resume a small private run in a folder and take some steps; how many it knew to be behind it."""
        options = {"output_dir": folder, "resume": resume, "epochs": 8, "noise_multiplier": 1.0, "target_delta": 1e-5}
        task = Task(Net, options=options)
        private = self.start(task, examples(), 1.0)
        try:
            before = private.steps_done
            for _ in range(steps):
                list(self.steps(private, task))
            return before
        finally:
            private.detach()

    def release(self, task: Task, records: Sequence[Record], bound: float, noise: float = 0.0) -> Release:
        torch.manual_seed(0)
        private = self.start(task, records, bound, noise_multiplier=noise)
        (sums,) = self.steps(private, task)
        private.detach()
        return Release(sums, _rest(private.model))


class Opacus(System):
    """Opacus with hooks, its default."""

    name, module, package = "Opacus", "opacus", "opacus"

    def release(self, task: Task, records: Sequence[Record], bound: float, noise: float = 0.0) -> Release:
        from opacus import PrivacyEngine
        from opacus.utils.batch_memory_manager import BatchMemoryManager

        _only_shared(task)
        torch.manual_seed(0)
        model = task.model().train()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            private, optimizer, loader = PrivacyEngine().make_private(
                module=model,
                optimizer=torch.optim.SGD(_trained(model).values(), lr=0.0),
                data_loader=DataLoader(list(records), batch_size=len(records), collate_fn=task.collate),  # type: ignore[arg-type]
                noise_multiplier=noise,
                max_grad_norm=bound,
            )
            with BatchMemoryManager(
                data_loader=loader, max_physical_batch_size=task.physical or len(records), optimizer=optimizer
            ) as micro_batches:
                for batch in micro_batches:
                    optimizer.zero_grad()
                    _loss(task, private(**task.loop(batch)), batch).backward()
                    optimizer.step()
        rows = len(records)
        sums = {n: p.grad.detach().float() * rows for n, p in _trained(model).items() if p.grad is not None}
        return Release(sums, _rest(model))


class _RowLosses:
    """A row's mean cross-entropy, in the shape that Opacus's ghost clipping asks of a criterion."""

    reduction = "mean"  # what it checks; it asks for row losses by setting another

    def __call__(self, output: Any, labels: torch.Tensor) -> torch.Tensor:
        logits = output["logits"]
        losses = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none").view(labels.shape)
        return losses if losses.dim() == 1 else losses.flatten(1).mean(1)


class OpacusGhost(Opacus):
    """Opacus with ghost clipping; it takes a criterion, so the attack's own loss must be a cross-entropy of logits."""

    name = "Opacus ghost"

    def release(self, task: Task, records: Sequence[Record], bound: float, noise: float = 0.0) -> Release:
        from opacus import PrivacyEngine

        _only_shared(task)
        if task.criterion is not None or task.physical is not None or "labels" not in records[0]:
            raise NotApplicable
        torch.manual_seed(0)
        model = task.model().train()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            private, optimizer, criterion, loader = PrivacyEngine().make_private(
                module=model,
                optimizer=torch.optim.SGD(_trained(model).values(), lr=0.0),
                data_loader=DataLoader(list(records), batch_size=len(records), collate_fn=task.collate),  # type: ignore[arg-type]
                criterion=_RowLosses(),
                noise_multiplier=noise,
                max_grad_norm=bound,
                grad_sample_mode="ghost",
            )
            for batch in loader:
                optimizer.zero_grad()
                output = private(**task.loop(batch))
                if "logits" not in output:
                    raise NotApplicable
                criterion(output, batch["labels"]).backward()
                optimizer.step()
        rows = len(records)
        sums = {n: p.grad.detach().float() * rows for n, p in _trained(model).items() if p.grad is not None}
        return Release(sums, _rest(model))


class Opake(System):
    """Opake, whose clipped gradient is a function of one record's loss."""

    name, module, package = "Opake", "opake.dpsgd.clipping", "opake"

    def release(self, task: Task, records: Sequence[Record], bound: float, noise: float = 0.0) -> Release:
        from opake.dpsgd.clipping import clipped_grad

        _only_shared(task)
        if noise:
            raise NotApplicable  # its noise takes a key, which the user chooses
        torch.manual_seed(0)
        model = task.model().train()
        whole = task.loop(task.collate(list(records)))
        if any(t.dim() == 0 for t in whole.values()):
            raise NotApplicable  # it takes fields of records alone
        names = list(whole)

        def loss(parameters: dict[str, torch.Tensor], *fields: torch.Tensor) -> torch.Tensor:
            batch = {name: field.unsqueeze(0) for name, field in zip(names, fields)}
            return _loss(task, torch.func.functional_call(model, parameters, (), batch), batch)

        sums: dict[str, torch.Tensor] = {}
        for piece in _pieces(records, task.physical):
            batch = task.loop(task.collate(piece))
            function, state = clipped_grad(loss, clipping_norm=bound, batch_argnums=tuple(range(1, 1 + len(names))))
            clipped, _ = function({n: p.detach() for n, p in _trained(model).items()}, *batch.values(), state=state)
            for name, value in clipped.pytree.items():
                sums[name] = sums[name] + value if name in sums else value.float()
        return Release(sums, _rest(model))


def _pieces(records: Sequence[Record], most: int | None) -> Iterator[list[Record]]:
    most = most or len(records)
    for start in range(0, len(records), most):
        yield list(records[start : start + most])


def _only_shared(task: Task) -> None:
    if task.options:
        raise NotApplicable


def only_fastdp(system: System) -> FastDP:
    """The system, for an attack on something that others do not have.

    Raises NotApplicable for any but fastdp.
    """
    if not isinstance(system, FastDP):
        raise NotApplicable
    return system
