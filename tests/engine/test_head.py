"""The head without its logits: every way in which models go from hidden states to a loss, against one example at a time."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fastdp.engine.bounds import UpperNorms
from fastdp.engine.clip.policy import Policy
from fastdp.engine.engine import Engine
from fastdp.engine.errors import SelfCheckError
from fastdp.engine.routing import Routing
from fastdp.engine.rules import head
from fastdp.engine.uses import logits
from fastdp.engine.uses.layout import Ticket
from fastdp.engine.uses.logits import Logits
from fastdp.ops import heads
from fastdp.verify import Checks
from tests.cases import cases, pairs
from tests.engine.models import MODELS, batch, build
from tests.engine.reference import (
    Recording,
    engine_for,
    feed,
    norms,
    relative,
    require_exact,
    stepped,
    ticket,
)
from tests.engine.runs import one_by_one

VOCABULARY, WIDTH, TOKENS = 37, 5, 9
TOLERANCE = 1e-5


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Toys have vocabularies and tiles of their own size, so that one batch takes several tiles of several parts."""
    monkeypatch.setattr(Engine, "vocabulary", 8)
    monkeypatch.setattr(logits.Heads, "tile", 0)
    monkeypatch.setattr(logits, "_pays", lambda hidden, weight: True)
    monkeypatch.setattr(head, "TILE", 12 * VOCABULARY)
    for module in (logits, head):
        monkeypatch.setattr(module, "LOSS_CHUNK", 5 * VOCABULARY)


class Speaker(nn.Module):
    """A language model of one layer, in which a token sees those before it; ``options`` are what models do to logits."""

    def __init__(
        self,
        *,
        tied: bool = False,
        bias: bool = False,
        between: Callable[[torch.Tensor], torch.Tensor] = lambda z: z,
        slices: bool = False,
        loss: dict[str, Any] | None = None,
        width: int = WIDTH,
    ):
        super().__init__()
        torch.manual_seed(3)
        self.table = nn.Embedding(VOCABULARY, width)
        self.layer = nn.Linear(width, width)
        self.head = nn.Linear(width, VOCABULARY, bias=bias)
        if tied:
            self.head.weight = self.table.weight
        self.between, self.slices, self.loss = between, slices, loss or {}

    def forward(
        self, ids: torch.Tensor, labels: torch.Tensor | None = None, units: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        seen = self.table(ids)
        if units is None:
            seen = seen + 0.5 * F.pad(seen, (0, 0, 1, 0))[:, :-1]
        found = self.between(self.head(torch.tanh(self.layer(seen))))
        if labels is None:
            return {"logits": found}
        if self.slices:
            rows, wanted = found[..., :-1, :].contiguous(), labels[..., 1:].contiguous()
        else:
            ignored = self.loss.get("ignore_index", -100)
            rows, wanted = found.float(), F.pad(labels, (0, 1), value=ignored)[..., 1:].contiguous()
        if found.dtype == torch.float64:
            rows = rows.double()
        return {"loss": F.cross_entropy(rows.view(-1, VOCABULARY), wanted.view(-1), **self.loss), "logits": found}


def data(rows: int = 5, tokens: int = TOKENS, seed: int = 0) -> dict[str, torch.Tensor]:
    """Ids with repeats, and labels of which some are to be ignored; the second row has none."""
    torch.manual_seed(seed)
    ids = torch.randint(0, VOCABULARY // 2, (rows, tokens))
    labels = ids.clone()
    labels[:, :2] = -100
    if rows > 1:
        labels[1] = -100
    return {"ids": ids, "labels": labels}


def truth(model: nn.Module, inputs: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Rows' own gradients; a row without labels has none."""
    return [{name: g.nan_to_num() for name, g in own.items()} for own in one_by_one(model, inputs)]


def step(
    model: nn.Module, inputs: dict[str, torch.Tensor], bound: float = 0.7, *, left_out: bool = True, **options: Any
) -> Engine:
    engine, tickets = engine_for(model, bound, **options)
    tickets.append(ticket(inputs["ids"].shape[0]))
    output = model(**inputs)
    assert isinstance(output["logits"], Logits) is left_out, engine.reason
    output["loss"].backward()
    return engine


def exact(model: nn.Module, inputs: dict[str, torch.Tensor], **options: Any) -> Engine:
    """A `step` whose norms and sums are those of each row alone."""
    units = truth(model, inputs)
    engine = step(model, inputs, **options)
    require_exact(engine, units)
    return engine


def cap(z: torch.Tensor) -> torch.Tensor:
    z = z / 2.0
    z = torch.tanh(z)
    return z * 2.0


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tied": True},
    "bias": {"bias": True},
    "tied and biased": {"tied": True, "bias": True},
    "shifted by slices": {"slices": True, "tied": True},
    "capped": {"between": cap, "tied": True},
    "scaled": {"between": lambda z: 0.3 * z},
    "scaled by a number on the device": {"between": lambda z: z / torch.tensor(1.7)},
    "with constants": {"between": lambda z: z + torch.linspace(-1, 1, VOCABULARY).view(1, -1)},
    "summed": {"loss": {"reduction": "sum"}, "tied": True},
    "another ignored label": {"loss": {"ignore_index": 3}},
}


@cases(*pairs(("tokens", [1 + WIDTH, 4 * WIDTH + 3]), ("way", WAYS), ("two_pass", [None, True])))
def test_a_head_is_exact_however_a_model_calls_it(way: str, tokens: int, two_pass: bool | None) -> None:
    model = Speaker(**WAYS[way])
    inputs = data(tokens=tokens)
    if "ignore_index" in WAYS[way].get("loss", {}):
        inputs["labels"] = inputs["labels"].clamp(min=3)
    engine = exact(model, inputs, two_pass=two_pass)
    if not WAYS[way].get("tied"):
        assert engine.accumulator.routes["head.weight"].name == "tiles"


#: Tensors that look like constants along the vocabulary, and whether they are.
ALONG = torch.linspace(0.5, 1.5, VOCABULARY)
BETWEEN: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], bool]] = {
    "[V, 1]": (lambda z: z * ALONG.to(z.dtype).view(-1, 1), False),
    "[1, V, 1]": (lambda z: z + ALONG.to(z.dtype).view(1, -1, 1), False),
    "[V]": (lambda z: z * ALONG.to(z.dtype), True),
    "[1, V]": (lambda z: z + ALONG.to(z.dtype).view(1, -1), True),
    "[1, 1]": (lambda z: z * torch.full((1, 1), 0.7, dtype=z.dtype), True),
}


