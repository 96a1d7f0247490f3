"""Honest programs that `tests/honest` does not have: verification must not refuse them or slow them down."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy
import pytest
import torch
import transformers as hf
from torch import nn
from torch.utils.data import DataLoader, Dataset

import fastdp

WORDS, WIDTH = 40, 16
Batch = dict[str, Any]
Loop = Callable[[nn.Module, Batch], torch.Tensor]


def gpt2() -> nn.Module:
    config = hf.GPT2Config(vocab_size=WORDS, n_embd=WIDTH, n_layer=1, n_head=2, n_positions=32)
    return hf.GPT2LMHeadModel(config)


def t5() -> nn.Module:
    config = hf.T5Config(
        vocab_size=WORDS, d_model=WIDTH, d_kv=8, d_ff=24, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    return hf.T5ForConditionalGeneration(config)


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


def train(model: nn.Module, data: Any, collate: Any, loop: Loop, seed: int, rate: float = 0.01, **options: Any) -> Any:
    """Train for four releases; every program here must take the fast route."""
    torch.manual_seed(seed), random.seed(seed), numpy.random.seed(seed)  # noqa: NPY002
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    loader = DataLoader(data, batch_size=4, shuffle=True, collate_fn=collate)
    options = {"noise_multiplier": 1.0, "target_delta": 1e-3, "epochs": 1, "max_physical_batch_size": 4, **options}
    private = fastdp.make_private(model, optimizer, loader, **options)
    with silent():
        for batch in private.data_loader:
            loop(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert private.steps_done == private.total_steps == 4
    assert private.route == "uses"
    return private


def seeds(count: int) -> Any:
    return pytest.mark.parametrize("seed", range(count))


@pytest.mark.parametrize("lengths", [[12, 12, 7], [12, 12, 10, 7], [12, 11, 12, 10], [12, 12, 12, 7]])
def test_rows_without_padding_before_a_row_with(lengths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """T5 leaves its mask out where no row is padded: a few rows of a batch go another way than all of it."""
    draw = random.Random(1)
    data = [[draw.randrange(1, WORDS) for _ in range(length)] for length in lengths]
    monkeypatch.setattr("fastdp.engine.uses.layout.Ticket.chosen_rows", lambda ticket: [0, len(lengths) // 2])
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


def labelled(items: Sequence[Sequence[int]]) -> Batch:
    batch = padded(items)
    return {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}


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

    private = train(gpt2(), texts(), labelled, loop, seed, method=method, rate=1e38, unsafe_seed=seed)
    assert private.nonfinite_examples > 0


class Noise(nn.Module):
    """Adds noise of a generator that it keeps."""

    def __init__(self, kind: str):
        super().__init__()
        make: Any = {
            "torch": lambda: torch.Generator().manual_seed(0),
            "numpy": lambda: numpy.random.default_rng(0),
            "python": lambda: random.Random(0),
        }
        self.generator: Any = make[kind]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self.generator, torch.Generator):
            return x + torch.randn(x.shape, generator=self.generator)
        if isinstance(self.generator, numpy.random.Generator):
            return x + torch.from_numpy(self.generator.normal(size=tuple(x.shape))).to(x)
        return x * torch.tensor([self.generator.random() for _ in x])[:, None]


def rows(count: int = 16) -> list[tuple[torch.Tensor, int]]:
    draw = torch.Generator().manual_seed(0)
    return [(torch.rand(6, generator=draw), number % 3) for number in range(count)]


@seeds(4)
@pytest.mark.parametrize("kind", ["torch", "numpy", "python"])
def test_a_model_that_holds_its_generator(kind: str, seed: int) -> None:
    model = nn.Sequential(nn.Linear(6, 8), Noise(kind), nn.Linear(8, 3))
    loop: Loop = lambda net, batch: nn.functional.cross_entropy(net(batch[0]), batch[1])  # noqa: E731
    private = train(model, rows(), None, loop, seed, loss_reduction="mean")
    assert any("draws random numbers" in sentence for sentence in private.card()["assumptions"])


class Drawing:
    """A loop with a generator of its own, which sometimes does something to a batch."""

    def __init__(self, seed: int, change: Callable[[torch.Tensor], torch.Tensor]):
        self.generator, self.change = numpy.random.default_rng(seed), change

    def __call__(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        x = self.change(batch[0]) if self.generator.random() < 0.15 else batch[0]
        return nn.functional.cross_entropy(model(x), batch[1])


@seeds(12)
def test_a_loop_that_seldom_flips_by_a_generator_of_its_own(seed: int) -> None:
    train(nn.Linear(6, 3), rows(), None, Drawing(seed, lambda x: x.flip(1)), seed, loss_reduction="mean")


@seeds(4)
def test_a_loop_that_seldom_mixes_rows_by_a_generator_of_its_own_is_found(seed: int) -> None:
    with pytest.raises(RuntimeError, match="another gradient beside other examples|another gradient alone"):
        train(nn.Linear(6, 3), rows(), None, Drawing(seed, lambda x: x + x.roll(1, 0)), seed, loss_reduction="mean")
