"""What no fast rule knows is served exactly, and every gradient is autograd's on one example alone."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fastdp.engine.bounds import Errors, Norms, UpperNorms
from fastdp.engine.clip.accumulator import Accumulator
from fastdp.engine.clip.policy import Policy
from fastdp.engine.loss.losses import LossTerms, intercepted
from fastdp.engine.routing import Routing
from fastdp.engine.uses.layout import Ticket
from tests.cases import cases
from tests.engine.nets import EXACT, Net, exact_batches, gap, mixed, parameter, trained
from tests.engine.reference import assert_exact_step, engine_for, feed, require_exact, stepped, ticket
from tests.engine.runs import (
    CLIPPED,
    Batch,
    clipped_sum,
    collate,
    error,
    examples,
    join,
    logical_step,
    one_by_one,
    start,
)

SERVED: dict[str, Callable[[], nn.Module]] = {
    "scalars of a batch": lambda: Net(
        lambda net, h: h * (h.sum(1) * net.gate).sigmoid().unsqueeze(1), gate=parameter()
    ),
    "vmap": lambda: Net(lambda net, h: torch.vmap(lambda row: torch.tanh(net.inner(row)))(h), inner=nn.Linear(6, 6)),
    "a layer on a parameter": lambda: Net(
        lambda net, h: h + net.inner(net.query).sum(0), inner=nn.Linear(6, 6), query=parameter(2, 6)
    ),
    "a layer on three parameters": lambda: Net(
        lambda net, h: h + net.inner(net.query).sum(0), inner=nn.Linear(6, 6), query=parameter(3, 6)
    ),
    "a spectral norm": lambda: Net(
        lambda net, h: net.inner(h),
        inner=nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6), n_power_iterations=40),
    ),
    "a scripted module": lambda: Net(lambda net, h: net.inner(h), inner=torch.jit.script(nn.Linear(6, 6))),
    "its own loss": lambda: Net(loss=lambda o, y: -torch.log_softmax(o, -1)[torch.arange(len(o)), y].mean()),
}


@cases("name", SERVED)
def test_what_no_fast_rule_knows_is_served_exactly(name: str) -> None:
    model, data = SERVED[name](), collate(examples(6))
    engine = trained(model, data)
    # A scripted module has no copy in float64.
    if name != "a scripted module":
        require_exact(engine, one_by_one(model, data), route=str(engine.route))


def penalised(o: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(o, y) + 0.7 * F.mse_loss(o, torch.ones_like(o))


def penalised_in_place(o: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = F.cross_entropy(o, y)
    loss += 0.7 * F.mse_loss(o, torch.ones_like(o))
    return loss.mul_(1.5)


LOSSES: dict[str, tuple[Any, str]] = {
    "half": (lambda o, y: 0.5 * F.cross_entropy(o, y), "uses"),
    "two losses": (penalised, "uses"),
    "a loss that is added to in place": (penalised_in_place, "uses"),
    "a loss that is halved in place": (lambda o, y: F.cross_entropy(o, y).mul_(0.5), "uses"),
    "a sum over the rows' number": (lambda o, y: F.cross_entropy(o, y, reduction="sum") / len(o), "uses"),
    "a sum over some number": (
        lambda o, y: F.cross_entropy(o, y, reduction="sum") / (y > 0).sum().clamp(min=1),
        "one-example",
    ),
    "a sum": (lambda o, y: F.cross_entropy(o, y, reduction="sum"), "uses"),
}


@cases("name", LOSSES)
def test_the_gradient_is_that_of_the_loss_as_written(name: str) -> None:
    loss, route = LOSSES[name]
    assert_exact_step(Net(loss=loss), collate(examples(6)), route=route)
    assert_exact_step(Net(mixed, loss=loss, mix=parameter(3)), collate(examples(6)), route="one-example")


@cases("add", [operator.add, operator.iadd])
def test_a_penalty_on_the_weights_is_part_of_every_example_s_loss(add: Any) -> None:
    class Penalised(Net):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
            output = super().forward(x, labels)
            return {"loss": add(output["loss"], 0.01 * self.first.weight.square().sum())}

    assert_exact_step(Penalised(), collate(examples(6)), route="one-example")


@cases("route", ["uses", "one-example"])
def test_class_weights_stay_in_an_example_s_loss(route: str) -> None:
    weight = torch.tensor([1.0, 5.0, 0.1])

    class Weighted(Net):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
            hidden = torch.tanh(self.first(x))
            hidden = mixed(self, hidden) if route == "one-example" else hidden
            return {"loss": F.cross_entropy(self.second(hidden), labels, weight=weight.to(hidden))}

    class Written(Weighted):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
            with intercepted(LossTerms(ticket(1).layout(x.device), alone=True)):
                return super().forward(x, labels)

    data = collate(examples(6))
    model = Weighted(mix=parameter(3)) if route == "one-example" else Weighted()
    plain = Written(mix=parameter(3)) if route == "one-example" else Written()
    truth = one_by_one(plain, data)
    unweighted = one_by_one(Net() if route == "uses" else Weighted(mix=parameter(3)), data)
    engine = trained(model, data, 100.0)
    assert engine.route == route
    assert gap(engine, truth, 100.0) < EXACT
    by_class = [float(w["first.weight"].norm() / u["first.weight"].norm()) for w, u in zip(truth, unweighted)]
    assert by_class == pytest.approx([float(weight[int(y)]) for y in data["labels"]], rel=1e-4)


class Growing(Net):
    """Sees other tokens than in the batch before, by no reason of its inputs' shapes."""

    tokens = 1

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        hidden = self.first(x).repeat_interleave(self.tokens, 0)
        output = self.second(torch.tanh(hidden)).view(len(x), self.tokens, 3).mean(1)
        return {"loss": F.cross_entropy(output, labels)}


