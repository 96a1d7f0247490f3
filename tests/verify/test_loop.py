"""What a training loop makes of a batch, or computes outside the model: of each row alone anything, of all rows nothing."""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F

import fastdp
from fastdp.engine.errors import SelfCheckError
from fastdp.private.run import Private
from tests.cases import pairs
from tests.engine.runs import (
    CLIPPED,
    FEATURES,
    PRIVATE,
    Batch,
    Classifier,
    clipped_sum,
    error,
    examples,
    loader,
    one_by_one,
    start,
)
from tests.loops import train_epoch

Make = Callable[[Batch], Any]


class Scaled(Classifier):
    """Takes a number besides its rows."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None, scale: Any = 1.0) -> Any:
        return super().forward(x * scale, labels)


class Logits(Scaled):
    """Leaves the loss to a criterion outside."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None, scale: Any = 1.0) -> Any:
        return super().forward(x, None, scale)["logits"]


def row_losses(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(logits, batch["labels"], reduction="none")


#: Where the loss is computed: the model, what `make_private` is told, and the loop's line.
LOSSES: dict[str, tuple[type[Classifier], dict[str, Any], Callable[[Private, Any, Batch], torch.Tensor]]] = {
    "the model's own": (Scaled, {}, lambda private, output, batch: output["loss"]),
    "a criterion": (Logits, {"criterion": row_losses}, lambda private, output, batch: private.loss(output, batch)),
    "the loop's mean": (
        Logits,
        {"loss_reduction": "mean"},
        lambda private, output, batch: row_losses(output, batch).mean(),
    ),
}


def own_generator() -> Make:
    generator = torch.Generator().manual_seed(3)
    return lambda b: {**b, "x": b["x"] + torch.randn(b["x"].shape, generator=generator)}


def annealed(last: int = 100) -> Make:
    numbers = itertools.count()
    return lambda b: {**b, "scale": 1 - 0.01 * min(next(numbers), last)}


def with_the_batch_before() -> Make:
    before: list[torch.Tensor] = []

    def make(batch: Batch) -> Batch:
        x = batch["x"]
        same = bool(before) and before[-1].shape == x.shape
        before.append(x)
        return {**batch, "x": 0.7 * x + 0.3 * before[-2]} if same else batch

    return make


def with_the_last_row_centred(batch: Batch) -> Batch:
    x = batch["x"]
    return {**batch, "x": torch.cat([x[:-1], x[-1:] - x.mean(0)])} if len(x) > 1 else batch


def written(change: Make) -> Make:
    def make(batch: Batch) -> Batch:
        change(batch)
        return batch

    return make


BY_ROW: dict[str, Callable[[], Make]] = {
    "untouched": lambda: lambda b: b,
    "copied": lambda: lambda b: {"x": b["x"].double().float(), "labels": b["labels"].clone()},
    "normalised": lambda: lambda b: {**b, "x": b["x"] / b["x"].norm(dim=1, keepdim=True)},
    "noised": lambda: lambda b: {**b, "x": b["x"] + torch.randn_like(b["x"])},
    "noised by a generator of its own": own_generator,
    "a constant": lambda: lambda b: {**b, "scale": 0.5},
    "an annealed number": annealed,
    **{f"a number annealed {last} times": functools.partial(annealed, last) for last in (1, 2, 3, 4, 8)},
    "labels masked": lambda: lambda b: {**b, "labels": b["labels"].masked_fill(b["x"][:, 0] > 2, -100)},
    "written into": lambda: written(lambda b: b["x"].div_(b["x"].norm(dim=1, keepdim=True))),
}
TOGETHER: dict[str, Callable[[], Make]] = {
    "centred": lambda: lambda b: {**b, "x": b["x"] - b["x"].mean(0)},
    "the largest entry": lambda: lambda b: {**b, "x": b["x"] / b["x"].abs().max()},
    "a count": lambda: lambda b: {**b, "x": b["x"] / len(b["x"])},
    "mixed": lambda: lambda b: {**b, "x": 0.7 * b["x"] + 0.3 * b["x"].flip(0)},
    "the last row": lambda: with_the_last_row_centred,
    "mixed with some chance": lambda: lambda b: {**b, "x": b["x"].lerp(b["x"].flip(0), 0.3 * (random.random() < 0.2))},
    "a number": lambda: lambda b: {**b, "scale": float(b["x"].mean())},
    "an array": lambda: lambda b: {**b, "scale": numpy.asarray(b["x"].numpy().mean())},
}


def train(private: Private, make: Make, loss: str = "the model's own", releases: int = 1) -> list[Batch]:
    """A loop until so many releases, as honest loops are written; the batches that were summed."""
    summed: list[Batch] = []
    for batch in private.data_loader:
        probes = private.data_loader.tickets[0].probe is not None
        made = make(batch)
        summed += [] if probes else [made]
        private.optimizer.zero_grad()
        value = LOSSES[loss][2](private, private.model(**made), made)
        if not math.isfinite(value.item()):
            raise SystemExit("the loop was handed values that nobody has")
        value.backward()
        private.optimizer.step()
        releases -= private.last_step_done
        if releases == 0:
            break
    return summed


@pytest.mark.parametrize(
    ("name", "loss"),
    [(n, loss) for at, n in enumerate(BY_ROW) for loss in sorted({[*LOSSES][at % 3], "the loop's mean"})],
)
def test_what_is_made_of_each_row_is_accepted_and_summed(name: str, loss: str) -> None:
    model, options, _ = LOSSES[loss]
    private = start(model(), **options, method=fastdp.DPSGD(max_grad_norm=0.5), max_physical_batch_size=3)
    summed = train(private, BY_ROW[name](), loss)
    # A number is one for all rows, and so each row's own.
    rows = [
        {k: v if isinstance(v, torch.Tensor) else torch.full((len(b["x"]), 1), v) for k, v in b.items()} for b in summed
    ]
    truth = [gradient for batch in rows for gradient in one_by_one(Scaled(), batch)]
    truth = [{n: g.nan_to_num() for n, g in gradient.items()} for gradient in truth]
    got = {n: 8 * p.grad for n, p in private.model.named_parameters() if p.grad is not None}
    assert error(got, clipped_sum([g for g in truth if any(t.any() for t in g.values())], 0.5)) < CLIPPED


class Recurrent(torch.nn.Module):
    """A net that is given its state."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.head = torch.nn.LSTM(FEATURES, 4), torch.nn.Linear(4, FEATURES)

    def forward(self, x: torch.Tensor, state: Any) -> Any:
        found, state = self.net(x.unsqueeze(0), state)
        return self.head(found.squeeze(0)), state


@pytest.mark.parametrize("seed", range(2))
def test_a_state_that_is_carried_from_batch_to_batch_is_refused(seed: int) -> None:
    torch.manual_seed(seed)
    private = start(Recurrent(), loss_reduction="mean", max_physical_batch_size=3)

    def carry() -> None:
        state: Any = None
        for batch in private.data_loader:
            known = state if state is not None and state[0].shape[1] == len(batch["x"]) else None
            found, state = private.model(batch["x"], known)
            state = tuple(t.detach() for t in state)
            F.mse_loss(found, batch["x"]).backward()
            private.optimizer.step()

    with pytest.raises(SelfCheckError, match="this batch was not released"):
        carry()
    assert private.steps_done == 0


@pytest.mark.parametrize("loss", LOSSES)
def test_rows_mixed_with_those_of_the_batch_before_are_refused(loss: str) -> None:
    model, options, _ = LOSSES[loss]
    private = start(model(), max_physical_batch_size=3, **options)
    with pytest.raises(SelfCheckError, match="this batch was not released"):
        train(private, with_the_batch_before(), loss)


@pytest.mark.parametrize(*pairs(("loss", LOSSES), ("most", [8, 3]), ("name", TOGETHER)))
def test_what_is_made_of_all_rows_together_is_refused_before_a_release(name: str, most: int, loss: str) -> None:
    model, options, _ = LOSSES[loss]
    private = start(model(), max_physical_batch_size=most, **options)
    with pytest.raises(SelfCheckError, match="this batch was not released"):
        train(private, TOGETHER[name](), loss)
    assert private.steps_done == 0
    # A loop that goes on after the refusal is refused again.
    with pytest.raises(SelfCheckError, match="this batch was not released"):
        train(private, TOGETHER[name](), loss)


def _of_class(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Every row's loss, and once more those of one class, over their number."""
    losses, chosen = F.cross_entropy(logits, labels, reduction="none"), labels == 0
    return losses.mean() + 0.3 * (losses * chosen).sum() / chosen.sum().clamp(min=1)


OUTSIDE: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], bool]] = {
    "a contrast": (lambda logits, y: F.cross_entropy(logits @ logits.T, torch.arange(len(y))), False),
    "weighted by the batch": (lambda logits, y: (logits - logits.mean(0)).square().mean(), False),
    "binary": (lambda logits, y: F.binary_cross_entropy(logits.sigmoid(), F.one_hot(y, 3).float()), True),
    "distilled": (
        lambda logits, y: F.kl_div(logits.log_softmax(1), logits.detach().softmax(1).flip(1), reduction="batchmean"),
        True,
    ),
    "a small term of the batch's mean": (
        lambda logits, y: F.cross_entropy(logits, y) - 1e-3 * logits.sigmoid().mean(0).log().sum(),
        False,
    ),
    "noised": (lambda logits, y: (logits - torch.randn_like(logits)).square().mean(), True),
    "a mean over one class": (lambda logits, y: _of_class(logits, y), False),
    "squeezed": (lambda logits, y: F.binary_cross_entropy_with_logits(logits[:, :1].squeeze(), (y > 0).float()), True),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_losses_in_the_loop(name: str) -> None:
    compute, honest = OUTSIDE[name]
    private = start(Logits())

    with nullcontext() if honest else pytest.raises(SelfCheckError, match="example has another gradient"):
        train_epoch(private, lambda model, batch: compute(model(batch["x"]), batch["labels"]))
    assert (private.steps_done > 1) == honest


class Learning:
    """A loop with a net of its own, which learns after each batch. Torch makes noise of another size in another way."""

    def __init__(self) -> None:
        self.net, self.steps = torch.nn.Linear(4, FEATURES), 0

    def __call__(self, model: Any, batch: Batch) -> torch.Tensor:
        self.steps += 1
        made = self.net(torch.randn(len(batch["x"]), 4)).detach()
        with torch.no_grad():
            # Fast, slowly, and back.
            self.net.weight += 0.01 * math.cos(self.steps / 6)
        return row_losses(model(batch["x"] + made), batch).mean()


@pytest.mark.parametrize("rows", [4, 8])
def test_a_net_of_the_loop_that_learns_is_no_coupling(rows: int) -> None:
    private = start(Logits(), loss_reduction="mean", max_physical_batch_size=rows)
    train_epoch(private, Learning())
    assert private.steps_done == 3


class Drawing:
    """A loop with a generator of its own, which seldom does something to a batch."""

    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor]):
        self.generator, self.change = numpy.random.default_rng(0), change

    def __call__(self, model: Any, batch: Batch) -> torch.Tensor:
        x = self.change(batch["x"]) if self.generator.random() < 0.15 else batch["x"]
        return row_losses(model(x), batch).mean()


