"""One record and the others: a record that adds nothing moves no other record's bound, whatever its length and neighbours.

The others' tokens cancel, so that a bound which followed the longest row, the route or the number of units would move all of
them at once. Records are searched for by size, length, place and number of rows.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from hypothesis import assume, given, settings, strategies as st
from torch import nn

import fastdp
from fastdp import ops
from fastdp.accounting.statements import AMONG_UNITS
from fastdp.engine.bounds import UpperNorms
from fastdp.engine.clip import norms, sums
from fastdp.engine.clip.accumulator import Accumulator
from fastdp.engine.clip.norms import NormSink
from fastdp.engine.clip.policy import Policy
from fastdp.engine.uses.factors import Factors
from fastdp.engine.uses.layout import Ticket
from fastdp.methods.frost.accumulate import AbsoluteSink
from fastdp.ops.routes import NARROW, ROUTES
from fastdp.private.observer import Observer
from tests.cases import cases, pairs
from tests.loops import train_epoch

#: What one record may move, in units of the bound.
MOVES = 1.0001
BOUND = 0.1
KINDS = ("matrix", "masked", "table", "tied", "joined", "read too", "bias", "absolute", "absolute twice")
#: Those that a GPU measures in ways of its own.
ON_GPU = ("matrix", "masked", "table", "tied", "joined", "absolute")
#: Sizes at which every way of measuring and adding is the fastest one for some length.
SIZES = ((4, 90), (90, 4), (70, 80), (130, 66), (200, 200))


def record(generator: torch.Generator, tokens: int, m: int, n: int, ratio: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Factors of a unit whose tokens cancel to about 1 of ``ratio``."""
    left = torch.randn(1, m, generator=generator).expand(tokens, m).clone()
    right = torch.randn(1, n, generator=generator).expand(tokens, n).clone()
    right[1::2] *= -1
    right[-1] *= tokens % 2 + 1e-12
    spread = torch.randn(tokens, n, generator=generator)
    return left / m**0.5, (ratio * right / n**0.5 + spread / n**0.5) / tokens


