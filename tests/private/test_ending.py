"""A run that ends before all releases that were paid for says so once, and a run that goes on says nothing."""

from __future__ import annotations

import copy
import gc
import itertools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fastdp
from fastdp.engine.errors import SelfCheckError
from tests.cases import cases
from tests.engine.models import build
from tests.engine.runs import PRIVATE, loader, logical_step, start
from tests.loops import train_epoch, trained


def epoch(private: Any, most: int | None = None) -> None:
    """One pass over the loader, left after so many batches."""
    for _ in itertools.islice(trained(private), most):
        pass


def test_a_run_that_ends_early_says_so_when_it_is_detached_or_collected() -> None:
    private = start(**PRIVATE)
    epoch(private)
    said = r"3 of 6 releases paid for were made\. Count steps by private\.last_step_done"
    with pytest.warns(UserWarning, match=said):
        private.detach()
    epoch(start(**PRIVATE), 2)
    with pytest.warns(UserWarning, match="2 of 6 releases paid for were made"):
        gc.collect()
    epoch(private := start(**PRIVATE), 2)
    with pytest.warns(UserWarning, match="2 of 6 releases paid for were made"):
        private.card()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        private.card()
        private.detach()


@cases(
    "options, begun, expected",
    [({"noise_multiplier": 0.0}, True, False), (PRIVATE, False, False), (PRIVATE, True, True)],
)
def test_what_was_not_paid_for_not_begun_or_expected_is_not_missed(
    options: dict[str, Any], begun: bool, expected: bool
) -> None:
    private = start(**options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if begun:
            epoch(private)
        if expected:
            private.ending.expect()
        private.detach()


def test_batches_that_check_the_loop_are_no_releases() -> None:
    private = start(nn.Linear(5, 3), loader(), loss_reduction="mean", **PRIVATE)
    for step, batch in enumerate(private.data_loader, 1):
        private.model(batch["x"]).square().mean().backward()
        private.optimizer.step()
        private.optimizer.zero_grad()
        if step == len(private.data_loader):
            break
    with pytest.warns(UserWarning, match="0 of 6 releases paid for were made. Count steps by private.last_step_done"):
        private.detach()
    # What was refused has said so.
    private = start(nn.Linear(5, 3), loader(), loss_reduction="mean", **PRIVATE)
    with pytest.raises(SelfCheckError):
        train_epoch(private, lambda model, batch: model(batch["x"]).mean(0).softmax(0)[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        private.detach()


def test_it_says_so_when_the_program_ends(folder: Path) -> None:
    """Of two scripts that make one epoch, one paid for one and the other for two."""
    once, twice = ((folder / f"ends-{epochs}.txt").read_text() for epochs in (1, 2))
    assert "releases paid for were made" not in once
    assert "3 of 6 releases paid for were made" in twice
    assert "Exception" not in once + twice


def test_a_run_that_is_not_over_says_nothing() -> None:
    private = start(epochs=3, **PRIVATE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        next(iter(private.data_loader))  # a look at one batch
        private.card()
        for step in range(9):
            if step % 3 == 0:
                iterator = iter(private.data_loader)
            logical_step(private, iterator)
            private.epsilon()
            if step % 3 == 2:
                # Left at the epoch's last batch, as where a loop counts up to its length.
                iterator.close()
                private.card()
        private.detach()
    assert private.steps_done == 9


def test_refusals_after_releases_say_what_was_spent_and_the_way_on_works() -> None:
    private = start(**PRIVATE)
    epoch(private)
    kept = copy.deepcopy((private.model.state_dict(), private.state_dict()))
    # Freezing is no reason to refuse.
    private.model.first.weight.requires_grad_(False)
    epoch(private)
    private.model.first.weight.requires_grad_(True)
    assert private.steps_done == 6
    private.extend(1)
    with torch.no_grad():
        private.model.first.weight.zero_()
    with pytest.raises(RuntimeError, match=r"changed outside of a release.*6 of 9 releases are spent\."):
        epoch(private)
    # Of the two ways on, one goes on with weights and state that were kept, the other anew.
    private.model.load_state_dict(kept[0])
    private.load_state_dict(kept[1])
    epoch(private)
    assert private.steps_done == 9
    fastdp.detach(private.model)
    again = start(private.model, **PRIVATE)
    epoch(again)
    assert again.steps_done == 3


@cases("make", [torch.optim.SGD, fastdp.optim.AdamW])
def test_resized_embeddings_are_refused_before_a_release_and_the_way_on_works(make: Any) -> None:
    def begin() -> Any:
        optimizer = make(model.parameters(), lr=1e-3)
        batches = torch.utils.data.DataLoader(rows, batch_size=4)
        return fastdp.make_private(model, optimizer, batches, epochs=2, **PRIVATE)

    model = build("gpt2")
    rows = [{"input_ids": torch.full((5,), n), "labels": torch.full((5,), n)} for n in range(3, 15)]
    private = begin()
    epoch(private)
    size = model.config.vocab_size
    model.resize_token_embeddings(size + 1)
    said = rf"wte.weight was resized from \[{size}, .*Resize it before make_private.* 3 of 6 releases are spent\."
    with pytest.raises(RuntimeError, match=said):
        epoch(private)
    assert private.steps_done == 3
    fastdp.detach(model)
    private = begin()
    epoch(private)
    assert private.steps_done == 3


def test_without_a_limit_all_examples_of_the_drawn_users_are_one_batch() -> None:
    users = [i // 3 for i in range(24)]
    data = loader(batch_size=4)
    private = start(data_loader=data, user_ids=users, max_examples_per_user=3, **PRIVATE)
    for _ in range(2):
        epoch(private)
    assert private.steps_done == private.total_steps == 4


def test_leaving_a_loop_between_backward_and_step_is_no_accumulation() -> None:
    private = start(**PRIVATE)
    for batch in private.data_loader:
        private.model(**batch)["loss"].backward()
        break
    epoch(private)
    assert private.steps_done == 3
