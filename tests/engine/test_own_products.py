"""Linear layers that autograd differentiates by itself: the same sums as where each captures, whatever is round them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from fastdp.engine import passes
from fastdp.engine.clip import norms
from fastdp.engine.engine import Engine
from fastdp.engine.routing import Routing
from tests.cases import pairs
from tests.engine.models import batch, build
from tests.engine.nets import EXACT, Net
from tests.engine.reference import engine_for, feed
from tests.engine.runs import clipped_sum, error, one_by_one

DATA = {"x": torch.randn(4, 7, 5, generator=torch.Generator().manual_seed(1)), "labels": torch.arange(4) % 3}


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many there were in each backward pass, of engines that may hold as much as they like."""
    counts: list[int] = []
    monkeypatch.setattr(norms, "may_hold", lambda device: 1 << 40)
    differentiate = passes.differentiate

    def noted(tops, seeds, products, *args, **options):
        counts.append(len(products))
        differentiate(tops, seeds, products, *args, **options)

    monkeypatch.setattr(passes, "differentiate", noted)
    return counts


def twice(model: torch.nn.Module, data: dict, **options: object) -> Engine:
    """An engine after two micro-batches: the first is looked at, and takes no such products."""
    engine, tickets = engine_for(model, 0.5, verify=Routing, **options)
    feed(engine, tickets, data)
    feed(engine, tickets, data)
    assert engine.route == "uses", engine.reason
    return engine


def require_alike(engine: Engine, other: Engine) -> None:
    assert engine.accumulator.sums.keys() == other.accumulator.sums.keys()
    for name, total in other.accumulator.sums.items():
        torch.testing.assert_close(engine.accumulator.sums[name], total, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(*pairs(("tuning", ["full", "lora"]), ("name", ["llama", "bert", "gpt2"])))
def test_sums_of_models(name: str, tuning: str, taken: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = twice(build(name, tuning), batch(name))
    assert taken[0] == 0
    assert taken[1] > 0
    monkeypatch.setattr(norms, "may_hold", lambda device: 0)
    require_alike(engine, twice(build(name, tuning), batch(name)))
    assert taken[3] == 0


def net(middle) -> Net:
    # With a bias the output is a view, which torch lets nobody write to where the layer captures.
    own = {"scale": Scale()} if middle in (scaled_behind_a_leaf, scaled_twice, scaled_among_norms) else {}
    if middle in (norms_in_place, scaled_among_norms):
        own |= {"norm": torch.nn.LayerNorm(6), "shift": torch.nn.LayerNorm(6)}
        own["shift"].weight.requires_grad_(False)
    made = Net(middle, third=torch.nn.Linear(6, 6, bias=middle is not in_place), **own)
    made.first.requires_grad_(middle is not scaled_behind_a_leaf)
    made.third.requires_grad_(middle is not scaled_behind_a_leaf)
    return made


def in_place(net: Net, h: torch.Tensor) -> torch.Tensor:
    h = net.third(h)
    h += 1
    h.mul_(0.5)
    return h.relu_()


def norms_in_place(net: Net, h: torch.Tensor) -> torch.Tensor:
    h = net.norm(h).mul_(2)
    return net.norm(net.shift(h)).relu_()


def scaled_twice(net: Net, h: torch.Tensor) -> torch.Tensor:
    return net.scale(net.scale(net.third(h)).tanh()).mul_(2)


def scaled_among_norms(net: Net, h: torch.Tensor) -> torch.Tensor:
    """A layer norm has the whole graph run, and copies found where they gather their gradients."""
    return net.shift(net.scale(net.norm(net.third(h))))


def checkpointed(net: Net, h: torch.Tensor) -> torch.Tensor:
    return h + checkpoint(net.third, h, use_reentrant=False)


def reentrant(net: Net, h: torch.Tensor) -> torch.Tensor:
    return h + checkpoint(net.third, h, use_reentrant=True)


def tanh_reentrant(net: Net, h: torch.Tensor) -> torch.Tensor:
    return checkpoint(torch.tanh, h, use_reentrant=True)


def scaled_behind_a_leaf(net: Net, h: torch.Tensor, use_reentrant: bool = True) -> torch.Tensor:
    """Nothing that is trained lies before the checkpoint, and no linear layer in it."""
    leaf = h.detach().requires_grad_()
    return checkpoint(net.scale, leaf, use_reentrant=use_reentrant)


def scaled(net: Net, h: torch.Tensor) -> torch.Tensor:
    return scaled_behind_a_leaf(net, h, use_reentrant=False)


class Scale(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(0.5, 1.5, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x


@pytest.mark.parametrize(
    ("middle", "products"),
    [
        pytest.param(in_place, 2, id="written to"),
        pytest.param(lambda net, h: net.third(net.third(h)), 3, id="used twice"),
        pytest.param(norms_in_place, 1, id="layer norms"),
        pytest.param(scaled_twice, 4, id="copies"),
        pytest.param(scaled_among_norms, 3, id="copies among layer norms"),
        pytest.param(lambda net, h: h + 0 * net.third(h).detach(), 2, id="reached by no gradient"),
        pytest.param(checkpointed, 1, id="checkpointed"),
        pytest.param(reentrant, 1, id="reentrant"),
        # Autograd refuses to be asked for single gradients behind one.
        pytest.param(tanh_reentrant, 1, id="reentrant without parameters"),
        pytest.param(scaled_behind_a_leaf, 1, id="reentrant behind a leaf"),
    ],
)
def test_sums_of_nets(middle, products: int, taken: list[int]) -> None:
    """The first layer captures, as its input needs no gradient; the last is always differentiated by autograd."""
    model = net(middle)
    truth = copy.deepcopy(model)
    # Torch's own gradients of single tensors do not go through reentrant checkpoints.
    alike = {tanh_reentrant: lambda net, h: torch.tanh(h), reentrant: checkpointed, scaled_behind_a_leaf: scaled}
    truth.steps = tuple(alike.get(step, step) for step in truth.steps)
    engine = twice(model, DATA, two_pass=False)
    assert taken[1] == products
    sums = {n: engine.accumulator.sums.get(n, torch.zeros_like(p)) for n, p in engine.parameters.items()}
    assert error(sums, clipped_sum(one_by_one(truth, DATA), 0.5)) < EXACT


@pytest.mark.parametrize("layer", ["third", "norm"])
def test_an_input_that_is_written_to_afterwards_is_refused(layer: str, taken: list[int]) -> None:
    def middle(net: Net, h: torch.Tensor) -> torch.Tensor:
        h = h + 0
        out = getattr(net, layer)(h)
        if written:
            h.add_(1)
        return out

    written = False
    model = net(middle)
    model.norm = torch.nn.LayerNorm(6)
    engine, tickets = engine_for(model, 0.5, verify=Routing)
    feed(engine, tickets, DATA)
    written = True
    with pytest.raises(RuntimeError, match="in ?place"):
        feed(engine, tickets, DATA)


def test_a_gradient_that_comes_in_another_way_is_refused(taken: list[int]) -> None:
    def middle(net: Net, h: torch.Tensor) -> torch.Tensor:
        out = net.third(h)
        if unseen:
            with torch._C.DisableTorchFunction():
                out = out * net.third.weight.sum()
        return out

    unseen = False
    engine, tickets = engine_for(net(middle), 0.5, verify=Routing)
    feed(engine, tickets, DATA)
    unseen = True
    with pytest.raises(RuntimeError, match="third.weight holds an unclipped gradient"):
        feed(engine, tickets, DATA)
