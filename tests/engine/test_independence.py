"""What couples examples is refused, what only looks like it is served, and every gradient is autograd's on one example alone."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import nn
from torch.utils.checkpoint import checkpoint

from fastdp.engine import later
from fastdp.engine.accumulator import Accumulator
from fastdp.engine.bounds import Norms, UpperNorms
from fastdp.engine.engine import Engine
from fastdp.engine.errors import SelfCheckError
from fastdp.engine.losses import LossTerms, intercepted
from fastdp.engine.policy import Policy
from tests.engine.models import VOCABULARY
from tests.engine.reference import engine_for, ticket
from tests.engine.runs import Batch, clipped_sum, collate, error, examples, one_by_one

EXACT = 1e-5
Step = Callable[["Net", torch.Tensor], torch.Tensor]


class Net(nn.Module):
    """Two layers with something between them, and a loss, both given as functions of the module."""

    def __init__(
        self,
        middle: Step = lambda net, h: h,
        loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = lambda o, y: F.cross_entropy(o, y),
        before: Step = lambda net, x: x,
        **own: nn.Module | nn.Parameter,
    ):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(5, 6), nn.Linear(6, 3)
        self.steps = (before, middle, loss)
        for name, value in own.items():
            setattr(self, name, value)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        before, middle, loss = self.steps
        output = self.second(middle(self, torch.tanh(self.first(before(self, x)))))
        return {"loss": loss(output if output.dim() == 2 else output.mean(1), labels)}


def trained(model: nn.Module, data: Batch, bound: float = 0.5) -> Engine:
    """An engine after one micro-batch."""
    rows = len(next(iter(data.values())))
    engine, tickets = engine_for(model, bound)
    tickets.append(ticket(rows))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model(**data)["loss"].backward()
    engine.close()
    return engine


def exact(model: nn.Module, data: Batch) -> Engine:
    """Assert that the clipped sum is that of each row's own gradient."""
    truth = one_by_one(model, data)
    engine = trained(model, data)
    got = {n: engine.accumulator.sums.get(n, torch.zeros_like(p)) for n, p in engine.parameters.items()}
    assert error(got, clipped_sum(truth, 0.5)) < EXACT
    return engine


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(3)))


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
        engine.abandon()
        tickets.append(ticket(4))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model(**data)["loss"].backward()
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


def experts(net: Any, h: torch.Tensor) -> torch.Tensor:
    """Each row goes to one of two experts."""
    chances = net.router(h).softmax(-1)
    out = torch.zeros_like(h)
    for i, expert in enumerate((net.one, net.two)):
        where = (chances.argmax(-1) == i).nonzero().flatten()
        out = out.index_add(0, where, expert(h[where]) * chances[where, i : i + 1])
    return out


def steps(h: torch.Tensor) -> torch.Tensor:
    """Four steps of time a row."""
    return h.unsqueeze(1) * torch.arange(1.0, 5.0).to(h).view(1, 4, 1)


