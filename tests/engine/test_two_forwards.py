"""Several forward passes of one batch before one backward pass, as R-Drop and pairs have: clipped by the row, as one pass."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import fastdp
from fastdp.engine.errors import SelfCheckError
from tests.cases import cases
from tests.engine.runs import CLASSES, CLIPPED, FEATURES, Batch, collate, examples, opaque

SEED, EXPECTED = 5, 8
#: Between the norms of rows' gradients.
CLIPS = {"rdrop": 2.2, "simsiam": 0.5, "three_inputs": 4.5, "own": 1.55}
PRIVATE: dict[str, Any] = {"noise_multiplier": 0.0, "epochs": 1, "unsafe_seed": 3, "output_dir": None}
Model = Callable[[torch.Tensor], torch.Tensor]


class Dropped(nn.Module):
    """A classifier with dropout and a norm, one of whose matrices no rule reads if it is ``odd``."""

    def __init__(self, odd: bool = False, rate: float = 0.3):
        super().__init__()
        torch.manual_seed(0)
        self.odd, self.rate = odd, rate
        self.first, self.norm = nn.Linear(FEATURES, 7), nn.LayerNorm(7)
        self.second = nn.Linear(7, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = opaque(torch.clone, self.first.weight) if self.odd else self.first.weight
        hidden = torch.tanh(self.norm(F.linear(x, weight, self.first.bias)))
        return self.second(F.dropout(hidden, self.rate, self.training))


class Own(Dropped):
    """The same, which returns its loss."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
        logits = super().forward(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def divergence(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Kullback-Leibler divergence by row."""
    return F.kl_div(one.log_softmax(-1), other.log_softmax(-1), reduction="none", log_target=True).sum(1)


def rdrop(model: Model, batch: Batch) -> torch.Tensor:
    one, two = model(batch["x"]), model(batch["x"])
    losses = sum(F.cross_entropy(z, batch["labels"], reduction="none") for z in (one, two))
    return 0.5 * losses + divergence(one, two) + divergence(two, one)


def simsiam(model: Model, batch: Batch) -> torch.Tensor:
    """Two views of a row, each the other's target."""
    one, two = model(batch["x"]), model(batch["x"].flip(1))
    return -F.cosine_similarity(one, two.detach()) - F.cosine_similarity(two, one.detach())


def three_inputs(model: Model, batch: Batch) -> torch.Tensor:
    """Passes of different inputs, of different weight."""
    found = [model(batch["x"] * factor) for factor in (1.0, 0.5, -2.0)]
    return F.cross_entropy(found[0], batch["labels"], reduction="none") + (found[1] * found[2]).sum(1)


LOSSES = {"rdrop": rdrop, "simsiam": simsiam, "three_inputs": three_inputs}


def reference(
    model: nn.Module, batches: list[Batch], by_row: Callable[[nn.Module, Batch], torch.Tensor], clip: float
) -> dict[str, torch.Tensor]:
    """The clipped sum of rows' gradients, float64, some clipped and some not; batches draw from seeds of their own."""
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    norms = []
    for number, batch in enumerate(batches):
        torch.manual_seed(SEED + number)
        losses = by_row(model, batch)
        for row in range(len(losses)):
            found = torch.autograd.grad(losses[row], list(model.parameters()), retain_graph=True)
            norms.append(float(torch.sqrt(sum((g**2).sum() for g in found))))  # type: ignore[call-overload]
            for name, gradient in zip(total, found):
                total[name] += gradient * min(1.0, clip / norms[-1])
    assert min(norms) < clip < max(norms), norms
    return {name: own / EXPECTED for name, own in total.items()}


def begun(model: nn.Module, **options: Any) -> Any:
    """A run without noise and with a learning rate of 0, on data of 64 bits."""
    data = [{**item, "x": item["x"].double()} for item in examples()]
    loader = DataLoader(data, batch_size=EXPECTED, shuffle=True, collate_fn=collate)  # type: ignore[arg-type]
    return fastdp.make_private(model, torch.optim.SGD(model.parameters(), lr=0.0), loader, **{**PRIVATE, **options})


def trained(
    model: nn.Module, loss: Callable[[nn.Module, Batch], torch.Tensor], clip: float = 1.0, **options: Any
) -> Any:
    """The gradients of one logical batch, its microbatches and the run."""
    private = begun(model, method=fastdp.DPSGD(max_grad_norm=clip), **options)
    batches: list[Batch] = []
    for batch in private.data_loader:
        real = private.data_loader.tickets[0].probe is None
        if real:
            torch.manual_seed(SEED + len(batches))
            batches.append(batch)
        loss(model, batch).backward()
        private.optimizer.step()
        if private.last_step_done:
            break
        private.optimizer.zero_grad()
    return {name: p.grad for name, p in model.named_parameters()}, batches, private


def agree(model: nn.Module, found: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> None:
    """Assert that sums are equal, but for the rounding of float32 and the certified bound of norms."""
    for name, own in truth.items():
        torch.testing.assert_close(found[name].double(), own, rtol=0, atol=CLIPPED * float(own.abs().max()), msg=name)


@cases(
    "name, odd, options, route",
    [
        ("rdrop", False, {}, "uses"),
        ("rdrop", False, {"max_physical_batch_size": 3}, "uses"),
        ("rdrop", True, {}, "one-example"),
        ("simsiam", False, {}, "uses"),
        ("simsiam", True, {"max_physical_batch_size": 3}, "one-example"),
        ("three_inputs", False, {}, "uses"),
        ("three_inputs", False, {"isolation": "per_example"}, "one-example"),
    ],
)
def test_clipped_sums_are_those_of_single_rows(name: str, odd: bool, options: dict[str, Any], route: str) -> None:
    """Rows that are run alone draw other masks than in their batch: there without dropout."""
    model, by_row = Dropped(odd, 0.3 if route == "uses" else 0.0).double(), LOSSES[name]
    plain = copy.deepcopy(model)
    mean = lambda m, b: by_row(m, b).mean()  # noqa: E731
    found, batches, private = trained(model, mean, CLIPS[name], loss_reduction="mean", **options)
    assert private.route == route
    agree(model, found, reference(plain, batches, by_row, CLIPS[name]))


def test_losses_of_the_model_count_by_their_mean() -> None:
    """Two passes of a model that returns its loss: every row by the mean of its losses, whatever the loop's factor."""
    by_row = lambda m, b: sum(  # noqa: E731
        F.cross_entropy(Dropped.forward(m, b["x"] * factor), b["labels"], reduction="none") for factor in (1.0, -2.0)
    )
    model = Own().double()
    plain = copy.deepcopy(model)

    def loss(m: nn.Module, b: Batch) -> Any:
        return 0.1 * sum(m(b["x"] * factor, b["labels"])["loss"] for factor in (1.0, -2.0))

    found, batches, private = trained(model, loss, CLIPS["own"])
    assert private.route == "uses"
    agree(model, found, reference(plain, batches, lambda m, b: 0.5 * by_row(m, b), CLIPS["own"]))


class ByRow(Own):
    """The same with a loss for each row."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
        logits = Dropped.forward(self, x)
        return {"loss": F.cross_entropy(logits, labels, reduction="none"), "logits": logits}


def distilled(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Hinton's way: the model's own loss, and the divergence of its logits from a teacher's."""
    found = model(batch["x"], batch["labels"])
    return 0.5 * found["loss"] + divergence(found["logits"], batch["x"][:, :CLASSES])


def rdrop_of_losses(model: nn.Module, batch: Batch) -> torch.Tensor:
    """R-Drop, with losses of different weights."""
    one, two = (model(batch["x"], batch["labels"]) for _ in range(2))
    return one["loss"] + 0.5 * two["loss"] + divergence(one["logits"], two["logits"])


def weighted(*weights: float) -> Callable[[Any, Batch], torch.Tensor]:
    """Whole losses of different weights."""
    return lambda m, b: sum(w * m(b["x"] * w, b["labels"])["loss"] for w in weights)  # type: ignore[return-value]


def unused_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The loop computes its own loss of a model that has computed one."""
    logits = model(batch["x"], batch["labels"])["logits"]
    return F.cross_entropy(logits, batch["labels"], label_smoothing=0.1, reduction="none")


@cases(
    "loss, odd, options, route",
    [
        (distilled, False, {}, "uses"),
        (distilled, False, {"max_physical_batch_size": 3}, "uses"),
        (distilled, True, {}, "one-example"),
        (distilled, False, {"isolation": "per_example"}, "one-example"),
        (rdrop_of_losses, False, {}, "uses"),
        (rdrop_of_losses, True, {"max_physical_batch_size": 3}, "one-example"),
        (weighted(1.0, 0.5), False, {}, "uses"),
        (weighted(1.0, -0.5), True, {}, "one-example"),
        (unused_loss, False, {}, "uses"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*one-example")
def test_terms_beside_the_loss_of_the_model_count_by_row(
    loss: Callable[[nn.Module, Batch], torch.Tensor], odd: bool, options: dict[str, Any], route: str
) -> None:
    """What the loop multiplies each of them by stays, as nothing says which factor is the whole loss's."""
    model = Own(odd, 0.3 if route == "uses" else 0.0).double()
    plain = ByRow(odd, model.rate).double()
    every = {key: t.double() if t.is_floating_point() else t for key, t in collate(examples()).items()}
    grads = [torch.autograd.grad(own, list(plain.parameters()), retain_graph=True) for own in loss(plain, every)]
    clip = float(torch.stack([torch.cat([g.flatten() for g in own]).norm() for own in grads]).median())
    found, batches, private = trained(model, lambda m, b: loss(m, b).mean(), clip, **options)
    assert private.route == route
    agree(model, found, reference(plain, batches, loss, clip))


def contrasted(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Rows' logits are each other's negatives, in a term that is small beside the loss."""
    found = model(batch["x"], batch["labels"])
    return found["loss"] + 1e-4 * F.cross_entropy(found["logits"] @ found["logits"].T, torch.arange(len(batch["x"])))


def in_proportion(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The term's weight follows from the whole batch's losses."""
    found = model(batch["x"], batch["labels"])
    return found["loss"] + found["loss"].detach() * found["logits"].square().mean()


def summed(model: nn.Module, batch: Batch) -> torch.Tensor:
    """A mean of losses beside a sum over rows."""
    found = model(batch["x"], batch["labels"])
    return found["loss"] + found["logits"].square().sum()


def with_the_batch_before() -> Callable[[Any, Batch], torch.Tensor]:
    """A second pass of as many rows of the batch before, where it had as many."""
    kept: list[torch.Tensor] = []

    def loss(model: Model, batch: Batch) -> torch.Tensor:
        old = kept.pop() if kept else batch["x"]
        kept.append(batch["x"])
        rows = len(batch["x"])
        old = torch.cat([old] * rows)[:rows]
        return (F.cross_entropy(model(batch["x"]), batch["labels"], reduction="none") + model(old).sum(1)).mean()

    return loss


def in_batch(model: Model, batch: Batch) -> torch.Tensor:
    """SimCSE: the other rows' second passes are negatives."""
    one, two = (F.normalize(model(batch["x"]), dim=1) for _ in range(2))
    return F.cross_entropy(one @ two.T, torch.arange(len(one)))


class Sorted(Dropped):
    """May sort its rows and put them back: they would count for each other's units."""

    def forward(self, x: torch.Tensor, sort: bool = False) -> torch.Tensor:
        order = x[:, 0].argsort() if sort else torch.arange(len(x))
        return super().forward(x[order])[order.argsort()]


def another_way(m: Any, b: Batch) -> torch.Tensor:
    """By a choice of the call, and not by its shapes."""
    return F.cross_entropy(m(b["x"]), b["labels"]) + F.cross_entropy(m(b["x"], sort=True), b["labels"])


MEAN: dict[str, Any] = {"loss_reduction": "mean"}
PARTS: dict[str, Any] = {**MEAN, "max_physical_batch_size": 3}
OTHER = (SelfCheckError, "An example has another gradient")


@cases(
    "make, loss, options, said",
    [
        *[(Own, loss, {}, (SelfCheckError, "the loop's own terms")) for loss in (contrasted, in_proportion, summed)],
        (Own, weighted(-1.0), {}, (ValueError, "The scale must be positive")),
        (Dropped, in_batch, MEAN, OTHER),
        (Dropped, with_the_batch_before(), MEAN, OTHER),
        (Dropped, with_the_batch_before(), PARTS, OTHER),
        (lambda: Sorted(rate=0.0), another_way, MEAN, (RuntimeError, "Two forward passes ran")),
    ],
)
@pytest.mark.filterwarnings("ignore:.*one-example")
def test_passes_that_couple_rows_or_weigh_them_by_the_batch_are_refused(
    make: Callable[[], nn.Module], loss: Any, options: dict[str, Any], said: tuple[type[Exception], str]
) -> None:
    with pytest.raises(said[0], match=said[1]):
        trained(make().double(), loss, **options)


@cases("loss, couples", [(distilled, False), (contrasted, True)])
def test_a_term_that_comes_after_the_first_batch_is_verified_then(
    loss: Callable[[nn.Module, Batch], torch.Tensor], couples: bool
) -> None:
    model = Own(rate=0.0).double()
    plain = ByRow(rate=0.0).double()
    private, late = begun(model, method=fastdp.DPSGD(max_grad_norm=2.5), epochs=3), list[Batch]()

    def two_steps() -> None:
        for batch in private.data_loader:
            private.optimizer.zero_grad()
            if private.steps_done and private.data_loader.tickets[0].probe is None:
                late.append(batch)
            total = loss(model, batch).mean() if private.steps_done else model(**batch)["loss"]
            total.backward()
            private.optimizer.step()
            if private.steps_done == 2:
                break

    if couples:
        with pytest.raises(SelfCheckError, match="own terms"):
            two_steps()
        assert private.steps_done == 1
        return
    two_steps()
    agree(model, {name: p.grad for name, p in model.named_parameters()}, reference(plain, late, loss, 2.5))


def test_passes_of_two_batches_are_no_pair() -> None:
    """A loop that takes two batches, and differentiates both at once: their rows are not each other's."""
    model = Dropped().double()
    private = begun(model, max_physical_batch_size=2, loss_reduction="mean")
    iterator = iter(private.data_loader)
    with pytest.raises(RuntimeError, match="Two forward passes ran before one backward|before the backward pass"):
        sum(model(next(iterator)["x"]).sum() for _ in range(2)).backward()  # type: ignore[union-attr]
    assert private.steps_done == 0


def test_a_loop_that_begins_to_call_the_model_twice_is_verified_then() -> None:
    """The third batch couples rows by its second pass, which no batch had before."""
    model = Dropped().double()
    private = begun(model, loss_reduction="mean", epochs=3)

    def train() -> None:
        for batch in private.data_loader:
            late = private.steps_done >= 2
            loss = in_batch(model, batch) if late else F.cross_entropy(model(batch["x"]), batch["labels"])
            loss.backward()
            private.optimizer.step()
            private.optimizer.zero_grad()

    with pytest.raises(SelfCheckError, match="An example has another gradient"):
        train()
    assert private.steps_done == 2
