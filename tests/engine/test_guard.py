"""What the guard looks at anew each time, and what it takes once."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import fastdp.engine.guard as engine_guard
import pytest
import torch
from fastdp.engine.guard import Guard
from fastdp.engine.sent import Sent
from torch import nn


def settled() -> tuple[nn.Sequential, Guard, dict[str, nn.Parameter]]:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    guard = Guard(model)
    guard.settle()
    return model, guard, dict(model.named_parameters())


def test_a_module_that_joins_later_is_found_wherever_it_stands() -> None:
    model, guard, trained = settled()
    guard.require_settled(trained)
    model[0].add_module("late", nn.Sequential(nn.Identity(), nn.Linear(3, 3)))
    with pytest.raises(RuntimeError, match="0.late.1.weight was unfrozen or added"):
        guard.require_settled(trained)


def test_a_parameter_that_is_replaced_within_a_step_is_refused() -> None:
    model, guard, _ = settled()
    model[1].weight = nn.Parameter(model[1].weight.detach().clone())
    guard.advance()
    with pytest.raises(RuntimeError, match="1.weight was changed outside of a release"):
        guard.require_settled()


def test_modules_that_hold_each_other_are_walked_once() -> None:
    model, guard, trained = settled()
    model[0]._modules["back"] = model
    model[1]._modules["none"] = None
    guard.require_settled(trained)


def test_what_no_step_trains_is_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, guard, _ = settled()
    monkeypatch.setattr(model, "state_dict", lambda: pytest.fail("the whole state was read again"))
    guard.settle()


def test_state_that_appears_after_the_start_is_refused() -> None:
    model, guard, _ = settled()

    def add(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        state["secret"] = torch.ones(2)

    model.register_state_dict_post_hook(add)
    guard.settle()
    with pytest.raises(RuntimeError, match="secret was changed outside of a release"):
        guard.require_untouched(last=True)


def test_a_parameter_in_another_s_place_is_refused() -> None:
    model, guard, _ = settled()
    guard.require_settled()
    model[1].weight = nn.Parameter(model[1].weight.detach().clone())
    with pytest.raises(RuntimeError, match="1.weight was changed outside of a release"):
        guard.require_settled()


class Late(Sent):
    """Values of a processor that arrive as late as a GPU's: whoever reads them before the next release has waited."""

    waits = 0

    def __init__(self, values: torch.Tensor):
        super().__init__(values.clone())
        self.there = False

    def read(self) -> torch.Tensor:
        Late.waits += 1
        return super().read()


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> type[Late]:
    monkeypatch.setattr(engine_guard, "Sent", Late)
    monkeypatch.setattr(Late, "waits", 0)
    return Late


def everywhere(model: nn.Module) -> None:
    """Write where torch does not count it, so that any place tells."""
    for parameter in model.parameters():
        parameter.data.add_(1.0)


def released(guard: Guard, *, last: bool = False) -> None:
    guard.require_untouched(last=last)
    guard.settle()


def test_nothing_is_read_before_the_next_release(late: type[Late]) -> None:
    _, guard, _ = settled()
    released(guard)
    assert late.waits == 0
    released(guard)
    assert late.waits == 1
    released(guard, last=True)
    assert late.waits == 3


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_a_write_is_told_at_the_next_release_and_forgotten_by_nothing(late: type[Late], frozen: bool) -> None:
    model, guard, _ = settled()
    model[1].weight.requires_grad_(not frozen)
    released(guard)
    model[1].weight.data.add_(1.0)
    released(guard)
    model[1].weight.data.sub_(1.0)
    guard.settle()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="1.weight was changed outside of a release"):
            guard.require_untouched(last=False)
        guard.settle()


def test_frozen_weights_are_compared_as_a_whole_at_the_fourth_release(
    late: type[Late], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_guard, "_SPOTS", 0)
    model, guard, _ = settled()
    model.requires_grad_(False)
    released(guard)
    model[0].bias.data[1] = 7.0
    for _ in range(3):
        released(guard)
    with pytest.raises(RuntimeError, match="0.bias was changed outside of a release"):
        guard.require_told()


def test_the_last_release_waits(late: type[Late]) -> None:
    model, guard, _ = settled()
    everywhere(model)
    with pytest.raises(RuntimeError, match="changed outside of a release"):
        guard.require_untouched(last=True)


def test_another_shape_or_place_is_told_at_once_beside_what_is_late(late: type[Late]) -> None:
    model, guard, _ = settled()
    everywhere(model)
    released(guard)
    model[0].weight.data = torch.zeros(1)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="changed outside of a release"):
            guard.require_untouched(last=False)


def test_whoever_begins_anew_is_told_once(late: type[Late]) -> None:
    model, guard, _ = settled()
    everywhere(model)
    released(guard)
    with pytest.raises(RuntimeError, match="changed outside of a release"):
        guard.conclude()
    guard.settle()
    guard.conclude()
    released(guard, last=True)
    everywhere(model)
    released(guard)
    with pytest.raises(RuntimeError, match="changed outside of a release"):
        guard.require_untouched(last=False)
    guard.conclude()


