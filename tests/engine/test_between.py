"""What a loop makes of a batch before it calls the model: of each row alone it may be anything, of all together nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F

import fastdp
from fastdp.engine.errors import SelfCheckError
from fastdp.private.run import Private
from tests.engine.runs import FEATURES, Batch, Classifier, clipped_sum, error, examples, loader, one_by_one, start

CLIPPED = 1e-4


class Scaled(Classifier):
    """Takes a number besides its rows."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None, scale: Any = 1.0) -> Any:
        return super().forward(x * scale, labels)


def own_generator() -> Callable[[Batch], Batch]:
    generator = torch.Generator().manual_seed(3)
    return lambda batch: {**batch, "x": batch["x"] + torch.randn(batch["x"].shape, generator=generator)}


def annealed() -> Callable[[Batch], Any]:
    numbers = iter(range(100))
    return lambda batch: {**batch, "scale": 1 - 0.01 * next(numbers)}


def mixed(weight: float) -> Callable[[Batch], Batch]:
    generator = numpy.random.default_rng(5)

    def mix(batch: Batch) -> Batch:
        order = torch.from_numpy(generator.permutation(len(batch["x"])))
        return {**batch, "x": (1 - weight) * batch["x"] + weight * batch["x"][order]}

    return mix


def written(change: Callable[[Batch], Any]) -> Callable[[Batch], Batch]:
    def make(batch: Batch) -> Batch:
        change(batch)
        return batch

    return make


BY_ROW: dict[str, Callable[[], Callable[[Batch], Any]]] = {
    "normalised": lambda: lambda b: {**b, "x": b["x"] / b["x"].norm(dim=1, keepdim=True)},
    "noised": lambda: lambda b: {**b, "x": b["x"] + torch.randn_like(b["x"])},
    "noised by a generator of its own": own_generator,
    "a constant": lambda: lambda b: {**b, "scale": 0.5},
    "an annealed number": annealed,
    "a map": lambda: lambda b: {**b, "x": b["x"] @ torch.ones(FEATURES, FEATURES)},
    "written into": lambda: written(lambda b: b["x"].div_(b["x"].norm(dim=1, keepdim=True))),
}
TOGETHER: dict[str, Callable[[], Callable[[Batch], Any]]] = {
    "centred": lambda: lambda b: {**b, "x": b["x"] - b["x"].mean(0)},
    "barely centred": lambda: lambda b: {**b, "x": b["x"] - 1e-4 * b["x"].mean(0)},
    "a large entry": lambda: lambda b: {**b, "x": b["x"] / b["x"].abs().max()},
    "a count": lambda: lambda b: {**b, "x": b["x"] / len(b["x"])},
    "mixed": lambda: mixed(0.3),
    "hardly mixed": lambda: mixed(1e-3),
    "a number": lambda: lambda b: {**b, "scale": float(b["x"].mean())},
    "a number of numpy's": lambda: lambda b: {**b, "scale": b["x"].numpy().mean()},
    "an array": lambda: lambda b: {**b, "scale": numpy.asarray(b["x"].numpy().mean())},
    "a class's share": lambda: lambda b: {**b, "scale": (b["labels"] == 0).float().mean()},
    "sorted": lambda: lambda b: {**b, "x": b["x"].sort(0).values},
    "labels of the next row": lambda: lambda b: {**b, "labels": b["labels"].roll(1)},
    "written into": lambda: written(lambda b: b["x"].sub_(b["x"].mean(0))),
    "written through numpy": lambda: written(lambda b: numpy.subtract(b["x"], b["x"].mean(0), out=b["x"].numpy())),
}


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


def train(
    private: Private, make: Callable[[Batch], Any], loss: str = "the model's own", releases: int = 1
) -> list[Batch]:
    """A loop until so many releases; what of its batches was summed."""
    summed: list[Batch] = []
    for batch in private.data_loader:
        tried = private.data_loader.tickets[0].company
        made = make(batch)
        summed += [] if tried else [made]
        private.optimizer.zero_grad()
        LOSSES[loss][2](private, private.model(**made), made).backward()
        private.optimizer.step()
        releases -= private.last_step_done
        if releases == 0:
            break
    return summed


@pytest.mark.parametrize("name", TOGETHER)
@pytest.mark.parametrize("most", [8, 3])
@pytest.mark.parametrize("loss", LOSSES)
def test_what_is_made_of_all_rows_together_is_refused_before_a_release(name: str, most: int, loss: str) -> None:
    model, options, _ = LOSSES[loss]
    private = start(model(), max_physical_batch_size=most, **options)
    with pytest.raises(SelfCheckError, match="beside other companions|couples examples|draws at random"):
        train(private, TOGETHER[name](), loss)
    assert private.steps_done == 0