@cases("shape", BETWEEN)
def test_as_many_tokens_as_words(shape: str) -> None:
    """A scale of each token is as long as one of each word: its shape says which it is."""
    between, left_out = BETWEEN[shape]
    exact(Speaker(between=between), data(tokens=VOCABULARY), left_out=left_out)


@cases("reduction", ["mean", "sum", "none"])
def test_a_loss_of_the_plain_model_counts_the_labels_that_are_there(reduction: str) -> None:
    hidden, weight = torch.randn(6, 5), torch.randn(VOCABULARY, 5)
    target = torch.tensor([1, -100, 3, -100, 0, 7])
    own = logits.Heads(always=True).leave_out(hidden, weight, None, lambda: F.linear(hidden, weight))
    found = F.cross_entropy(own, target, reduction=reduction)
    torch.testing.assert_close(found, F.cross_entropy(F.linear(hidden, weight), target, reduction=reduction))
    assert own.source.logits is None, "the logits were not computed"


def test_a_longer_text_moves_no_bound_of_the_others_by_their_head() -> None:
    """Neither a route nor a number of tokens follows the longest row: its padding is no token of theirs."""
    found: list[torch.Tensor] = []
    bounds: list[torch.Tensor] = []

    class Seen(Policy):
        def scales(self, upper: UpperNorms) -> torch.Tensor:
            found.append(upper.norms)
            return super().scales(upper)

    for longer in (0, 3, 4 * WIDTH, 20 * WIDTH):
        inputs = data(3)
        inputs = {"ids": F.pad(inputs["ids"], (0, longer)), "labels": F.pad(inputs["labels"], (0, longer), value=-100)}
        model, tickets = Speaker(), deque([ticket(3)])
        for module in (model.table, model.layer):
            module.requires_grad_(False)
        Engine(model, Seen((1.0,), (0.0,), {"head.weight": 0}), tickets)
        model(**inputs)["loss"].backward()
        bounds.append(found[-1])
    for other in bounds[1:]:
        torch.testing.assert_close(other, bounds[0], rtol=1e-9, atol=0)


