"""What couples examples is refused, and what only looks like it is not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from fastdp.engine import later
from fastdp.engine.errors import SelfCheckError
from tests.engine.models import VOCABULARY
from tests.engine.nets import EXACT, Net, Step, exact, steps, trained
from tests.engine.reference import engine_for, feed, stepped, ticket
from tests.engine.runs import Batch, clipped_sum, collate, error, examples, one_by_one, start


def int8(net: Net, h: torch.Tensor) -> torch.Tensor:
    """Activations rounded to 255 levels of the largest in the batch, with a straight-through gradient."""
    scale = h.detach().abs().max() / 127
    return h + ((h / scale).round() * scale - h).detach()


def capacity(net: Any, h: torch.Tensor) -> torch.Tensor:
    """Two experts that take only so many rows of a batch, first come, first served."""
    chances = net.router(h).softmax(-1)
    chosen = F.one_hot(chances.argmax(-1), 2)
    place = (chosen.cumsum(0) * chosen).sum(1)
    return h * (place <= max(1, int(0.75 * len(h)))).float().unsqueeze(1) * chances.max(-1, keepdim=True).values


COUPLING: dict[str, Callable[[], nn.Module]] = {
    "the batch's mean in the inputs": lambda: Net(before=lambda net, x: x + 1e-4 * x.mean(0)),
    "the batch's mean, detached": lambda: Net(lambda net, h: h + 1e-4 * h.mean(0).detach()),
    "int8 activations": lambda: Net(int8),
    "int8 activations and one bf16 parameter": lambda: Net(int8, unused=nn.Parameter(torch.zeros(1).bfloat16())),
    "expert capacity": lambda: Net(capacity, router=nn.Linear(6, 2)),
    "contrast": lambda: Net(loss=lambda o, y: F.cross_entropy(o @ o.T, torch.arange(len(o)))),
    "contrast written out": lambda: Net(loss=lambda o, y: -torch.log_softmax(o @ o.T, -1).diagonal().mean()),
    "a balancing term": lambda: Net(loss=lambda o, y: F.cross_entropy(o, y) + o.mean(0).square().sum()),
}


@pytest.mark.parametrize("name", COUPLING)
def test_what_couples_examples_is_refused(name: str) -> None:
    model = COUPLING[name]()
    with pytest.raises(SelfCheckError, match="nothing was released"):
        trained(model, collate(examples(6)))
    assert all(p.grad is None for p in model.parameters())


class Words(nn.Module):
    """Token by token, with something done to the embeddings of the whole batch."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor] = lambda h: h, sparse: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(11, 6), nn.Linear(6, 11)
        self.between, self.sparse = between, sparse

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Any:
        hidden = self.between(self.table(ids))
        if self.sparse:
            kept = labels != -100
            hidden, labels = hidden[kept], labels[kept]
        return {"loss": F.cross_entropy(self.head(hidden).flatten(0, -2), labels.flatten())}


def sentences(labelled: list[int], tokens: int = 6) -> Batch:
    """Rows of which so many tokens carry labels."""
    ids = torch.randint(0, 11, (len(labelled), tokens), generator=torch.Generator().manual_seed(1))
    kept = torch.arange(tokens) < torch.tensor(labelled).unsqueeze(1)
    return {"ids": ids, "labels": ids.masked_fill(~kept, -100)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_gradient_that_reaches_other_rows_is_refused_however_small(dtype: torch.dtype, frozen: bool) -> None:
    model = Words(lambda h: h + 1e-4 * h.mean(0)).to(dtype)
    model.table.weight.requires_grad_(not frozen)
    with pytest.raises(SelfCheckError, match="couples examples"):
        trained(model, sentences([6] * 5))


def test_tokens_chosen_by_the_data_are_attributed_to_their_own_rows() -> None:
    """Equal numbers in the first batch, and in a later one unequal ones with a total that the rows divide."""
    model = Words(sparse=True)
    engine, tickets = engine_for(model, 0.5)
    for labelled in ([2, 2, 2, 2], [1, 3, 3, 1], [6, 1, 4, 1]):
        data = sentences(labelled)
        truth = one_by_one(Words(sparse=True), data)
        feed(engine, tickets, data)
        assert error(engine.accumulator.sums, clipped_sum(truth, 0.5)) < EXACT
    assert engine.route == "one-example"
    assert "the data choose which tokens" in str(engine.reason)


@pytest.mark.parametrize("sparse", [False, True])
def test_a_stock_head_on_labelled_tokens_alone(sparse: bool) -> None:
    config = hf.ModernBertConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        pad_token_id=0,
        sparse_prediction=sparse,
        attn_implementation="eager",
        **dict.fromkeys(("bos_token_id", "cls_token_id"), 1),
        **dict.fromkeys(("eos_token_id", "sep_token_id"), 2),
    )
    torch.manual_seed(0)
    model = hf.ModernBertForMaskedLM(config).train()
    for labelled in ([2, 2, 2, 2], [1, 3, 3, 1]):
        data = sentences(labelled)
        engine = exact(model, {"input_ids": data["ids"], "labels": data["labels"]})
        assert engine.route == ("one-example" if sparse else "uses")