@pytest.mark.parametrize("loss", ["a criterion", "the loop's mean"])
def test_a_loop_that_draws_with_a_criterion_outside_is_told_what_to_do(loss: str) -> None:
    model, options, _ = LOSSES[loss]
    for name in ("noised", "noised by a generator of its own", "an annealed number"):
        private = start(model(), **options)
        with pytest.raises(SelfCheckError, match="draws at random, or changes from batch to batch"):
            train(private, BY_ROW[name](), loss)


@pytest.mark.parametrize("name", ["centred", "hardly mixed"])
def test_a_loop_that_goes_on_after_a_refusal_is_tried_again(name: str) -> None:
    private, make = start(Scaled()), TOGETHER[name]()
    for _ in range(2):
        with pytest.raises(SelfCheckError, match="another for an example"):
            train(private, make)
    assert private.steps_done == 0


@pytest.mark.parametrize(
    ("name", "loss"),
    [*((name, "the model's own") for name in BY_ROW), *((n, k) for n in ("normalised", "a constant") for k in LOSSES)],
)
def test_what_is_made_of_each_row_is_summed_as_ever(name: str, loss: str) -> None:
    model, options, _ = LOSSES[loss]
    private = start(model(), **options, method=fastdp.DPSGD(max_grad_norm=0.5), max_physical_batch_size=3)
    summed = train(private, BY_ROW[name](), loss)
    plain = Scaled()
    plain.load_state_dict(private.model.state_dict())
    # A number is one for all rows, and so each row's own.
    rows = [
        {k: v if isinstance(v, torch.Tensor) else torch.full((len(b["x"]), 1), v) for k, v in b.items()} for b in summed
    ]
    truth = [gradient for batch in rows for gradient in one_by_one(plain, batch)]
    got = {
        n: private.data_loader.batch_size * p.grad for n, p in private.model.named_parameters() if p.grad is not None
    }
    assert error(got, clipped_sum(truth, 0.5)) < CLIPPED


def test_a_loop_that_makes_nothing_gets_no_batch_besides_its_own() -> None:
    for make in (lambda b: b, lambda b: {"x": b["x"].double().float(), "labels": b["labels"].clone()}):
        private = start(noise_multiplier=1.0, target_delta=1e-3)
        tried = []
        for batch in private.data_loader:
            tried.append(private.data_loader.tickets[0].company)
            private.model(**make(batch))["loss"].backward()
            private.optimizer.step()
            private.optimizer.zero_grad()
        assert not any(tried)


def test_a_trial_leaves_random_states_and_the_draws_as_they_were() -> None:
    states = []
    for name in ("a constant", "a map"):
        private = start(Scaled())
        torch.manual_seed(7)
        train(private, BY_ROW[name]())
        states.append(torch.get_rng_state())
    private = start(Scaled())
    torch.manual_seed(7)
    train(private, lambda batch: batch)
    assert all(torch.equal(state, torch.get_rng_state()) for state in states)


def test_a_trial_that_is_broken_off_begins_anew() -> None:
    private = start(Scaled(), max_physical_batch_size=3)
    for number, batch in enumerate(private.data_loader):
        private.model(**BY_ROW["normalised"]()(batch))["loss"].backward()
        private.optimizer.step()
        if number == 2:
            break
    assert private.steps_done == 0
    with pytest.raises(SelfCheckError, match="another for an example"):
        train(private, TOGETHER["centred"]())
    assert private.steps_done == 0


def test_rows_that_never_meet_cannot_reach_each_other() -> None:
    private = start(Scaled(), loader(examples(6), batch_size=3), max_physical_batch_size=1)
    assert all(len(batch["x"]) == 1 for batch in train(private, TOGETHER["centred"]()))
    assert private.steps_done == 1


RARELY: dict[str, Callable[[Batch], Batch]] = {
    "scaled": lambda b: {**b, "x": b["x"] / b["x"].abs().max()} if b["x"].abs().max() > 100 else b,
    "scaled in place": written(lambda b: b["x"].div_(b["x"].abs().max()) if b["x"].abs().max() > 100 else b),
    "a number": lambda b: {**b, "scale": 0.5} if b["x"].abs().max() > 100 else b,
}


