"""The audit catches mechanisms that are broken on purpose, and passes the correct one.

Every audit of this file is made at confidence 1 - 1e-5: that is how often a correct mechanism may be called broken.
The bounds of correct ones are far below their claim, at most .04 of 1 in 225 audits, so that none comes near. Noise at a
tenth is missed by an audit in a hundred or fewer, by losses in 5 of 140: it is looked for up to eight times, which misses less
than once in 10^11. Noise that is somewhat weaker is missed more seldom still, and looked for four times.
"""

import pytest
import torch

import fastdp
from fastdp import audit, ops
from fastdp.engine.clip import norms
from fastdp.engine.clip.accumulator import Accumulator
from fastdp.engine.clip.policy import Policy
from tests.audit.runs import CANARIES, Tied, canary, ordinary, start
from tests.cases import cases
from tests.loops import train
from tests.noise import replace_noise

CONFIDENCE = 1 - 1e-5
SHARES = (0.2, 0.5)


def gradients(count=800, statistic="mean", **options):
    """An audit by gradient canaries of a run that claims epsilon 1."""
    private = start(ordinary(), **{"target_epsilon": 1.0, **options})
    canaries = audit.GradientCanaries(private, count, statistic=statistic)
    train(private)
    result = canaries.result(CONFIDENCE, shares=SHARES)
    assert result.claimed <= 1.0
    return result


def examples(score="gradient", **options):
    """An audit by example canaries of a run that claims epsilon 1."""
    data, units = audit.with_canaries(ordinary(), [canary(token) for token in range(CANARIES)])
    private = start(data, **{"target_epsilon": 1.0, "epochs": 1, **options})
    canaries = audit.ExampleCanaries(private, units, score=score)
    train(private)
    return canaries.result(CONFIDENCE, shares=SHARES)


# --- the correct mechanism --------------------------------------------------------------------------------------------


@cases(
    "options",
    [
        {},
        {"method": fastdp.DPSGD(max_grad_norm=0.1, groups="per_layer"), "tied": False},
        {"method": fastdp.DPSGD(max_grad_norm=0.1, adaptive=fastdp.AdaptiveClipping())},
        {"batch_size": 4, "epochs": 8},
        {"sampling": "shuffled", "batch_size": 4},
        {"adjacency": "replace_one"},
    ],
)
def test_gradient_canaries_pass_the_correct_mechanism(options):
    assert not gradients(**options).refuted


@cases(("score", "options"), [("gradient", {}), ("loss", {}), ("gradient", {"batch_size": 124, "tied": False})])
def test_example_canaries_pass_the_correct_mechanism(score, options):
    assert not examples(score, **options).refuted


# --- mechanisms that are broken ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("audited", "options"),
    [
        (gradients, {"batch_size": 7}),
        (gradients, {"sampling": "shuffled", "batch_size": 4}),
        (examples, {"score": "gradient"}),
        (examples, {"score": "loss"}),
    ],
)
def test_noise_at_a_tenth_is_caught(audited, options, monkeypatch):
    replace_noise(monkeypatch, lambda total, std, add: add(total, std / 10))
    assert any(audited(**options).refuted for _ in range(8))


def test_noise_that_is_reused_in_every_step_is_caught(monkeypatch):
    kept = {}

    def draw(total, std, add):
        if total.shape not in kept:
            add(kept.setdefault(total.shape, torch.zeros_like(total)), 1.0)
        total.add_(kept[total.shape], alpha=std)

    replace_noise(monkeypatch, draw)
    assert gradients().refuted


def test_a_group_that_the_policy_leaves_unclipped_is_caught(monkeypatch):
    correct = Policy.scales

    def scales(self, upper):
        factors = correct(self, upper)
        return torch.cat([torch.ones_like(factors[:1]), factors[1:]])

    monkeypatch.setattr(Policy, "scales", scales)
    per_layer = fastdp.DPSGD(max_grad_norm=0.1, groups="per_layer")
    assert gradients(method=per_layer, tied=False, self_check=False).refuted


def test_a_layer_left_out_of_the_norm_is_caught(monkeypatch):
    correct = ops.sqnorm
    # The embedding's factor is the ids of its tokens.
    monkeypatch.setattr(ops, "sqnorm", lambda left, *rest: correct(left, *rest) * float(left.is_floating_point()))
    assert examples(tied=False, self_check=False).refuted


@pytest.mark.parametrize("score", ["gradient", "loss"])
def test_a_second_use_left_out_of_the_norm_is_caught(score, monkeypatch):
    join = norms.join_uses
    monkeypatch.setattr(norms, "join_uses", lambda uses, *rest: join([use for use in uses if not use.one_hot], *rest))
    assert examples(score, self_check=False).refuted


def test_noise_whose_size_depends_on_the_data_is_caught(monkeypatch):
    """Three times the noise where the clipped sum is large: too much on average, and it shows where that is."""

    def draw(total, std, add):
        extra = torch.where(total.abs() > total.abs().median(), 3.0, 1.0)
        silent = total.clone()
        add(total, std)
        total.copy_(silent + (total - silent) * extra)

    replace_noise(monkeypatch, draw)
    assert not gradients().refuted
    assert gradients(statistic="variance").refuted


# --- how canaries enter a run -----------------------------------------------------------------------------------------


def silent(private):
    """Take one step and leave the gradients."""
    batch = next(iter(private.data_loader))
    private.model(**batch)["loss"].backward()
    private.optimizer.step()


def flat(private):
    return torch.cat([p.grad.reshape(-1) for p in private.model.parameters() if p.grad is not None])


