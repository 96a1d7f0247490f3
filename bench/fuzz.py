"""Random networks of every kind of layer, each step against one example at a time in float64.

A network is a beginning (ids, numbers or images), a few blocks that keep the kind of what they pass on, and a loss. Blocks
may be called twice (shared weights), and see rows folded into more rows or stacked in another order; batches have odd sizes,
and a second one has other sizes than the first. Each network is *exact* (on either route), *refused* in words before
anything is summed, *wrong*, or a *crash*.

`python -m fastdp.bench.fuzz COUNT --json FILE` writes the table.
"""

from __future__ import annotations

import copy
import random
import warnings
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from fastdp.engine.bounds import UpperNorms
from fastdp.engine.clip.policy import Policy
from fastdp.engine.engine import Engine
from fastdp.engine.errors import SelfCheckError
from fastdp.engine.uses.layout import Ticket
from fastdp.verify import Checks

from .record import parser_of, write

#: The worst relative error of a norm or a sum; beyond it, what float32 autograd itself makes of the same example decides.
TOLERANCE = 1e-5
CLASSES = 3
Choice = random.Random
Function = Callable[[torch.Tensor], torch.Tensor]


class Block(nn.Module):
    """A function of activations and of the modules and parameters that it was given by name."""

    def __init__(self, function: Callable[..., torch.Tensor], **parts: Any):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *given: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        return self.function(self, *given, **named)


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(0.5 * torch.randn(shape))


def _channels(module: nn.Module) -> Block:
    """A module over channels that come second, for words whose channels come last."""
    return Block(lambda own, x: own.inner(x.transpose(1, 2)).transpose(1, 2), inner=module)


def _rnn(kind: Any, width: int, pick: Choice) -> Block:
    both, first, layers = pick.random() < 0.4, pick.random() < 0.5, pick.choice((1, 1, 2))
    inner = kind(width, width, layers, bidirectional=both, batch_first=first, bias=pick.random() < 0.8)

    def run(own: Any, x: torch.Tensor) -> torch.Tensor:
        out = own.inner(x)[0] if first else own.inner(x.transpose(0, 1))[0].transpose(0, 1)
        return out[..., :width] + out[..., -width:]

    return Block(run, inner=inner)


def _cells(kind: Any, width: int, pick: Choice) -> Block:
    def run(own: Any, x: torch.Tensor) -> torch.Tensor:
        state, seen = None, []
        for step in x.unbind(1):
            state = own.cell(step, state)
            seen.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(seen, 1)

    return Block(run, cell=kind(width, width))


def _attention(width: int, pick: Choice) -> Block:
    first, weights = pick.random() < 0.5, pick.random() < 0.5

    def run(own: Any, x: torch.Tensor) -> torch.Tensor:
        q = x if first else x.transpose(0, 1)
        out = own.inner(q, q, q, need_weights=weights)[0]
        return out if first else out.transpose(0, 1)

    return Block(run, inner=nn.MultiheadAttention(width, 2, batch_first=first, bias=pick.random() < 0.8))


def _queries(width: int, pick: Choice) -> Block:
    def run(own: Any, x: torch.Tensor) -> torch.Tensor:
        queries = own.into(own.queries).expand(len(x), -1, -1)
        return x + torch.softmax(queries @ x.transpose(1, 2), -1).transpose(1, 2) @ queries

    return Block(run, queries=_parameter(pick.choice((1, 2, 5)), width), into=nn.Linear(width, width))


def _experts(width: int, pick: Choice) -> Block:
    def run(own: Any, x: torch.Tensor) -> torch.Tensor:
        gates = torch.softmax(own.gate(x), -1)
        return sum(gates[..., i : i + 1] * expert(x) for i, expert in enumerate(own.experts))  # type: ignore[return-value]

    experts = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
    return Block(run, gate=nn.Linear(width, 2), experts=experts)


