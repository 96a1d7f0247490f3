"""A private run from outside: budget, card, optimizers, clipping that adapts, averages, checkpoints and crashes."""

from __future__ import annotations

import gc
import math
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats
from typer.testing import CliRunner

import fastdp
from fastdp.accounting import BudgetExceeded, epsilon
from fastdp.cli import app
from fastdp.methods.rapft import NoisyMap
from fastdp.private.steps import noised_fraction
from tests.cases import cases, pairs
from tests.engine.reference import norms as sizes
from tests.engine.runs import (
    Classifier,
    clipped_sum,
    collate,
    error,
    examples,
    join,
    loader,
    logical_step,
    one_by_one,
    start,
)
from tests.loops import trained
from tests.private.conftest import Found, ranks, run

PRIVATE: dict[str, Any] = {"noise_multiplier": 1.0, "target_delta": 1e-4}


def train(private: Any, epochs: int) -> list[float]:
    """Train and return epsilon after each release."""
    return [private.epsilon() for _ in trained(private, epochs) if private.last_step_done]


@cases("sampling", ["poisson", "shuffled"])
def test_epsilon_grows_to_its_target_and_never_above(sampling: str) -> None:
    private = start(target_epsilon=3.0, target_delta=1e-3, epochs=2, sampling=sampling, unsafe_seed=None)
    assert private.epsilon() == 0
    spent = train(private, 2)
    assert len(spent) == private.total_steps == 6
    assert spent == sorted(spent)
    assert 0 < spent[0] < spent[-1] <= 3.0
    assert spent[-1] > 2.97, "the noise is no more than was asked for"


def test_no_noise_is_no_privacy_and_the_card_says_so(tmp_path: Path) -> None:
    for options in ({"noise_multiplier": 0.0}, {"target_epsilon": math.inf, "target_delta": 1e-4}):
        private = start(unsafe_seed=None, **options)
        train(private, 1)
        assert private.epsilon(1e-4) == math.inf
        card = private.card()
        assert card["guarantee"] == "none"
        assert any("noise" in reason for reason in card["why_no_guarantee"])
        card.save(tmp_path / "card.json")
        verified = CliRunner().invoke(app, ["verify", str(tmp_path / "card.json")])
        assert verified.exit_code != 0
        assert "certifies no guarantee" in " ".join(verified.stderr.split())
    private = start(method=fastdp.NonPrivate(), noise_multiplier=None)
    train(private, 1)
    assert private.route == "ordinary"
    assert private.epsilon(1e-4) == math.inf


def test_the_non_private_baseline_is_the_mean_gradient_over_the_expected_batch() -> None:
    private = start(method=fastdp.NonPrivate(), noise_multiplier=None, max_physical_batch_size=3)
    got, batches = logical_step(private)
    total = clipped_sum(one_by_one(private.model, join(batches)), math.inf)
    assert error(got, {n: t / 8 for n, t in total.items()}) < 1e-5


def test_extending_pays_for_more() -> None:
    private = start(epochs=1, unsafe_seed=None, **PRIVATE)
    before = train(private, 1)
    with pytest.raises(BudgetExceeded, match=r"all 3 budgeted steps are spent; call private\.extend"):
        next(iter(private.data_loader))
    with pytest.raises(ValueError, match="extend by a positive number"):
        private.extend(-1)
    private.extend(0.5)
    assert private.total_steps == 5
    after = train(private, 1)
    assert len(after) == 2
    assert after[-1] > before[-1]
    assert after[-1] == pytest.approx(float(epsilon(fastdp.accounting.dpsgd(1.0, 8 / 24, 5), 1e-4)))