@pytest.mark.parametrize("groups", [None, "per_layer"])
def test_each_included_gradient_canary_adds_a_gradient_of_the_bounds_norm(groups):
    options = {
        "target_epsilon": None,
        "noise_multiplier": 0.0,
        "method": fastdp.DPSGD(max_grad_norm=0.1, groups=groups),
    }
    plain, watched = (start(ordinary(), tied=False, **options) for _ in range(2))
    canaries = audit.GradientCanaries(watched, 50, unsafe_seed=3)
    silent(plain)
    silent(watched)
    added = (flat(watched) - flat(plain)) * len(ordinary())
    assert float(added.norm()) == pytest.approx(0.1 * float(canaries.included.sum()) ** 0.5, rel=1e-3)
    assert 10 < int(canaries.included.sum()) < 40
    scores = canaries.scores()
    assert scores[canaries.included].min() > scores[~canaries.included].max()


def test_masked_groups_are_clipped_each_on_its_own():
    private = start(ordinary(), target_epsilon=None, noise_multiplier=0.0)
    name, mask = "embedding.weight", torch.arange(Tied().embedding.weight.numel()).view(-1, 12) % 3 == 0
    policy = Policy((0.1, 0.4), (0.0, 0.0), {name: (0, 1)}, {name: mask})
    canaries = audit.GradientCanaries(private, 20, unsafe_seed=1)
    accumulator = Accumulator({name: private.parameters[name]}, policy)
    canaries.before_release(accumulator)
    sums = accumulator.sums
    included = float(canaries.included.sum()) ** 0.5
    assert float(sums[name][mask].norm()) == pytest.approx(0.1 * included, rel=1e-4)
    assert float(sums[name][~mask].norm()) == pytest.approx(0.4 * included, rel=1e-4)


def test_excluded_examples_take_no_part_and_included_ones_do():
    data, units = audit.with_canaries(ordinary(), [canary(token) for token in range(20)])
    private = start(data, target_epsilon=None, noise_multiplier=0.0)
    canaries = audit.ExampleCanaries(private, units, unsafe_seed=1)
    batch = next(iter(private.data_loader))
    seen = set(batch["ids"][:, 0].tolist()) & set(range(20))
    assert seen == set(canaries.included.nonzero().reshape(-1).tolist())
    assert len(private.data_loader.units) == len(ordinary()) + 20
    canaries.detach()
    private.data_loader.tickets.clear()
    assert len(next(iter(private.data_loader))["ids"]) == len(data)


def test_plain_gradients_leave_the_released_ones_alone():
    data, units = audit.with_canaries(ordinary(), [canary(token) for token in range(20)])
    options = {"target_epsilon": None, "noise_multiplier": 1.0, "unsafe_seed": 4}
    runs = [start(data, **options) for _ in range(2)]
    audit.ExampleCanaries(runs[0], units, score="gradient", unsafe_seed=1)
    audit.ExampleCanaries(runs[1], units, score="loss", unsafe_seed=1)
    for run in runs:
        silent(run)
    assert torch.equal(flat(runs[0]), flat(runs[1]))
    assert runs[0].model.training


def test_detached_canaries_leave_the_run_as_it_was():
    plain, watched = (start(ordinary(), target_epsilon=1.0, unsafe_seed=2) for _ in range(2))
    audit.GradientCanaries(watched, 10).detach()
    for run in (plain, watched):
        silent(run)
    assert torch.equal(flat(plain), flat(watched))


def test_what_cannot_be_audited_is_refused():
    run = start(ordinary(), target_epsilon=1.0, target_delta=1e-5)
    for kind, canaries_of, options, match in (
        (audit.GradientCanaries, 1, {}, "at least 2"),
        (audit.GradientCanaries, 10**9, {}, "as many coordinates"),
        (audit.GradientCanaries, 10, {"statistic": "median"}, "statistic"),
        (audit.ExampleCanaries, [1, 99], {}, "not among"),
        (audit.ExampleCanaries, [1, 1], {}, "twice"),
        (audit.ExampleCanaries, [0, 1], {"score": "guess"}, "score"),
    ):
        with pytest.raises(ValueError, match=match):
            kind(run, canaries_of, **options)
    canaries = audit.GradientCanaries(run, 10)
    with pytest.raises(ValueError, match="already"):
        audit.ExampleCanaries(run, [0, 1])
    with pytest.raises(ValueError, match="nothing was released"):
        canaries.result()
    train(run)
    canaries.detach()
    with pytest.raises(ValueError, match="before its first step"):
        audit.GradientCanaries(run, 10)
    nothing = start(ordinary(), method=fastdp.NonPrivate(), target_delta=None)
    with pytest.raises(ValueError, match="claims nothing"):
        audit.GradientCanaries(nothing, 10)


def test_input_canaries_are_what_no_data_holds():
    rows = audit.random_sequences(30, 8, 50)
    assert len({tuple(row["input_ids"]) for row in rows}) == 30
    assert all(
        row["labels"] == row["input_ids"] and min(row["input_ids"]) >= 0 and max(row["input_ids"]) < 50 for row in rows
    )
    wrong = audit.mislabelled([{"x": i, "labels": i % 3} for i in range(30)], 3)
    assert all(row["labels"] != i % 3 and row["labels"] in (0, 1, 2) and row["x"] == i for i, row in enumerate(wrong))
    with pytest.raises(ValueError, match="at least 2"):
        audit.random_sequences(3, 1, 50)
    with pytest.raises(ValueError, match="wrong label"):
        audit.mislabelled([], 1)
    with pytest.raises(ValueError, match="between 0 and 1"):
        audit.mislabelled([{"labels": 2}], 2)
