"""State that changes between releases, or within a training forward pass, is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fastdp import _native
from fastdp.engine.errors import SelfCheckError
from fastdp.verify.state import StateCheck
from tests.cases import cases
from tests.engine.nets import Net, steps, trained
from tests.engine.runs import Batch, Classifier, Odd, collate, examples, loader, start
from tests.loops import train_epoch


def settled() -> tuple[nn.Sequential, StateCheck]:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    model.register_buffer("seen", torch.zeros(3))
    model[1].weight.requires_grad_(False)
    state = StateCheck(model)
    state.settle()
    return model, state


@torch.no_grad()
def _write(model: Any) -> None:
    model[0].weight.add_(1)


@torch.no_grad()
def _write_frozen(model: Any) -> None:
    model[1].weight[0, 0] += 1


def _replace(model: Any) -> None:
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())


def _write_buffer(model: Any) -> None:
    model.seen.add_(1)


def _replace_buffer(model: Any) -> None:
    model.seen = model.seen + 1


@cases("change", [_write, _replace, _write_buffer, _replace_buffer])
def test_state_that_changes_outside_of_a_release_is_refused(change: Callable[[nn.Module], None]) -> None:
    model, state = settled()
    state.require_settled()
    change(model)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="(0.weight|seen) was"):
            state.require_settled()
    state.settle()
    model.seen = model.seen.clone()  # As where a model is moved.
    state.require_settled()


def test_frozen_parameters_may_be_written_between_passes_alone() -> None:
    model, state = settled()
    _write_frozen(model)
    state.require_parameters()
    state.require_settled()
    assert state.frozen_written
    with pytest.raises(SelfCheckError, match="Training passes write 1.weight"), state.forward():
        _write_frozen(model)
    # A trained one that is frozen afterwards still counts.
    _write(model)
    model.requires_grad_(False)
    with pytest.raises(RuntimeError, match="0.weight was changed"):
        state.require_parameters()
    with pytest.raises(RuntimeError, match="0.weight was changed"):
        state.require_settled()


def test_a_frozen_parameter_may_be_replaced_between_passes_and_a_trained_one_is_named() -> None:
    for place, frozen in ((1, True), (1, False), (0, True), (0, False)):
        model, state = settled()
        names = {name: p for name, p in model.named_parameters() if p.requires_grad}
        own = nn.Parameter(model[place].weight.detach().clone(), requires_grad=not frozen)  # type: ignore[operator]
        model[place].weight = own
        if place == 1 and frozen:
            state.require_settled(names)
            assert state.frozen_written
            continue
        said = "1.weight is none of what" if place == 1 else "0.weight was changed outside of a release"
        with pytest.raises(RuntimeError, match=said):
            state.require_settled(names)


def test_a_parameter_that_is_unfrozen_or_added_is_refused() -> None:
    for change in (
        lambda model: model[1].weight.requires_grad_(),
        lambda model: model[0].add_module("late", nn.Linear(3, 3)),
    ):
        model, state = settled()
        names = {name: p for name, p in model.named_parameters() if p.requires_grad}
        state.require_settled(names)
        state.structure_changed()
        change(model)
        state.structure_changed()
        with pytest.raises(RuntimeError, match="(1.weight|late.weight) is none of what"):
            state.require_settled(names)


def test_a_parameter_that_is_replaced_within_a_batch_is_found_at_the_next_release() -> None:
    model, state = settled()
    names = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for _ in range(3):
        state.structure_changed()  # As before each batch's pass.
        state.require_settled(names)
        state.settle(written=True)
    state.structure_changed()
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())
    state.require_settled(names)  # The release is of what the batch's pass read.
    state.settle(written=True)
    state.structure_changed()
    with pytest.raises(RuntimeError, match=r"0.weight was changed outside of a release"):
        state.require_settled(names)


def test_hooks_modules_and_modes_count_as_structure() -> None:
    model, state = settled()
    assert not state.structure_changed()
    for change in (
        lambda: model[0].eval(),
        lambda: model[1].register_forward_hook(lambda *_: None),
        lambda: model.append(nn.Tanh()),
    ):
        assert not state.structure_changed()
        change()
        assert state.structure_changed()


def test_values_of_dictionaries_are_compared_by_identity() -> None:
    one, equal = [1], [1]
    for tables, known, same in (
        (({"a": one}, {}, {"b": None}), [one, None], True),
        (({"a": one},), [equal], False),
        (({"a": one},), [one, None], False),
        (({"a": one, "b": one},), [one], False),
        ((), [], True),
        (([one],), [one], False),
    ):
        assert _native.same_values(tables, known) is same


class Writing(Net):
    """Writes a buffer in each forward pass."""

    def __init__(self, write: Callable[[Any, torch.Tensor], Any], persistent: bool = True):
        super().__init__()
        self.write = write
        self.register_buffer("average", torch.zeros(5), persistent=persistent)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        with torch.no_grad():
            self.write(self, x)
        return super().forward(x, labels)


RUNNING: dict[str, Callable[[], nn.Module]] = {
    "in place": lambda: Writing(lambda net, x: net.average.lerp_(x.mean(0), 0.1)),
    "an entry": lambda: Writing(lambda net, x: net.average[0].copy_(x.mean())),
    "replaced": lambda: Writing(lambda net, x: setattr(net, "average", 0.9 * net.average + 0.1 * x.mean(0))),
    "rows counted": lambda: Writing(lambda net, x: net.average.add_(len(x))),
    "instance norm": lambda: Net(
        lambda net, h: net.average(steps(h)), average=nn.InstanceNorm1d(4, track_running_stats=True)
    ),
}


@pytest.mark.parametrize("name", RUNNING)
def test_a_buffer_that_forwards_write_from_data_is_refused(name: str) -> None:
    model = RUNNING[name]()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    with pytest.raises(SelfCheckError, match="Training passes write average"):
        trained(model, collate(examples(6)))
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())


@pytest.mark.filterwarnings("ignore:this model takes the one-example route")
@pytest.mark.parametrize("base", [Classifier, Odd])
def test_a_counter_in_a_buffer_counts_batches_on_each_route(base: type[Classifier]) -> None:
    class Counting(base):  # type: ignore[misc, valid-type]
        def logits(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            return super().logits(x)

    model = Counting()
    model.register_buffer("count", torch.zeros(()))
    # One more record may make one more microbatch.
    private = start(model, max_physical_batch_size=3)
    train_epoch(private)
    assert private.model.count == private.steps_done > 1


@pytest.mark.filterwarnings("ignore:this model takes the one-example route")
def test_a_record_that_changes_a_counter_alone_is_refused() -> None:
    class Counting(Odd):
        def logits(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1 + int(x.max() > 100)
            return super().logits(x)

    model, data = Counting(), examples()
    model.register_buffer("count", torch.zeros(()))
    private = start(model, loader(data))
    train_epoch(private)
    for item in data[::2]:
        item["x"] = item["x"] + 1000
    with pytest.raises(SelfCheckError, match="Training passes write count"):
        train_epoch(private)


@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "trained"])
@pytest.mark.parametrize("isolation", [None, "per_example"])
def test_a_parameter_that_forwards_write_is_refused(frozen: bool, isolation: str | None) -> None:
    model = Writing(lambda net, x: net.first.weight[0].add_(x.mean()))
    model.first.weight.requires_grad_(not frozen)
    with pytest.raises(SelfCheckError, match="Training passes write first.weight.*register_step_post_hook"):
        train_epoch(start(model, isolation=isolation))


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ("average", "Training passes write average"),
        ("first.bias", "first.bias was changed outside of a release"),
        ("second.bias", "Training passes write second.bias"),
    ],
    ids=["buffer", "trained", "frozen"],
)
def test_state_that_a_later_forward_writes_is_refused(own: str, said: str) -> None:
    model = Writing(lambda net, x: net.state_dict()[own].add_(x.mean()) if net.late else None)
    model.second.bias.requires_grad_(False)
    private = start(model, epochs=4)

    def loss(model: Any, batch: Batch) -> torch.Tensor:
        model.late = private.steps_done == 2
        return model(**batch)["loss"]

    with pytest.raises(RuntimeError, match=said):
        train_epoch(private, loss)
    assert private.steps_done == 2