@pytest.mark.parametrize("name", RARELY)
@pytest.mark.parametrize("at", [1, 5])
def test_what_a_loop_makes_of_one_late_batch_alone_is_looked_at_in_that_batch(name: str, at: int) -> None:
    """Nothing in the first batches is large: the trial needs the very batch in which something is."""
    data = examples(8)
    private = start(Scaled(), loader(data), epochs=4)
    for _ in range(2):
        train(private, RARELY[name])
    data[at] = {**data[at], "x": torch.full((FEATURES,), 1e3)}
    with pytest.raises(SelfCheckError, match="another for an example"):
        train(private, RARELY[name])
    assert private.steps_done == 2


@pytest.mark.parametrize("kind", ["large", "long"])
def test_a_loop_that_changes_every_batch_is_tried_with_one_that_is_larger_than_all_before(kind: str) -> None:
    data: list[Any] = [[1 + i % 8] * 6 for i in range(8)] if kind == "long" else examples(8)

    def scaled(batch: Batch) -> Batch:
        x = 1.5 * batch["x"]
        return {**batch, "x": x / x.abs().max() if x.abs().max() > 100 else x}

    def cut(batch: Batch) -> Batch:
        labels = batch["labels"].clone()
        return {**batch, "labels": labels[:, :4] if labels.shape[1] > 9 else labels, "ids": batch["ids"] % 9 + 0}

    def shorter(batch: Batch) -> Batch:
        made = cut(batch)
        return {name: t[:, : made["labels"].shape[1]] for name, t in made.items()}

    def padded(items: Any) -> Batch:
        rows = [torch.tensor(item) for item in items]
        ids, labels = (torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=v) for v in (0, -100))
        return {"ids": ids + 9, "labels": labels}

    if kind == "large":
        private, make = start(Scaled(), loader(data), epochs=4), scaled
    else:
        private, make = start(Places(), loader(data, collate_fn=padded), epochs=4), shorter
    for _ in range(2):
        train(private, make)
    data[5] = [3] * 20 if kind == "long" else {**data[5], "x": torch.full((FEATURES,), 1e3)}
    with pytest.raises(SelfCheckError, match="another for an example|another loss"):
        train(private, make)
    assert private.steps_done == 2


def test_a_loop_that_changes_every_row_by_itself_may_meet_a_larger_one() -> None:
    data = examples(8)
    private = start(Scaled(), loader(data), epochs=4)
    for scale in (1.0, 1e3, 1e6, 1.0):
        data[5] = {**data[5], "x": torch.full((FEATURES,), scale)}
        train(private, BY_ROW["normalised"]())
    assert private.steps_done == 4


def test_what_a_loop_makes_of_a_late_batch_by_row_is_summed() -> None:
    private = start(Scaled(), loader(examples(8)), epochs=4)
    for make in (lambda b: b, BY_ROW["normalised"](), BY_ROW["written into"](), lambda b: b):
        train(private, make)
    assert private.steps_done == 4


class Set(Scaled):
    """Takes what its batches are scaled by from attributes of a module."""

    def __init__(self) -> None:
        super().__init__()
        self.second.scale, self.second.flips = 1.0, False

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return super().logits(x * self.second.scale * (-1 if self.second.flips else 1))


def train_setting(private: Private, make: Callable[[Batch], Any], name: str = "scale") -> None:
    for batch in private.data_loader:
        value = make(batch)
        if value is not None:
            setattr(private.model.second, name, value)
        private.model(**batch)["loss"].backward()
        private.optimizer.step()
        private.optimizer.zero_grad()


SET: dict[str, Callable[[Batch], Any]] = {
    "number": lambda b: float(b["x"].mean()),
    "tensor": lambda b: b["x"].mean(),
    "once": lambda b: -1.0 if b["x"].abs().max() > 100 else None,
    "flips": lambda b: bool(b["x"].abs().max() > 100),
}


@pytest.mark.parametrize("name", SET)
@pytest.mark.parametrize("late", [False, True])
def test_what_a_loop_sets_in_a_module_is_looked_at(name: str, late: bool) -> None:
    data = examples(8)
    private = start(Set(), loader(data), epochs=4)
    kind = "flips" if name == "flips" else "scale"
    for _ in range(2 if late or name in ("once", "flips") else 0):
        train_setting(private, SET[name] if name in ("once", "flips") else lambda batch: 0.5, kind)
    before = private.steps_done
    data[5] = {**data[5], "x": torch.full((FEATURES,), 1e3)}
    with pytest.raises(SelfCheckError, match="another for an example"):
        train_setting(private, SET[name], kind)
    assert private.steps_done == before


