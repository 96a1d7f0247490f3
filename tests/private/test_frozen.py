"""Parameters that a loop freezes, unfreezes or writes between releases."""

from __future__ import annotations

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


def test_a_parameter_that_was_frozen_at_make_private_may_not_be_unfrozen_and_the_run_goes_on() -> None:
    model = Classifier()
    freeze(model, "first.weight", True)
    private = start(model, optimizer=OPTIMIZERS["torch"](model), **PRIVATE)
    before, batches = state(model), iter(private.data_loader)
    logical_step(private, batches)
    freeze(model, "first.weight", False)
    with pytest.raises(
        RuntimeError, match=r"first.weight was not trainable at make_private.* 1 of 6 releases are spent"
    ):
        logical_step(private, batches)
    freeze(model, "first.weight", True)
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
