"""A row's loss in its batch is the loss of the example alone: what breaks that is refused, or run one example at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import fastdp
from fastdp.engine.errors import SelfCheckError
from fastdp.private.run import Private
from tests.cases import cases, pairs
from tests.engine.models import build
from tests.engine.nets import EXACT, Net, parameter, trained
from tests.engine.reference import engine_for, feed
from tests.engine.runs import CLIPPED, Batch, clipped_sum, collate, error, examples, logical_step, one_by_one, start
from tests.loops import train_epoch, trained as trained_on

BOUND = 0.5


def int8(net: Net, h: torch.Tensor) -> torch.Tensor:
    """Activations rounded to 255 levels of the largest in the batch, with a straight-through gradient."""
    scale = h.detach().abs().max() / 127
    return h + ((h / scale).round() * scale - h).detach()


def capacity(net: Any, h: torch.Tensor) -> torch.Tensor:
    """Two experts that take at most three quarters of the rows each, first come, first served."""
    chances = net.router(h).softmax(-1)
    chosen = F.one_hot(chances.argmax(-1), 2)
    place = (chosen.cumsum(0) * chosen).sum(1)
    return h * (place <= max(1, int(0.75 * len(h)))).float().unsqueeze(1) * chances.max(-1, keepdim=True).values


class Recurrent(Net):
    """Begins each pass with the hidden state in which the one before ended."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        h = torch.tanh(self.first(x)) + getattr(self, "hidden", 0.0)
        self.hidden = h.detach().mean(0)
        return {"loss": F.cross_entropy(self.second(h), labels)}


COUPLING: dict[str, Callable[[], nn.Module]] = {
    "the batch's mean": lambda: Net(before=lambda net, x: x + 1e-2 * x.mean(0)),
    "the batch's mean, detached": lambda: Net(lambda net, h: h + 1e-2 * h.mean(0).detach()),
    "the batch's scale": lambda: Net(before=lambda net, x: x / x.std(0).mean()),
    "int8 activations": lambda: Net(int8),
    "expert capacity": lambda: Net(capacity, router=nn.Linear(6, 2)),
    "contrast": lambda: Net(loss=lambda o, y: F.cross_entropy(o @ o.T, torch.arange(len(o)))),
    "dropout and the mean": lambda: Net(lambda net, h: F.dropout(h + h.mean(0), 0.5)),
    "the hidden state of the batch before": lambda: Recurrent(),
    # Below rounding in other shapes, and above it in the same shapes beside other companions.
    "the batch's mean, hardly": lambda: Net(lambda net, h: h + 1e-5 * h.mean(0).detach()),
    # Of one row a softmax gives ones, and cross-entropy the logarithm of the classes, which another row may nearly have.
    "a softmax over rows": lambda: Net(loss=lambda o, y: F.cross_entropy((o / 100).softmax(0), y)),
    # Terms over the batch; of one row alone each has a value, or none.
    "a balance of experts": lambda: Net(loss=lambda o, y: F.cross_entropy(o, y) + o.softmax(-1).mean(0).square().sum()),
    "a variance over rows": lambda: Net(loss=lambda o, y: F.cross_entropy(o, y) + F.relu(4 - o.std(0)).mean()),
    "a product of rows": lambda: Net(loss=lambda o, y: F.cross_entropy(o, y) + 1e-3 * (o @ o.T).mean()),
}


@pytest.mark.parametrize("name", COUPLING)
def test_models_that_couple_rows_are_refused(name: str) -> None:
    model = COUPLING[name]()
    with pytest.raises(SelfCheckError, match="this batch was not released"):
        trained(model, collate(examples(6)))
    assert all(p.grad is None for p in model.parameters())


def test_a_capacity_that_one_row_meets_is_found_whichever_rows_are_run_alone() -> None:
    """The seventh positive row finds no place; the last row is none."""
    data = collate(examples(8))
    data["x"][:, 0] = torch.tensor([1.0] * 7 + [-1.0])

    class Crowded(Net):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
            positive = (x[:, :1] > 0).int()
            return super().forward(x * (positive.cumsum(0) * positive < 7), labels)

    with pytest.raises(SelfCheckError, match="this batch was not released"):
        trained(Crowded(), data)


def test_a_mean_over_rows_of_one_kind_is_found_where_most_are_of_another() -> None:
    """Rows that are run alone may have no part of the term; it is divided by the rows of the batch that have."""
    data = collate(examples(8))
    data["labels"] = torch.tensor([0, 0, 1, 0, 1, 0, 0, 0])
    model = Net(loss=lambda o, y: F.cross_entropy(o, y) + (o.square().sum(1) * y).sum() / y.sum().clamp(min=1))
    engine = trained(model, data, BOUND)
    assert engine.route == "one-example"
    assert error(engine.accumulator.sums, clipped_sum(one_by_one(model, data), BOUND)) < EXACT


