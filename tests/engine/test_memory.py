"""Whether a checkpointed pass keeps its factors: what they take, what is free, and that each way gives exact gradients."""

import gc
from collections import deque
from collections.abc import Callable

import pytest
import torch
from torch.utils.data import DataLoader

import fastdp
from fastdp.engine.capture import memory
from fastdp.engine.capture.memory import kept_bytes
from fastdp.engine.clip.norms import NormSink
from fastdp.engine.clip.sums import SumSink
from fastdp.engine.engine import Engine
from fastdp.engine.uses.layout import Ticket
from tests.cases import cases, pairs
from tests.engine.models import batch, build
from tests.engine.reference import engine_for, feed, norms
from tests.engine.runs import CLIPPED, Batch, clipped_sum, error, one_by_one
from tests.loops import train_epoch

CPU = torch.device("cpu")
PLENTY = 1 << 40


def checkpointed(name: str, tuning: str, reentrant: bool) -> torch.nn.Module:
    model = build(name, tuning)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if tuning == "lora":
        model.enable_input_require_grads()
    return model


def kept(engine: Engine, rows: int, units: int | None = None) -> int:
    assert engine.trace is not None
    return kept_bytes(engine.trace, engine.read, rows, units or rows, 1.0, CPU)


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with each second pass."""
    found: list[int] = []
    opened = SumSink.__init__
    monkeypatch.setattr(SumSink, "__init__", lambda self, *a, **k: (found.append(1), opened(self, *a, **k))[1])
    return found


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Engine, deque[Ticket]]]:
    """An engine that may keep as many bytes as a function of one that has met the model says, after its first batch."""

    def made(
        model: torch.nn.Module, data: Batch, limit: Callable[[Engine], int], bound: float, units: Ticket | None = None
    ) -> tuple[Engine, deque[Ticket]]:
        engine, tickets = engine_for(model, bound, two_pass=False)
        feed(engine, tickets, data, units)
        allowed = limit(engine)
        engine.close()
        monkeypatch.setattr("fastdp.engine.passes.allowed_bytes", lambda *_: allowed)
        engine, tickets = engine_for(model, bound)
        feed(engine, tickets, data, units)
        return engine, tickets

    return made


Limited = Callable[..., tuple[Engine, deque[Ticket]]]
#: As much memory as all rows need, as two of five need, and less than one needs.
LIMITS: dict[str, Callable[[Engine], int]] = {
    "one pass": lambda engine: PLENTY,
    "parts": lambda engine: kept(engine, 2),
    "two passes": lambda engine: kept(engine, 1) - 1,
}


@pytest.mark.parametrize(
    *pairs(("name", ["gpt2", "llama"]), ("tuning", ["full", "lora"]), ("reentrant", [False, True]), ("way", LIMITS))
)
def test_gradients_are_those_of_each_example_alone(
    name: str, tuning: str, reentrant: bool, way: str, seconds: list[int], limited: Limited
) -> None:
    data = batch(name, rows=5)
    truth = one_by_one(build(name, tuning), data)
    bound = float(norms(truth).median())
    engine, tickets = limited(checkpointed(name, tuning, reentrant), data, LIMITS[way], bound)
    seconds.clear()
    feed(engine, tickets, data)
    assert engine.route == "uses", engine.reason
    assert len(seconds) == (way == "two passes")
    assert int(engine.accumulator.units) == 5
    assert error(engine.accumulator.sums, clipped_sum(truth, bound)) < CLIPPED


def test_parts_hold_whole_units_and_leave_out_padding(limited: Limited, monkeypatch: pytest.MonkeyPatch) -> None:
    data = batch("llama", rows=6)
    rows = one_by_one(build("llama"), data)
    units = [[0, 1], [2], [3, 4]]  # and row 5, which pads
    truth = [{n: sum(rows[row][n] for row in unit) for n in rows[0]} for unit in units]  # type: ignore[misc]
    users = Ticket(torch.tensor([0, 0, 1, 2, 2, 3]), torch.tensor([1.0, 1.0, 1.0, 0.0]), True)
    model = checkpointed("llama", "full", False)
    engine, tickets = limited(model, data, lambda engine: kept(engine, 2, 1), 1.0, users)
    parts: list[int] = []
    run = Engine.run_forward
    monkeypatch.setattr(
        Engine,
        "run_forward",
        lambda self, call, ticket, **k: (parts.append(ticket.rows), run(self, call, ticket, **k))[1],
    )
    feed(engine, tickets, data, users)
    assert parts == [6, 2, 1, 2, 1]
    assert (int(engine.accumulator.units), engine.backward_passes) == (3, 2)
    assert error(engine.accumulator.sums, clipped_sum(truth, 1.0)) < CLIPPED


@pytest.mark.parametrize(*pairs(("name", ["gpt2", "llama", "bert", "vit"]), ("tuning", ["full", "lora"])))
def test_factors_take_what_the_trace_foretells(name: str, tuning: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more, and not much less, of what a pass really keeps until its sums are made."""
    found: list[int] = []
    finish = NormSink.finish

    def finished(self: NormSink) -> object:
        upper = finish(self)
        self.apart()
        every = [t for entry in self.entries.values() for use in entry.factors for t in (use.left, use.right)]
        every += [entry.instance for entry in self.entries.values() if entry.instance is not None]
        found.append(sum({t.data_ptr(): t.nbytes for t in every}.values()))
        return upper

    monkeypatch.setattr(NormSink, "finish", finished)
    engine, tickets = engine_for(build(name, tuning), 1.0)
    feed(engine, tickets, batch(name, rows=4))
    assert engine.route == "uses", engine.reason
    assert 0.9 * found[-1] <= kept(engine, 4) <= 1.6 * found[-1]


