"""A card says whose the weights are that it names: this run's releases', another run's, or something else's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fastdp.private.observer import Observer
from fastdp.private.run import Private
from tests.cases import cases, pairs
from tests.engine.runs import Classifier, collate, examples, logical_step, start

SETTINGS = {"noise_multiplier": 1.0, "target_delta": 1e-3, "unsafe_seed": None}


def trained(model: torch.nn.Module | None = None, steps: int = 1, **settings: object) -> Private:
    model = model or Classifier()
    private = start(model, None, torch.optim.SGD(model.parameters(), lr=0.1), **SETTINGS, **settings)
    for _ in range(steps):
        logical_step(private)
    return private


def says(private: Private, words: str) -> bool:
    return any(words in sentence for sentence in private.card()["assumptions"])


def _train_on(model: torch.nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model.eval()(**collate(examples()))["loss"].backward()
    optimizer.step()
    model.zero_grad()


def _write_unseen(model: torch.nn.Module) -> None:
    model.first.weight.data[0] = 1.0


def _write(model: torch.nn.Module) -> None:
    with torch.no_grad():
        model.first.weight[0] = 1.0


@cases(*pairs(("change", [_train_on, _write, _write_unseen]), ("detached", [True, False])))
def test_weights_that_no_release_left_are_named_as_such(
    change: Callable[[torch.nn.Module], None], detached: bool
) -> None:
    private = trained(steps=start(Classifier(), **SETTINGS).total_steps)
    assert not says(private, "changed after a release")
    if detached:
        private.detach()
        assert not says(private, "changed after a release")
    change(private.model)
    assert says(private, "changed after a release")


def test_what_follows_from_releases_is_not_called_changed(tmp_path: Path) -> None:
    private = trained()
    state, weights = private.state_dict(), copy.deepcopy(private.model.state_dict())
    logical_step(private)
    private.detach()
    assert not says(private, "changed after a release")
    # The best of several checkpoints.
    private.model.load_state_dict(weights)
    assert not says(private, "changed after a release")
    torch.save(state, tmp_path / "state.pt")
    resumed = start(Classifier(), **SETTINGS)
    resumed.model.load_state_dict(weights)
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    logical_step(resumed)
    assert not says(resumed, "changed after a release")


def test_a_state_knows_its_weights() -> None:
    one, other = trained(), trained(Classifier(seed=1))
    resumed = start(Classifier(), **SETTINGS)
    resumed.model.load_state_dict(other.model.state_dict())
    resumed.load_state_dict(one.state_dict())
    assert says(resumed, "checkpoint of another run")
    # One of before states knew that says nothing.
    state = {key: value for key, value in one.state_dict().items() if key != "weights"}
    again = start(Classifier(), **SETTINGS)
    again.model.load_state_dict(one.model.state_dict())
    again.load_state_dict(state)
    assert not says(again, "checkpoint of another run")


def test_it_is_kept_with_the_spending(tmp_path: Path) -> None:
    private = trained(output_dir=tmp_path)
    _write(private.model)
    private.detach()
    resumed = start(Classifier(), **SETTINGS, output_dir=tmp_path, resume=True)
    assert says(resumed, "changed after a release")


def test_a_card_names_the_private_runs_that_trained_the_model_before(tmp_path: Path) -> None:
    model = Classifier()
    (untouched := trained(model, steps=0)).detach()
    (first := trained(model)).detach()
    assert not says(first, "in private runs before")
    (second := trained(model, output_dir=tmp_path)).detach()
    assert says(second, first.ledger.run_id)
    assert second.ledger.noted("trained before") == first.ledger.run_id
    assert not says(second, untouched.ledger.run_id)
    # Who goes on with a run in another process has the ledger's word for it; and the run itself is none before.
    for again in (model, Classifier()):
        resumed = start(again, **SETTINGS, output_dir=tmp_path, resume=True)
        assert says(resumed, first.ledger.run_id)
        assert not says(resumed, second.ledger.run_id)
        resumed.detach()


def test_runs_that_left_their_weights_by_a_copy_or_at_the_same_time_are_named() -> None:
    first = trained()
    first.detach()
    again = trained(copy.deepcopy(first.model))
    assert says(again, first.ledger.run_id)
    loaded = Classifier(seed=5)
    loaded.load_state_dict(first.model.state_dict())
    assert says(trained(loaded), first.ledger.run_id)
    assert not says(trained(Classifier(seed=90210)), "in private runs before")

    one, two = (start(Classifier(seed=seed), **SETTINGS) for seed in (6, 7))
    two.detach()
    two.model.first = one.model.first
    two = start(two.model, **SETTINGS)
    for private in (one, two):
        private.optimizer.param_groups[0]["lr"] = 0.1
        logical_step(private)
    assert says(two, one.ledger.run_id)
    assert says(one, "changed after a release")


@cases("taken", [lambda units: [24], lambda units: [*units, *units[:1]]])
def test_an_observer_puts_nothing_into_a_sample(taken: Callable[[list[int]], list[int]]) -> None:
    class Choosing(Observer):
        def drawn(self, units: list[int], kind: str) -> list[int]:
            return taken(units)

    private = start(Classifier(), **SETTINGS)
    private.observe(Choosing())
    with pytest.raises(ValueError, match="an observer may leave units out"):
        list(private.data_loader)