@pytest.mark.parametrize("mixes", [False, True])
def test_what_a_loop_seldom_does_by_a_generator_of_its_own_is_verified(mixes: bool) -> None:
    loop = Drawing((lambda x: x + x.roll(1, 0)) if mixes else (lambda x: x.flip(1)))
    private = start(Logits(), loss_reduction="mean", max_physical_batch_size=4)
    with pytest.raises(SelfCheckError, match="another gradient") if mixes else nullcontext():
        train_epoch(private, loop)
    assert private.steps_done == (0 if mixes else 3)


@pytest.mark.parametrize(("stated", "true"), [(None, "sum"), ("mean", "sum"), ("sum", "mean")])
def test_a_loss_that_is_reduced_in_another_way_is_refused_by_name(stated: str | None, true: str) -> None:
    private = start(Logits(), loss_reduction=stated)

    def run() -> None:
        for batch in private.data_loader:
            F.cross_entropy(private.model(batch["x"]), batch["labels"], reduction=true).backward()
            private.optimizer.step()

    with pytest.raises(SelfCheckError, match=f"loss_reduction='{true}'"):
        run()
    assert private.steps_done == 0


def test_a_loop_that_makes_nothing_gets_no_probe_batch() -> None:
    private, probes = start(**PRIVATE), []
    private.model.register_forward_pre_hook(lambda *_: probes.append(private.data_loader.tickets[0].probe))
    train_epoch(private)
    assert probes == [None] * len(probes)