def batch_of(
    units: list[list[tuple[torch.Tensor, torch.Tensor]]], left_sided: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows padded to the longest; a unit may have several."""
    rows = [row for unit in units for row in unit]
    longest = max(len(left) for left, _ in rows)

    def padded(x: torch.Tensor) -> torch.Tensor:
        rest = x.new_zeros(longest - len(x), x.shape[1])
        return torch.cat([rest, x] if left_sided else [x, rest])

    lefts, rights = zip(*rows)
    # Inputs at padding are what they are: it is the gradient that is zero there.
    fill = [padded(right) + (padded(torch.ones(len(right), 1)) == 0) * 0.7 for right in rights]
    return torch.cat([padded(left) for left in lefts]), torch.cat(fill)


def clipped(
    kind: str, units: list[Any], size: tuple[int, int], *, keep: bool, left_sided: bool
) -> tuple[UpperNorms, torch.Tensor, torch.Tensor]:
    """Bounds, weights and the clipped sum of a micro-batch."""
    m, n = size
    left, right = batch_of(units, left_sided)
    masks = {"w": torch.rand(m, n, generator=torch.Generator().manual_seed(5)) < 0.4} if kind == "masked" else {}
    parameter = nn.Parameter(torch.zeros(m) if kind == "bias" else torch.zeros(m, n))
    group: Any = (0, 1) if masks else 0
    policy = Policy((BOUND, BOUND) if masks else (BOUND,), (0.0,) * (2 if masks else 1), {"w": group}, masks)
    accumulator = Accumulator({"w": parameter}, policy)
    # Of each token its own, wherever it stands.
    ids = (right[:, 0].abs() * 2**20).long() % 3
    uses = {
        "tied": [Factors(left, right), Factors(ids, right * left.ne(0).any(1, keepdim=True))],
        "joined": [Factors(left, right), Factors(left, right * 0.5)],
        "table": [Factors(ids, right * left.ne(0).any(1, keepdim=True))],
        "absolute twice": [Factors(left, right), Factors(left, -0.999 * right)],
    }.get(kind, [Factors(left, right)])
    reads = torch.stack([torch.full((m, n), 1e-3 * bool(unit[0][0].any())) for unit in units])
    row_units = torch.tensor([at for at, unit in enumerate(units) for _ in unit])
    layout = Ticket(row_units, torch.ones(len(units)), True).layout(torch.device("cpu"))
    sinks: list[NormSink] = []
    expected = {"w": len(uses) + (kind == "read too")}
    made = NormSink if not kind.startswith("absolute") else AbsoluteSink

    def backward(retain: bool) -> None:
        for use in uses:
            if kind == "bias":
                sinks[-1].tokens(parameter, left * right[:, :1], layout, False)
            else:
                sinks[-1].matrix(parameter, use, layout)
        if kind == "read too":
            sinks[-1].instances(parameter, reads, layout)

    sinks.append(made(accumulator, layout, expected, keep=keep))
    if kind in ("table", "tied"):
        accumulator.tables = frozenset("w")
        sinks[-1].tables = accumulator.tables
    backward(False)
    upper = sinks[-1].finish()
    weights = policy.scales(upper)
    if kind.startswith("absolute"):
        return upper, weights, weights.double() @ upper.measured.T
    again = Accumulator({"w": parameter}, policy)
    again.tables = accumulator.tables
    again.run(backward, sinks.append, layout, expected, two_pass=False)  # type: ignore[arg-type]
    return upper, weights, again.sums["w"].double()


@contextmanager
def gpu(route: Callable[..., str]) -> Iterator[None]:
    """Measure as on a GPU, where ``route`` says how: many uses in one launch, and the error terms of its kernels."""

    class Rounding(ops.Rounding):
        def __init__(self, *factors: torch.Tensor):
            super().__init__(*factors)
            self.arithmetic = "triton"

    with ExitStack() as patches:
        for module, name, value in (
            (norms, "launches", lambda device: True),
            (sums, "launches", lambda device: True),
            (norms, "may_hold", lambda device: 1 << 30),
            (norms, "plan_route", route),
            (norms, "_CONSTANTS", {}),
            (ops, "Rounding", Rounding),
        ):
            patches.enter_context(mock.patch.object(module, name, value))
        yield


@settings(max_examples=200, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    size=st.sampled_from(SIZES),
    seed=st.integers(0, 10**6),
    count=st.sampled_from((1, 3, 21, 40)),
    tokens=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    rows=st.integers(1, 2),
    ratio=st.sampled_from((1.0, 30.0, 1e3, 1e5)),
    length=st.sampled_from((1, 5, 64, 170, 450)),
    at=st.floats(0, 1),
    routes=st.sampled_from((None, None, *itertools.product(ROUTES, ROUTES))),
    keep=st.booleans(),
    left_sided=st.booleans(),
)
def test_a_record_of_zeros_moves_no_other(
    kind: str,
    size: tuple[int, int],
    seed: int,
    count: int,
    tokens: list[int],
    rows: int,
    ratio: float,
    length: int,
    at: float,
    routes: tuple[str, str] | None,
    keep: bool,
    left_sided: bool,
) -> None:
    """On a GPU by two routes, whatever becomes of the lengths, of padding, of the route and of the number of units."""
    assume(routes is None or kind in ON_GPU)
    generator, (m, n) = torch.Generator().manual_seed(seed), size
    own = [[record(generator, t, m, n, ratio) for _ in range(rows)] for t in tokens]
    # Alike, so that what moves one of them moves all in one direction.
    others = [own[i % len(own)] for i in range(count)]
    x, place = [(torch.zeros(length, m), torch.zeros(length, n))], round(at * count)
    found = []
    for units, route in zip((others, [*others[:place], x, *others[place:]]), routes or (None, None)):
        with nullcontext() if route is None else gpu(lambda *sizes, chosen=route, **options: chosen):
            found.append(clipped(kind, units, size, keep=keep, left_sided=left_sided))
    (upper, weights, total), (upper_x, weights_x, total_x) = found
    rest = [i for i in range(count + 1) if i != place]
    # What is left is the rounding of the squares themselves, of which each route of a wide matrix has its own.
    rtol = 1e-12 if routes is None or routes[0] == routes[1] else 1e-5
    torch.testing.assert_close(upper_x.norms[:, rest], upper.norms, rtol=rtol, atol=0)
    if routes is None:
        assert torch.equal(upper_x.measured[:, rest], upper.measured)
        assert torch.equal(weights_x[:, rest], weights)
    # What a GPU makes of a narrow matrix by unit is what it adds.
    if routes is None or (min(size) <= NARROW and kind in ("matrix", "masked", "joined")):
        assert float((total_x - total).norm()) <= (MOVES - 1) * BOUND


@cases(*pairs(("kind", KINDS), ("size", SIZES), ("route", [None, "direct", "instantiate"])))
def test_one_pass_and_two_have_one_bound(kind: str, size: tuple[int, int], route: str | None) -> None:
    """Memory decides between them, and so the lengths of others."""
    if route == "instantiate" and kind not in ON_GPU:
        return
    generator = torch.Generator().manual_seed(4)
    units = [[record(generator, tokens, *size, ratio)] for tokens, ratio in ((9, 1.0), (30, 1e3), (2, 1.0))]
    with nullcontext() if route is None else gpu(lambda *sizes, **options: route):
        found = [clipped(kind, units, size, keep=keep, left_sided=False)[0].norms for keep in (True, False)]
    torch.testing.assert_close(*found, rtol=1e-12, atol=0)


@cases(*pairs(("size", [(4, 90), (90, 4)]), ("ratio", [1.0, 1e4])))
def test_a_narrow_matrix_of_a_gpu_has_one_bound_in_one_pass_and_in_two(size: tuple[int, int], ratio: float) -> None:
    """Memory decides between the two, and so the lengths of others; the second pass adds what the first one measured."""
    m, n = size
    generator = torch.Generator().manual_seed(3)
    left, right = batch_of([[record(generator, 9, m, n, ratio)] for _ in range(3)], False)
    parameter = nn.Parameter(torch.zeros(m, n))
    layout = Ticket(torch.arange(3), torch.ones(3), True).layout(torch.device("cpu"))
    found, made = [], []
    for two_pass in (False, True):
        accumulator = Accumulator({"w": parameter}, Policy((BOUND,), (0.0,), {"w": 0}))
        sinks: list[Any] = []

        def backward(retain: bool, sinks: list[Any] = sinks) -> None:
            sinks[-1].matrix(parameter, Factors(left, right), layout)

        with gpu(lambda *sizes, **options: "instantiate"):
            sink = NormSink(accumulator, layout, {"w": 1}, keep=not two_pass)
            sink.matrix(parameter, Factors(left, right), layout)
            found.append(sink.finish().norms)
            accumulator.run(backward, sinks.append, layout, {"w": 1}, two_pass=two_pass)  # type: ignore[arg-type]
        made.append(accumulator.sums["w"])
    assert torch.equal(*found)
    assert torch.equal(*made)


class Bag(nn.Module):
    """A bag of tokens, whose gradient is the sum of its rows."""

    def __init__(self, width: int):
        super().__init__()
        self.layer = nn.Linear(width, width, bias=False)
        nn.init.zeros_(self.layer.weight)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        scores = self.layer(x).sum((1, 2)) / x.shape[2] ** 0.5
        return {"loss": nn.functional.binary_cross_entropy_with_logits(scores, y)}


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    longest = max(len(row["x"]) for row in rows)
    x = torch.stack([nn.functional.pad(row["x"], (0, 0, 0, longest - len(row["x"]))) for row in rows])
    return {"x": x, "y": torch.stack([row["y"] for row in rows])}


class Counted(Observer):
    counts = (0.0, 0.0)

    def before_release(self, accumulator: Any) -> None:
        self.counts = float(accumulator.unclipped), float(accumulator.units)


def one_release(
    records: list[dict[str, torch.Tensor]], lr: float = 0.0, watch: Observer | None = None, **options: Any
) -> fastdp.Private:
    """A run of one release of all records, in one microbatch; its card speaks of records of their lengths."""
    model = Bag(records[0]["x"].shape[1])
    optimizer = torch.optim.SGD(model.parameters(), lr)
    loader = torch.utils.data.DataLoader(records, batch_size=len(records), collate_fn=collate)
    given: Any = {"target_delta": 1e-5, "max_physical_batch_size": len(records), "epochs": 1, **options}
    private = fastdp.make_private(model, optimizer, loader, **given)
    private.longest = max(len(record["x"]) for record in records)
    if watch is not None:
        private.observe(watch)
    train_epoch(private)
    private.detach()
    return private


def counted(records: list[dict[str, torch.Tensor]], bound: float) -> tuple[float, float]:
    method = fastdp.DPSGD(max_grad_norm=bound, adaptive=fastdp.AdaptiveClipping())
    one_release(records, watch=(seen := Counted()), method=method, noise_multiplier=1.0)
    return seen.counts


@cases("above", [1.5e-6, 1.2e-5, 0.05])
def test_a_record_moves_the_count_by_one(above: float) -> None:
    """Others of one norm at the bound: a last bit must not turn all of them."""
    rows = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))
    norm = 0.5 * float(rows.double().sum(0).norm())
    others = [{"x": rows, "y": torch.tensor(1.0)} for _ in range(64)]
    before = counted(others, norm * (1 + above))
    for length in (5, 500):
        x = {"x": torch.zeros(length, 64), "y": torch.tensor(1.0)}
        after = counted([*others, x], norm * (1 + above))
        centred = [whole - units / 2 for whole, units in (before, after)]
        assert abs(centred[1] - centred[0]) <= 0.5 * MOVES


def test_a_changed_last_bit_moves_the_count_by_little() -> None:
    policy = Policy((1.0,), (1.0,), {})
    norms = torch.tensor([0.9, 15 / 16, 1.0, 1.0, 17 / 16, 2.0, float("nan")], dtype=torch.float64)
    nothing = torch.zeros(7, dtype=torch.bool)
    whole, changed = (
        policy.unclipped(UpperNorms(own[None], own[None].square(), nothing)) for own in (norms, norms * (1 + 1e-7))
    )
    torch.testing.assert_close(whole, torch.tensor([1, 1, 0.5, 0.5, 0, 0, 0], dtype=torch.float64))
    assert float((whole - changed).abs().max()) <= 8.5e-7


def cancelling(tokens: int, width: int, ratio: float) -> torch.Tensor:
    """Tokens of about ``ratio``, whose sum is of length 1."""
    generator = torch.Generator().manual_seed(1)
    base, kept = (nn.functional.normalize(torch.randn(width, generator=generator), dim=0) for _ in range(2))
    return torch.stack([base * ratio * 2 / tokens * (-1) ** token + kept / tokens for token in range(tokens)])


@cases(
    ("rows", "count", "length", "physical", "moves"),
    [
        # Of the longest row of a microbatch, and of a route that the number of units chooses.
        *((cancelling(2, 64, 3e4), count, 512, None, MOVES - 1) for count in (16, 21, 64, 256)),
        *((cancelling(32, width, 3e3), count, 32, None, MOVES - 1) for width, count in ((16, 21), (24, 76), (32, 244))),
        # A short one in front, which decides who shares a microbatch with a long one.
        *((cancelling(2, 64, 3e5), count, 1, 4, MOVES - 1) for count in (16, 64)),
        # A bag of tokens. A longer one changes how its sum is cut into products, by no more than the card says.
        (torch.randn(2, 64, generator=torch.Generator().manual_seed(1)), 512, 2, None, MOVES - 1),
        *(
            (torch.randn(2, width, generator=torch.Generator().manual_seed(1)), 512, 64, None, None)
            for width in (16, 64)
        ),
    ],
)
def test_a_record_of_zeros_moves_the_release_by_nothing(
    rows: torch.Tensor, count: int, length: int, physical: int | None, moves: float | None
) -> None:
    """The whole way, to the parameters. Without ``moves``, by the least figure that the run's own card allows."""

    def record(rows: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"x": rows, "y": torch.tensor(1.0)}

    x, others = record(torch.zeros(length, rows.shape[1])), [record(rows)] * count
    if physical is not None:
        others[2 * physical - 1 :: 2 * physical] = [record(torch.zeros(300, rows.shape[1]))] * (count // (2 * physical))

    def released(records: list[dict[str, torch.Tensor]]) -> tuple[torch.Tensor, Any]:
        options = {} if physical is None else {"max_physical_batch_size": physical}
        method = fastdp.DPSGD(max_grad_norm=BOUND)
        private = one_release(records, 1.0, method=method, noise_multiplier=0.0, **options)
        return -private.model.layer.weight.detach().double() * len(records), private.card()

    (with_x, card), (without, _) = released([x, *others]), released(others)
    if moves is None:
        (said,) = [said for said in card["remaining"] if said.startswith(AMONG_UNITS)]
        likely, most = (float(figure) for figure in re.findall(r"by (?:some )?(\d\S+)", said))
        assert f"about {count + 1} units of {length} tokens" in said
        moves = min(likely, most)
    # A card allows the bound, which x may add whole, and its figure beside.
    assert float((with_x - without).norm()) <= moves * BOUND