@pytest.fixture
def tiles_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tiles are made as on a GPU: padded, by the op, as large as those of a processor; notes what the op made."""
    made: list[int] = []
    kernel = heads.cross_entropy_gradient_

    def noted(tile: torch.Tensor, *labels: Any) -> torch.Tensor:
        made.append(tile.shape[1])
        return kernel(tile, *labels)

    for module in (head, logits, heads):
        monkeypatch.setattr(module, "on_gpu", lambda weight: True)
    monkeypatch.setattr(head, "TILE", VOCABULARY)
    monkeypatch.setattr(head, "HEAD_SPAN", 20)
    monkeypatch.setattr(head.ops, "cross_entropy_gradient_", noted)
    return made


@cases(*pairs(("tokens", [1 + WIDTH, 4 * WIDTH + 3]), ("way", WAYS)))
def test_a_head_is_exact_in_the_tiles_of_a_gpu(way: str, tokens: int, tiles_of_a_gpu: list[int]) -> None:
    model, inputs = Speaker(**WAYS[way]), data(tokens=tokens)
    if "ignore_index" in WAYS[way].get("loss", {}):
        inputs["labels"] = inputs["labels"].clamp(min=3)
    tiles_of_a_gpu.clear()
    casts, plain = WAYS[way].keys().isdisjoint({"between"}), copy.deepcopy(model)
    engine = exact(model, inputs)
    # Other operations than casts are left to torch, and to logits; long units' gradients are kept whole.
    assert engine.accumulator.tiles_heads is (casts and tokens <= 2 * WIDTH)
    assert set(tiles_of_a_gpu) == ({48} if casts else set())
    if not casts:
        exact(plain, inputs, keep_logits=False)
        assert not tiles_of_a_gpu


@cases(*pairs(("tokens", [1 + WIDTH, 4 * WIDTH + 3]), ("trained", [[], ["head.bias"], ["head.weight"]])))
def test_what_is_frozen_gets_nothing_and_passes_all_on(trained: list[str], tokens: int) -> None:
    model = Speaker(bias=True)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = name in trained or name.startswith("layer")
    inputs = data(tokens=tokens)
    engine = exact(model, inputs)
    assert set(engine.accumulator.sums) == {"layer.weight", "layer.bias", *trained}


@cases("tokens", [1 + WIDTH, 4 * WIDTH + 3])
def test_users_of_several_rows_and_padding_rows(tokens: int) -> None:
    model, inputs = Speaker(tied=True), data(rows=7, tokens=tokens)
    rows = truth(model, inputs)
    owners = torch.tensor([0, 0, 0, 1, 2, 2, 3])
    units = [{n: sum(rows[row][n] for row in range(7) if owners[row] == unit) for n in rows[0]} for unit in range(3)]
    engine = stepped(model, inputs, 0.7, Ticket(owners, torch.tensor([1.0, 1.0, 1.0, 0.0]), is_last=True))
    Recording.given[-1], Recording.seen[-1] = Recording.given[-1][:, :3], Recording.seen[-1][:, :3]
    require_exact(engine, units)


@cases("tied", [False, True])
def test_packed_units(tied: bool) -> None:
    model = Speaker(tied=tied)
    lengths = [[4, 6], [2, 8]]
    torch.manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (2, 10))
    number, rows, units = 0, [], []
    for row, own in zip(ids, lengths):
        start, line = 0, []
        for length in own:
            piece = row[start : start + length].unsqueeze(0)
            none = torch.zeros_like(piece)
            units += truth(model, {"ids": piece, "labels": piece, "units": none})
            line += [number] * length
            number, start = number + 1, start + length
        rows.append(line)
    engine, tickets = engine_for(model, 0.7)
    owners = torch.tensor(rows)
    tickets.append(Ticket(torch.arange(4), torch.ones(4), is_last=True, token_units=owners))
    model(ids=ids, labels=ids, units=owners)["loss"].backward()
    require_exact(engine, units)


@cases(*pairs(("tokens", [1 + WIDTH, 8 * WIDTH]), ("tied", [False, True])))
def test_bfloat16_is_as_good_as_with_its_logits(tied: bool, tokens: int) -> None:
    model, inputs = Speaker(tied=tied).bfloat16(), data(tokens=tokens)
    units = truth(model, inputs)

    def error(engine: Engine) -> float:
        scales = Recording.given[-1][0].double()
        wanted = {n: sum(s * g[n] for s, g in zip(scales, units)) for n in units[0]}
        gaps = sum(float((engine.accumulator.sums[n].double() - w).square().sum()) for n, w in wanted.items())
        return (gaps / sum(float(w.square().sum()) for w in wanted.values())) ** 0.5

    plain = copy.deepcopy(model)
    without = error(step(model, inputs))
    engine = step(plain, inputs, left_out=False, keep_logits=True)
    # Both round a token's products to bfloat16 once; 1e-3 is an eighth of its unit of rounding.
    assert without < 1.5 * error(engine) + 1e-3


_SLOW = [(n, t) for n in MODELS for t in ("full", "lora") if n != "vit"]
_FAST = [("gpt2", "full"), ("gemma3", "full"), ("llama", "lora"), ("bart", "full")]


@pytest.mark.parametrize(
    ("name", "tuning"), [pytest.param(*c, marks=[] if c in _FAST else pytest.mark.slow) for c in _SLOW]
)
def test_models_of_transformers(name: str, tuning: str) -> None:
    model, inputs = build(name, tuning), batch(name)
    units = one_by_one(model, inputs)
    engine, tickets = engine_for(model, float(norms(units).median()))
    tickets.append(ticket(len(units)))
    output = model(**inputs)
    output.loss.backward()
    assert isinstance(output.logits, Logits) == (output.logits.dim() == 3)
    require_exact(engine, units)


def test_logits_are_computed_again_for_a_loop_that_reads_them() -> None:
    model, inputs = Speaker(), data()
    engine, tickets = engine_for(model, 1.0)
    tickets.append(ticket(5))
    output = model(**inputs)
    # Casting every output, as accelerate does, reads nothing.
    assert output["logits"].float().detach().shape == (5, TOKENS, VOCABULARY)
    with torch.no_grad():
        plain = model.eval()(**inputs)["logits"]
    model.train()
    with pytest.warns(UserWarning, match="keep_logits=True"):
        assert torch.equal(output["logits"].argmax(-1), plain.argmax(-1))
    assert torch.equal(output["logits"][0, 0].detach(), plain[0, 0])
    assert output["logits"].tolist() == plain.tolist()
    term = output["logits"].square().mean()
    with pytest.raises(RuntimeError, match="uses logits that were not kept"):
        term.backward()
    output["loss"].backward()
    tickets.append(ticket(5))
    late = model(**inputs)["logits"]
    with torch.no_grad():
        model.head.weight.mul_(2)
    with pytest.raises(RuntimeError, match="Read them before step"):
        late.sum()


READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "double": lambda z: z.double().softmax(-1),
    "half": lambda z: z.half() + 0,
    "whole numbers": lambda z: z.to(torch.int64) + 0,
    "numpy": lambda z: torch.from_numpy(z.detach().float().numpy()),
    "written": lambda z: z.detach().masked_fill_(z > 0, -1).sum(),
    "written as it is": lambda z: (z.__setitem__((0,), 0.0), z.sum())[1],
    "written by a view": lambda z: (z[0].zero_(), z.sum())[1],
}


@pytest.mark.filterwarnings("ignore:Reading logits")
@pytest.mark.parametrize("inside", [False, True], ids=["autocast", "autocast of the model"])
@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_logits_that_are_read_are_those_of_plain_torch(read: Callable[[torch.Tensor], Any], inside: bool) -> None:
    model, inputs = Speaker(), data()
    if inside:
        forward = model.forward
        model.forward = torch.autocast("cpu", torch.bfloat16)(forward)  # type: ignore[method-assign]
    _, tickets = engine_for(model, 1.0)
    tickets.append(ticket(5))
    found = model(**inputs)["logits"]
    with torch.no_grad():
        wanted = read(model.eval()(**inputs)["logits"])
        got = read(found)
    assert got.dtype == wanted.dtype
    assert torch.equal(got, wanted)


class Reads(Speaker):
    """Does something with the logits besides the loss."""

    def __init__(self, read: Callable[[torch.Tensor], Any], **options: Any):
        super().__init__(**options)
        self.read = read

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        found = self.head(torch.tanh(self.layer(self.table(ids))))
        read = self.read(found)
        loss = F.cross_entropy((found if read is None else read).flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": found}


def _half(z: torch.Tensor) -> None:
    z.mul_(0.5)


READS = {
    "for a metric": lambda z: z.argmax(-1).sum() * 0 + z,
    "in place": _half,
    "through a softmax": lambda z: torch.log_softmax(z, -1),
    "against the data": lambda z: z * (1 + torch.arange(z.shape[1]).view(1, -1, 1)),
    "in another order": lambda z: z.flip(1),
}


@cases(*pairs(("how", READS), ("trained", [True, False])))
def test_other_readers_of_logits_get_them(how: str, trained: bool) -> None:
    model, inputs = Reads(READS[how]), data()
    model.head.weight.requires_grad = trained
    inputs["labels"] = inputs["ids"]
    exact(model, inputs, left_out=False)


class Writes(Speaker):
    """Writes into the hidden states after the head has seen them."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        hidden = torch.tanh(self.layer(self.table(ids))) * 1.0
        found = self.head(hidden)
        with torch.no_grad():
            hidden.zero_()
        return {"loss": F.cross_entropy(found.flatten(0, 1), labels.flatten()), "logits": found}