def test_a_refusal_names_the_module_where_rows_meet() -> None:
    class Mixing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + x.mean(0)

    model = Net(lambda net, h: net.mixing(h), mixing=Mixing())
    with pytest.raises(SelfCheckError, match="first in the output of mixing"):
        trained(model, collate(examples(6)))


#: Terms of a model's own beside torch's loss.
TERMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "stacked": lambda o: torch.stack([row.square().sum() for row in o]).mean(),
    "a mean by dimension": lambda o: o.tanh().mean(0).mean(),
    "two means, stacked": lambda o: torch.stack([o.tanh().sum(1), o.square().sum(1)]).mean(1).sum(),
    "features first": lambda o: o.tanh().T.mean(1).sum(),
    "a trace": lambda o: torch.trace(o.tanh() @ o.new_ones(o.shape[1], len(o))) / len(o),
    "Python's sum": lambda o: sum(o.square().sum(1)) / len(o),
    "an equation": lambda o: torch.einsum("b->", o.square().sum(1)) / len(o),
    "a product with weights": lambda o: o.square().sum(1) @ o.new_full((len(o),), 0.5) / len(o),
    "a sum by dimension": lambda o: o.tanh().sum(0).sum(),
    "divided by a count": lambda o: o.relu().sum((0, 1)) / (o.detach() > -1e9).sum(),
}


@pytest.mark.parametrize("name", TERMS)
def test_a_term_of_the_rows_themselves_is_never_refused(name: str) -> None:
    model, data = Net(loss=lambda o, y: F.cross_entropy(o, y) + TERMS[name](o)), collate(examples(6))
    engine = trained(model, data, BOUND)
    assert engine.route == "uses"
    assert error(engine.accumulator.sums, clipped_sum(one_by_one(model, data), BOUND)) < EXACT


def test_the_same_function_may_normalize_a_weight() -> None:
    """As weight standardization does."""

    def standardised(net: Any, h: torch.Tensor) -> torch.Tensor:
        weight = F.batch_norm(net.own.reshape(1, 6, -1), None, None, training=True, eps=1e-4).view(6, 6)
        return F.linear(h, weight)

    model, data = Net(standardised, own=parameter(6, 6)), collate(examples(6))
    assert error(trained(model, data).accumulator.sums, clipped_sum(one_by_one(model, data), BOUND)) < EXACT


@pytest.mark.parametrize("preserved", [True, False])
def test_checkpoints_must_keep_their_dropout_masks(preserved: bool) -> None:
    def middle(net: Net, h: torch.Tensor) -> torch.Tensor:
        def part(v: torch.Tensor) -> torch.Tensor:
            return F.dropout(torch.tanh(v), 0.5)

        out: torch.Tensor = checkpoint(part, h, use_reentrant=False, preserve_rng_state=preserved)
        return out

    if preserved:
        assert trained(Net(middle), collate(examples(6))).route == "uses"
        return
    with pytest.raises(SelfCheckError, match="preserve_rng_state=True"):
        trained(Net(middle), collate(examples(6)))


class Spreading(torch.autograd.Function):
    """Returns its input, and adds 0 times the mean gradient to each row's."""

    @staticmethod
    def forward(ctx: Any, h: torch.Tensor) -> torch.Tensor:
        return h.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient + 0 * gradient.mean(0)


#: Each keeps finite rows apart to the last bit.
SPREADING: dict[str, Callable[[], nn.Module]] = {
    "0 times the mean": lambda: Net(before=lambda net, x: x + 0 * x.mean(0)),
    "0 times the mean, detached": lambda: Net(lambda net, h: h + 0 * h.mean(0).detach()),
    "backward alone": lambda: Net(lambda net, h: Spreading.apply(h)),
}


@pytest.mark.parametrize(*pairs(("value", [float("nan"), float("inf")]), ("first", [True, False]), ("name", SPREADING)))
def test_a_record_that_is_not_finite_takes_no_other_along(name: str, first: bool, value: float) -> None:
    data = collate(examples(6))
    truth = clipped_sum(one_by_one(SPREADING[name](), data), BOUND)
    engine, tickets = engine_for(SPREADING[name](), BOUND)
    if not first:
        feed(engine, tickets, data)
    feed(engine, tickets, collate([*examples(6), {"x": torch.full((5,), value), "labels": 0}]))
    assert engine.route == "one-example"
    assert error(engine.accumulator.sums, truth) < EXACT