def _first_expert(width: int, pick: Choice) -> Block:
    def run(own: Any, x: torch.Tensor) -> torch.Tensor:
        flat, out = x.flatten(0, 1), torch.zeros_like(x.flatten(0, 1))
        best = own.gate(flat).argmax(-1)
        for i, expert in enumerate(own.experts):
            where = (best == i).nonzero()[:, 0]
            out = out.index_add(0, where, expert(flat[where]))
        return out.view_as(x) + own.gate(x)[..., :1]

    experts = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
    return Block(run, gate=nn.Linear(width, 2), experts=experts)


def _convolved(width: int, pick: Choice) -> nn.Module:
    size, groups = pick.choice((1, 2, 3)), pick.choice((1, 1, 2, width))
    return nn.Conv1d(width, width, size, padding="same", dilation=pick.choice((1, 2)), groups=groups)


def _widened(width: int, pick: Choice) -> nn.Module:
    step = pick.choice((1, 2))
    return nn.ConvTranspose1d(
        width, width, pick.choice((2, 3)), step, output_padding=step - 1, groups=pick.choice((1, 2))
    )


def _function(width: int, pick: Choice) -> Block:
    """A linear layer whose matrix is made of parameters."""
    made: Callable[[Any], torch.Tensor] = pick.choice(
        (
            lambda own: own.a.t(),
            lambda own: torch.cat([own.a[:1], own.a[1:] * own.scale]),
            lambda own: own.a @ own.b,
            lambda own: own.a / own.a.norm(dim=1, keepdim=True),
        )
    )
    parts = {"a": _parameter(width, width), "b": _parameter(width, width), "scale": _parameter()}
    return Block(lambda own, x: F.linear(x, made(own)), **parts)


#: Blocks over words ``[rows, words, width]``.
WORDS: dict[str, Callable[[int, Choice], nn.Module]] = {
    "linear": lambda n, pick: nn.Linear(n, n, bias=pick.random() < 0.7),
    "layer norm": lambda n, pick: nn.LayerNorm(n, elementwise_affine=pick.random() < 0.8),
    "rms norm": lambda n, pick: nn.RMSNorm(n),
    "group norm": lambda n, pick: _channels(nn.GroupNorm(pick.choice((1, 2, n)), n)),
    "instance norm": lambda n, pick: _channels(nn.InstanceNorm1d(n, affine=True)),
    "conv1d": lambda n, pick: _channels(_convolved(n, pick)),
    "transposed conv1d": lambda n, pick: _channels(_widened(n, pick)),
    "weight-normed conv1d": lambda n, pick: _channels(weight_norm(nn.Conv1d(n, n, 3, padding=1))),
    "lstm": lambda n, pick: _rnn(nn.LSTM, n, pick),
    "gru": lambda n, pick: _rnn(nn.GRU, n, pick),
    "rnn": lambda n, pick: _rnn(nn.RNN, n, pick),
    "recurrent cells": lambda n, pick: _cells(pick.choice((nn.LSTMCell, nn.GRUCell, nn.RNNCell)), n, pick),
    "attention": _attention,
    "encoder layer": lambda n, pick: nn.TransformerEncoderLayer(
        n, 2, 5, dropout=0.0, batch_first=True, norm_first=pick.random() < 0.5
    ),
    "bilinear": lambda n, pick: Block(lambda own, x: own.inner(x, x.sin()), inner=nn.Bilinear(n, n, n)),
    "einsum": lambda n, pick: Block(lambda own, x: torch.einsum("btd,ed->bte", x, own.a), a=_parameter(n, n)),
    "matmul": lambda n, pick: Block(lambda own, x: x @ own.a.t() + own.b, a=_parameter(n, n), b=_parameter(n)),
    "matrix of parameters": _function,
    "learned queries": _queries,
    "mixed experts": _experts,
    "chosen experts": _first_expert,
    "scalar": lambda n, pick: Block(lambda own, x: x * torch.sigmoid(own.a), a=_parameter()),
    "vector": lambda n, pick: Block(
        lambda own, x: torch.tanh(x * own.a + own.b), a=_parameter(n), b=_parameter(1, 1, n)
    ),
    "positions": lambda n, pick: Block(lambda own, x: x + own.a[: x.shape[1]], a=_parameter(40, n)),
    "first token": lambda n, pick: Block(
        lambda own, x: torch.cat([own.a.expand(len(x), -1, -1), x], 1), a=_parameter(1, 1, n)
    ),
    "distances": lambda n, pick: Block(lambda own, x: torch.cdist(x, own.a), a=_parameter(n, n)),
}