@pytest.mark.parametrize(
    "take", [nn.Module.state_dict, lambda model: model[1].state_dict(), copy.deepcopy, pickle.dumps]
)
def test_no_weights_leave_before_the_answer(late: type[Late], take: Any) -> None:
    model, guard, _ = settled()
    everywhere(model)
    released(guard)
    with pytest.raises(RuntimeError, match="changed outside of a release"):
        take(model)
    guard.close()
    take(model)


def test_a_copy_knows_nothing_of_the_guard(late: type[Late]) -> None:
    model, guard, _ = settled()
    copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    everywhere(model)
    released(guard)
    for copied in copies:
        assert len(copied.state_dict()) == 4


def test_a_module_in_two_places_is_trained_on() -> None:
    """As an encoder and a decoder share their embeddings: the state has a name for each place."""
    shared = nn.Linear(3, 3)
    shared.register_buffer("scale", torch.ones(3))
    model = nn.Sequential(shared, nn.Tanh(), shared)
    guard = Guard(model)
    guard.settle()
    for release in range(5):
        guard.require_untouched(last=release == 4)
        with torch.no_grad():
            shared.weight.add_(1.0)
        guard.settle()


def _frozen_module(model: nn.Module) -> None:
    model.add_module("late", nn.Linear(3, 3).requires_grad_(False))


def _frozen_parameter(model: nn.Module) -> None:
    model.register_parameter("late", nn.Parameter(torch.ones(3), requires_grad=False))


def _swapped_names(model: Any) -> None:
    model[0]._parameters = {"bias": model[0].weight, "weight": model[0].bias}


@pytest.mark.parametrize("change", [_frozen_module, _frozen_parameter, _swapped_names])
def test_frozen_parameters_that_come_or_change_places_are_refused(change: Callable[[nn.Module], None]) -> None:
    model, guard, trained = settled()
    change(model)
    with pytest.raises(RuntimeError, match="late.* was unfrozen or added|0.weight was changed outside of a release"):
        guard.require_settled(trained)


def _buffer(model: nn.Module) -> None:
    model.register_buffer("late", torch.ones(3))


def _buffer_of_a_module(model: nn.Module) -> None:
    late = nn.Module()
    late.register_buffer("seen", torch.ones(3))
    model.add_module("late", late)


@pytest.mark.parametrize("change", [_buffer, _buffer_of_a_module])
def test_buffers_that_come_after_the_start_are_refused(change: Callable[[nn.Module], None]) -> None:
    model, guard, trained = settled()
    change(model)
    guard.require_settled(trained)
    with pytest.raises(RuntimeError, match="late.* was changed outside of a release"):
        guard.require_untouched(last=True)


def _written_in_place(model: nn.Module) -> None:
    model.seen.add_(1)


def _replaced(model: nn.Module) -> None:
    model.seen = model.seen + 1


@pytest.mark.parametrize("write", [_written_in_place, _replaced])
def test_a_buffer_that_the_loop_writes_is_refused_at_the_next_release(write: Callable[[nn.Module], None]) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    model.register_buffer("seen", torch.zeros(3))
    guard = Guard(model)
    guard.settle()
    guard.require_untouched(last=False)
    for change in (lambda: model.seen.copy_(torch.zeros(3)), lambda: setattr(model, "seen", torch.zeros(3))):
        change()
        guard.require_untouched(last=False)
    write(model)
    with pytest.raises(RuntimeError, match="seen was changed outside of a release"):
        guard.require_untouched(last=False)
    guard.conclude()
    guard.require_untouched(last=False)
    model.seen.sub_(1)
    with pytest.raises(RuntimeError, match="seen was changed outside of a release"):
        guard.require_untouched(last=False)


class Remembering(nn.Module):
    """Keeps what its latest forward pass saw, as models keep attention maps."""

    def __init__(self, where: str):
        super().__init__()
        self.linear, self.where = nn.Linear(3, 2), where
        self.constant = torch.ones(2)
        self.register_buffer("scratch", torch.zeros(4, 3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = {"attribute": x, "nested": {"seen": [x]}}
        if self.where == "scratch":
            self.scratch.copy_(x)
        else:
            self.kept = kept[self.where]
        return self.linear(x) * self.constant


@pytest.mark.parametrize("take", [copy.deepcopy, pickle.dumps])
@pytest.mark.parametrize("where", ["attribute", "nested", "scratch"])
def test_what_a_forward_leaves_in_a_model_does_not_leave_with_it(where: str, take: Any) -> None:
    model = nn.Sequential(Remembering(where))
    guard = Guard(model)
    guard.settle()
    take(model)
    model(torch.ones(4, 3))
    assert len(model.state_dict()) == 2
    with pytest.raises(RuntimeError, match=r"0\.(kept|scratch) has come to the model, or was written"):
        take(model)
    guard.close()
    take(model)


@pytest.mark.parametrize("take", [copy.deepcopy, pickle.dumps])
def test_a_model_that_is_moved_leaves_whole(take: Any) -> None:
    """As by `model.cpu()` before it is saved: buffers that no state has are other tensors then, of the same numbers."""
    model = nn.Sequential(Remembering("scratch"))
    model[0].itself = {"tensor": torch.ones(2)}
    model[0].itself["round"] = model[0].itself
    guard = Guard(model)
    model[0].scratch = model[0].scratch.clone()
    take(model)
    model[0].scratch = model[0].scratch + 1
    with pytest.raises(RuntimeError, match="scratch has come to the model, or was written"):
        take(model)
    guard.close()