def test_a_record_that_is_not_finite_slows_no_model_that_keeps_it_apart() -> None:
    more = collate([*examples(6), {"x": torch.full((5,), float("nan")), "labels": 0}])
    engine = trained(Net(), more, BOUND)
    assert engine.route == "uses", engine.reason
    assert error(engine.accumulator.sums, clipped_sum(one_by_one(Net(), collate(examples(6))), BOUND)) < CLIPPED


def texts(lengths: Sequence[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 61, (length,), generator=generator).tolist() for length in lengths]


def padding(side: str, masked: bool) -> Callable[[list[list[int]]], Batch]:
    """A collator as tokenizers pad, to the longest text of the batch."""

    def pad(items: list[list[int]]) -> Batch:
        width, rows = max(map(len, items)), []
        for item in items:
            fill = [0] * (width - len(item))
            rows.append(fill + item if side == "left" else item + fill)
        ids = torch.tensor(rows)
        batch = {"input_ids": ids, "labels": ids.masked_fill(ids == 0, -100)}
        return batch | ({"attention_mask": (ids > 0).long()} if masked else {})

    return pad


def released(private: Private) -> dict[str, torch.Tensor]:
    """The sum of an epoch of one batch of eight."""
    for _ in trained_on(private):
        found = {n: 8 * p.grad for n, p in private.model.named_parameters()}
    return found


def own_gradients(make: Callable[[], nn.Module], data: list[list[int]]) -> list[dict[str, torch.Tensor]]:
    """Of each text alone, without padding."""
    return [one_by_one(make(), {k: torch.tensor([text]) for k in ("input_ids", "labels")})[0] for text in data]


gpt2 = partial(build, "gpt2")


@pytest.mark.parametrize(*pairs(("masked", [True, False]), ("side", ["left", "right"]), ("long", [0, 1, None])))
def test_padding_that_moves_positions_changes_no_clipped_sum(long: int | None, side: str, masked: bool) -> None:
    """GPT-2 counts positions from the first token of the row, padding included."""
    data = texts([6] * 8)
    batches = DataLoader(data, batch_size=8, collate_fn=padding(side, masked))  # type: ignore[arg-type]
    private = start(gpt2(), batches, epochs=3, method=fastdp.DPSGD(max_grad_norm=BOUND))
    for number in range(2):
        if number == long:
            data[3] = texts([40])[0]
        assert error(released(private), clipped_sum(own_gradients(gpt2, data), BOUND)) < CLIPPED
    assert private.route == ("one-example" if side == "left" and long is not None else "uses")


@pytest.mark.parametrize("bound", [1.0, 1e30])
def test_training_that_diverges_goes_on(bound: float) -> None:
    """Nothing more is learned, and every example is left out; a search over learning rates reads it from the loss."""
    model = gpt2()
    batches = DataLoader(texts([6] * 8), batch_size=8, collate_fn=padding("right", True))  # type: ignore[arg-type]
    options: dict[str, Any] = {"noise_multiplier": 1.0, "target_delta": 1e-3, "epochs": 4}
    method = fastdp.DPSGD(max_grad_norm=bound)
    private = start(model, batches, torch.optim.SGD(model.parameters(), lr=1e38), method=method, **options)
    for _ in range(4):
        released(private)
    assert private.steps_done == 4
    assert private.nonfinite_examples > 0
    assert private.route == "uses"


class Stretching(nn.Module):
    """Turns words round in a batch that is longer than ten."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(61, 6), nn.Linear(6, 61)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, attention_mask: torch.Tensor | None = None) -> Any:
        logits = self.head((-1 if input_ids.shape[1] > 10 else 1) * self.table(input_ids))
        return {"loss": F.cross_entropy(logits.transpose(1, 2), labels)}


@pytest.mark.parametrize("masked", [True, False], ids=["with a mask", "without"])
def test_a_branch_on_the_length_of_a_batch_is_found_in_the_first_longer_one(masked: bool) -> None:
    data = texts([4, 5, 6, 7] * 2)
    batches = DataLoader(data, batch_size=8, collate_fn=padding("right", masked))  # type: ignore[arg-type]
    private = start(Stretching(), batches, epochs=3, method=fastdp.DPSGD(max_grad_norm=BOUND))
    for length in (7, 20):
        data[3] = texts([length])[0]
        got = released(private)
        assert error(got, clipped_sum(own_gradients(Stretching, data), BOUND)) < CLIPPED
    assert private.route == "one-example"


class AlongTime(nn.Module):
    """A recurrent model of tokens; its time may run along either axis, whatever the data's does."""

    def __init__(self, batch_first: bool):
        super().__init__()
        self.embed, self.layer = nn.Embedding(96, 8), nn.GRU(8, 8, batch_first=batch_first)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.layer(self.embed(ids))[0]