class Attending(nn.Module):
    """Self-attention that returns no weights."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.attention(h, h, h, need_weights=False)[0]
        return out


def translator() -> nn.Transformer:
    return nn.Transformer(6, 2, 1, 1, 12, dropout=0.0, batch_first=True)


def mixed(net: Any, h: torch.Tensor) -> torch.Tensor:
    """A learned mixture of three things from a copy of the parameter: no fast rule knows what was written."""
    return mixture(h, torch.empty(net.mix.shape, dtype=h.dtype).copy_(net.mix))


def mixture(h: torch.Tensor, mix: torch.Tensor) -> torch.Tensor:
    return (torch.stack([h, 2 * h, h.sin()]) * mix.softmax(0).view(3, *[1] * h.dim())).sum(0)


SERVED: dict[str, Callable[[], nn.Module]] = {
    "a scalar parameter": lambda: Net(lambda net, h: h * net.gate, gate=parameter()),
    "scalars of a batch": lambda: Net(
        lambda net, h: h * (h.sum(1) * net.gate).sigmoid().unsqueeze(1), gate=parameter()
    ),
    "attention without weights": lambda: Net(lambda net, h: net.inner(steps(h)), inner=Attending()),
    "an encoder layer": lambda: Net(
        lambda net, h: net.inner(steps(h)), inner=nn.TransformerEncoderLayer(6, 2, 12, 0.0, batch_first=True)
    ),
    "a transformer": lambda: Net(lambda net, h: net.inner(steps(h), steps(h)), inner=translator()),
    "vmap": lambda: Net(lambda net, h: torch.vmap(lambda row: torch.tanh(net.inner(row)))(h), inner=nn.Linear(6, 6)),
    "a layer on a parameter": lambda: Net(
        lambda net, h: h + net.inner(net.query).sum(0), inner=nn.Linear(6, 6), query=parameter(2, 6)
    ),
    "a layer on three parameters": lambda: Net(
        lambda net, h: h + net.inner(net.query).sum(0), inner=nn.Linear(6, 6), query=parameter(3, 6)
    ),
    "a repeated bias": lambda: Net(lambda net, h: h + net.shift.repeat(len(h), 1), shift=parameter(6)),
    "a bias in the sequence": lambda: Net(
        lambda net, h: torch.cat([steps(h), net.shift.repeat(len(h), 1, 1)], 1), shift=parameter(1, 1, 6)
    ),
    "a scalar mix": lambda: Net(lambda net, h: mixture(h, net.mix), mix=parameter(3)),
    "heads before rows": lambda: Net(
        lambda net, h: (
            net.inner(h.unflatten(1, (2, 3)).transpose(0, 1).reshape(-1, 3))
            .view(2, len(h), 3)
            .transpose(0, 1)
            .flatten(1)
        ),
        inner=nn.Linear(3, 3),
    ),
    "time before rows": lambda: Net(
        lambda net, h: net.inner(steps(h).transpose(0, 1).reshape(-1, 6)).view(4, len(h), 6).transpose(0, 1),
        inner=nn.Linear(6, 6),
    ),
    "experts": lambda: Net(experts, router=nn.Linear(6, 2), one=nn.Linear(6, 6), two=nn.Linear(6, 6)),
    "rows sorted and put back": lambda: Net(
        lambda net, h: net.inner(h[h.sum(1).argsort()])[h.sum(1).argsort().argsort()], inner=nn.Linear(6, 6)
    ),
    "a scripted module": lambda: Net(lambda net, h: net.inner(h), inner=torch.jit.script(nn.Linear(6, 6))),
    "its own loss": lambda: Net(loss=lambda o, y: -torch.log_softmax(o, -1)[torch.arange(len(o)), y].mean()),
}


@pytest.mark.parametrize("name", SERVED)
def test_what_no_fast_rule_knows_is_served_exactly(name: str) -> None:
    model = SERVED[name]()
    scripted = name == "a scripted module"
    data = collate(examples(6))
    if scripted:
        assert trained(model, data).route == "one-example"
    else:
        exact(model, data)


def penalised(o: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(o, y) + 0.7 * F.mse_loss(o, torch.ones_like(o))


LOSSES: dict[str, tuple[Any, str]] = {
    "half": (lambda o, y: 0.5 * F.cross_entropy(o, y), "uses"),
    "two losses": (penalised, "uses"),
    "a sum over the rows' number": (lambda o, y: F.cross_entropy(o, y, reduction="sum") / len(o), "uses"),
    "a sum over some number": (
        lambda o, y: F.cross_entropy(o, y, reduction="sum") / (y > 0).sum().clamp(min=1),
        "one-example",
    ),
    "a sum": (lambda o, y: F.cross_entropy(o, y, reduction="sum"), "uses"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_gradient_is_that_of_the_loss_as_written(name: str) -> None:
    loss, route = LOSSES[name]
    assert exact(Net(loss=loss), collate(examples(6))).route == route
    assert exact(Net(mixed, loss=loss, mix=parameter(3)), collate(examples(6))).route == "one-example"


def test_a_penalty_on_the_weights_is_part_of_every_example_s_loss() -> None:
    class Penalised(Net):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
            output = super().forward(x, labels)
            return {"loss": output["loss"] + 0.01 * self.first.weight.square().sum()}

    assert exact(Penalised(), collate(examples(6))).route == "one-example"


@pytest.mark.parametrize("route", ["uses", "one-example"])
def test_class_weights_stay_in_an_example_s_loss(route: str) -> None:
    weight = torch.tensor([1.0, 5.0, 0.1])

    class Weighted(Net):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
            hidden = torch.tanh(self.first(x))
            hidden = mixed(self, hidden) if route == "one-example" else hidden
            return {"loss": F.cross_entropy(self.second(hidden), labels, weight=weight.to(hidden))}

    class Written(Weighted):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
            with intercepted(LossTerms(ticket(1).layout(x.device), alone=True)):
                return super().forward(x, labels)

    data = collate(examples(6))
    model = Weighted(mix=parameter(3)) if route == "one-example" else Weighted()
    plain = Written(mix=parameter(3)) if route == "one-example" else Written()
    truth = one_by_one(plain, data)
    unweighted = one_by_one(Net() if route == "uses" else Weighted(mix=parameter(3)), data)
    engine = trained(model, data, 100.0)
    got = {n: engine.accumulator.sums.get(n, torch.zeros_like(p)) for n, p in engine.parameters.items()}
    assert engine.route == route
    assert error(got, clipped_sum(truth, 100.0)) < EXACT
    by_class = [float(w["first.weight"].norm() / u["first.weight"].norm()) for w, u in zip(truth, unweighted)]
    assert by_class == pytest.approx([float(weight[int(y)]) for y in data["labels"]], rel=1e-4)


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
    engine, tickets = engine_for(model, 0.5)
    tickets.append(ticket(6))
    model(**collate(examples(6)))["loss"].backward()
    assert engine.route == "uses", engine.reason


def test_a_checkpoint_that_forgets_its_dropout_masks_is_refused() -> None:
    def middle(net: Net, h: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(
            lambda v: F.dropout(torch.tanh(v), 0.5), h, use_reentrant=False, preserve_rng_state=False
        )
        return out

    with pytest.raises(SelfCheckError, match="preserve_rng_state=True"):
        trained(Net(middle), collate(examples(6)))


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


class Shifted(Net):
    """Adds a table that the caller hands in."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor, positions: torch.Tensor) -> Any:  # type: ignore[override]
        hidden = torch.tanh(self.first(x)).unsqueeze(1) + positions
        hidden = mixed(self, hidden)
        return {"loss": F.cross_entropy(self.second(hidden).mean(1), labels)}


