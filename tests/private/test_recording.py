"""Recording by default: what the loader pads, which masks are left out, and when a run goes on eagerly; without a GPU."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import BertForSequenceClassification

import fastdp
from fastdp.data import Collator
from fastdp.private.graphs import Graphs
from fastdp.private.loader import LoaderOwner
from fastdp.private.run import Private
from fastdp.private.shapes import grid_size
from tests.cases import cases
from tests.engine.models import build
from tests.engine.runs import Sums
from tests.private.test_graphs import again_on_a_processor

PRIVACY: dict[str, Any] = {"noise_multiplier": 0.0, "target_delta": 1e-5, "unsafe_seed": 3}


class Regression(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(6, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": torch.nn.functional.mse_loss(self.layer(x)[:, 0], y)}


class Recording(LoaderOwner):
    """The owner of a loader in a run whose passes are recorded."""

    records_passes = True


def record_on_a_processor(monkeypatch: pytest.MonkeyPatch, record: Any = again_on_a_processor) -> None:
    """Let runs on a processor record as they do on a GPU, whatever it gains."""

    def opened(passes: Any, watched: Any, *, force: bool) -> Graphs:
        return Graphs(passes, watched, lambda: record(passes.accumulator, []), force=force)

    monkeypatch.setattr("fastdp.builder.Graphs", opened)
    monkeypatch.setattr("fastdp.builder.refuse_capture", lambda *args, **options: None)
    monkeypatch.setattr("fastdp.private.recorder.MAX_TIME_SHARE", float("inf"))


def run(
    model: torch.nn.Module,
    rows: list[Any],
    collate: Any = None,
    change: Callable[[Any], Any] = lambda batch: batch,
    **options: Any,
) -> tuple[Private, Sums, list[int]]:
    """A run of Poisson draws of 64 in microbatches of 32, its sums, and the rows that each step handed out."""
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(rows, batch_size=64, collate_fn=collate)
    options = {"max_physical_batch_size": 32, "epochs": 1, **PRIVACY, **options}
    private = fastdp.make_private(model, optimizer, loader, **options)
    private.observe(sums := Sums())
    handed = [0]
    while private.steps_done < private.total_steps:
        for batch in private.data_loader:
            handed[-1] += private.data_loader.tickets[0].rows
            model(**change(batch))["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
            if private.last_step_done:
                handed.append(0)
    return private, sums, handed[:-1]


def twins(make: Callable[[], torch.nn.Module]) -> list[torch.nn.Module]:
    """Two models of the same weights."""
    torch.manual_seed(1)
    model = make()
    return [model, copy.deepcopy(model)]


def require_equal_sums(one: Sums, other: Sums) -> None:
    assert len(one.steps) == len(other.steps)
    for ours, theirs in zip(one.steps, other.steps):
        expected = torch.cat([total.flatten() for total in theirs.values()])
        assert (torch.cat([ours[name].flatten() for name in theirs]) - expected).norm() <= 1e-5 * expected.norm()


def test_poisson_batches_are_recorded_to_their_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    record_on_a_processor(monkeypatch)
    generator = torch.Generator().manual_seed(0)
    rows = [{"x": torch.randn(6, generator=generator), "y": torch.randn((), generator=generator)} for _ in range(1280)]
    models = twins(Regression)
    private, recorded, handed = run(models[0], rows, epochs=3)
    eager, plain, drawn = run(models[1], rows, epochs=3, capture=False)
    require_equal_sums(recorded, plain)
    assert all(0 <= padded - own < 32 for padded, own in zip(handed, drawn))
    counts = private.microbatches
    assert counts["eager"] <= 6 < counts["recorded"] / 10
    assert eager.microbatches["recorded"] == 0
    # Every microbatch has the padding's shape.
    assert {rows % 32 for rows in handed} == {0}


def test_the_public_grid_adds_little() -> None:
    lengths = range(8, 4097)
    assert all(n <= grid_size(n) < 1.25 * n for n in lengths)
    assert sum(map(grid_size, lengths)) <= 1.15 * sum(lengths)


def test_a_batch_is_padded_to_what_its_own_length_says() -> None:
    """Lengths of earlier batches decide nothing: a record of one would change the arithmetic of another."""
    from fastdp.private.shapes import LengthBuckets

    def seen(buckets: LengthBuckets, length: int) -> int:
        batch = Collator(pad_token=0)([{"input_ids": [1] * length}] * 2)
        return int(buckets.pad(batch)["input_ids"].shape[1])

    for earlier in ([], [101] * 3, [33, 120]):
        buckets = LengthBuckets(Collator(pad_token=0), 120)
        for length in earlier:
            seen(buckets, length)
        assert [seen(buckets, length) for length in (33, 101, 119, 120)] == [40, 112, 120, 120]
    # A model that does not say how many tokens it takes may take no more.
    assert [seen(LengthBuckets(Collator(pad_token=0), 0), length) for length in (33, 101)] == [33, 101]
    # A sequence whose padding is not known leaves all as they are.
    for length in (50, 51, 52, 53, 54, 55):
        batch = Collator(pad_token=0)([{"input_ids": [1] * length}] * 2)
        batch["tags"] = torch.zeros(2, length, 3)
        assert buckets.pad(batch)["input_ids"].shape[1] == length


def texts(model: torch.nn.Module, lengths: list[int]) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    rows = []
    for length in lengths:
        ids = torch.randint(3, 20, (length,), generator=generator).tolist()
        rows.append(
            {"input_ids": ids, "labels": length % 2 if isinstance(model, BertForSequenceClassification) else ids}
        )
    return rows


#: Of the last some microbatches are unpadded.
LENGTHS = {
    "equal": ([12] * 192, 32, {False}),
    "padded": ([12, 9, 7] * 64, 32, {True}),
    "varying": ([5 + row % 26 if row % 7 == 0 else 5 for row in range(192)], 8, {False, True}),
}


@cases("name, kind", [("bert", "varying"), ("gpt2", "padded"), ("llama", "equal")])
def test_a_mask_of_ones_is_left_out_and_another_one_is_not(
    name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    explicit: list[bool] = []
    attention = torch.nn.functional.scaled_dot_product_attention

    def spied(accumulator: Any, runs: list[str]) -> Any:
        record = again_on_a_processor(accumulator, runs)

        def capturing(function: Callable[[], Any]) -> Any:
            def attend(*args: Any, **options: Any) -> torch.Tensor:
                explicit.append(options.get("attn_mask") is not None)
                return attention(*args, **options)

            # What transformers goes by.
            with (
                mock.patch("torch.cuda.is_current_stream_capturing", return_value=True),
                mock.patch("torch.nn.functional.scaled_dot_product_attention", attend),
            ):
                return record(function)

        return capturing

    lengths, most, masked = LENGTHS[kind]
    models = twins(partial(build, name))
    rows, options = texts(models[0], lengths), {"epochs": 1, "max_physical_batch_size": most}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        record_on_a_processor(monkeypatch, spied)
        private, recorded, _ = run(models[0], rows, Collator(pad_token=0), **options)
        _, plain, _ = run(models[1], rows, Collator(pad_token=0), **options, capture=False)
    assert private.microbatches["recorded"] > 0
    require_equal_sums(recorded, plain)
    assert set(explicit) == masked


def test_a_loop_that_changes_a_mask_of_ones_is_told_once_and_keeps_its_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    record_on_a_processor(monkeypatch)
    models = twins(partial(build, "gpt2"))
    rows, sums = texts(models[0], [12] * 192), []
    for model, capture in zip(models, ("auto", False)):
        batches = iter(range(1000))

        def change(batch: Any, batches: Any = batches) -> Any:
            kept = torch.ones(12, dtype=torch.int64)
            kept[-2:] = next(batches) < 12
            return {**batch, "attention_mask": batch["attention_mask"] * kept}

        options = {"epochs": 4, "capture": capture, "self_check": False, "sampling": "shuffled"}
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always", UserWarning)
            _, own, _ = run(model, rows, Collator(pad_token=0), change, **options)
        told = [str(entry.message) for entry in seen if "The loop changed an attention_mask" in str(entry.message)]
        assert len(told) == (capture == "auto")
        sums.append(own)
    # One microbatch, the first of these, ran without its mask.
    sums[0].steps[6] = sums[1].steps[6]
    for own in sums:
        own.steps = own.steps[:7]
    require_equal_sums(*sums)


class NeedsItsMask(torch.nn.Module):
    """Takes texts without a mask for something else, or not at all."""

    def __init__(self, refuses: bool):
        super().__init__()
        self.body, self.refuses = build("gpt2"), refuses

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, attention_mask: torch.Tensor | None = None) -> Any:
        if attention_mask is None and self.refuses:
            raise ValueError("a mask is needed")
        halves = 1.0 if attention_mask is None else 0.5
        return {"loss": halves * self.body(input_ids=input_ids, labels=labels).loss}


@cases("refuses", [True, False])
def test_a_model_that_needs_its_mask_keeps_it(refuses: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    record_on_a_processor(monkeypatch)
    models = twins(partial(NeedsItsMask, refuses))
    rows = texts(models[0], [12] * 192)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        private, recorded, _ = run(models[0], rows, Collator(pad_token=0), epochs=2)
        _, plain, _ = run(models[1], rows, Collator(pad_token=0), epochs=2, capture=False)
    assert private.microbatches["recorded"] > 0
    require_equal_sums(recorded, plain)