def test_what_a_loop_sets_for_all_batches_or_by_their_number_is_its_own() -> None:
    numbers = iter(range(100))
    for make in (lambda batch: 0.5, lambda batch: 1 - 0.01 * next(numbers)):
        private = start(Set(), epochs=3)
        for _ in range(3):
            train_setting(private, make)
        assert private.steps_done == private.total_steps
        private.detach()
    # What a trial put back is again what the loop has set.
    assert private.model.second.scale < 1


class Named(Scaled):
    """Takes a text besides its rows, and one for each row."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor, kind: str = "", names: Any = ()) -> Any:
        return super().forward(x, labels, -1.0 if kind == "large" else 1.0)


def test_a_text_that_tells_of_a_batch_is_looked_at_and_texts_of_rows_are_their_own() -> None:
    data = examples(8)
    private = start(Named(), loader(data), epochs=4)

    def named(batch: Batch) -> dict[str, Any]:
        kind = "large" if batch["x"].abs().max() > 100 else "usual"
        return {**batch, "kind": kind, "names": [f"row {float(x[0])}" for x in batch["x"]]}

    for _ in range(2):
        train(private, named)
    data[5] = {**data[5], "x": torch.full((FEATURES,), 1e3)}
    with pytest.raises(SelfCheckError, match="'kind'"):
        train(private, named)
    assert private.steps_done == 2


@pytest.mark.parametrize("size", [1.0, 1e3])
def test_a_criterion_is_tried_again_with_a_batch_that_holds_something_larger(size: float) -> None:
    data = examples(8)
    private = start(Classifier(), loader(data), epochs=4, loss_reduction="mean")

    def train_by(batches: Any) -> None:
        for batch in batches:
            sign = -1 if batch["x"].abs().max() > 100 else 1
            logits = private.model(batch["x"])["logits"]
            F.cross_entropy(sign * logits, batch["labels"]).backward()
            private.optimizer.step()
            private.optimizer.zero_grad()

    for _ in range(2):
        train_by(private.data_loader)
    data[5] = {**data[5], "x": torch.full((FEATURES,), size)}
    if size == 1.0:
        train_by(private.data_loader)
        return
    with pytest.raises(SelfCheckError, match="criterion couples"):
        train_by(private.data_loader)
    assert private.steps_done == 2


class Places(torch.nn.Module):
    """Tokens that know where they stand in their row, and how many there are beside a mask."""

    def __init__(self, *, alone: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places, self.head = torch.nn.Embedding(9, 6), torch.nn.Embedding(32, 6), torch.nn.Linear(6, 9)
        self.alone = alone

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Any:
        logits = self.head(torch.tanh(self.words(ids) + self.places(torch.arange(ids.shape[1]))))
        if self.alone:
            losses = -logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
            return {"loss": ((losses * (labels >= 0)).sum(1) / (labels >= 0).sum(1)).mean()}
        return {"loss": F.cross_entropy(logits.transpose(1, 2), labels)}


def of_one_width(side: str) -> Callable[[Any], Batch]:
    def collate(items: Any) -> Batch:
        found = {}
        for name, fill in (("ids", 0), ("labels", -100)):
            rows = [(24 - len(i)) * [fill] + i if side == "left" else i + (24 - len(i)) * [fill] for i in items]
            found[name] = torch.tensor(rows)
        return found

    return collate


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("alone", [False, True])
def test_padding_that_a_loop_cuts_by_the_batch_may_change_no_loss(side: str, alone: bool) -> None:
    """Every row has one width as it is handed out, and so the same places whatever stands beside it."""
    data = [[1 + i % 8] * (3 + i) for i in range(8)]

    def cut(batch: Batch) -> Batch:
        width = int((batch["labels"] >= 0).sum(1).max())
        return {name: t[:, -width:] if side == "left" else t[:, :width] for name, t in batch.items()}

    private = start(Places(alone=alone), loader(data, collate_fn=of_one_width(side)))
    if side == "left":
        with pytest.raises(SelfCheckError, match="what the loop pads or cuts by the batch changes it"):
            train(private, cut)
        assert private.steps_done == 0
        train(private, lambda batch: batch)
    else:
        train(private, cut)
    assert private.steps_done == 1
    assert private.route == ("one-example" if alone else "uses")


def test_a_loop_may_make_tensors_of_texts() -> None:
    data = [" ".join(str(1 + i % 8) for _ in range(3 + i)) for i in range(8)]

    def encoded(batch: list[str]) -> Batch:
        rows = [torch.tensor([int(word) for word in text.split()]) for text in batch]
        ids, labels = (torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=v) for v in (0, -100))
        return {"ids": ids, "labels": labels}

    private = start(Places(), loader(data, collate_fn=list))
    train(private, encoded)
    assert private.steps_done == 1