def test_what_carries_rows_is_decided_once_and_not_by_length() -> None:
    model = Shifted(mix=parameter(3))
    positions = torch.randn(3, 6, generator=torch.Generator().manual_seed(2))
    engine, tickets = engine_for(model, 0.5)
    for rows in (4, 3, 6, 1, 3):
        data = collate(examples(rows))
        plain = Net(lambda net, h: mixed(net, h.unsqueeze(1) + positions.to(h)), mix=parameter(3))
        truth = one_by_one(plain, data)
        engine.abandon()
        tickets.append(ticket(rows))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model(**data, positions=positions)["loss"].backward()
        got = {n: engine.accumulator.sums[n] for n in truth[0]}
        assert error(got, clipped_sum(truth, 0.5)) < EXACT
    assert engine.route == "one-example"


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


class Growing(Net):
    """Sees other tokens than in the batch before, by no reason of its inputs' shapes."""

    tokens = 1

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        hidden = self.first(x).repeat_interleave(self.tokens, 0)
        output = self.second(torch.tanh(hidden)).view(len(x), self.tokens, 3).mean(1)
        return {"loss": F.cross_entropy(output, labels)}


def test_a_use_of_another_shape_takes_the_route_that_needs_none() -> None:
    model, data = Growing(), collate(examples(6))
    engine, tickets = engine_for(model, 0.5)
    for tokens in (2, 4):
        model.tokens = tokens
        engine.abandon()
        tickets.append(ticket(6))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model(**data)["loss"].backward()
        assert error(engine.accumulator.sums, clipped_sum(one_by_one(Net(), data), 0.5)) < EXACT
    assert engine.route == "one-example"
    assert "by no reason of the batch's shapes" in str(engine.reason)