@pytest.mark.parametrize(*pairs(("tokens", [12, 8]), ("rows_first", [True, False]), ("mistaken", [False, True])))
def test_time_may_run_along_either_axis_and_never_along_the_rows(tokens: int, rows_first: bool, mistaken: bool) -> None:
    model = AlongTime(batch_first=rows_first != mistaken)
    data = list(torch.randint(0, 96, (16, tokens), generator=torch.Generator().manual_seed(0)))
    loader = DataLoader(data, batch_size=8, collate_fn=lambda rows: torch.stack(rows, 0 if rows_first else 1))
    private = start(model, loader, noise_multiplier=1.0, epochs=1, loss_reduction="mean")
    with pytest.raises(SelfCheckError, match="never couple examples") if mistaken else nullcontext():
        train_epoch(private, lambda model, ids: F.mse_loss(model(ids), F.one_hot(ids % 8, 8).float()))
    assert private.steps_done == (0 if mistaken else 2)


@pytest.mark.parametrize("at", [0, 2])
def test_a_record_whose_gradient_alone_is_not_finite_is_left_out(at: int) -> None:
    """Its loss is finite. It was taken for a model that keeps state between batches, and ended the run."""

    def rooted(net: Net, h: torch.Tensor) -> torch.Tensor:
        # The slope of a root at 0 is infinite, and 0 times that is no number.
        return h + 0 * torch.where(h.abs() > 0.999999, 0 * h, h).abs().sqrt()

    data = collate(examples(6))
    data["x"][at] = 1e6
    engine = trained(Net(rooted), data)
    assert int(engine.accumulator.nonfinite) == 1
    assert all(bool(total.isfinite().all()) for total in engine.accumulator.sums.values())


def test_padding_that_changes_a_loss_is_found_where_training_draws_random_numbers() -> None:
    """wav2vec2 normalizes speech over time, without a mask, and skips layers at random."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    convolutions = {"conv_dim": (8, 8), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2}
    positions = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
    config = hf.Wav2Vec2Config(vocab_size=12, mask_time_prob=0.0, pad_token_id=0, **sizes, **convolutions, **positions)
    model = hf.Wav2Vec2ForCTC(config)
    model.freeze_feature_encoder()

    def pad(rows: Any) -> Any:
        speech = nn.utils.rnn.pad_sequence([row["speech"] for row in rows], batch_first=True)
        return {"input_values": speech, "labels": torch.tensor([row["labels"] for row in rows])}

    draw = torch.Generator().manual_seed(0)
    data = [{"speech": torch.randn(160 + 20 * (n % 4), generator=draw), "labels": [1 + n % 11, 2]} for n in range(24)]
    private = start(model.train(), DataLoader(data, batch_size=8, collate_fn=pad))
    with pytest.warns(UserWarning, match="padding changes this row's loss"):
        logical_step(private)
    assert private.route == "one-example"


class Averaged(nn.Module):
    """Averages a text over its padding too, and draws random numbers in evaluation as well."""

    def __init__(self, noise: str) -> None:
        super().__init__()
        self.embed, self.head, self.noise = nn.Embedding(20, 8), nn.Linear(8, 3), noise

    def forward(self, ids: Any, labels: Any) -> Any:
        hidden, chance = self.embed(ids), torch.rand([])
        if self.noise:
            hidden = hidden + 0.1 * (torch.randn_like(hidden) if self.noise == "of rows" else torch.randn(8))
        if self.training and chance < 0.1:
            hidden = 1.1 * hidden
        return {"loss": F.cross_entropy(self.head(hidden.mean(1)), labels)}


@cases("noise", ["", "of all", "of rows"])
def test_draws_in_evaluation_hide_no_padding_unless_they_follow_the_batch(noise: str) -> None:
    def pad(rows: Any) -> Any:
        ids = nn.utils.rnn.pad_sequence([row["ids"] for row in rows], batch_first=True)
        return {"ids": ids, "labels": torch.tensor([row["labels"] for row in rows])}

    torch.manual_seed(0)
    data = [{"ids": torch.randint(1, 20, (3 + n % 5,)), "labels": n % 3} for n in range(40)]
    private = start(Averaged(noise), DataLoader(data, batch_size=8, collate_fn=pad))
    logical_step(private)
    undecided = any("random numbers" in sentence for sentence in private.card()["assumptions"])
    assert (private.route == "one-example", undecided) == ((False, True) if noise == "of rows" else (True, False))
