"""Rank-one axes: the clipped sum in scaled coordinates is that of single examples by autograd, on every route and model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fastdp.engine.clip.axes import RankOne
from fastdp.engine.clip.policy import Policy
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
    assert own.left.dtype is own.right.dtype is dtype
    exact = torch.einsum("utm,utn->umn", left.double().view(3, 7, m), right.double().view(3, 7, n))
    exact = (exact.mT if swap else exact) / axes.whole(torch.Size(shape)).double()
    assert relative(own.each(layout), exact) < (1e-6 if dtype is torch.float32 else 2**-7)
    # A lookup in the same table.
    ids, rows = torch.arange(21) % shape[0], torch.randn(21, shape[1], generator=generator)
    one, wanted = torch.zeros(shape), torch.zeros(shape, dtype=torch.float64)
    axes.scaled(Factors(ids, rows)).unit_to(one, 2, [0, 7, 14, 21])
    wanted.index_add_(0, ids[14:], rows[14:].double())
    assert relative(one, wanted / axes.whole(torch.Size(shape)).double()) < 1e-6


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