def test_probe_batches_leave_random_states_as_they_were() -> None:
    states = []
    for name in ("a constant", "normalised", "untouched"):
        private = start(Scaled())
        torch.manual_seed(7)
        train(private, BY_ROW[name]())
        states.append(torch.get_rng_state())
    assert all(torch.equal(state, states[-1]) for state in states)


RARELY: dict[str, Make] = {
    "scaled": lambda b: {**b, "x": b["x"] / b["x"].abs().max()} if b["x"].abs().max() > 100 else b,
    "scaled in place": written(lambda b: b["x"].div_(b["x"].abs().max()) if b["x"].abs().max() > 100 else b),
    "always": lambda b: {**b, "x": 1.5 * b["x"] / (b["x"].abs().max() if b["x"].abs().max() > 100 else 1)},
}


def test_a_loop_that_stops_amid_a_probe_leaves_torch_as_it_was() -> None:
    functions = dict(vars(torch._C._nn))
    private = start(Logits(), loss_reduction="mean", **PRIVATE)
    for batch in private.data_loader:
        output = private.model(**batch)
        if vars(torch._C._nn) != functions:
            break
        row_losses(output, batch).mean().backward()
        private.optimizer.step()
        private.optimizer.zero_grad()
    else:
        pytest.fail("no probe was under way")
    private.detach()
    assert vars(torch._C._nn) == functions