def _convolved_image(width: int, pick: Choice) -> nn.Module:
    options: dict[str, Any] = {"groups": pick.choice((1, 1, 2, width)), "bias": pick.random() < 0.7}
    if pick.random() < 0.3:
        return nn.Conv2d(width, width, (pick.choice((1, 2)), 3), padding="same", **options)
    step = pick.choice((1, 1, 2))
    options |= {"stride": step, "padding": pick.choice((1, 2)), "dilation": pick.choice((1, 2)) if step == 1 else 1}
    return nn.Conv2d(width, width, 3, **options)


#: Blocks over images ``[rows, width, height, breadth]``.
IMAGES: dict[str, Callable[[int, Choice], nn.Module]] = {
    "conv2d": _convolved_image,
    "transposed conv2d": lambda n, pick: nn.ConvTranspose2d(
        n, n, 3, 2, padding=1, output_padding=1, groups=pick.choice((1, 2))
    ),
    "conv3d": lambda n, pick: Block(
        lambda own, x: own.inner(x.unsqueeze(2)).mean(2), inner=nn.Conv3d(n, n, (2, 1, 3), padding=(1, 0, 1))
    ),
    "group norm": lambda n, pick: nn.GroupNorm(pick.choice((1, 2, n)), n),
    # Torch's instance norm of a single image goes wrong on its way back from gradients whose channels come last: these do not.
    "instance norm": lambda n, pick: Block(
        lambda own, x: own.inner(x).flatten(1).view_as(x), inner=nn.InstanceNorm2d(n, affine=True)
    ),
    "channels": lambda n, pick: Block(
        lambda own, x: x * own.a + own.b, a=_parameter(n, 1, 1), b=_parameter(1, n, 1, 1)
    ),
}