RANDOM: dict[str, Step] = {
    "dropout at a literal rate": lambda net, h: F.dropout(h, 0.3, net.training),
    "noise": lambda net, h: h + torch.randn_like(h),
    "layers dropped at random": lambda net, h: 2 * h if torch.rand([]) < 0.5 else h,
    "Gumbel": lambda net, h: F.gumbel_softmax(h),
    "a mask": lambda net, h: h * torch.empty_like(h).bernoulli_(0.5),
}


@pytest.mark.parametrize("name", RANDOM)
def test_randomness_in_the_forward_pass_is_no_coupling(name: str) -> None:
    state = torch.get_rng_state()
    model = Net(RANDOM[name])
    torch.set_rng_state(state)
    engine = stepped(model, collate(examples(6)), 0.5)
    assert engine.route == "uses", engine.reason


def test_a_checkpoint_that_forgets_its_dropout_masks_is_refused() -> None:
    def middle(net: Net, h: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(
            lambda v: F.dropout(torch.tanh(v), 0.5), h, use_reentrant=False, preserve_rng_state=False
        )
        return out

    with pytest.raises(SelfCheckError, match="preserve_rng_state=True"):
        trained(Net(middle), collate(examples(6)))


class Later(Net):
    """Keeps what does not yet weigh anything, as in a warm-up."""

    def __init__(self, write: Callable[[Any, torch.Tensor], Any]):
        super().__init__()
        self.write = write
        self.register_buffer("average", torch.zeros(5))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        with torch.no_grad():
            self.write(self, x.mean(0))
        return super().forward(x, labels)


WEIGHTLESS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "in place": lambda net, mean: net.average.lerp_(mean, 0.0),
    "through data": lambda net, mean: net.average.data.lerp_(mean, 0.0),
    "an entry": lambda net, mean: net.average[0].mul_(mean[0] * 0),
    "a slice": lambda net, mean: net.average.__setitem__(slice(2), mean[:2] * 0),
    "as out": lambda net, mean: torch.lerp(net.average, mean, 0.0, out=net.average),
    "replaced": lambda net, mean: setattr(net, "average", torch.where(net.count > 3, mean, net.average)),
    "other memory": lambda net, mean: setattr(net.average, "data", net.average + 0 * mean),
}
#: These follow from no data, though the count is brought into the data's type.
COUNTED: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "counted": lambda net, mean: net.count.add_(1),
    "used between": lambda net, mean: (net.count.add_(1), net.count.to(mean) * mean, net.count.add_(1)),
    "of weights": lambda net, mean: net.average.fill_(float(next(net.parameters()).detach().sum())),
}


@pytest.mark.parametrize("way", WEIGHTLESS)
def test_a_buffer_into_which_data_are_written_without_weight_is_refused(way: str) -> None:
    with pytest.raises(SelfCheckError, match="average is a buffer that a training forward writes"):
        trained(Later(WEIGHTLESS[way]), collate(examples(6)))


@pytest.mark.parametrize("way", COUNTED)
def test_a_buffer_that_is_written_without_data_is_let_be(way: str) -> None:
    trained(Later(COUNTED[way]), collate(examples(6)))


class Running(Net):
    """Keeps a mean of its data, in place or by another tensor."""

    def __init__(self, replaced: bool):
        super().__init__()
        self.replaced = replaced
        self.register_buffer("average", torch.zeros(5))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        with torch.no_grad():
            if self.replaced:
                self.average = 0.9 * self.average + 0.1 * x.mean(0)
            else:
                self.average.lerp_(x.mean(0), 0.1)
        return super().forward(x, labels)