class TestOptimizers:
    """`fastdp.optim`: torch's classes, torch's steps."""

    @pytest.mark.parametrize(
        ("ours", "theirs", "options"),
        [
            (fastdp.optim.SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}),
            (fastdp.optim.Adam, torch.optim.Adam, {"lr": 0.01, "betas": (0.8, 0.9), "weight_decay": 0.02}),
            (fastdp.optim.AdamW, torch.optim.AdamW, {"lr": 0.01, "eps": 1e-6, "weight_decay": 0.1}),
        ],
    )
    def test_steps_are_torch_s_for_the_same_gradients(self, ours: Any, theirs: Any, options: dict[str, Any]) -> None:
        model, plain = Classifier(), Classifier()
        unfused = {} if ours is fastdp.optim.SGD else {"fused": False}
        optimizer = ours(model, loader(), **options, **unfused, noise_multiplier=0.5, epochs=3, unsafe_seed=1)
        assert isinstance(optimizer, torch.optim.Optimizer)
        if ours is fastdp.optim.SGD:
            assert isinstance(optimizer, torch.optim.SGD)
        reference = theirs(plain.parameters(), **options)
        for _ in trained(optimizer.private, 2):
            for p, q in zip(model.parameters(), plain.parameters()):
                q.grad = None if p.grad is None else p.grad.clone()
            reference.step()
            for p, q in zip(model.parameters(), plain.parameters()):
                assert torch.allclose(p, q, rtol=1e-6, atol=1e-8)
        saved = optimizer.state_dict()
        reference.load_state_dict(saved)
        assert len(saved["state"]) == 4

    @pytest.mark.parametrize(
        *pairs(
            ("ours", [fastdp.optim.Adam, fastdp.optim.AdamW]),
            ("method", [fastdp.DPSGD(max_grad_norm=0.5), fastdp.DPSGD(groups="per_layer")]),
        )
    )
    def test_noise_within_the_update_is_noise_before_it(self, ours: Any, method: Any) -> None:
        models = []
        for fused in (True, False):
            model = Classifier()
            optimizer = ours(model, loader(), lr=0.01, method=method, fused=fused, epochs=2, unsafe_seed=1, **PRIVATE)
            for _ in trained(optimizer.private, 2):
                done = optimizer.private.last_step_done
                assert all((p.grad is None) == (fused or not done) for p in model.parameters())
            models.append((model, optimizer.state_dict()["state"]))
        (model, ours_state), (other, their_state) = models
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.allclose(p, q, rtol=1e-5, atol=1e-7)
        for index, of in their_state.items():
            assert of.keys() == ours_state[index].keys()
            assert all(torch.allclose(value, ours_state[index][key], rtol=1e-5, atol=1e-9) for key, value in of.items())

    @pytest.mark.parametrize(
        "reason", ["weight decay of Adam's kind", "an option the op lacks", "a hook that may look"]
    )
    def test_what_cannot_be_fused_gets_its_gradient(self, reason: str) -> None:
        model = Classifier()
        ours, decay = (fastdp.optim.Adam, 0.1) if "decay" in reason else (fastdp.optim.AdamW, 0.0)
        optimizer = ours(model, loader(), weight_decay=decay, epochs=1, **PRIVATE)
        seen: list[bool] = []
        if "option" in reason:
            optimizer.param_groups[0]["maximize"] = True
        if "hook" in reason:
            optimizer.register_step_pre_hook(
                lambda *_: seen.append(all(p.grad is not None for p in model.parameters()))
            )
        before = [p.detach().clone() for p in model.parameters()]
        gradients, _ = logical_step(optimizer.private)
        assert gradients.keys() == dict(model.named_parameters()).keys()
        assert not any(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
        assert not seen or seen[-1]
        assert bool(seen) == ("hook" in reason)


class TestAdaptiveClipping:
    """Andrew et al. 2021, algorithm 1."""

    def test_the_threshold_finds_its_quantile(self) -> None:
        adaptive = fastdp.AdaptiveClipping(target_quantile=0.5, learning_rate=0.3, count_noise_std=0.6)
        method = fastdp.DPSGD(max_grad_norm=50.0, adaptive=adaptive)
        data = loader(batch_size=24)
        private = start(data_loader=data, method=method, noise_multiplier=1.0, epochs=40, target_delta=1e-4)
        norms = sizes(one_by_one(private.model, collate(examples())))
        bounds = []
        for _ in range(40):
            logical_step(private)
            bounds.append(private.policy.bounds[0])
        settled = sum(bounds[-10:]) / 10
        assert float((norms < settled).double().mean()) == pytest.approx(0.5, abs=0.2)
        ratio = {round(s / b, 6) for s, b in [(private.policy.stds[0], bounds[-1])]}
        assert ratio == {round(adaptive.gradient_multiplier(1.0), 6)}, "noise follows the threshold"

    def test_one_unit_moves_the_released_count_by_one_half(self, monkeypatch: pytest.MonkeyPatch) -> None:
        released: list[float] = []
        monkeypatch.setattr(fastdp.ops, "add_noise_", lambda x, std, *a, **k: (released.append(float(x)), x)[1])
        for unclipped, units in ((5, 9), (6, 10), (5, 10)):  # one unit more, whole or clipped
            noised_fraction(unclipped, units, 10.0, 8.0, fastdp.NoiseStream())
        assert released == [0.5, 1.0, 0.0]

    def test_the_count_comes_from_the_units_that_took_part(self, monkeypatch: pytest.MonkeyPatch) -> None:
        released: list[float] = []
        drawn = fastdp.ops.add_noise_

        def watch(x: torch.Tensor, std: float, *args: Any, **kwargs: Any) -> torch.Tensor:
            if x.numel() == 1:
                released.append(float(x))
            return drawn(x, std, *args, **kwargs)

        monkeypatch.setattr(fastdp.ops, "add_noise_", watch)
        bound = 2.0
        private = start(method=fastdp.DPSGD(max_grad_norm=bound, adaptive=fastdp.AdaptiveClipping()), **PRIVATE)
        _, batches = logical_step(private)
        rows = one_by_one(private.model, join(batches))
        norms = sizes(rows)
        # Whole up to 15/16 of the bound, not at all from 17/16.
        whole = float(((17 / 16 - norms / bound) * 8).clamp(0, 1).sum())
        assert 0 < whole < len(rows)
        assert released == [pytest.approx(whole - len(rows) / 2, abs=1e-4)]


def test_a_state_holds_counts_and_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add, keys = fastdp.ops.add_noise_group_, []

    def watched(xs: Any, stds: Any, drawn: torch.Tensor, **options: Any) -> None:
        keys.append(drawn[0, :8].numpy().tobytes())
        add(xs, stds, drawn, **options)

    monkeypatch.setattr(fastdp.ops, "add_noise_group_", watched)
    private = start(unsafe_seed=None, output_dir=tmp_path, **PRIVATE)
    train(private, 1)
    keys.append(private.data_loader.sampler.stream.take()[:8].numpy().tobytes())
    torch.save(private.state_dict(), tmp_path / "state.pt")
    saved = torch.load(tmp_path / "state.pt", weights_only=True)
    written = (tmp_path / "state.pt").read_bytes() + (tmp_path / "ledger.jsonl").read_bytes()
    assert len(keys) == 4
    for key in keys:
        assert key not in written
        assert key.hex().encode() not in written
    assert saved["steps_done"] == 3


def test_the_spent_budget_is_the_larger_of_checkpoint_and_ledger(tmp_path: Path) -> None:
    private = start(output_dir=tmp_path, **PRIVATE)
    logical_step(private)
    early = private.state_dict()
    logical_step(private)
    private.load_state_dict(early)
    assert private.steps_done == 2, "loading an early state gives nothing back"
    late = private.state_dict()
    private.detach()
    other = start(**PRIVATE)
    other.load_state_dict({**late, "ledger_head": None})
    assert other.steps_done == 2
    assert len(train(other, 2)) == 4


def test_a_resumed_run_goes_on_where_it_was(tmp_path: Path) -> None:
    adaptive = fastdp.DPSGD(adaptive=fastdp.AdaptiveClipping(count_noise_std=2.0))
    options: dict[str, Any] = {**PRIVATE, "method": adaptive, "output_dir": tmp_path}
    private = start(**options)
    for _ in range(2):
        logical_step(private)
    saved, policy = private.state_dict(), private.policy
    private.detach()
    resumed = start(resume=True, **options)
    resumed.load_state_dict(saved)
    assert resumed.steps_done == 2
    assert resumed.policy.bounds == policy.bounds != (1.0,)
    assert resumed.ledger.run_id == private.ledger.run_id
    assert len(train(resumed, 2)) == 4


def require_counts(outcome: Found, budget: int) -> None:
    """The books are never below the truth, the total never above the budget, and no noise comes twice."""
    observations, noise = outcome["observations"], outcome["noise"]
    assert observations[-1]["status"] == 0
    assert len(observations) > 3, "killed a few times at least"
    for before, after in zip([{"released": 0, "spent": 0}, *observations], observations):
        assert after["spent"] >= after["released"]
        assert after["spent"] <= budget
        assert after["spent"] >= before["spent"]
    assert len(noise) == observations[-1]["released"] <= budget
    assert observations[-1]["spent"] == budget
    assert len({tuple(n) for n in noise}) == len(noise), "noise repeats"
    assert stats.kstest(torch.tensor(noise).reshape(-1).double().numpy(), "norm").pvalue > 1e-9


def test_a_run_that_is_killed_between_any_two_lines(folder: Path) -> None:
    require_counts(ranks(folder, "crashes", 1)[0], 6)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_a_run_that_is_killed_many_times_with_blocks_of_several_steps(tmp_path: Path, seed: int) -> None:
    run(tmp_path, "crashes:1", SEED=str(seed), BUDGET="180")
    require_counts(ranks(tmp_path, "crashes", 1)[0], 180)


@cases("method", [fastdp.DPSGD(), fastdp.RapFT(NoisyMap(1.5, 0.5), map_every=2)])
def test_noise_that_can_be_drawn_again_is_worth_nothing(method: Any) -> None:
    options = {"method": method, "target_epsilon": 3.0, "target_delta": 1e-3}
    for seed, worth in ((7, math.inf), (None, 3.0)):
        private = start(unsafe_seed=seed, **options)
        assert private.epsilon() == 0, "nothing was released yet"
        logical_step(private)
        assert private.epsilon() <= worth
        assert math.isinf(private.epsilon()) == math.isinf(worth)
        assert (private.card()["guarantee"] == "none") == math.isinf(worth)


def test_a_run_that_is_let_go_of_keeps_no_model() -> None:
    private = start(noise_multiplier=1.0, target_delta=1e-3)
    logical_step(private)
    weights = [weakref.ref(parameter) for parameter in private.model.parameters()]
    del private
    gc.collect()
    assert not any(parameter() is not None for parameter in weights)