def test_what_logits_are_made_of_may_be_written_afterwards() -> None:
    model, inputs = Writes(), data()
    for parameter in (model.table.weight, *model.layer.parameters(), model.head.weight):
        parameter.requires_grad = False
    model.head.bias = nn.Parameter(torch.zeros(VOCABULARY))
    inputs["labels"] = inputs["ids"]
    exact(model, inputs, left_out=False)


def test_units_that_are_not_finite_take_no_part() -> None:
    for tokens in (1 + WIDTH, 4 * WIDTH):
        model, inputs = Speaker(), data(tokens=tokens)
        with torch.no_grad():
            model.table.weight[VOCABULARY - 1] = float("nan")
        inputs["ids"][2, 1], inputs["labels"][2] = VOCABULARY - 1, 0
        engine = step(model, inputs, verify=Routing)
        assert int(engine.accumulator.nonfinite) == 1
        others = {name: torch.cat([t[:2], t[3:]]) for name, t in inputs.items()}
        again = step(copy.deepcopy(model), others, verify=Routing)
        for name, total in again.accumulator.sums.items():
            assert relative(engine.accumulator.sums[name], total) < TOLERANCE, name


def test_masks_and_several_groups_of_the_head() -> None:
    model, inputs = Speaker(), data(tokens=1 + WIDTH)
    units = truth(model, inputs)
    names = list(units[0])
    mask = torch.rand(VOCABULARY, WIDTH) < 0.4
    groups = dict.fromkeys(names, 0) | {"head.weight": (0, 1)}
    tickets: deque[Ticket] = deque([ticket(5)])
    policy = Policy((0.5, 0.3), (0.0, 0.0), groups, {"head.weight": mask})
    engine = Engine(model, policy, tickets, verify=Checks)
    model(**inputs)["loss"].backward()
    wanted = torch.zeros(VOCABULARY, WIDTH, dtype=torch.float64)
    for unit in units:
        rest = sum(float(unit[n].square().sum()) for n in names if n != "head.weight")
        inside = (rest + float(unit["head.weight"][mask].square().sum())) ** 0.5
        outside = float(unit["head.weight"][~mask].norm())
        scales = min(1.0, 0.5 / max(inside, 1e-30)), min(1.0, 0.3 / max(outside, 1e-30))
        wanted += torch.where(mask, scales[0], scales[1]) * unit["head.weight"]
    assert relative(engine.accumulator.sums["head.weight"], wanted) < 2e-3