def test_the_choice_is_made_once(monkeypatch: pytest.MonkeyPatch, seconds: list[int]) -> None:
    """Memory that others take meanwhile does not change how batches of one shape are summed."""
    free = deque([PLENTY, 0])
    monkeypatch.setattr(memory, "free_bytes", lambda device: free.popleft())
    engine, tickets = engine_for(checkpointed("llama", "full", False), 1.0)
    for _ in range(3):
        feed(engine, tickets, batch("llama"))
    assert (len(seconds), engine.backward_passes, len(free)) == (0, 1, 1)


@cases("two_pass", [None, True])
def test_a_card_says_how_many_passes_ran(two_pass: bool | None) -> None:
    data: list[Batch] = [{"input_ids": row, "labels": row} for row in batch("llama", rows=8)["input_ids"]]
    model = checkpointed("llama", "full", False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = {"noise_multiplier": 1.0, "target_delta": 1e-3, "epochs": 1, "two_pass": two_pass}
    private = fastdp.make_private(model, optimizer, DataLoader(data, batch_size=4), **given)  # type: ignore[arg-type]
    train_epoch(private)
    card = private.card()
    assert card["model"]["backward_passes"] == private.backward_passes == (2 if two_pass else 1)
    assert any("backward passes" in text for text in card["unprotected"])


class Classifier(torch.nn.Module):
    """Of torch's own encoder, whose projections are slices of one weight; it reads a parameter itself, and makes its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.head, self.start = torch.nn.Linear(8, 3), torch.nn.Parameter(torch.randn(5, 8))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.head(self.encoder(x + self.start)[:, 0]), labels)


def test_no_graph_of_a_pass_outlives_it() -> None:
    model = Classifier()
    rows = [{"x": torch.randn(5, 8), "labels": torch.tensor(i % 3)} for i in range(8)]
    loader: DataLoader = DataLoader(rows, batch_size=4)  # type: ignore[arg-type]
    private = fastdp.make_private(
        model, torch.optim.SGD(model.parameters(), 0.1), loader, noise_multiplier=1.0, target_delta=1e-3, epochs=3
    )
    for _ in range(3):
        train_epoch(private, lambda model, batch: model(**batch))
    gc.collect()
    for parameter in model.parameters():
        # A parameter has one node for its gradient as long as any graph leads to it.
        parameter.view_as(parameter).grad_fn.next_functions[0][0].metadata["met"] = True  # type: ignore[union-attr]
        node = parameter.view_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        assert "met" not in node.metadata
