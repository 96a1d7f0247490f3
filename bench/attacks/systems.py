"""The libraries that the attacks run against, each behind the same small face. None but fastdp has to be installed."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from .kit import Net, NotApplicable, Record, Release, System, Task, apart, records as examples


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

    name, module, package = "fastdp", "fastdp", "fastdp-lm"

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
            options.pop("optimizer", None) or torch.optim.SGD(_trained(model).values(), lr=0.0),
            DataLoader(records, batch_size=batch_size, collate_fn=task.collate),  # type: ignore[arg-type]
            method=options.pop("method", fastdp.DPSGD(max_grad_norm=bound)),
            max_physical_batch_size=task.physical,
            **{"noise_multiplier": 0.0, "epochs": 1, **options},
        )

    def written_by_the_loop(self, model: Callable[[], nn.Module], *writes: Callable[[Any, torch.Tensor], Any]) -> float:
        """Infinite unless each write of a batch's mean into the model, in the middle of a run, is refused: raises the last."""
        refused = []
        for write in writes:
            private = self.start(Task(model), examples(16), 1.0, epochs=8)
            try:
                for epoch in range(8):
                    for batch in private.data_loader:
                        private.optimizer.zero_grad()
                        private.model(**batch)["loss"].backward()
                        private.optimizer.step()
                        if epoch == 4:
                            write(private.model, batch["x"].mean(0))
            except RuntimeError as error:
                refused.append(error)
            finally:
                private.detach()
        if len(refused) == len(writes):
            raise refused[-1]
        return float("inf")

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

    def train(
        self,
        task: Task,
        records: Sequence[Record],
        bound: float,
        passes: int,
        change: Callable[[Any], Any] | None = None,
        **options: Any,
    ) -> list[dict[str, torch.Tensor]]:
        """The released sums of each step of so many passes; ``change`` is done to the run before the last of them."""
        private = self.start(task, records, bound, **{"epochs": passes, **options})
        found: list[dict[str, torch.Tensor]] = []
        for number in range(passes):
            if change is not None and number == passes - 1:
                change(private)
            found += self.steps(private, task)
        private.detach()
        return found

    def moves(
        self,
        task: Task,
        records: Sequence[Record],
        extra: Record,
        bound: float,
        passes: int,
        change: Callable[[Any], Any] | None = None,
        *,
        first: bool = False,
    ) -> float:
        """How far one more record moves the sums of the last step, in units of ``bound``; as of `train`."""
        both = records, [extra, *records] if first else [*records, extra]
        less, more = (self.train(task, data, bound, passes, change)[-1] for data in both)
        return apart(more, less) / bound

    def map_moves(self, task: Task, records: Sequence[Record], extra: Record) -> float:
        """How far one more record moves Rap-FT's noised map of relevance, of which each may move 1."""
        import fastdp
        from fastdp.methods.rapft import NoisyMap

        sums: list[dict[str, torch.Tensor]] = []

        class Watched(fastdp.RapFT):
            def conclude(self, findings: Any) -> Any:
                sums.append(dict(findings.releases[0]))
                return super().conclude(findings)

        options = {"method": Watched(NoisyMap(1e-9, 1.0, max_norm=1.0)), "noise_multiplier": 1.0, "target_delta": 1e-3}
        for data in (records, [*records, extra]):
            private = self.start(task, data, 1.0, **options)
            private.prepare()
            private.detach()
        return apart(*sums)

    def accounted(self, **options: Any) -> tuple[Any, dict[str, torch.Tensor]]:
        """A small private run after its first step, with noise unless the options say otherwise, and what it released."""
        task = Task(Net, options={"noise_multiplier": 1.0, "target_delta": 1e-5, **options})
        private = self.start(task, examples(), 1.0)
        (sums,) = self.steps(private, task)
        return private, sums

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


class _RowLosses:
    """A row's mean cross-entropy, in the shape that Opacus's ghost clipping asks of a criterion."""

    reduction = "mean"  # what it checks; it asks for row losses by setting another

    def __call__(self, output: Any, labels: torch.Tensor) -> torch.Tensor:
        logits = output["logits"]
        losses = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none").view(labels.shape)
        return losses if losses.dim() == 1 else losses.flatten(1).mean(1)


class Opacus(System):
    """Opacus with hooks, its default."""

    name, module, package = "Opacus", "opacus", "opacus"
    ghost = False

    def release(self, task: Task, records: Sequence[Record], bound: float, noise: float = 0.0) -> Release:
        from opacus import PrivacyEngine
        from opacus.utils.batch_memory_manager import BatchMemoryManager

        _only_shared(task)
        if self.ghost and (task.criterion is not None or task.physical is not None or "labels" not in records[0]):
            raise NotApplicable
        torch.manual_seed(0)
        model, rows = task.model().train(), len(records)
        options: dict[str, Any] = {"criterion": _RowLosses(), "grad_sample_mode": "ghost"} if self.ghost else {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            private, optimizer, *criterion, loader = PrivacyEngine().make_private(
                module=model,
                optimizer=torch.optim.SGD(_trained(model).values(), lr=0.0),
                data_loader=DataLoader(list(records), batch_size=rows, collate_fn=task.collate),  # type: ignore[arg-type]
                noise_multiplier=noise,
                max_grad_norm=bound,
                **options,
            )
            most = task.physical or rows
            with (
                nullcontext(loader)
                if self.ghost
                else BatchMemoryManager(data_loader=loader, max_physical_batch_size=most, optimizer=optimizer)
            ) as batches:
                for batch in batches:
                    optimizer.zero_grad()
                    output = private(**task.loop(batch))
                    if self.ghost and "logits" not in output:
                        raise NotApplicable
                    loss = criterion[0](output, batch["labels"]) if self.ghost else _loss(task, output, batch)
                    loss.backward()
                    optimizer.step()
        sums = {n: p.grad.detach().float() * rows for n, p in _trained(model).items() if p.grad is not None}
        return Release(sums, _rest(model))


class OpacusGhost(Opacus):
    """Opacus with ghost clipping; it takes a criterion, so the attack's own loss must be a cross-entropy of logits."""

    name, ghost = "Opacus ghost", True


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
