"""What the engine carries: shapes, layers used several times, routes, policies, packed rows, users, copies."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

import fastdp
from fastdp.engine.errors import SelfCheckError
from fastdp.engine.routing import Routing
from fastdp.verify import Checks
from tests.cases import cases, pairs
from tests.engine.models import batch as model_batch, build
from tests.engine.reference import engine_for, ticket
from tests.engine.runs import (
    CLIPPED,
    Classifier,
    Odd,
    clipped_sum,
    collate,
    error,
    examples,
    join,
    loader,
    logical_step,
    one_by_one,
    same,
    start,
)
from tests.private.ranked import packed, padded, texts


def test_rescaling_a_loss_does_not_move_the_threshold() -> None:
    gradients = []
    for scale in (1.0, 1e-3, 250.0):
        private = start(method=fastdp.DPSGD(max_grad_norm=0.5))
        (scale * private.model(**next(iter(private.data_loader)))["loss"]).backward()
        private.optimizer.step()
        gradients.append({n: p.grad for n, p in private.model.named_parameters()})
    assert same(gradients[0], gradients[1])
    assert same(gradients[0], gradients[2])


@cases(
    *pairs(
        ("route", ["single-pass", "two-pass", "one-example"]),
        ("value", [float("nan"), float("inf")]),
        ("check", [True, False]),
    )
)
def test_a_non_finite_example_is_taken_out_of_both_factors(route: str, value: float, check: bool) -> None:
    data = collate(examples(6))
    model = Odd() if route == "one-example" else Classifier()
    rest = {k: torch.cat([v[:2], v[3:]]) for k, v in data.items()}
    expected = clipped_sum(one_by_one(model, rest), 0.6)
    data["x"][2, 1] = value
    engine, tickets = engine_for(model, 0.6, two_pass=route == "two-pass", verify=Checks if check else Routing)
    tickets.append(ticket(6))
    model(**data)["loss"].backward()
    if route == "one-example":
        assert engine.route == "one-example"
    assert int(engine.accumulator.nonfinite) == 1
    assert error(engine.accumulator.sums, expected) < CLIPPED


@cases("half", ["a frozen weight", "autocast"])
def test_packed_rows_in_which_an_overflow_would_spread_are_refused(half: str) -> None:
    """Two examples of a row are apart by attention of exact zeros, times what may be NaN."""
    model = build("llama", "lora")
    model.config.use_cache = False
    if half == "a frozen weight":
        model.register_parameter("unused", torch.nn.Parameter(torch.zeros(1, dtype=torch.float16), requires_grad=False))
    data = loader(texts(12, tokens=6), batch_size=6, collate_fn=packed)
    private = start(model, data, unit_map="units", noise_multiplier=1.0)
    batch = next(iter(private.data_loader))
    with (
        torch.autocast("cpu", torch.float16, enabled=half == "autocast"),
        pytest.raises(SelfCheckError, match="no float16"),
    ):
        private.model(**batch)
    assert private.steps_done == 0


@cases("tuning", ["full", "lora", "bitfit"])
def test_packed_rows_are_their_examples(tuning: str) -> None:
    name = "phi" if tuning == "bitfit" else "llama"
    method = fastdp.DPSGD(max_grad_norm=1.0)
    gradients = []
    for unit_map, collator in ((None, padded), ("units", packed)):
        data = loader(texts(12, tokens=6), batch_size=6, collate_fn=collator)
        model = build(name, tuning)
        model.config.use_cache = False  # with a cache, transformers lets the examples of a row see each other
        private = start(model, data, unit_map=unit_map, method=method, max_physical_batch_size=4)
        for batch in private.data_loader:
            private.model(**batch).loss.backward()
            private.optimizer.step()
            if private.last_step_done:
                break
        assert private.route == "uses"
        gradients.append({n: p.grad for n, p in private.model.named_parameters() if p.grad is not None})
    assert error(gradients[1], gradients[0]) < CLIPPED


def test_a_batch_that_was_begun_and_left_adds_nothing_to_the_next() -> None:
    private = start(method=fastdp.DPSGD(max_grad_norm=0.5), max_physical_batch_size=2)
    private.model(**next(iter(private.data_loader)))["loss"].backward()  # begun, and left
    got, batches = logical_step(private)
    assert (
        error({n: 8 * g for n, g in got.items()}, clipped_sum(one_by_one(private.model, join(batches)), 0.5)) < CLIPPED
    )


def test_users_are_clipped_as_one() -> None:
    data = examples(18)
    users = [f"user {i % 6}" for i in range(18)]
    for physical in (18, 3):
        private = start(
            data_loader=loader(data, batch_size=4),
            user_ids=users,
            max_examples_per_user=2,
            max_physical_batch_size=physical,
        )
        got, batches = logical_step(private)
        rows = one_by_one(private.model, join(batches))
        by_user: dict[int, dict[str, torch.Tensor]] = {}
        for gradient, x in zip(rows, join(batches)["x"]):
            index = next(i for i, e in enumerate(data) if torch.equal(e["x"], x))
            assert index < 12, "the first two examples of each of six users"
            whole = by_user.setdefault(index % 6, {n: torch.zeros_like(g) for n, g in gradient.items()})
            by_user[index % 6] = {n: whole[n] + g for n, g in gradient.items()}
        assert error({n: 4 * g for n, g in got.items()}, clipped_sum(list(by_user.values()), 1.0)) < CLIPPED
    assert "user" in private.plan.unit


def test_groups_are_clipped_on_their_own() -> None:
    def policy_step(method: fastdp.DPSGD) -> tuple[dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]:
        got, batches = logical_step(private := start(method=method))
        return {n: 8 * g for n, g in got.items()}, one_by_one(private.model, join(batches))

    def by_group(rows: list[dict[str, torch.Tensor]], group: Callable[[str], str], bounds: Mapping[str, float]) -> Any:
        total = {n: torch.zeros_like(g) for n, g in rows[0].items()}
        for row in rows:
            for key in bounds:
                inside = {n: g for n, g in row.items() if group(n) == key}
                for n, g in clipped_sum([inside], bounds[key]).items():
                    total[n] += g
        return total

    got, rows = policy_step(fastdp.DPSGD(max_grad_norm=0.5, groups="per_layer"))
    share = 0.5 / 2**0.5
    layer = lambda name: name.split(".")[0]  # noqa: E731
    assert error(got, by_group(rows, layer, {"first": share, "second": share})) < CLIPPED

    got, rows = policy_step(fastdp.DPSGD({"w": 0.4, "b": 0.1}, groups={"b": ["*.bias"], "w": ["*"]}))
    assert error(got, by_group(rows, lambda n: "b" if n.endswith("bias") else "w", {"w": 0.4, "b": 0.1})) < CLIPPED


@cases("model", [Classifier, Odd])
def test_any_physical_batch_size_gives_the_same_noisy_gradient(model: type[Classifier]) -> None:
    reference = None
    for physical in (None, 1, 2, 3, 7, 24):
        private = start(model(), noise_multiplier=1.3, max_physical_batch_size=physical, unsafe_seed=5)
        got, _ = logical_step(private)
        reference = got if reference is None else reference
        assert error(got, reference) < 1e-6


def test_an_empty_poisson_batch_releases_noise_alone() -> None:
    data = loader(batch_size=1)
    for seed in range(50):
        private = start(data_loader=data, noise_multiplier=2.0, unsafe_seed=seed, max_physical_batch_size=24)
        batch = next(iter(private.data_loader))
        if float(private.data_loader.tickets[0].weights.sum()) == 0:
            break
    assert len(batch["labels"]) == 1
    private.model(**batch)["loss"].backward()
    private.optimizer.step()
    got = {n: p.grad for n, p in private.model.named_parameters()}
    stream = fastdp.NoiseStream.unsafe_reproducible(2 * seed)
    for index, (name, gradient) in enumerate(got.items()):
        noise = fastdp.ops.add_noise_(torch.zeros_like(gradient), 2.0, stream.at(0, index))
        assert torch.equal(gradient, noise), name
    assert private.steps_done == 1


@cases("make", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_private_model_is_a_plain_model(make: Callable[[nn.Module], nn.Module]) -> None:
    private = start()
    logical_step(private)
    plain = make(private.model)
    data = collate(examples(3))
    reference = Classifier()
    reference.load_state_dict(plain.state_dict())
    loss, expected = plain(**data)["loss"], reference(**data)["loss"]
    assert torch.equal(loss, expected)
    loss.backward()
    expected.backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), reference.parameters()))  # type: ignore[arg-type]
    start(plain)
    logical_step(private)


def test_detach_restores_model_and_optimizer() -> None:
    model = build("gpt2")
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = [{k: v[i % 4] for k, v in model_batch("gpt2").items()} for i in range(16)]
    private = start(model, loader(data, collate_fn=torch.utils.data.default_collate), optimizer)
    batch = next(iter(private.data_loader))
    model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    private.detach()
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
    plain = copy.deepcopy(model)
    plain(**batch).loss.backward()
    model(**batch).loss.backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters()))  # type: ignore[arg-type]
    expected = [p.detach() - 0.1 * p.grad for p in plain.parameters()]  # type: ignore[operator]
    optimizer.step()
    assert all(torch.allclose(p, e) for p, e in zip(model.parameters(), expected))
    start(model, loader(data, collate_fn=torch.utils.data.default_collate), optimizer)