@pytest.mark.parametrize("name", RARELY)
def test_what_a_loop_makes_of_a_larger_batch_is_verified_in_that_batch(name: str) -> None:
    data = examples(8)
    private = start(Scaled(), loader(data), epochs=4)
    for _ in range(2):
        train(private, RARELY[name])
    data[5] = {**data[5], "x": torch.full((FEATURES,), 1e3)}
    with pytest.raises(SelfCheckError, match="this batch was not released"):
        train(private, RARELY[name])
    assert private.steps_done == 2


@pytest.mark.parametrize("rows", [2, 4])
def test_a_permutation_that_leaves_the_first_row_in_its_place_is_found_under_another_seed(rows: int) -> None:
    torch.manual_seed(0)
    assert torch.randperm(rows)[0] == 0

    def mixed(batch: Batch) -> Batch:
        return {**batch, "x": 0.7 * batch["x"] + 0.3 * batch["x"][torch.randperm(len(batch["x"]))]}

    private = start(Scaled(), max_physical_batch_size=rows)
    with pytest.raises(SelfCheckError, match="this batch was not released"):
        train(private, mixed)
    assert private.steps_done == 0


def test_records_of_nan_hide_others_and_are_no_mixing() -> None:
    """With a mean over the batch, zero times their NaN reaches the weights' gradient of every example."""
    data = examples(40)
    for example in data[::4]:
        example["x"] = torch.full((FEATURES,), math.nan)
    model = Logits()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = start(model, loader(data, 10), optimizer, noise_multiplier=1.0, criterion=row_losses, epochs=1)
    train_epoch(private, lambda model, batch: row_losses(model(batch["x"]), batch).mean())
    assert all(p.isfinite().all() for p in model.parameters())


def test_a_model_that_comes_to_mix_rows_is_refused_beside_a_loss_in_the_loop() -> None:
    class Late(Logits):
        calls = 0

        def logits(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += len(x) > 4
            return super().logits(x + (0.1 * x.mean(0) if self.calls > 20 else 0))

    private = start(Late(), sampling="shuffled", adjacency="replace_one", epochs=20)
    with pytest.raises(SelfCheckError, match="changes when it is run alone"):
        _train_outside(private)


def _train_outside(private: Private) -> None:
    for _ in range(20):
        for batch in private.data_loader:
            F.cross_entropy(private.model(batch["x"]), batch["labels"]).backward()
            private.optimizer.step()
            private.optimizer.zero_grad()
