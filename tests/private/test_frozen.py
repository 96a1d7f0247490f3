"""Parameters that a loop freezes, unfreezes or writes between releases."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fastdp
from fastdp.accounting import verify
from fastdp.methods.frost import DPFrost
from fastdp.methods.rapft import NoisyMap, PublicMap, RapFT
from fastdp.private.run import Private
from tests.engine.reference import known
from tests.engine.runs import (
    CLIPPED,
    PRIVATE,
    Classifier,
    Odd,
    clipped_sum,
    collate,
    error,
    examples,
    join,
    logical_step,
    one_by_one,
    start,
    state,
)

STEPS = 6


def run(private: Private, each: Callable[[int], None] = lambda done: None) -> None:
    """Two epochs; ``each`` is told the number of releases before a batch and after its step."""
    for _ in range(2):
        for batch in private.data_loader:
            each(private.steps_done)
            private.model(**batch)["loss"].backward()
            private.optimizer.step()
            private.optimizer.zero_grad()
            each(private.steps_done)


def run_epoch(private: Private) -> None:
    for batch in private.data_loader:
        private.model(**batch)["loss"].backward()
        private.optimizer.step()
        private.optimizer.zero_grad()


def freeze(model: nn.Module, name: str, frozen: bool) -> None:
    model.get_parameter(name).requires_grad_(not frozen)


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "torch": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "fused": lambda model: fastdp.optim.AdamW(model.parameters(), lr=0.1),
}


@pytest.mark.parametrize("frozen", ["first.weight", "second.weight", "first.bias"])
@pytest.mark.parametrize("build", [Classifier, Odd])
def test_clipping_ignores_what_is_frozen(frozen: str, build: Callable[[], nn.Module]) -> None:
    model = build()
    private = start(
        model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), method=fastdp.DPSGD(max_grad_norm=0.5)
    )
    iterator = iter(private.data_loader)
    for absent in ((), (frozen,), ()):
        freeze(model, frozen, bool(absent))
        gradients, batches = logical_step(private, iterator)
        truth = [{n: g for n, g in own.items() if n not in absent} for own in one_by_one(model, join(batches))]
        expected = {n: g / private.expected_batch_size for n, g in clipped_sum(truth, 0.5).items()}
        assert error(gradients, expected) < CLIPPED


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("capped", [None, 2])
def test_what_is_unfrozen_between_two_batches_is_clipped_with_all_else(add: bool, capped: int | None) -> None:
    model = Classifier()
    freeze(model, "first.weight", True)
    held = [p for p in model.parameters() if p.requires_grad or not add]
    optimizer, method = torch.optim.SGD(held, lr=0.0), fastdp.DPSGD(max_grad_norm=0.5)
    private = start(model, optimizer=optimizer, method=method, max_physical_batch_size=capped)
    iterator = iter(private.data_loader)
    assert "first.weight" not in logical_step(private, iterator)[0]
    freeze(model, "first.weight", False)
    if add:
        optimizer.add_param_group({"params": [model.first.weight]})
    for absent in ((), ("first.weight",), ()):
        freeze(model, "first.weight", bool(absent))
        iterator = iterator if not absent else iter(private.data_loader)
        gradients, batches = logical_step(private, iterator)
        truth = [{n: g for n, g in own.items() if n not in absent} for own in one_by_one(model, join(batches))]
        expected = {n: g / private.expected_batch_size for n, g in clipped_sum(truth, 0.5).items()}
        assert gradients.keys() == expected.keys()
        assert error(gradients, expected) < CLIPPED


def test_what_is_unfrozen_has_noise_of_its_own_and_adaptive_bounds_go_on() -> None:
    model = Classifier()
    freeze(model, "first.weight", True)
    method = fastdp.DPSGD(max_grad_norm=0.5, adaptive=fastdp.AdaptiveClipping())
    private = start(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), method=method, **PRIVATE)
    iterator = iter(private.data_loader)
    logical_step(private, iterator)
    bounds = private.policy.bounds
    assert bounds != (0.5,)
    freeze(model, "first.weight", False)
    batch = next(iterator)
    assert private.policy.bounds == bounds
    private.model(**batch)["loss"].backward()
    private.optimizer.step()
    noises = [g.flatten()[:7] for g in (p.grad for p in model.parameters()) if g is not None]
    assert len(noises) == 4
    assert all(not torch.allclose(a, b) for a, b in itertools.combinations([n for n in noises if len(n) == 7], 2))


def test_a_run_that_unfreezes_is_resumed_and_its_card_holds(tmp_path: Path) -> None:
    saved: dict[str, Any] = {}
    for resume in (False, True):
        model = Classifier()
        freeze(model, "first.weight", True)
        options = {**PRIVATE, "output_dir": tmp_path, "resume": resume, "unsafe_seed": None}
        private = start(model, optimizer=OPTIMIZERS["torch"](model), **options)
        if resume:
            model.load_state_dict(saved["model"])
            private.optimizer.load_state_dict(saved["optimizer"])
            private.load_state_dict(saved["private"])
        else:
            run_epoch(private)
        freeze(model, "first.weight", False)
        if not resume:
            logical_step(private)
        saved = {name: getattr(private, name).state_dict() for name in ("model", "optimizer")}
        saved = copy.deepcopy(saved) | {"private": private.state_dict()}
        if resume:
            run_epoch(private)
            assert private.steps_done == STEPS
        private.detach()
    card = private.card()
    assert card["model"]["trained_parameters"] == sum(p.numel() for p in model.parameters())
    assert not any("changed" in sentence for sentence in card["assumptions"])
    card.save(tmp_path / "card")
    assert verify(tmp_path / "card.json", ledger=tmp_path / "ledger.jsonl").holds


def test_the_card_keeps_what_was_assumed_before_a_parameter_was_unfrozen() -> None:
    model = Classifier()
    model.first.requires_grad_(False)
    private = start(model, optimizer=OPTIMIZERS["torch"](model), **PRIVATE)
    iterator = iter(private.data_loader)
    logical_step(private, iterator)
    with torch.no_grad():
        model.first.bias.add_(1)
    logical_step(private, iterator)
    freeze(model, "first.weight", False)
    logical_step(private, iterator)
    assert any("the loop wrote" in sentence for sentence in private.card()["assumptions"])
    with torch.no_grad():
        model.second.bias.add_(1)
    freeze(model, "first.bias", False)
    with pytest.raises(RuntimeError, match=r"second\.bias was changed outside of a release"):
        next(iter(private.data_loader))


@pytest.mark.parametrize("held", [False, True])
def test_what_the_optimizer_does_not_hold_or_a_batch_began_without_is_refused_and_the_run_goes_on(held: bool) -> None:
    model = Classifier()
    freeze(model, "first.weight", True)
    optimizer = torch.optim.SGD([p for p in model.parameters() if held or p.requires_grad], lr=0.1)
    private = start(model, optimizer=optimizer, **PRIVATE)
    before, batches = state(model), iter(private.data_loader)
    logical_step(private, batches)
    batch = next(batches)
    freeze(model, "first.weight", False)
    private.model(**batch)["loss"].backward()
    with pytest.raises(
        RuntimeError, match=r"first.weight is none of what this batch trains.* 1 of 6 releases are spent"
    ):
        optimizer.step()
    freeze(model, "first.weight", True)
    optimizer.step()
    optimizer.zero_grad()
    while private.steps_done < private.total_steps:
        run(private)
    assert torch.equal(model.first.weight, before["first.weight"])


PUBLIC = PublicMap([collate(examples(6, 9))])
SELECTION: Any = {"selection_steps": 2, "selection_rate": 0.5, "selection_noise_multiplier": 1.0}
#: Methods, and whether they prepare again while the loop runs.
PREPARED: dict[str, Any] = {
    "rapft, map of private rows": RapFT(NoisyMap(2.0, 0.5), map_every=2),
    "rapft, map after the freezing": RapFT(PUBLIC, map_after=3),
    "frost": DPFrost(unfreezing_ratio=0.5, select_every=1, **SELECTION),
}
#: Of the two layers only the second has at most half of all numbers, so that `DPFrost` chooses it.
CHOSEN, LEFT_OUT = "second.weight", "first.weight"


@pytest.mark.parametrize("name", PREPARED)
def test_what_a_loop_freezes_stays_through_a_methods_preparations_until_it_is_unfrozen(
    name: str, tmp_path: Path
) -> None:
    model = Classifier()
    options: dict[str, Any] = {"noise_multiplier": 1.0, "target_delta": 1e-3, "unsafe_seed": None}
    method = PREPARED[name]
    private = start(model, optimizer=OPTIMIZERS["torch"](model), method=method, output_dir=tmp_path, **options)
    seen: list[torch.Tensor] = []

    def each(done: int) -> None:
        # Told before a step and after it, of which only what the loop does once counts.
        if len(seen) == 2 and done == 1:
            freeze(model, CHOSEN, True)
        if len(seen) == 8 and done == 4:
            freeze(model, CHOSEN, False)
        seen.append(model.get_parameter(CHOSEN).detach().clone())

    run(private, each)
    moved = [not torch.equal(a, b) for a, b in zip(seen[::2], seen[1::2])]
    assert moved == [True, False, False, False, True, True]
    assert private.steps_done == STEPS
    freeze(model, CHOSEN, True)
    private.detach()
    assert [n for n, p in model.named_parameters() if not p.requires_grad] == [CHOSEN]
    private.card().save(tmp_path / "card")
    assert verify(tmp_path / "card.json", ledger=tmp_path / "ledger.jsonl").holds


def test_masks_clip_what_is_not_frozen() -> None:
    model = Classifier()
    private = start(model, method=RapFT(PUBLIC, allocation="optimal", max_grad_norm=0.5))
    iterator = iter(private.data_loader)
    for absent in ((), (CHOSEN,), ()):
        freeze(model, CHOSEN, bool(absent))
        gradients, batches = logical_step(private, iterator)
        truth = [{n: g for n, g in own.items() if n not in absent} for own in one_by_one(model, join(batches))]
        masks = {n: m.bool() for n, m in private.outcome.items() if n not in absent}
        squares = torch.stack(
            [
                torch.stack([sum((g[n][m].square().sum() for n, m in side.items()), torch.zeros(())) for g in truth])
                for side in (masks, {n: ~m for n, m in masks.items()})
            ]
        )
        weak, strong = private.policy.scales(known(squares))
        expected = {
            n: sum(g[n] * torch.where(m, weak[i], strong[i]) for i, g in enumerate(truth)) / 8 for n, m in masks.items()
        }
        assert error(gradients, expected) < CLIPPED


def test_what_a_method_left_out_may_not_be_unfrozen_and_the_run_goes_on() -> None:
    model = Classifier()
    before = state(model)
    method = DPFrost(unfreezing_ratio=0.5, **SELECTION)
    private = start(model, method=method, **PRIVATE)
    batches = iter(private.data_loader)
    logical_step(private, batches)
    freeze(model, LEFT_OUT, False)
    # Two of the selection and one of training.
    said = r"first.weight was unfrozen, and DP-FROST did not choose it: freeze it again. 3 of 8 releases are spent"
    with pytest.raises(RuntimeError, match=said):
        logical_step(private, batches)
    freeze(model, LEFT_OUT, True)
    while private.steps_done < private.total_steps:
        run(private)
    assert torch.equal(model.first.weight, before["first.weight"])
    private.detach()
    assert all(p.requires_grad for p in model.parameters())