def test_a_loss_without_whole_rows_of_the_logits_is_no_heads() -> None:
    class Late(Speaker):
        def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
            found = self.head(torch.tanh(self.layer(self.table(ids))))
            return {"loss": F.cross_entropy(found[1:].flatten(0, 1), labels[1:].flatten()), "logits": found}

    model, inputs = Late(), data(rows=2, tokens=2 * WIDTH)
    inputs["labels"] = inputs["ids"]
    _, tickets = engine_for(model, 0.7)
    tickets.append(ticket(2))
    with pytest.raises((SelfCheckError, ValueError)):
        model(**inputs)


@pytest.mark.parametrize(
    ("tokens", "frozen", "asked", "left_out"),
    [(9, False, None, False), (10, False, None, True), (9, True, None, True), (9, False, False, True)],
)
def test_logits_are_left_out_where_that_takes_no_longer_or_is_asked_for(
    tokens: int, frozen: bool, asked: bool | None, left_out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(logits.Heads, "tile", 0)
    weight = torch.nn.Parameter(torch.randn(VOCABULARY, WIDTH), requires_grad=not frozen)
    heads = logits.Heads()
    heads.always = asked is False
    made = heads.leave_out(torch.randn(2, tokens, WIDTH), weight, None, lambda: None)  # type: ignore[arg-type,return-value]
    assert made.source.small != left_out


def test_later_batches_of_any_length_take_whatever_way_is_theirs() -> None:
    model = Speaker(tied=True)
    engine, tickets = engine_for(model, 0.7)
    for tokens in (6, 23, 1 + 2 * WIDTH, 2 * WIDTH, 2, 60, 6):
        inputs = data(tokens=tokens, seed=tokens)
        inputs["labels"] = inputs["ids"]
        units = truth(model, inputs)
        feed(engine, tickets, inputs)
        require_exact(engine, units)