@pytest.mark.parametrize("kind", ["in place", "replaced", "instance norm"])
def test_a_buffer_that_takes_data_along_is_refused_by_name(kind: str) -> None:
    norm = nn.InstanceNorm1d(4, track_running_stats=True)
    model = (
        Net(lambda net, h: net.norm(steps(h)), norm=norm) if kind == "instance norm" else Running(kind == "replaced")
    )
    before = {n: t.clone() for n, t in model.state_dict().items()}
    name = "norm.running_mean" if kind == "instance norm" else "average"
    with pytest.raises(SelfCheckError, match=f"{name} is a buffer that a training forward writes"):
        trained(model, collate(examples(6)))
    if kind == "in place":
        # What the check itself ran has been put back.
        assert torch.equal(before["average"], torch.zeros(5))


def test_a_buffer_that_follows_from_the_weights_is_not() -> None:
    model = Net()
    nn.utils.parametrizations.spectral_norm(model.first)
    assert trained(model, collate(examples(6))).backwards == 1


class Late(Net):
    """Becomes another model after a while."""

    late = False

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        if self.late:
            x = x + 1e-3 * x.mean(0)
        return super().forward(x, labels)


def test_later_batches_are_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Late()
    engine, tickets = engine_for(model, 0.5)
    data = collate(examples(6))

    def step() -> None:
        engine.abandon()
        tickets.clear()
        tickets.append(ticket(6))
        model(**data)["loss"].backward()

    step()
    monkeypatch.setattr(later, "SHARE", float("inf"))
    before = {n: s.clone() for n, s in engine.accumulator.sums.items()}
    model.late = False
    state = torch.get_rng_state()
    step()
    assert torch.equal(state, torch.get_rng_state()), "a check leaves the random state as it was"
    assert before.keys() == engine.accumulator.sums.keys()
    model.late = True
    with pytest.raises(SelfCheckError, match="couples examples"):
        step()


class Spreading(torch.autograd.Function):
    """Nothing forward; backward nothing times the mean of all gradients."""

    @staticmethod
    def forward(ctx: Any, h: torch.Tensor) -> torch.Tensor:
        return h.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient + 0 * gradient.mean(0)


def chosen_by_products(net: Net, h: torch.Tensor) -> torch.Tensor:
    """Two experts that are handed their rows by a product with zeros and ones."""
    places = F.one_hot((h[:, 0] > 0).long(), 2).to(h).unsqueeze(1) * torch.eye(len(h)).unsqueeze(2)
    return torch.einsum("bse,esh->bh", places, torch.einsum("bse,bh->esh", places, h).sin())


def chosen_by_index(net: Net, h: torch.Tensor) -> torch.Tensor:
    """The same experts, whose rows are taken and put back."""
    out = torch.zeros_like(h)
    for expert in (0, 1):
        own = ((h[:, 0] > 0).long() == expert).nonzero()[:, 0]
        out = out.index_add(0, own, h[own].sin())
    return out


#: Each keeps finite rows apart to the last bit.
SPREADING: dict[str, Callable[[], nn.Module]] = {
    "0 times the mean": lambda: Net(before=lambda net, x: x + 0 * x.mean(0)),
    "0 times the mean, detached": lambda: Net(lambda net, h: h + 0 * h.mean(0).detach()),
    "whether all are finite": lambda: Net(before=lambda net, x: x.nan_to_num() * x.isfinite().all()),
    "a product with zeros and ones": lambda: Net(chosen_by_products),
    "backward alone": lambda: Net(lambda net, h: Spreading.apply(h)),
    "in the loss's coefficient": lambda: Net(loss=lambda o, y: F.cross_entropy(o, y) * (1 + 0 * o.detach().mean())),
    "a question in the loss's coefficient": lambda: Net(loss=lambda o, y: F.cross_entropy(o, y) * o.isfinite().all()),
}


