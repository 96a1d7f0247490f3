"""Loops that people really write: verification must not refuse them, slow them down, or change what they compute."""

from __future__ import annotations

import copy
import math
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import nn
from torch.utils.data import DataLoader, Dataset

import fastdp

WORDS, WIDTH, CLASSES = 40, 16, 3
Batch = dict[str, Any]
Loop = Callable[[nn.Module, Batch], torch.Tensor]

SMALL = {
    "vocab_size": WORDS,
    "hidden_size": WIDTH,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}


def gpt2() -> nn.Module:
    config = hf.GPT2Config(vocab_size=WORDS, n_embd=WIDTH, n_layer=1, n_head=2, n_positions=32)
    return hf.GPT2LMHeadModel(config)


def t5() -> nn.Module:
    config = hf.T5Config(
        vocab_size=WORDS, d_model=WIDTH, d_kv=8, d_ff=24, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    return hf.T5ForConditionalGeneration(config)


def bert() -> nn.Module:
    return hf.BertForMaskedLM(hf.BertConfig(**SMALL))


def texts(longest: int = 12, shortest: int = 4, count: int = 16) -> list[list[int]]:
    draw = random.Random(1)
    return [[draw.randrange(1, WORDS) for _ in range(draw.randint(shortest, longest))] for _ in range(count)]


def padded(items: Sequence[Sequence[int]]) -> Batch:
    ids = nn.utils.rnn.pad_sequence([torch.tensor(item) for item in items], batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


@contextmanager
def silent() -> Iterator[None]:
    """Neither the route nor anything else may be warned of."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*one-example route")
        yield


def train(
    model: nn.Module, data: Any, collate: Any, loop: Loop | None, seed: int, rate: float = 0.01, **options: Any
) -> Any:
    """Train for four releases; every program here must take the fast route."""
    torch.manual_seed(seed), random.seed(seed), numpy.random.seed(seed)  # noqa: NPY002
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    loader = DataLoader(data, batch_size=4, shuffle=True, collate_fn=collate)
    options = {"noise_multiplier": 1.0, "target_delta": 1e-3, "epochs": 1, "max_physical_batch_size": 4, **options}
    private = fastdp.make_private(model, optimizer, loader, **options)
    with silent():
        for batch in private.data_loader:
            loss = private.loss(model(batch["x"]), batch) if loop is None else loop(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert private.steps_done == private.total_steps == 4
    assert private.route == "uses"
    return private


def seeds(count: int) -> Any:
    return pytest.mark.parametrize("seed", range(count))


# Labels that the loop makes.


@seeds(3)
@pytest.mark.parametrize("mask", [True, False])
@pytest.mark.parametrize("make", [gpt2, t5, bert])
def test_labels_made_in_the_loop(make: Callable[[], nn.Module], mask: bool, seed: int) -> None:
    def loop(model: nn.Module, batch: Batch) -> torch.Tensor:
        ids = batch["input_ids"]
        labels = ids.clone()
        labels[(batch["attention_mask"] == 0) | (ids == 7)] = -100
        options = {"attention_mask": batch["attention_mask"]} if mask else {}
        return model(input_ids=ids, labels=labels, **options).loss

    # An encoder sees padding unless a mask hides it.
    data = texts(shortest=4 if mask or make is gpt2 else 12)
    train(make(), data, padded, loop, seed)


@pytest.mark.parametrize("lengths", [[12, 12, 7], [12, 12, 10, 7], [12, 11, 12, 10], [12, 12, 12, 7]])
def test_rows_without_padding_before_a_row_with(lengths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """T5 leaves its mask out where no row is padded: a few rows of a batch go another way than all of it."""
    draw = random.Random(1)
    data = [[draw.randrange(1, WORDS) for _ in range(length)] for length in lengths]
    monkeypatch.setattr("fastdp.engine.layout.Ticket.chosen_rows", lambda ticket: [0, len(lengths) // 2])
    model = t5()
    loader = DataLoader(data, batch_size=len(data), shuffle=True, collate_fn=padded)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    private = fastdp.make_private(model, optimizer, loader, noise_multiplier=1.0, target_delta=1e-3, epochs=2)
    with silent():
        for batch in private.data_loader:
            labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
            model(**batch, labels=labels).loss.backward()
            optimizer.step()
    assert private.route == "uses"


# Draws of the data set, the loop, the criterion, the model and the collator.


class Rows(Dataset):
    """Vectors and classes."""

    def __init__(self, noise: float = 0.0):
        generator = torch.Generator().manual_seed(2)
        self.x, self.noise = torch.rand(16, 6, generator=generator), noise

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Batch:
        x = self.x[index].clone()
        if self.noise:
            x = x.flip(0) if random.random() < 0.5 else x
            x = x + self.noise * torch.randn(6) + self.noise * torch.from_numpy(numpy.random.rand(6)).float()  # noqa: NPY002
        return {"x": x, "y": index % CLASSES}


def classifier() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def autoencoder() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 6), nn.Sigmoid())


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.times, self.body = nn.Embedding(10, 6), classifier()
        self.out = nn.Linear(CLASSES, 6)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return self.out(self.body(x + self.times(t)))


def classified(model: nn.Module, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def diffusion(model: nn.Module, batch: Batch) -> torch.Tensor:
    x = batch["x"]
    t, noise = torch.randint(0, 10, (x.shape[0],)), torch.randn_like(x)
    share = (1 - t / 10)[:, None]
    return F.mse_loss(model(share * x + (1 - share) * noise, t), noise)


def dropped(model: nn.Module, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(F.dropout(batch["x"], 0.2)), batch["y"])


def denoising(model: nn.Module, batch: Batch) -> torch.Tensor:
    return F.mse_loss(model(batch["x"] + 0.1 * torch.randn(batch["x"].shape)), batch["x"])


def finite(model: nn.Module, batch: Batch) -> torch.Tensor:
    loss = F.mse_loss(model(batch["x"]), batch["x"])
    if not math.isfinite(loss.item()):
        print("the loss is not finite, stopping")
        sys.exit(1)
    return loss


def reconstructed(model: nn.Module, batch: Batch) -> torch.Tensor:
    return F.binary_cross_entropy(model(batch["x"]), batch["x"])


@seeds(4)
@pytest.mark.parametrize(
    ("loop", "make", "noise"),
    [
        (classified, classifier, 0.1),
        (finite, autoencoder, 0.0),
        (reconstructed, autoencoder, 0.0),
        (dropped, classifier, 0.0),
        (denoising, autoencoder, 0.0),
        (diffusion, Denoiser, 0.0),
    ],
)
def test_a_loss_in_the_loop(loop: Loop, make: Callable[[], nn.Module], noise: float, seed: int) -> None:
    """With a data set that augments at random, noise, dropout or timesteps of the loop's own, and stock loss functions."""
    train(make(), Rows(noise), None, loop, seed, loss_reduction="mean")


def smoothed(output: torch.Tensor, batch: Batch) -> torch.Tensor:
    """A criterion that draws how far labels are smoothed."""
    smoothing = 0.2 * torch.rand(len(output))
    own = F.cross_entropy(output, batch["y"], reduction="none")
    return (1 - smoothing) * own - smoothing * output.log_softmax(1).mean(1)


@seeds(4)
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_a_criterion_that_draws(noise: float, seed: int) -> None:
    train(classifier(), Rows(noise), None, None, seed, criterion=smoothed)


class Masked(nn.Module):
    """A speech model that masks spans of each row in training, drawn by numpy, as wav2vec2 does."""

    def __init__(self) -> None:
        super().__init__()
        self.wave, self.head, self.mask = nn.Linear(1, 6), nn.Linear(6, CLASSES), nn.Parameter(torch.rand(6))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.wave(x.unsqueeze(-1))
        if self.training:
            spans = numpy.zeros(tuple(x.shape), dtype=bool)
            for row in range(len(x)):
                begin = numpy.random.randint(0, x.shape[1] - 1)  # noqa: NPY002
                spans[row, begin : begin + 2] = True
            hidden = torch.where(torch.from_numpy(spans)[..., None], self.mask, hidden)
        logits = self.head(torch.tanh(hidden).mean(1))
        return {"loss": F.cross_entropy(logits, y), "logits": logits}


@seeds(4)
def test_spans_that_are_masked_row_by_row(seed: int) -> None:
    train(Masked(), Rows(), None, lambda model, batch: model(**batch)["loss"], seed)


# Collators.


def labelled(items: Sequence[Sequence[int]]) -> Batch:
    batch = padded(items)
    return {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}


def counting(items: Sequence[Sequence[int]]) -> Batch:
    return {**labelled(items), "ntokens": sum(map(len, items))}


def by_length(items: Sequence[Sequence[int]]) -> Batch:
    return labelled(sorted(items, key=len, reverse=True))


@seeds(3)
@pytest.mark.parametrize("collate", [counting, by_length])
def test_collators_that_count_or_sort(collate: Any, seed: int) -> None:
    seen = 0

    def loop(model: nn.Module, batch: Batch) -> torch.Tensor:
        nonlocal seen
        seen += batch.pop("ntokens", 0)
        return model(**batch).loss

    train(gpt2(), texts(), collate, loop, seed)


@seeds(3)
@pytest.mark.parametrize(("longest", "shortest", "rate"), [(3, 2, 0.15), (12, 4, 0.02)])
def test_masked_words_of_short_texts_and_at_a_low_rate(longest: int, shortest: int, rate: float, seed: int) -> None:
    def mask(items: Sequence[Sequence[int]]) -> Batch:
        batch = padded(items)
        ids = batch["input_ids"]
        chosen = torch.bernoulli(rate * batch["attention_mask"].float()).bool()
        labels = ids.masked_fill(~chosen, -100)
        changed = torch.bernoulli(torch.full(ids.shape, 0.8)).bool() & chosen
        return {**batch, "input_ids": ids.masked_fill(changed, 3), "labels": labels}

    loop: Loop = lambda model, batch: model(**batch).loss  # noqa: E731
    train(bert(), texts(longest, shortest, 16), mask, loop, seed, max_physical_batch_size=2)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = classifier()

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        return {"logits": self.body(x)}


def test_a_trainer_with_a_criterion(tmp_path: Path) -> None:
    from fastdp import DPTrainer, PrivacyArguments

    def criterion(output: Any, batch: Batch) -> torch.Tensor:
        return F.cross_entropy(output["logits"], batch["labels"], reduction="none")

    data = [{"x": row["x"].tolist(), "labels": row["y"]} for row in (Rows()[index] for index in range(16))]
    arguments = hf.TrainingArguments(
        str(tmp_path), per_device_train_batch_size=4, num_train_epochs=1, report_to=[], use_cpu=True, save_strategy="no"
    )
    privacy = PrivacyArguments(noise_multiplier=1.0, target_delta=1e-3, criterion=criterion)
    trainer = DPTrainer(model=Plain(), args=arguments, train_dataset=data, privacy=privacy)
    with silent():
        trainer.train()
    assert trainer.private.steps_done == 4
    assert trainer.private.route == "uses"


class Cropped(Dataset):
    """Texts, of which long ones are cropped at random."""

    def __init__(self, texts: Sequence[list[int]]):
        self.texts = texts

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> list[int]:
        text = self.texts[index]
        begin = random.randint(0, len(text) - 8) if len(text) > 8 else 0
        return text[begin : begin + 8]


@seeds(4)
def test_long_texts_that_are_cropped_at_random(seed: int) -> None:
    loop: Loop = lambda model, batch: model(**batch).loss  # noqa: E731
    train(gpt2(), Cropped(texts()), labelled, loop, seed)


@seeds(2)
@pytest.mark.parametrize("method", [fastdp.DPSGD(), fastdp.DPSGD(max_grad_norm=1e30)])
def test_training_that_diverges_goes_on(method: Any, seed: int) -> None:
    """Nothing more is learned, and every example is left out; a search over learning rates reads it from the loss."""

    def loop(model: nn.Module, batch: Batch) -> torch.Tensor:
        return model(**batch).loss

    private = train(gpt2(), texts(), labelled, loop, seed, method=method, rate=1e38)
    assert private.nonfinite_examples > 0


# Hidden states.


class Head(nn.Module):
    """A classifier of the last two hidden states."""

    def __init__(self, kind: str):
        super().__init__()
        settings: Any = {**SMALL, "num_hidden_layers": 3}
        if kind == "llama":
            self.body = hf.LlamaModel(hf.LlamaConfig(**settings))
        else:
            dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
            self.body = hf.BertModel(hf.BertConfig(**settings, **dropout), add_pooling_layer=False)
        self.out, self.counts = nn.Linear(2 * WIDTH, CLASSES), []

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> Batch:
        states = self.body(input_ids, attention_mask=attention_mask, output_hidden_states=True).hidden_states
        self.counts.append(len(states))
        logits = self.out(torch.cat([states[-1][:, 0], states[-2][:, 0]], -1))
        return {"loss": F.cross_entropy(logits, labels)}


def clipped(model: nn.Module, batches: Sequence[Batch], bound: float) -> dict[str, torch.Tensor]:
    """Sums of each example's gradient scaled to norm ``bound`` at most, by autograd in float64."""
    model = copy.deepcopy(model).double()
    total: dict[str, torch.Tensor] = {}
    for batch in batches:
        for row in range(len(batch["labels"])):
            own = {name: t[row : row + 1] for name, t in batch.items()}
            length = int(own["attention_mask"].sum())
            own.update({name: own[name][:, :length] for name in ("input_ids", "attention_mask")})
            gradients = torch.autograd.grad(model(**own)["loss"], list(model.parameters()))
            scale = min(1.0, bound / float(torch.stack([g.norm() for g in gradients]).norm()))
            for (name, _), gradient in zip(model.named_parameters(), gradients):
                total[name] = total.get(name, 0) + scale * gradient
    return total


def distance(got: Mapping[str, torch.Tensor], truth: Mapping[str, torch.Tensor]) -> float:
    gap = sum(float((got[name] - own).square().sum()) for name, own in truth.items())
    return math.sqrt(gap / sum(float(own.square().sum()) for own in truth.values()))


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_a_head_on_hidden_states(kind: str) -> None:
    torch.manual_seed(0)
    model = Head(kind)
    data = [{"ids": text, "label": index % CLASSES} for index, text in enumerate(texts())]

    def collate(items: Sequence[Batch]) -> Batch:
        return {**padded([item["ids"] for item in items]), "labels": torch.tensor([item["label"] for item in items])}

    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loader = DataLoader(data, batch_size=8, collate_fn=collate)  # type: ignore[arg-type]
    method = fastdp.DPSGD(max_grad_norm=1.0)
    private = fastdp.make_private(model, optimizer, loader, method=method, noise_multiplier=0.0, epochs=2)
    batches = []
    for batch in private.data_loader:
        model(**batch)["loss"].backward()
        batches.append(batch)
        optimizer.step()
        if private.last_step_done:
            got = {name: 8 * p.grad.double() for name, p in model.named_parameters() if p.grad is not None}
            assert distance(got, clipped(model, batches, 1.0)) < 1e-5
            batches.clear()
        optimizer.zero_grad()
    assert private.route == "uses"
    model.eval()
    with torch.no_grad():
        model(**collate(data[:3]))
        private.detach()
        model(**collate(data[:3]))
    model.train()(**collate(data[:3]))
    assert set(model.counts) == {4}