def test_a_use_of_another_shape_takes_the_route_that_needs_none() -> None:
    model, data = Growing(), collate(examples(6))

    def batches() -> Iterator[Batch]:
        for model.tokens in (2, 4):
            yield data

    engine = exact_batches(lambda: model, batches(), plain=Net, route="one-example")
    assert "by no reason of the batch's shapes" in str(engine.reason)


def test_a_padding_row_whose_gradient_is_nan_adds_nothing() -> None:
    data = collate(examples(4))
    truth = one_by_one(Net(), {k: v[:3] for k, v in data.items()})
    data["x"][3] = float("nan")
    padded = Ticket(torch.arange(4), torch.tensor([1.0, 1.0, 1.0, 0.0]), is_last=True)
    for model in (Net(), Net(mixed, mix=parameter(3))):
        engine = stepped(model, data, 0.5, padded, verify=Routing)
        assert all(bool(s.isfinite().all()) for s in engine.accumulator.sums.values())
        if engine.route == "uses":
            assert gap(engine, truth) < EXACT


class Pooled(nn.Module):
    """Reads its table in a way that has no rule, and notes how many tokens it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(30, 6), nn.Linear(6, 3)
        self.seen: list[int] = []

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> Any:
        self.seen.append(input_ids.shape[1])
        words, places = torch.unique(input_ids, return_inverse=True)
        hidden = self.table(words)[places] * attention_mask.unsqueeze(-1)
        return {"loss": F.cross_entropy(self.head(hidden.sum(1)), labels)}


@cases("left", [False, True])
def test_a_row_that_runs_alone_is_without_its_padding(left: bool) -> None:
    torch.manual_seed(0)
    model, lengths, width = Pooled(), [3, 5, 7, 4], 7
    mask = torch.stack([(torch.arange(width) < n).long() for n in lengths])
    mask = mask.flip(1) if left else mask
    data = {"input_ids": torch.randint(1, 30, (4, width)) * mask, "attention_mask": mask, "labels": torch.arange(4) % 3}
    truth = one_by_one(model, data)
    engine, tickets = engine_for(model, 0.5)
    tickets.append(ticket(4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        output = model(**data)
    assert engine.route == "one-example"
    assert model.seen[-4:] == lengths
    output["loss"].backward()
    assert error(engine.accumulator.sums, clipped_sum(truth, 0.5)) < EXACT


def test_a_forward_in_the_place_of_torch_s_own_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of torch's modules only their own code is known, and so not followed."""
    plain = nn.Linear.forward
    seen: list[int] = []

    def halved(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        seen.append(1)
        return plain(self, x) / 2

    monkeypatch.setattr(nn.Linear, "forward", halved)
    private = start()
    gradients, batches = logical_step(private)
    expected = clipped_sum(one_by_one(private.model, join(batches)), 1.0)
    assert seen
    assert private.route == "uses"
    assert error({name: 8 * g for name, g in gradients.items()}, expected) < CLIPPED


class Gain(nn.Module):
    """A gain of its own for each feature."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + torch.rand(6, generator=torch.Generator().manual_seed(1)))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h * self.weight


def test_a_layer_reads_the_weight_that_it_was_given_last() -> None:
    model = Net(lambda net, h: net.gain(net.inner(h)), inner=nn.Linear(6, 6), gain=Gain())
    data = collate(examples(6))
    engine, tickets = engine_for(model, 0.5)
    for _ in range(2):
        feed(engine, tickets, data)
    model.gain.weight = nn.Parameter(torch.linspace(-1, 1, 6), requires_grad=False)
    feed(engine, tickets, data)
    engine.close()
    assert engine.route == "uses"
    truth = one_by_one(model, data)
    assert error({name: engine.accumulator.sums[name] for name in truth[0]}, clipped_sum(truth, 0.5)) < EXACT


@cases("scale", [float("nan"), float("inf"), 1.0])
def test_a_padding_rows_scale_counts_for_nothing(scale: float) -> None:
    """Whatever a policy says of it: 0 times NaN is NaN."""

    class Strange(Policy):
        def scales(self, upper: UpperNorms) -> torch.Tensor:
            return super().scales(upper).index_fill(1, torch.tensor([3]), scale)

    parameters = {"weight": nn.Parameter(torch.ones(2, 2))}
    accumulator = Accumulator(parameters, Strange((1.0,), (0.0,), {"weight": 0}))
    norms = Norms(1, 4, torch.device("cpu"))
    norms.add(0, torch.ones(4), Errors(4, 0.0))
    found = accumulator.unit_scales(norms.upper(), torch.tensor([1.0, 1.0, 1.0, 0.0]))
    assert bool((found[0, :3] > 0).all())
    assert found[0, 3] == 0
    assert int(accumulator.units) == 3
    assert int(accumulator.nonfinite) == 0


class TimeMajor(nn.Module):
    """Looks up ids laid out time first, as older recurrent code does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.out = nn.Embedding(11, 5), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        return {"loss": F.cross_entropy(self.out(torch.tanh(self.table(x.t())).mean(0)), labels)}


@cases("tokens", [2, 3, 4, 5])
def test_a_lookup_time_first_is_served_whatever_the_lengths(tokens: int) -> None:
    assert_exact_step(TimeMajor(), {"x": torch.randint(0, 11, (4, tokens)), "labels": torch.arange(4) % 3})