@pytest.mark.parametrize("name", SPREADING)
def test_a_row_that_is_not_finite_takes_no_other_along(name: str) -> None:
    data = collate(examples(6))
    truth = clipped_sum(one_by_one(SPREADING[name](), data), 0.5)
    for value in (None, float("nan"), float("inf")):
        more = data if value is None else collate([*examples(6), {"x": torch.full((5,), value), "labels": 0}])
        engine = trained(SPREADING[name](), more)
        assert engine.route == "one-example"
        reasons = "not finite reaches the others", "asks the whole batch", "loss does not follow"
        assert any(reason in str(engine.reason) for reason in reasons)
        gaps = [engine.accumulator.sums[n] - t for n, t in truth.items()]
        # Of a record that is not finite itself; where the model makes it finite again, it counts like any other.
        most = 0.5 if name == "whether all are finite" and value is not None else 0.0
        assert math.hypot(*(float(gap.norm()) for gap in gaps)) <= most + EXACT


@pytest.mark.parametrize("between", [lambda h: h + 0 * h.mean(0), lambda h: h + 0 * h.mean(0).detach()])
def test_what_ids_may_overflow_to_takes_no_other_row_along(between: Callable[[torch.Tensor], torch.Tensor]) -> None:
    assert trained(Words(between), sentences([6] * 4)).route == "one-example"
    assert trained(Words(lambda h: h * 2), sentences([6] * 4)).route == "uses"


def test_a_row_that_is_not_finite_slows_no_model_that_keeps_it_apart() -> None:
    def stops(net: Net, h: torch.Tensor) -> torch.Tensor:
        torch._assert(bool(h.isfinite().all()), "not finite")
        return h

    for middle in (lambda net, h: h.clamp(-1, 1).nan_to_num(), chosen_by_index, stops):
        assert exact(Net(middle), collate(examples(6))).route == "uses"
    assert exact(Net(before=lambda net, x: torch.where(x.isfinite(), x, 0.0)), collate(examples(6))).route == "uses"


