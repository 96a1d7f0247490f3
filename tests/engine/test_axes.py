"""Rank-one axes: the clipped sum in scaled coordinates is that of single examples by autograd, on every route and model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fastdp.engine.clip.axes import RankOne
from fastdp.engine.clip.policy import Policy
from fastdp.engine.clip.sums import Sums
from fastdp.engine.uses.factors import Factors
from tests.cases import cases, pairs
from tests.engine.models import batch, build
from tests.engine.reference import Recording, engine_for, relative, ticket
from tests.engine.runs import Odd, collate, examples, one_by_one

BOUND = 0.5
#: Gradients of float32 models, and products of factors that were rounded once more.
CLOSE = 2e-5


def axes_of(model: torch.nn.Module, seed: int = 0, reach: float = 1.0) -> dict[str, RankOne]:
    """Axes within so many powers of 10 of 1, for every trained parameter but every fifth, which keeps its own scale."""
    generator = torch.Generator().manual_seed(seed)
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]

    def drawn(count: int) -> torch.Tensor:
        return 10 ** (reach * (2 * torch.rand(count, generator=generator) - 1))

    return {
        name: RankOne(drawn(p.shape[0]), drawn(p.numel() // p.shape[0]))
        for index, (name, p) in enumerate(trained)
        if index % 5 != 4
    }


def expected(gradients, axes: dict[str, RankOne], bound: float) -> dict[str, torch.Tensor]:
    total: dict[str, torch.Tensor] = {}
    for gradient in gradients:
        scaled = {
            name: g / axes[name].whole(g.shape).double() if name in axes and g.dim() else g
            for name, g in gradient.items()
        }
        norm = torch.stack([g.square().sum() for g in scaled.values()]).sum().sqrt()
        for name, g in scaled.items():
            total[name] = total.get(name, 0) + g * min(1.0, bound / float(norm))
    return total


def gap(found, wanted) -> float:
    known = {name: value for name, value in wanted.items() if value.dim()}
    a, b = (torch.cat([sums[name].double().reshape(-1) for name in known]) for sums in (found, known))
    return relative(a, b)


@pytest.mark.parametrize(
    ("name", "tuning", "two_pass", "reach"),
    [
        ("gpt2", "full", True, 1.0),
        ("gpt2", "full", False, 1.0),
        # Beyond what sums may be scaled by afterwards.
        ("gpt2", "full", False, 5.0),
        ("t5", "full", False, 1.0),
        ("vit", "full", False, 1.0),
        ("bert", "bottleneck", False, 1.0),
        ("llama", "lora", False, 1.0),
        ("llama", "lora", True, 1.0),
    ],
)
def test_sums_are_those_of_single_examples(name: str, tuning: str, two_pass: bool, reach: float) -> None:
    model, data = build(name, tuning), batch(name)
    axes = axes_of(model, reach=reach)
    gradients = one_by_one(model, data)
    norm = expected(gradients, axes, 1e9)
    bound = BOUND * float(torch.stack([v.square().sum() for v in norm.values()]).sum().sqrt()) / len(gradients)
    engine, tickets = engine_for(model, bound, two_pass=two_pass)
    engine.accumulator.policy = replace(engine.accumulator.policy, axes=axes)
    # In two microbatches, the second of which is added to what the first has left.
    for rows in (slice(1), slice(1, None)):
        part = {key: value[rows] for key, value in data.items()}
        count = len(next(iter(part.values())))
        tickets.append(ticket(count, last=rows.start == 1))
        model(**part).loss.backward()
    assert engine.route == "uses", engine.reason
    # Some are clipped, in the scaled coordinates.
    assert bool((Recording.given[-1] < 1).any())
    assert gap(engine.accumulator.sums, expected(gradients, axes, bound)) < CLOSE


@cases(
    *pairs(
        ("swap", [False, True]), ("dtype", [torch.float32, torch.bfloat16]), ("m, n", [(1, 7), (40, 23), (257, 123)])
    )
)
def test_factors_over_axes_are_those_of_the_gradient_over_them(m: int, n: int, dtype: torch.dtype, swap: bool) -> None:
    generator = torch.Generator().manual_seed(m)
    layout = ticket(3).layout(torch.device("cpu"))
    left, right = (torch.randn(21, size, generator=generator).to(dtype) for size in (m, n))
    shape = (n, m) if swap else (m, n)
    axes = RankOne(*(0.1 + torch.rand(size, generator=generator) for size in shape))
    own = axes.scaled(Factors(left, right, swap=swap))
    assert own.scales is not None
    exact = torch.einsum("utm,utn->umn", left.double().view(3, 7, m), right.double().view(3, 7, n))
    exact = (exact.mT if swap else exact) / axes.whole(torch.Size(shape)).double()
    weights = torch.tensor([0.5, 0.0, 2.0])

    def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
        assert relative(found, wanted) < 1e-6

    # Of two uses, of whole gradients between them, and of one along other axes, as after a change between logical batches.
    sums = Sums({"w": torch.nn.Parameter(torch.zeros(shape))}, Policy((1.0,), (0.0,), {"w": 0}))
    wanted = torch.einsum("u,umn->mn", weights.double(), exact)
    sums.add_uses("w", [own], weights.unsqueeze(0), layout)
    sums.add_instance("w", torch.ones(3, *shape), weights.unsqueeze(0))
    sums.add_uses("w", [own], weights.unsqueeze(0), layout)
    close(sums.sums["w"], 2 * wanted + 2.5)
    sums.add_uses("w", [own], weights.unsqueeze(0), layout)
    others = RankOne(axes.rows * 4, axes.columns)
    sums.add_uses("w", [others.scaled(Factors(left, right, swap=swap))], weights.unsqueeze(0), layout)
    close(sums.sums["w"], 3.25 * wanted + 2.5)
    each, one = torch.zeros(3, *shape), torch.zeros(shape)
    own.each_to(each, layout)
    close(each, exact)
    own.unit_to(one, 2, [0, 7, 14, 21])
    close(one, exact[2])
    squares, products = own.powers(layout)
    close(squares, exact.square().sum((1, 2)))
    assert relative(products, own.row_products(layout)) < 2**-10
    # Of two uses that are both yet to be scaled, and of one with a table's.
    straight, ids = own.straight, torch.arange(21) % shape[0]
    rows = torch.randn(21, shape[1], generator=generator)
    table = axes.scaled(Factors(ids, rows))
    of_table = torch.zeros(3, 7 * shape[0], shape[1], dtype=torch.float64)
    at = (torch.arange(7) * shape[0]).repeat(3) + ids
    of_table[torch.arange(3).repeat_interleave(7), at] = rows.double()
    of_table = of_table.view(3, 7, *shape).sum(1) / axes.whole(torch.Size(shape)).double()
    room = 1e-6 * float(products.sum()) * float(table.row_products(layout).sum())
    assert torch.allclose(straight.inner(straight, layout).double(), exact.square().sum((1, 2)), rtol=1e-5, atol=0)
    for found in (straight.inner(table, layout), table.inner(straight, layout)):
        assert torch.allclose(found.double(), (exact * of_table).sum((1, 2)), rtol=0, atol=room)


def test_one_example_at_a_time_takes_the_same_axes() -> None:
    model = Odd()
    axes, data = axes_of(model), collate(examples(4))
    engine, tickets = engine_for(model, BOUND)
    engine.accumulator.policy = replace(engine.accumulator.policy, axes=axes)
    tickets.append(ticket(4))
    model(**data)["loss"].backward()
    assert engine.route == "one-example"
    assert gap(engine.accumulator.sums, expected(one_by_one(Odd(), data), axes, BOUND)) < CLOSE


def test_refusals() -> None:
    one = torch.ones(1)
    for rows, columns in (
        (torch.zeros(1), one),
        (one, -one),
        (one, torch.full((1,), torch.inf)),
        (torch.ones(1, 1), one),
    ):
        with pytest.raises(ValueError, match="positive, finite"):
            RankOne(rows, columns)
    with pytest.raises(ValueError, match="2 columns; the parameter is"):
        RankOne(one, torch.ones(2)).check("w", torch.Size([1, 3]))
    with pytest.raises(ValueError, match="both a mask and axes"):
        Policy(
            (1.0, 1.0),
            (1.0, 1.0),
            {"w": (0, 1)},
            {"w": torch.ones(2, dtype=torch.bool)},
            {"w": RankOne(torch.ones(2), one)},
        )
