"""What models are called with and what they return: losses at any place, lists of texts, rows in an order of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fastdp
from tests.cases import cases
from tests.engine.runs import opaque
from tests.honest.harness import Case, sum_error
from tests.honest.kit import WIDTH, Wrapped, mlp, numbers, unpack


@dataclass(frozen=True)
class Frozen:
    scores: torch.Tensor
    objective: torch.Tensor


class Named(NamedTuple):
    logits: torch.Tensor
    loss: torch.Tensor


#: How a model returns logits and a loss, and where the loop finds the loss.
OUTPUTS: dict[str, tuple[Callable[..., Any], Callable[[Any], torch.Tensor]]] = {
    "a tuple": (lambda logits, loss: (logits, loss), lambda o: o[1]),
    "a list": (lambda logits, loss: [None, logits, loss], lambda o: o[-1]),
    "a named tuple": (Named, lambda o: o.loss),
    "a dictionary": (lambda logits, loss: {"logits": logits, "objective": loss}, lambda o: o["objective"]),
    "a dataclass": (Frozen, lambda o: o.objective),
    "an object": (lambda logits, loss: SimpleNamespace(logits=logits, loss=loss), lambda o: o.loss),
    "a nesting": (lambda logits, loss: (logits, {"loss": loss}), lambda o: o[1]["loss"]),
    "a loss beside its parts": (
        lambda logits, loss: {"ce": loss * 1.0, "loss": loss, "logits": logits},
        lambda o: o["loss"],
    ),
}


def train(case: Case, **options: Any) -> Any:
    """Two steps of a private run, which is then closed."""
    private = fastdp.make_private(
        case.model, case.make_optimizer(), case.make_loader(), **{"noise_multiplier": 0.0, "epochs": 1, **options}
    )
    try:
        for batch in private.data_loader:
            case.loss(case.model, batch).backward()
            private.optimizer.step()
            private.optimizer.zero_grad()
    finally:
        private.detach()
    return private


def returning(make: Callable[..., Any], find: Callable[[Any], torch.Tensor]) -> Case:
    def forward(self: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        logits = self.net(x)
        return make(logits, F.cross_entropy(logits, y))

    return Case(Wrapped(forward, net=mlp()), numbers(), None, lambda model, batch: find(model(*batch)))


def exact(build: Callable[[], Case]) -> str:
    """Assert that a case's clipped sums are those of single rows; the route that a run of it takes."""
    route = str(train(build()).route)
    assert sum_error(build) < 1e-4
    return route


@cases("name", OUTPUTS)
def test_the_only_loss_is_found_wherever_a_model_returns_it(name: str) -> None:
    assert exact(lambda: returning(*OUTPUTS[name])) == "uses"


def several(kind: Any, odd: bool = False) -> Callable[[Any, torch.Tensor, torch.Tensor], Any]:
    """The forward of a model that returns a loss for each of two tasks."""

    def forward(self: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        hidden = (opaque if odd else lambda function, *given: function(*given))(F.linear, x, *self.net[0].parameters())
        logits = self.net[2](torch.tanh(hidden))
        losses = F.cross_entropy(logits, y), F.mse_loss(self.value(hidden)[:, 0], x.sum(1))
        return dict(zip(("classes", "value"), losses)) if kind is dict else kind((*losses, logits))

    return forward


def added(output: Any) -> torch.Tensor:
    """The sum of what a model returned, or two losses and a term of its logits, by weights."""
    if isinstance(output, dict):
        return sum(output.values())  # type: ignore[return-value]
    return 0.5 * output[0] + 2.0 * output[1] + 0.1 * output[2].square().mean()


@cases("kind, odd, route", [(k, o, "one-example" if o else "uses") for k in (dict, tuple) for o in (False, True)])
@pytest.mark.filterwarnings("ignore:.*one-example")
def test_several_losses_count_as_the_loop_weighs_them(kind: Any, odd: bool, route: str) -> None:
    def build() -> Case:
        model = Wrapped(several(kind, odd), net=mlp(), value=nn.Linear(WIDTH, 1))
        return Case(model, numbers(), None, lambda model, batch: added(model(*batch)))

    assert exact(build) == route


def test_losses_of_shape_one_survive_the_one_example_route() -> None:
    def forward(self: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        hidden = opaque(F.linear, x, self.net[0].weight, self.net[0].bias)
        return {"loss": F.cross_entropy(self.net[2](hidden), y).reshape(1)}

    case = Case(Wrapped(forward, net=mlp()), numbers(), None, lambda model, batch: model(*batch)["loss"])
    with pytest.warns(UserWarning, match="one-example route"):
        assert train(case).route == "one-example"


def test_a_row_s_only_output_is_not_taken_for_its_loss() -> None:
    """On the one-example route a prediction [1, 1] before the loss has one number as well."""

    def forward(self: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        guess = self.net[2](torch.relu(opaque(F.linear, x, self.net[0].weight, self.net[0].bias)))
        return guess, F.mse_loss(guess[:, 0], y.to(guess))

    def build() -> Case:
        return Case(Wrapped(forward, net=mlp(outputs=1)), numbers(), None, lambda model, batch: model(*batch)[1])

    with pytest.warns(UserWarning, match="one-example route"):
        assert sum_error(build) < 1e-4


def test_losses_of_layers_may_be_stacked() -> None:
    def build() -> Case:
        def forward(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            hidden = self.first(x)
            losses = [F.cross_entropy(self.head(hidden), y), F.cross_entropy(self.head(torch.tanh(hidden)), y)]
            weights = torch.tensor([0.3, 0.7], dtype=x.dtype)
            return (torch.stack(losses) * weights).sum() + sum(losses) + torch.cat([t[None] for t in losses]).mean()

        return Case(Wrapped(forward, first=nn.Linear(12, 8), head=nn.Linear(8, 3)), numbers(), None, unpack)

    assert exact(build) == "uses"


#: Each batch is the whole data set, so that no batch has three rows by chance.
WHOLE = {"batch_size": len(numbers())}


def test_a_model_that_fails_on_some_numbers_of_rows_runs_one_by_one() -> None:
    def forward(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if len(x) == 3:
            raise RuntimeError("no kernel for three rows")
        return F.cross_entropy(self.net(x), y)

    with pytest.warns(UserWarning, match="fails on some rows of a batch: no kernel for three rows"):
        assert train(Case(Wrapped(forward, net=mlp()), numbers(), None, unpack, loader=WHOLE)).route == "one-example"


def test_a_fault_of_the_model_s_own_is_passed_on() -> None:
    def forward(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        raise LookupError("a fault of its own")

    with pytest.raises(LookupError, match="a fault of its own"):
        train(Case(Wrapped(forward, net=mlp()), numbers(), None, unpack))
