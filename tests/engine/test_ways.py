"""Batches that go another way through a model than those before: by uses where that way is traced and checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

import fastdp.engine.routing as routing
from fastdp.engine.errors import SelfCheckError
from tests.cases import cases
from tests.engine.models import batch, build
from tests.engine.nets import EXACT, Net, exact_batches, gap, parameter
from tests.engine.reference import engine_for, feed, norms, relative
from tests.engine.runs import Batch, clipped_sum, collate, error, examples, one_by_one


def padded(which: int) -> dict[str, torch.Tensor]:
    """All rows of one length; the last shorter than the others; all but one row shorter; as the first, of another length."""
    found = batch("t5", tokens=9 if which < 3 else 7)
    shorter = {0: [], 1: [3], 2: [0, 1, 3], 3: []}[which]
    found["attention_mask"] = torch.ones_like(found["input_ids"])
    found["attention_mask"][shorter, 6:] = 0
    found["input_ids"] = found["input_ids"].clamp(min=3) * found["attention_mask"]
    return found


@cases("order, chosen", [((0, 1, 2, 3), None), ((3, 2, 0, 1), None), ((1, 2), [0, 2])])
def test_a_model_that_leaves_its_mask_out_where_nothing_is_padded(
    order: tuple[int, ...], chosen: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that are chosen for a check may go another way than all of their batch."""
    if chosen is not None:
        monkeypatch.setattr("fastdp.engine.uses.layout.Ticket.chosen_rows", lambda ticket: chosen)
    model = build("t5")
    engine, tickets = engine_for(model, 0.5)
    for which in order:
        data = padded(which)
        truth = one_by_one(model, data)
        feed(engine, tickets, data)
        assert relative(engine.accumulator.sums["shared.weight"], clipped_sum(truth, 0.5)["shared.weight"]) < 1e-4
        assert error(engine.accumulator.sums, clipped_sum(truth, 0.5)) < 1e-4
        assert norms(truth).max() > 0.5
    assert engine.route == "uses", engine.reason


class Ways(Net):
    """Goes another way in the forward passes of some numbers, counted where they end; in those of the engine's own, too."""

    def __init__(self, way: Callable[[Any, torch.Tensor], torch.Tensor], usual: bool = True):
        super().__init__(lambda net, h: way(net, h) if net.other() else h + net.gate if usual else h, gate=parameter(6))
        self.other: Callable[[], bool] = lambda: False
        self.passes = 0

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        try:
            return super().forward(x, labels)
        finally:
            self.passes += 1


def of_others(net: Any, h: torch.Tensor) -> torch.Tensor:
    """A row's share in what all rows have in common."""
    return h + net.gate * h.mean(0, keepdim=True)


def scaled(net: Any, h: torch.Tensor) -> torch.Tensor:
    return h * net.gate.sin()


@cases("usual", [True, False])
def test_a_way_that_keeps_rows_apart(usual: bool) -> None:
    """Whether or not others read what it reads."""
    now = [0]

    def model() -> Ways:
        made = Ways(scaled, usual)
        made.other = lambda: now[0] % 3 == 2
        return made

    def batches() -> Iterator[Batch]:
        for now[0] in range(6):
            yield collate(examples(6, seed=now[0]))

    exact_batches(model, batches())


@cases("at", ["by the batch", "by the pass"])
def test_rows_that_meet_on_a_later_way_are_run_alone_or_refused(at: str) -> None:
    model = Ways(of_others)
    engine, tickets = engine_for(model, 0.5)
    for number in range(5):
        data = collate(examples(6, seed=number))
        # By the pass: the batch's own pass goes there, and none that is made to look at it afterwards.
        now = model.passes if at == "by the pass" else None
        model.other = partial(lambda number, now: number == 3 and now in (None, model.passes), number, now)
        try:
            feed(engine, tickets, data)
        except SelfCheckError:
            return
        if number == 3:
            alone = Ways(of_others)
            # A row that has been alone is one whose mean is its own.
            alone.other = lambda: True
            sums = [clipped_sum(one_by_one(plain, data), 0.5) for plain in (alone, Ways(of_others))]
            assert min(error(engine.accumulator.sums, wanted) for wanted in sums) < EXACT


class Tasks(Net):
    """Two tasks that a keyword tells apart: their losses are divided by the rows in ways of their own."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor, other: torch.Tensor | None = None) -> Any:
        h = torch.tanh(self.first(x))
        if other is None:
            return {"loss": torch.nn.functional.cross_entropy(self.second(h), labels)}
        loss = torch.nn.functional.cross_entropy(self.second(h.unsqueeze(1)).squeeze(1), labels, reduction="sum")
        return {"loss": loss / len(x)}


class Heads(Net):
    """A second task reads a layer of its own."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor, other: torch.Tensor | None = None) -> Any:
        head = self.second if other is None else self.third
        return {"loss": torch.nn.functional.cross_entropy(head(torch.tanh(self.first(x))), labels)}


def two_tasks() -> list[Batch]:
    """Of one and the other in turn."""
    data = [collate(examples(6, seed=number)) for number in range(4)]
    return [{**own, "other": own["labels"]} if number % 2 else own for number, own in enumerate(data)]


def test_a_layer_that_only_a_later_batch_reads_is_clipped() -> None:
    def net() -> Heads:
        torch.manual_seed(1)
        return Heads(third=torch.nn.Linear(6, 3))

    exact_batches(net, two_tasks())


def test_a_way_whose_loss_is_divided_otherwise_changes_no_other() -> None:
    exact_batches(Tasks, two_tasks(), plain=Net, route="one-example")


class Tagged(Net):
    """Takes a text that names its batch and chooses nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.passes = 0

    def forward(self, x: torch.Tensor, labels: torch.Tensor, tag: str) -> Any:
        self.passes += 1
        return super().forward(x, labels)


def test_a_text_of_another_value_in_each_batch_is_no_choice_among_ways() -> None:
    """The first values are compared with the trace in a pass of their own; from then on a batch is one pass."""
    model = Tagged()
    engine, tickets = engine_for(model, 0.5)
    passes = []
    for number in range(40):
        before, data = model.passes, collate(examples(6, seed=number))
        feed(engine, tickets, {**data, "tag": f"batch {number}"})
        passes.append(model.passes - before)
        assert gap(engine, one_by_one(Net(), data)) < EXACT
    assert passes[1:33] == [2] * 32
    assert passes[-5:] == [1] * 5


def test_of_many_kinds_of_calls_the_latest_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others are compared with the trace anew."""
    monkeypatch.setattr(routing, "MOST_CALLS", 3)
    engine, tickets = engine_for(Net(), 0.5)
    for rows in (*range(2, 8), *range(2, 8)):
        data = collate(examples(rows, seed=rows))
        feed(engine, tickets, data)
        assert gap(engine, one_by_one(Net(), data)) < EXACT
        assert len(engine.checks.traced.compared) <= 3
    assert engine.route == "uses", engine.reason
