"""A release is the clipped sum over the expected batch size, plus noise of the stated size, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from torch import nn

import fastdp
from fastdp.engine.clip.policy import Policy
from fastdp.ops.grid import DISTANCE
from fastdp.ops.noise import standard_normals
from fastdp.private.observer import Observer
from fastdp.private.plan import Plan
from fastdp.private.release import Release
from tests.cases import cases, pairs
from tests.engine.runs import (
    FEATURES,
    PRIVATE,
    Classifier,
    clipped_sum,
    examples,
    join,
    loader,
    logical_step,
    one_by_one,
    start,
)

#: How often a statistical test of this file may fail with nothing wrong; each draws fresh noise.
FALSE_ALARM = 1e-9


class Wide(nn.Module):
    """Enough parameters for their noise to be measured."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(FEATURES, 1500), nn.Linear(1500, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        return {"loss": F.cross_entropy(self.second(torch.tanh(self.first(x))), labels)}


class NoLedger:
    def record(self, kind: str = "step") -> None:
        """Notes nothing."""


def standard(noise: torch.Tensor) -> None:
    """Assert that numbers could be independent standard normals."""
    values = noise.double().reshape(-1)
    count = values.numel()
    assert count > 10_000
    assert stats.kstest(values.numpy(), "norm").pvalue > FALSE_ALARM
    square = float(values.square().sum())
    assert 2 * min(stats.chi2.cdf(square, count), stats.chi2.sf(square, count)) > FALSE_ALARM
    assert 2 * stats.norm.sf(abs(float(values.sum())) / count**0.5) > FALSE_ALARM
    neighbours = float((values[1:] * values[:-1]).sum()) / (count - 1) ** 0.5
    assert 2 * stats.norm.sf(abs(neighbours)) > FALSE_ALARM


@cases(*pairs(("physical", [None, 1, 3]), ("secure", [False, True])))
def test_what_is_added_to_the_clipped_sum_is_normal_with_std_sigma_c(physical: int | None, secure: bool) -> None:
    sigma, bound = 1.7, 0.4
    private = start(
        Wide(),
        noise_multiplier=sigma,
        sampling="shuffled",  # so that no batch is empty
        unsafe_seed=None,
        max_physical_batch_size=physical,
        method=fastdp.DPSGD(max_grad_norm=bound),
        secure_rounding=secure,
    )
    got, batches = logical_step(private)
    clipped = clipped_sum(one_by_one(private.model, join(batches)), bound)
    standard(torch.cat([((8 * got[n].double() - clipped[n]) / (sigma * bound)).reshape(-1) for n in got]))


@cases(
    "method, std",
    [
        (fastdp.DPSGD(max_grad_norm=0.4, groups="per_layer"), 0.4),
        (fastdp.DPSGD({"a": 0.3, "b": 0.4}, groups={"a": ["first.*"], "b": ["*"]}), 0.5),
        (fastdp.DPSGD(max_grad_norm=0.4, adaptive=fastdp.AdaptiveClipping(count_noise_std=5.0)), 0.4),
    ],
)
def test_groups_and_adaptive_clipping_have_the_noise_they_are_accounted_with(method: fastdp.DPSGD, std: float) -> None:
    sigma = 2.0
    options: dict[str, Any] = {"method": method, "unsafe_seed": 7}
    noisy = start(Wide(), noise_multiplier=sigma, **options)
    policy = noisy.policy
    got, _ = logical_step(noisy)
    silent, _ = logical_step(start(Wide(), noise_multiplier=0.0, **options))
    if method.adaptive is None:
        assert policy.noise_multiplier == pytest.approx(sigma)
        total = sigma * std
    else:
        # The count of unclipped units is paid for out of the same multiplier: z^-2 = z_gradient^-2 + (2 sigma_b)^-2.
        assert policy.noise_multiplier**-2 + (2 * 5.0) ** -2 == pytest.approx(sigma**-2)
        total = policy.noise_multiplier * std
    standard(torch.cat([(8 * (got[n].double() - silent[n]) / total).reshape(-1) for n in got]))


def test_the_card_names_what_exact_rounding_leaves() -> None:
    private = start(Wide(), noise_multiplier=1.0)
    logical_step(private)
    trained = sum(p.numel() for p in private.model.parameters())
    (sentence,) = [s for s in private.card()["remaining"] if "distance" in s]
    assert f"{trained * DISTANCE:.1e}" in sentence
    plain = start(Wide(), noise_multiplier=1.0, secure_rounding=False)
    assert not [s for s in plain.card()["remaining"] if "distance" in s]
    assert any("precision" in s for s in plain.card()["assumptions"])