def _twice_folded(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out = block(torch.stack([x, x.sin()], 1).flatten(0, 1))
    return out.unflatten(0, (len(x), 2)).mean(1)


def _stacked(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    one, two = block(torch.cat([x, x.sin()])).chunk(2)
    return one + two


#: How a block is called.
CALLS: dict[str, Callable[[nn.Module, torch.Tensor], torch.Tensor]] = {
    "once": lambda block, x: block(x),
    "shared": lambda block, x: block(torch.tanh(block(x))),
    "folded": _twice_folded,
    "stacked": _stacked,
}


@dataclass
class Case:
    model: Any
    batches: list[dict[str, torch.Tensor]]


class Network(nn.Module):
    def __init__(self, pick: Choice):
        super().__init__()
        self.kinds: list[str] = []
        self.width = pick.choice((4, 6))
        self.images = pick.random() < 0.3
        self.begin: nn.Module = nn.Identity()
        self.ids = not self.images and pick.random() < 0.5
        self.bag = self.ids and pick.random() < 0.3
        if self.bag:
            self.begin = nn.EmbeddingBag(9, 3 * self.width, mode=pick.choice(("sum", "mean", "max")))
            self.kinds.append("embedding bag")
        elif self.ids:
            self.begin = nn.Embedding(9, self.width, padding_idx=pick.choice((None, 0)))
            self.kinds.append("embedding")
        known = IMAGES if self.images else WORDS
        self.blocks = nn.ModuleList()
        self.calls: list[str] = []
        for _ in range(pick.choice((1, 2, 2, 3))):
            kind = pick.choice(list(known))
            call = pick.choice(("once", "once", "once", "shared", "folded", "stacked"))
            self.blocks.append(known[kind](self.width, pick))
            self.kinds += [kind] if call == "once" else [kind, f"({call})"]
            self.calls.append(call)
        self.out = nn.Linear(self.width, CLASSES)
        self.loss = pick.choice(("labels", "labels", "words", "sum"))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.begin(x)
        if self.bag:
            hidden = hidden.unflatten(1, (3, self.width))
        for block, call in zip(self.blocks, self.calls):
            hidden = torch.tanh(CALLS[call](block, hidden))
        hidden = hidden.flatten(2).transpose(1, 2) if self.images else hidden
        if self.loss == "words":
            logits = self.out(hidden)
            words = labels.unsqueeze(1).expand(-1, logits.shape[1])
            return {"loss": F.cross_entropy(logits.flatten(0, 1), words.flatten())}
        logits = self.out(hidden.mean(1))
        loss = F.cross_entropy(logits, labels)
        return {"loss": loss + 0.5 * F.mse_loss(logits, torch.ones_like(logits)) if self.loss == "sum" else loss}


def network(seed: int) -> Case:
    pick = random.Random(seed)
    torch.manual_seed(seed)
    while True:
        case = _drawn(pick)
        try:
            for batch in case.batches:
                case.model(**batch)
            return case
        except RuntimeError:
            # An image that has become smaller than the next kernel.
            continue


def _drawn(pick: Choice) -> Case:
    model = Network(pick).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    batches = []
    for _ in range(2):
        rows, length = pick.choice((1, 2, 3, 4, 5)), pick.choice((3, 4, 5, 7))
        if model.images:
            x = torch.randn(rows, model.width, length, 6)
        else:
            x = torch.randint(0, 9, (rows, length)) if model.ids else torch.randn(rows, length, model.width)
        batches.append({"x": x, "labels": torch.randint(0, CLASSES, (rows,))})
    return Case(model, batches)


@dataclass(frozen=True)
class NotingPolicy(Policy):
    """Flat clipping that keeps the norms it was given and the scales it gave."""

    seen: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def latest(self, rows: int, route: str | None) -> tuple[torch.Tensor, torch.Tensor]:
        norms, scales = zip(*self.seen[-rows if route == "one-example" else -1 :])
        return torch.cat(norms), torch.cat(scales)

    def scales(self, upper: UpperNorms) -> torch.Tensor:
        given = super().scales(upper)
        self.seen.append((upper.measured.sqrt()[0].double(), given[0].double()))
        return given


def alone(model: nn.Module, batch: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Plain autograd of each row's own loss, in the model's own precision."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    kind, found = named[0][1].dtype, []
    for row in range(len(next(iter(batch.values())))):
        single = {k: v[row : row + 1] for k, v in batch.items()}
        single = {k: v.to(kind) if v.is_floating_point() else v for k, v in single.items()}
        gradients = torch.autograd.grad(model(**single)["loss"], [p for _, p in named], allow_unused=True)
        found.append({n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(named, gradients)})
    return found


def norms(gradients: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    return torch.stack([torch.cat([g.double().flatten() for g in one.values()]).norm() for one in gradients])


def summed(gradients: list[dict[str, torch.Tensor]], scales: torch.Tensor) -> torch.Tensor:
    flat = [torch.cat([g.double().flatten() for g in one.values()]) for one in gradients]
    return torch.stack(flat).mul(scales.unsqueeze(1)).sum(0)


@dataclass(frozen=True)
class Outcome:
    """What became of a network: exact, refused, wrong or crash; its route; its worst error; and the reason in words."""

    verdict: str
    route: str
    error: float
    why: str = ""

    def __str__(self) -> str:
        return f"exact, {self.route}" if self.verdict == "exact" else self.verdict


def run(case: Case) -> Outcome:
    """One clipped step on each batch, and every norm and sum against float64."""
    plain, exact = copy.deepcopy(case.model), copy.deepcopy(case.model).double()
    names = [n for n, p in case.model.named_parameters() if p.requires_grad]
    tickets: deque[Ticket] = deque()
    engine, worst = None, 0.0
    try:
        for batch in case.batches:
            rows = len(batch["labels"])
            truth = alone(exact, batch)
            true = norms(truth)
            policy = NotingPolicy((float(true.median()),), (0.0,), dict.fromkeys(names, 0))
            if engine is None:
                engine = Engine(case.model, policy, tickets, verify=Checks)
            engine.accumulator.policy = policy
            engine.accumulator.reset()
            tickets.append(Ticket(torch.arange(rows), torch.ones(rows), is_last=False))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                case.model(**batch)["loss"].backward()
            seen, given = policy.latest(rows, engine.route)
            zero = {n: p for n, p in exact.named_parameters() if p.requires_grad}
            sums = [engine.accumulator.sums.get(n, torch.zeros_like(p)).double().flatten() for n, p in zero.items()]
            errors = float(((seen - true).abs() / true).max()), apart(torch.cat(sums), summed(truth, given))
            if not max(errors) < TOLERANCE:
                own = _rounding(plain, exact, batch, truth, given)
                if not all(error < TOLERANCE + 8 * room for error, room in zip(errors, own)):
                    return Outcome("wrong", str(engine.route), max(errors), engine.reason or "")
            worst = max(worst, *errors)
        assert engine is not None
        return Outcome("exact", str(engine.route), worst, engine.reason or "")
    except (SelfCheckError, ValueError) as error:
        return Outcome("refused", "none", 0.0, str(error))
    except Exception as error:
        return Outcome("crash", "none", 0.0, f"{type(error).__name__}: {error}")
    finally:
        if engine is not None:
            engine.close()


def _rounding(
    plain: nn.Module, exact: nn.Module, batch: dict[str, torch.Tensor], truth: Any, scales: torch.Tensor
) -> tuple[float, float]:
    """What float32 itself does to norms and to their sum: in autograd, and by rounding parameters and data at random."""
    true, expected, found = norms(truth), summed(truth, scales), [alone(plain, batch)]
    for _ in range(4):
        moved = copy.deepcopy(exact)
        with torch.no_grad():
            for parameter in moved.parameters():
                parameter.mul_(1 + 2.0**-23 * torch.randn_like(parameter))
        noise = {
            k: 2.0**-23 * torch.randn(v.shape, dtype=torch.float64) if v.is_floating_point() else 0
            for k, v in batch.items()
        }
        found.append(alone(moved, {k: v + v * noise[k] for k, v in batch.items()}))
    of_norms = max(float(((norms(one) - true).abs() / true).max()) for one in found)
    return of_norms, max(apart(summed(one, scales), expected) for one in found)


def apart(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


def table(seeds: range) -> dict[str, Any]:
    total: Counter[str] = Counter()
    by_kind: dict[str, Counter[str]] = {}
    notable, worst = [], 0.0
    for seed in seeds:
        case = network(seed)
        kinds, found = case.model.kinds, run(case)
        worst = max(worst, found.error if found.verdict == "exact" else 0.0)
        total[str(found)] += 1
        for kind in set(kinds):
            by_kind.setdefault(kind, Counter())[str(found)] += 1
        if found.verdict != "exact":
            notable.append({"seed": seed, "kinds": kinds, "verdict": found.verdict, "why": found.why[:300]})
    return {
        "networks": len(seeds),
        "total": dict(sorted(total.items())),
        "worst_error": worst,
        "by_kind": {kind: dict(sorted(count.items())) for kind, count in sorted(by_kind.items())},
        "not_exact": notable,
    }


if __name__ == "__main__":
    parser = parser_of(__doc__)
    parser.add_argument("count", type=int)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    write(options.json, table(range(options.count)))