def test_a_padding_row_whose_gradient_is_nan_adds_nothing() -> None:
    from fastdp.engine.layout import Ticket

    data = collate(examples(4))
    truth = one_by_one(Net(), {k: v[:3] for k, v in data.items()})
    data["x"][3] = float("nan")
    for model in (Net(), Net(mixed, mix=parameter(3))):
        engine, tickets = engine_for(model, 0.5, check=False)
        tickets.append(Ticket(torch.arange(4), torch.tensor([1.0, 1.0, 1.0, 0.0]), is_last=True))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model(**data)["loss"].backward()
        assert all(bool(s.isfinite().all()) for s in engine.accumulator.sums.values())
        if engine.route == "uses":
            assert error({n: engine.accumulator.sums[n] for n in truth[0]}, clipped_sum(truth, 0.5)) < EXACT


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), 1.0])
def test_a_padding_rows_scale_counts_for_nothing(scale: float) -> None:
    """Whatever a policy says of it: 0 times NaN is NaN."""

    class Strange(Policy):
        def scales(self, upper: UpperNorms) -> torch.Tensor:
            return super().scales(upper).index_fill(1, torch.tensor([3]), scale)

    parameters = {"weight": nn.Parameter(torch.ones(2, 2))}
    accumulator = Accumulator(parameters, Strange((1.0,), (0.0,), {"weight": 0}))
    norms = Norms(1, 4, torch.device("cpu"))
    norms.add(0, torch.ones(4), 4, relative=0.0)
    found = accumulator.factors(norms.upper(), torch.tensor([1.0, 1.0, 1.0, 0.0]))
    assert bool((found[0, :3] > 0).all())
    assert found[0, 3] == 0
    assert int(accumulator.units) == 3
    assert int(accumulator.nonfinite) == 0


class Pooled(nn.Module):
    """Reads its table in a way that has no rule, and notes how many tokens it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(30, 6), nn.Linear(6, 3)
        self.seen: list[int] = []

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> Any:
        self.seen.append(input_ids.shape[1])
        hidden = torch.cummax(self.table.weight, 0).values[input_ids] * attention_mask.unsqueeze(-1)
        return {"loss": F.cross_entropy(self.head(hidden.sum(1)), labels)}


@pytest.mark.parametrize("left", [False, True])
def test_a_row_that_runs_alone_is_without_its_padding(left: bool) -> None:
    torch.manual_seed(0)
    model, lengths, width = Pooled(), [3, 5, 7, 4], 7
    mask = torch.stack([(torch.arange(width) < n).long() for n in lengths])
    mask = mask.flip(1) if left else mask
    data = {"input_ids": torch.randint(1, 30, (4, width)) * mask, "attention_mask": mask, "labels": torch.arange(4) % 3}
    truth = one_by_one(model, data)
    engine, tickets = engine_for(model, 0.5)
    tickets.append(ticket(4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        output = model(**data)
    assert engine.route == "one-example"
    assert model.seen[-4:] == lengths
    output["loss"].backward()
    assert error(engine.accumulator.sums, clipped_sum(truth, 0.5)) < EXACT


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
    engine, tickets = engine_for(model, 0.5)
    tickets.append(ticket(6))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model(**data)["loss"].backward()
    assert engine.route == "one-example"
    assert "the model " in str(engine.reason)


def test_a_question_that_stops_the_run_or_changes_nothing_costs_nothing() -> None:
    class Careful(Net):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
            if not torch.isfinite(x).all():
                raise ValueError("not finite")
            return super().forward(x.clone() if (x > 2).any() else x, labels)

    assert trained(Careful(), collate(examples(6))).route == "uses"


class TimeMajor(nn.Module):
    """Looks up ids laid out time first, as older recurrent code does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.out = nn.Embedding(11, 5), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        return {"loss": F.cross_entropy(self.out(torch.tanh(self.table(x.t())).mean(0)), labels)}


@pytest.mark.parametrize("tokens", [2, 3, 4, 5])
def test_a_lookup_time_first_is_served_whatever_the_lengths(tokens: int) -> None:
    data = {"x": torch.randint(0, 11, (4, tokens)), "labels": torch.arange(4) % 3}
    model = TimeMajor()
    engine = trained(model, data)
    assert error(engine.accumulator.sums, clipped_sum(one_by_one(TimeMajor(), data), 0.5)) < EXACT