@pytest.mark.parametrize(*pairs(("fused", [False, True]), ("rounds", [20, 12])))
def test_only_the_noise_of_steps_has_fewer_rounds(rounds: int, fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each position that is drawn says so, sampling and a method's own releases have 20, and the card names the former."""
    drawn: list[tuple[fastdp.NoiseStream, int]] = []
    positions = fastdp.NoiseStream._positions

    def seen(stream: Any, step: int, tensors: Any) -> torch.Tensor:
        found = positions(stream, step, tensors)
        drawn.extend((stream, int(words[11])) for words in found)
        return found

    monkeypatch.setattr(fastdp.NoiseStream, "_positions", seen)
    model = Wide()
    optimizer = fastdp.optim.AdamW(model.parameters()) if fused else torch.optim.SGD(model.parameters(), lr=0.1)
    method = fastdp.DPFrost(unfreezing_ratio=0.9, selection_noise_multiplier=2.0)
    options: dict[str, Any] = {"noise_multiplier": 1.0, "target_delta": 1e-3, "unsafe_seed": None}
    private = start(
        model, None, optimizer, method=method, **options, **({} if rounds == 20 else {"noise_rounds": rounds})
    )
    private.prepare()
    assert {found for _, found in drawn} == {10}
    drawn.clear()
    logical_step(private)
    sampler = private.data_loader.sampler.stream
    assert {found for owner, found in drawn if owner is sampler} <= {10}
    assert {found for owner, found in drawn if owner is not sampler} == {rounds // 2}
    card = private.card()
    assert card["noise_source"]["generator"] == f"ChaCha{rounds}"
    assert f"generator: ChaCha{rounds}" in card.to_markdown()
    assert fastdp.accounting.verify(card).holds


def test_noise_differs_between_steps_tensors_and_runs() -> None:
    def noise(private: Any) -> torch.Tensor:
        got, _ = logical_step(private)
        return torch.cat([got["first.weight"].reshape(-1), got["second.weight"].reshape(-1)])

    # A bound so small that the clipped sum disappears.
    options: dict[str, Any] = {"noise_multiplier": 1e6, "unsafe_seed": None}
    private = start(Wide(), **options)
    draws = torch.stack([noise(private) for _ in range(3)] + [noise(start(Wide(), **options)) for _ in range(2)])
    halves = torch.cat([draws[:, :4500], draws[:, 4500:9000]])
    correlation = torch.corrcoef(halves)[tuple(torch.triu_indices(10, 10, 1))]
    assert 2 * stats.norm.sf(float(correlation.abs().max()) * 4500**0.5) * correlation.numel() > FALSE_ALARM


def test_masked_groups_have_each_their_own_noise() -> None:
    parameter = nn.Parameter(torch.zeros(200, 300))
    mask = torch.rand(200, 300) < 0.3
    policy = Policy((1.0, 1.0), (0.5, 4.0), {"w": (0, 1)}, {"w": mask})
    # Without the grid, whose steps a test of this many values would see.
    Release({"w": parameter}, NoLedger(), fastdp.NoiseStream(), 10.0, secure_rounding=False)({}, policy)
    assert parameter.grad is not None
    noise = 10 * parameter.grad
    standard(noise[mask] / 0.5)
    standard(noise[~mask] / 4.0)
    assert policy.noise_multiplier == pytest.approx((1 / 0.25 + 1 / 16) ** -0.5)


def test_a_gradient_does_not_lie_where_a_recorded_pass_writes_its_sums() -> None:
    parameters = {name: nn.Parameter(torch.zeros(3)) for name in ("own", "aliased")}
    policy = Policy((1.0,), (0.5,), dict.fromkeys(parameters, 0))
    sums = {name: torch.ones(3) for name in parameters}
    buffers = dict(sums)
    Release(parameters, NoLedger(), fastdp.NoiseStream(), 1.0)(sums, policy, aliased={"aliased"})
    for total in buffers.values():
        total.fill_(100.0)
    assert (parameters["own"].grad == 100.0).all()
    assert (parameters["aliased"].grad != 100.0).all()


def test_nothing_is_released_when_the_ledger_refuses() -> None:
    class Full:
        def record(self, kind: str = "step") -> None:
            raise fastdp.accounting.BudgetExceeded("the budget is spent")

    parameter = nn.Parameter(torch.zeros(3))
    release = Release({"w": parameter}, Full(), fastdp.NoiseStream(), 4.0)
    sums = {"w": torch.ones(3)}
    with pytest.raises(fastdp.accounting.BudgetExceeded):
        release(sums, Policy((1.0,), (3.0,), {"w": 0}))
    assert parameter.grad is None
    assert torch.equal(sums["w"], torch.ones(3))


def test_the_ledger_is_told_before_any_noise_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    private = start(Wide(), loader(), noise_multiplier=1.0)
    order: list[object] = []
    record, claim = private.ledger.record, fastdp.NoiseStream.take_at
    monkeypatch.setattr(private.ledger, "record", lambda kind="step": (order.append("ledger"), record(kind))[1])
    monkeypatch.setattr(fastdp.NoiseStream, "take_at", lambda *a: (order.append(list(a[2])), claim(*a))[1])
    logical_step(private)
    assert order == ["ledger", [0, 1, 2, 3]]


def test_noise_is_drawn_in_float32_for_bf16_parameters() -> None:
    model = Classifier().bfloat16()
    data = [{**e, "x": e["x"].bfloat16()} for e in examples()]
    # On a grid the noise would differ from the normals by more than bf16's rounding.
    got, _ = logical_step(start(model, loader(data), noise_multiplier=1e6, unsafe_seed=3, secure_rounding=False))
    stream = fastdp.NoiseStream.unsafe_reproducible(6)
    for index, (name, gradient) in enumerate(got.items()):
        noise = 1e6 / 8 * standard_normals(stream.at(0, index).take(), gradient.numel()).view(gradient.shape)
        assert gradient.dtype == torch.bfloat16
        # Half a unit in the last of bf16's 8 bits, at most 2^-8; the clipped sum over 8 and float32's rounding are below 4.
        assert bool(((gradient.double() - noise).abs() <= noise.abs() * 2**-8 + 4).all()), name


def test_the_card_of_other_data_differs_in_what_was_released_alone() -> None:
    """One long record, which takes another route, must not show in what is published with the weights."""

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.table, self.head = nn.Embedding(9, 4), nn.Linear(4, 9)

        def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Any:
            hidden = self.table(ids)
            if ids.shape[1] > 20:
                # No rule is known for a copy of the table.
                hidden = torch.empty(self.table.weight.shape).copy_(self.table.weight)[ids]
            return {"loss": F.cross_entropy(self.head(hidden).transpose(1, 2), labels)}

    def card(longest: int) -> dict[str, Any]:
        data = [torch.full((longest if i == 0 else 5,), i % 9) for i in range(8)]

        def padded(items: Any) -> Any:
            ids, labels = (nn.utils.rnn.pad_sequence(items, batch_first=True, padding_value=v) for v in (0, -100))
            return {"ids": ids, "labels": labels}

        private = start(Words(), loader(data, collate_fn=padded), epochs=4, **PRIVATE)
        for _ in range(4):
            logical_step(private)
        assert private.route == ("one-example" if longest > 20 else "uses")
        card = private.card()
        return {k: v for k, v in card.items() if k not in ("weights", "run_id", "digest", "created", "ledger_head")}

    assert card(5) == card(40)


# A release with less noise than its event in the ledger has is neither made nor counted.


class Cheaper(fastdp.DPSGD):
    """DP-SGD that gives its gradients a share of the noise that its budget says."""

    share = 0.0

    def policy(self, parameters: Any, noise_multiplier: float, outcome: Any = None) -> Policy:
        return super().policy(parameters, self.share * noise_multiplier, outcome)


@cases(
    *pairs(
        ("share, refused", [(0.0, True), (0.6, True), (0.999, True), (1.0, False), (1.5, False)]),
        ("fused", [False, True]),
    )
)
def test_a_method_that_gives_less_noise_than_its_budget_says(share: float, refused: bool, fused: bool) -> None:
    kind = type("Method", (Cheaper,), {"share": share})
    model = Classifier()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = fastdp.optim.AdamW(model.parameters()) if fused else torch.optim.SGD(model.parameters(), lr=0.1)
    options: dict[str, Any] = {"noise_multiplier": 1.0, "target_delta": 1e-3, "method": kind(max_grad_norm=1.0)}
    private = start(model, None, optimizer, **options)
    if not refused:
        logical_step(private)
        assert private.ledger.spent_steps == 1
        return
    with pytest.raises(RuntimeError, match="nothing was released"):
        logical_step(private)
    assert private.ledger.spent_steps == 0
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


class Keeper(Observer):
    """Holds the accumulator of a run beyond its release."""

    def before_release(self, accumulator: Any) -> None:
        self.accumulator = accumulator


def test_a_policy_that_is_replaced_between_steps_is_judged_as_well() -> None:
    private = start(Classifier(), **PRIVATE)
    private.observe(keeper := Keeper())
    logical_step(private)
    accumulator = keeper.accumulator
    policy = accumulator.policy
    accumulator.policy = Policy(policy.bounds, tuple(0.5 * std for std in policy.stds), policy.group_of)
    with pytest.raises(RuntimeError, match="noise multiplier is 0.5"):
        logical_step(private)
    assert private.ledger.spent_steps == 1


def test_a_schedule_of_noise_changes_at_the_step_that_it_names() -> None:
    plan = Plan(100, 10, 20, 10, "poisson", "add_remove", None, 1e-3, 1.5, factors=((0, 1.0), (5, 2.0), (9, 0.5)))
    assert [plan.sigma_at(step) for step in (0, 4, 5, 8, 9, 19)] == [1.5, 1.5, 3.0, 3.0, 0.75, 0.75]
