"""The library under attack, behind a small face: private runs that take every record in every step, without noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from .kit import Net, Record, Release, Task, distance, equal, flatten, outlier, records as examples

Sums = dict[str, torch.Tensor]
NOISE: Mapping[str, Any] = {"noise_multiplier": 1.0, "target_delta": 1e-5}


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def _loss(task: Task, output: Any, batch: Any) -> torch.Tensor:
    return output["loss"] if task.criterion is None else task.criterion(output, batch)


class Library:
    """This library.

    Args:
        options: arguments of `fastdp.make_private` that hold for all runs.
    """

    def __init__(self, **options: Any):
        self.options = options

    def start(self, task: Task, records: Sequence[Record], bound: float = 1.0, **options: Any) -> Any:
        """A private run without noise, unless the options say otherwise."""
        import fastdp

        model = task.model().train()
        options = {**options, **task.options, **self.options}
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

    def steps(self, private: Any, task: Task) -> Iterator[Sums]:
        """Train to the end of an epoch; the released sums of each logical step."""
        for batch in private.data_loader:
            private.optimizer.zero_grad()
            _loss(task, private.model(**task.loop(batch)), batch).backward()
            private.optimizer.step()
            if private.last_step_done:
                yield self.sums(private)

    @staticmethod
    def sums(private: Any) -> Sums:
        """What the latest step released, before it was divided by the expected batch size."""
        rows = private.data_loader.batch_size
        grads = {n: p.grad for n, p in _trained(private.model).items() if p.grad is not None}
        return {name: grad.detach().float() * rows for name, grad in grads.items()}

    def train(
        self,
        task: Task,
        records: Sequence[Record],
        bound: float,
        passes: int,
        change: Callable[[Any], Any] | None = None,
        **options: Any,
    ) -> list[Sums]:
        """The released sums of each step of so many passes; ``change`` is done to the run before the last of them."""
        private = self.start(task, records, bound, **{"epochs": passes, **options})
        try:
            found: list[Sums] = []
            for number in range(passes):
                if change is not None and number == passes - 1:
                    change(private)
                found += self.steps(private, task)
            return found
        finally:
            private.detach()

    def release(self, task: Task, records: Sequence[Record], bound: float = 1.0, **options: Any) -> Release:
        """What one logical batch that holds every record gives away."""
        torch.manual_seed(0)
        private = self.start(task, records, bound, **options)
        try:
            (sums,) = self.steps(private, task)
        finally:
            private.detach()
        return Release(sums, {name: t.detach().clone() for name, t in private.model.state_dict().items()})

    def moved(
        self, task: Task, records: Sequence[Record], extra: Record, bound: float = 1.0, *, first: bool = False
    ) -> float:
        """How far one more record moves one release, in units of ``bound``; infinite for what leaves without noise.

        Without other records it is the size of one record's own share.
        """
        more = self.release(task, [extra, *records] if first else [*records, extra], bound)
        if not records:
            return float(flatten(more.sums).nan_to_num(nan=math.inf).norm()) / bound
        less = self.release(task, records, bound)
        if any(not equal(more.rest[name], less.rest[name]) for name in more.rest):
            return math.inf
        return distance(more.sums, less.sums) / bound

    def moved_late(
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
        return distance(more, less) / bound

    def moved_by_change(
        self, task: Task, others: Sequence[Record], before: Record, after: Record, bound: float = 0.2
    ) -> float:
        """How far a record moves the fifth release that becomes another record once four were verified."""
        released = []
        for extra in ([], [before]):
            data = [*others, *extra]

            def change(_: Any, data: list[Record] = data) -> None:
                data[len(others) :] = [after] * len(data[len(others) :])

            released.append(self.train(task, data, bound, 5, change)[-1])
        return distance(*released) / bound

    def moved_by_late_outlier(self, task: Task) -> float:
        """`moved_by_change` of a record that becomes a thousand times as large."""
        return self.moved_by_change(task, examples(16), examples(1)[0], {**outlier(1e3), "labels": 0})

    def largest_step(self, task: Task, records: Sequence[Record], bound: float, passes: int) -> float:
        """The largest sum of any step, in units of what its records may add."""
        steps = self.train(task, records, bound, passes)
        return max(float(flatten(sums).norm()) for sums in steps) / bound / len(records)

    def map_moved(self, task: Task, records: Sequence[Record], extra: Record) -> float:
        """How far one more record moves Rap-FT's noised map of relevance, which each may move by 1."""
        import fastdp
        from fastdp.methods.rapft import NoisyMap

        sums: list[Sums] = []

        class Watched(fastdp.RapFT):
            def conclude(self, findings: Any) -> Any:
                sums.append(dict(findings.releases[0]))
                return super().conclude(findings)

        options = {**NOISE, "method": Watched(NoisyMap(1e-9, 1.0, max_norm=1.0)), "target_delta": 1e-3}
        for data in (records, [*records, extra]):
            private = self.start(task, data, 1.0, **options)
            private.prepare()
            private.detach()
        return distance(*sums)

    def accounted(self, **options: Any) -> tuple[Any, Sums]:
        """A small private run after its first step, with noise unless the options say otherwise, and what it released."""
        task = Task(Net, options={**NOISE, **options})
        private = self.start(task, examples())
        (sums,) = self.steps(private, task)
        return private, sums

    def go_on(self, folder: Path, steps: int, *, resume: bool) -> int:
        """Begin or resume a small private run in a folder and take some steps; how many it knew of before."""
        task = Task(Net, options={**NOISE, "output_dir": folder, "resume": resume, "epochs": 8})
        private = self.start(task, examples())
        try:
            before: int = private.steps_done
            for _ in range(steps):
                list(self.steps(private, task))
            return before
        finally:
            private.detach()