class Branching(nn.Module):
    """Asks something of the whole batch, and goes on as the answer is."""

    def __init__(self, asks: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.asks, self.table, self.head = asks, nn.Embedding(50, 6), nn.Linear(6, 3)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        hidden = self.table(input_ids).mean(1)
        if self.asks(input_ids):
            hidden = hidden + 1e-4 * hidden.mean(0)
        return {"loss": F.cross_entropy(self.head(hidden), labels)}


class Switched(Branching):
    """Multiplies all rows by an answer."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        hidden = self.table(input_ids).mean(1) * (1 - 1 * self.asks(input_ids))
        return {"loss": F.cross_entropy(self.head(hidden), labels)}


@pytest.mark.parametrize(
    "asks",
    [
        lambda ids: (ids == 49).any(),
        lambda ids: 49 in ids,
        lambda ids: ids.max().item() > 48,
        lambda ids: torch.equal(ids, ids.clamp(max=48)) is False,
        lambda ids: [False, True][int(ids.max()) // 49],
        lambda ids: 49 in ids.flatten().tolist(),
        lambda ids: (ids.numpy() == 49).any(),
    ],
)
def test_a_question_whose_answer_no_row_gives_is_found(asks: Callable[[torch.Tensor], Any]) -> None:
    torch.manual_seed(0)
    model, data = Branching(asks), {"input_ids": torch.randint(0, 49, (6, 5)), "labels": torch.arange(6) % 3}
    engine = stepped(model, data, 0.5)
    assert engine.route == "one-example"
    assert "the model " in str(engine.reason)


@pytest.mark.parametrize(
    "answer",
    [
        lambda ids: (ids == 49).any(),
        lambda ids: ~(ids != 49).all(0).all(),
        lambda ids: (ids == 49).sum() > 0,
        lambda ids: (ids == 49).float().amax(dim=(0, 1)),
        lambda ids: (ids == 49).sum(1).max() > 0,
        lambda ids: ids.flatten().bincount(minlength=50)[49] > 0,
        lambda ids: (ids == 49).float().var(0, correction=0).max() > 0,
        lambda ids: bool((ids == 49).any()),
    ],
)
def test_an_answer_that_stays_a_tensor_is_made_another(answer: Callable[[torch.Tensor], Any]) -> None:
    """What it switches off are all rows at once, and none of these holds what it asks for."""
    torch.manual_seed(0)
    model, data = Switched(answer), {"input_ids": torch.randint(0, 49, (6, 5)), "labels": torch.arange(6) % 3}
    engine = stepped(model, data, 0.5)
    assert engine.route == "one-example"
    assert "asks the whole batch" in str(engine.reason)


def test_what_is_asked_of_each_row_is_no_question_of_all() -> None:
    data = {"input_ids": torch.randint(0, 49, (6, 5)), "labels": torch.arange(6) % 3}
    for asks in (lambda ids: (ids == 49).any(1, keepdim=True), lambda ids: ids.max(-1, keepdim=True).values > 48):
        assert stepped(Switched(asks), data, 0.5).route == "uses"


def test_a_question_that_stops_the_run_or_changes_nothing_costs_nothing() -> None:
    class Careful(Net):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
            if not torch.isfinite(x).all():
                raise ValueError("not finite")
            return super().forward(x.clone() if (x > 2).any() else x, labels)

    assert trained(Careful(), collate(examples(6))).route == "uses"


class Stretching(nn.Module):
    """Words that a batch longer than any before turns round; with ``keeps``, as long as none is shorter again."""

    def __init__(self, *, keeps: bool = False, masked: bool = True):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(9, 6), nn.Linear(6, 9)
        self.keeps, self.masked, self.longest = keeps, masked, 10

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, attention_mask: torch.Tensor | None = None) -> Any:
        width = input_ids.shape[1]
        self.longest = width if self.keeps and width > self.longest else self.longest
        scale = -1 if (width > 10 if not self.keeps else self.longest > 10) else 1
        logits = self.head(scale * self.table(input_ids))
        return {"loss": F.cross_entropy(logits.transpose(1, 2), labels)}


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("keeps", [True, False])
def test_a_branch_on_the_length_of_a_batch_is_found_in_the_first_longer_one(keeps: bool, masked: bool) -> None:
    """With a mask each record goes on alone, in its own length, and finds nothing of the one before; else it is refused."""
    data = [torch.full((4 + i % 4,), 1 + i) for i in range(8)]

    def padded(items: Any) -> Batch:
        ids = nn.utils.rnn.pad_sequence(items, batch_first=True)
        mask = {"attention_mask": (ids > 0).long()} if masked else {}
        return {"input_ids": ids, "labels": ids.masked_fill(ids == 0, -100), **mask}

    private = start(Stretching(keeps=keeps), DataLoader(data, batch_size=8, collate_fn=padded), epochs=5)  # type: ignore[arg-type]

    def train(length: int) -> dict[str, torch.Tensor]:
        data[3] = torch.full((length,), 4)
        (batch,) = private.data_loader
        private.model(**batch)["loss"].backward()
        private.optimizer.step()
        sums = {n: p.grad.clone() for n, p in private.model.named_parameters()}
        private.optimizer.zero_grad()
        return sums

    first = [train(7), train(8), train(7)][0]
    if not masked:
        with pytest.raises(SelfCheckError, match="beside a longer one"):
            train(20)
        return
    train(20)
    assert private.route == "one-example"
    assert private.model.longest == 10
    for name, last in train(7).items():
        torch.testing.assert_close(last, first[name])


@pytest.mark.parametrize("what", ["rows", "numbers"])
def test_a_buffer_that_counts_what_a_batch_has_is_refused(what: str) -> None:
    def count(net: Any, x: torch.Tensor) -> torch.Tensor:
        net.seen += len(x) if what == "rows" else x.numel()
        return x

    net = Net(before=count)
    net.register_buffer("seen", torch.zeros((), dtype=torch.int64))
    with pytest.raises(SelfCheckError, match="seen is a buffer that a training forward writes"):
        trained(net, collate(examples(6)))


def test_a_loss_that_is_cut_off_beyond_what_the_first_batch_held_is_taken_row_by_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A later batch that happens to be due for a look is refused.
    for asked in ("due", "affordable"):
        monkeypatch.setattr(later.Schedule, asked, lambda *_: False)
    net = Net(loss=lambda o, y: F.cross_entropy(o, y).clamp(max=5.0))
    with torch.no_grad():
        net.second.bias += torch.tensor([0.0, 0.0, -60.0])
    engine, tickets = engine_for(net, 0.5)
    calm = collate(examples(6))
    calm["labels"] %= 2
    # One row of the class that hardly is takes the mean of all beyond the limit.
    for data in (calm, {**calm, "labels": torch.tensor([*calm["labels"][:5], 2])}):
        feed(engine, tickets, data)
        assert error(engine.accumulator.sums, clipped_sum(one_by_one(net, data), 0.5)) < 1e-4
    assert engine.route == "one-example"
