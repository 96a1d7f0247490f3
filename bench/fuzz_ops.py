"""Random calls of every op, each against its definition in float64.

Shapes are odd, layouts strided, units may be empty, tokens of weight 0 hold NaN, and memory around factors holds NaN. A call
is *exact* when its error stays within the bound stated beside it; the worst share of a bound is reported by op.

`python -m fastdp.bench.fuzz_ops CALLS --seed 0 --json FILE` writes the table, and ends with 1 if a call was not exact.
`make sanitize` runs it under the address and undefined-behaviour sanitizers.
"""

from __future__ import annotations

import math
import random
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastdp import ops
from fastdp.ops import NoiseStream
from fastdp.ops.dchi import dchi_noise
from fastdp.ops.grid import on_grid
from fastdp.ops.noise import standard_normals
from fastdp.ops.stream import chacha_words
from fastdp.ops.table import OPS

from .record import parser_of, write

#: Of a float32 sum, against the sum of the sizes of its terms: what docs/kernels.md promises.
ROUNDING = 1e-5
#: Of a float32 normal, against its size and against 1.
NORMAL = 8 * 2.0**-24 + 6e-8
HALF = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}
DTYPES = tuple(HALF)
NAN = float("nan")
#: Error and bound, of one shape.
Compared = tuple[Tensor, Tensor]


class Draw:
    """Random arguments of one call."""

    def __init__(self, seed: int):
        self.pick = random.Random(seed)
        self.seed = seed
        torch.manual_seed(seed)

    def size(self, most: int = 140) -> int:
        """Often 1, or next to a block's end."""
        odd = [n for n in (1, 7, 15, 16, 17, 63, 64, 65, 95, 97, 128, 129) if n <= most]
        return self.pick.choice(odd) if self.pick.random() < 0.5 else self.pick.randint(1, most)

    def turn(self, *kinds: str) -> str:
        """One of several kinds of calls, all of which come in few calls of a family's one or two entries."""
        return kinds[(self.seed // len(FAMILIES) * 2 + self.seed % 2) % len(kinds)]

    def chance(self, probability: float) -> bool:
        return self.pick.random() < probability

    def dtype(self) -> torch.dtype:
        return self.pick.choice((torch.float32, *DTYPES))

    def laid_out(self, values: Tensor) -> Tensor:
        """These values with memory around them that holds NaN."""
        rows, columns = values.shape
        kind = self.pick.choice(("plain", "plain", "rows", "transposed", "columns"))
        if kind == "plain":
            return values
        if kind == "rows":
            held = torch.full((rows, columns + 5), NAN, dtype=values.dtype)[:, 2 : 2 + columns]
        elif kind == "transposed":
            held = torch.full((columns, rows + 3), NAN, dtype=values.dtype).T[:rows]
        else:
            held = torch.full((rows, 2 * columns), NAN, dtype=values.dtype)[:, ::2]
        held.copy_(values)
        return held

    def factor(self, tokens: int, columns: int) -> Tensor:
        return self.laid_out((torch.randn(tokens, columns) * 10.0 ** self.pick.randint(-3, 3)).to(self.dtype()))

    def offsets(self, tokens: int, units: int) -> Tensor:
        """Of units, some of them empty, or all of one length."""
        if self.chance(0.3) and tokens % units == 0:
            return torch.arange(units + 1) * (tokens // units)
        return torch.tensor([0, *sorted(self.pick.randint(0, tokens) for _ in range(units - 1)), tokens])

    def use(self, ids: bool = True) -> tuple[Tensor, Tensor, Tensor, int]:
        """Left, right, offsets and the rows of the matrix."""
        tokens, m, n = self.size(300), self.size(), self.size()
        left = (
            torch.randint(m, (2 * tokens,))[:: self.pick.choice((1, 2))][:tokens] if ids and self.chance(0.5) else None
        )
        return (
            self.factor(tokens, m) if left is None else left,
            self.factor(tokens, n),
            self.offsets(tokens, self.pick.randint(1, 6)),
            m,
        )

    def mask(self, *shape: int) -> Tensor:
        """Of any density, sometimes strided."""
        values = torch.rand(shape) < self.pick.choice((0.0, 0.5, 0.9, 1.0))
        return values.T.contiguous().T if len(shape) == 2 and self.chance(0.3) else values

    def weights(self, *shape: int) -> Tensor:
        return torch.where(torch.rand(shape) < self.pick.choice((0.0, 0.4, 1.0)), 0.0, torch.randn(shape))

    def streams(self) -> tuple[NoiseStream, Tensor]:
        """A stream, and the position that it gives out first."""
        rounds = self.pick.choice((20, 12))
        one, other = (NoiseStream.unsafe_reproducible(self.seed, rounds) for _ in range(2))
        return one, other.take()


def wide(left: Tensor, rows: int) -> Tensor:
    return torch.nn.functional.one_hot(left, rows).double() if left.dim() == 1 else left.double()


def gradients(left: Tensor, right: Tensor, offsets: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Of each unit, [B, m, n] in float64; and the sums of the sizes of their terms."""
    one, two, bounds = wide(left, rows), right.double(), offsets.tolist()
    pairs = [(one[a:b].T @ two[a:b], one[a:b].abs().T @ two[a:b].abs()) for a, b in zip(bounds, bounds[1:])]
    return torch.stack([exact for exact, _ in pairs]), torch.stack([size for _, size in pairs])


def within(got: Tensor, truth: Tensor, size: Tensor, share: float = ROUNDING) -> Compared:
    """The error, and its bound: a share of a size, and what float32 cannot hold."""
    return (got.double() - truth).abs(), share * size.double() + 1e-37


def norms(draw: Draw) -> Compared:
    left, right, offsets, rows = draw.use()
    exact, sizes = gradients(left, right, offsets, rows)
    kind = draw.turn("square", "absolute", "masked")
    if kind == "absolute":
        return within(ops.abs_sum(left, right, offsets), exact.abs().sum((1, 2)), sizes.sum((1, 2)))
    if kind == "masked":
        mask = draw.mask(rows, right.shape[1])
        parts = [torch.where(one, exact, 0).square().sum((1, 2)) for one in (mask, ~mask)]
        bounds = [torch.where(one, sizes, 0).square().sum((1, 2)) for one in (mask, ~mask)]
        return within(ops.masked_sqnorm(left, right, offsets, mask), torch.stack(parts), torch.stack(bounds))
    route = draw.pick.choice(("auto", "gram", "direct"))
    products = ops.row_products(left, right, offsets)[0].square()
    return within(ops.sqnorm(left, right, offsets, route), exact.square().sum((1, 2)), products)


def cross_inner(draw: Draw) -> Compared:
    left1, right1, offsets1, rows = draw.use()
    tokens = draw.size(200)
    left2 = draw.factor(tokens, rows) if draw.chance(0.7) else torch.randint(rows, (tokens,))
    right2, offsets2 = draw.factor(tokens, right1.shape[1]), draw.offsets(tokens, len(offsets1) - 1)
    one, size1 = gradients(left1, right1, offsets1, rows)
    two, size2 = gradients(left2, right2, offsets2, rows)
    got = ops.cross_inner(left1, right1, left2, right2, offsets1, offsets2)
    products = ops.row_products(left1, right1, offsets1)[0] * ops.row_products(left2, right2, offsets2)[0]
    return within(got, (one * two).sum((1, 2)), products)


def row_products(draw: Draw) -> Compared:
    left, right, offsets, rows = draw.use()
    order = draw.pick.choice((1, 2))
    one, two = (torch.linalg.vector_norm(x, order, 1) for x in (wide(left, rows), right.double()))
    bounds = offsets.tolist()
    exact = torch.stack([(one * two)[a:b].sum() for a, b in zip(bounds, bounds[1:])])
    got = ops.row_products(left, right, offsets, order)[0]
    if bool((got < exact).any()):
        return got.new_ones(1), got.new_zeros(1)
    return within(got, exact, exact + (one.sum() + two.sum() + 1) * 2.0**-30, 2.0**-8)


def groups(draw: Draw) -> Compared:
    tokens, k = draw.size(200), draw.pick.randint(1, 4)
    lefts, rights = ([draw.factor(tokens, draw.size()) for _ in range(k)] for _ in range(2))
    offsets = draw.offsets(tokens, draw.pick.randint(1, 5))
    units = len(offsets) - 1
    exact = [gradients(left, right, offsets, 0) for left, right in zip(lefts, rights)]
    squares = torch.stack([g.square().sum((1, 2)) for g, _ in exact])
    products = torch.stack([ops.row_products(left, right, offsets)[0] for left, right in zip(lefts, rights)])
    kind = draw.turn("gram", "chosen", "per_unit", "sum")
    if kind == "gram":
        got, upper = ops.gram_norms(lefts, rights, [1] * k, offsets)
        return within(torch.cat([got.double(), upper]), torch.cat([squares, products]),
                      torch.cat([products.square(), 1e3 * products]))  # fmt: skip
    if kind == "chosen":
        chosen = torch.rand(k, units) < 0.5
        return within(ops.chosen_sqnorm(lefts, rights, offsets, chosen), squares * chosen, products.square())
    if kind == "per_unit":
        made, norm = ops.per_unit_group(lefts, rights, offsets)
        truth, size = [g for g, _ in exact] + [squares], [s for _, s in exact] + [products.square()]
        got, expected, sizes = (torch.cat([x.double().flatten() for x in xs]) for xs in ((*made, norm), truth, size))
        return within(got, expected, sizes)
    weights, begun = draw.weights(k, units), [draw.chance(0.5) for _ in range(k)]
    outs = [torch.randn(a.shape[1], b.shape[1]) if own else None for a, b, own in zip(lefts, rights, begun)]
    before = [0.0 if out is None else out.double() for out in outs]
    poison(lefts, weights, offsets)
    got_sums = ops.weighted_sum_group(lefts, rights, weights, offsets, outs)
    pairs = [
        within(got, old + summed(g, w), (torch.as_tensor(old).abs() + summed(s, w.abs())).expand(got.shape))
        for got, old, (g, s), w in zip(got_sums, before, exact, weights)
    ]
    return torch.cat([e.flatten() for e, _ in pairs]), torch.cat([b.flatten() for _, b in pairs])


def poison(factors: list[Tensor], weights: Tensor, offsets: Tensor) -> None:
    """NaN in a token of each matrix whose unit has weight 0, if there is one."""
    bounds = offsets.tolist()
    for factor, own in zip(factors, weights):
        for unit, (start, end) in enumerate(zip(bounds, bounds[1:])):
            if own[unit] == 0 and end > start:
                factor[start] = NAN
                break


def summed(units: Tensor, weights: Tensor) -> Tensor:
    return torch.tensordot(weights.double(), units, 1)


def weighted_sum(draw: Draw) -> Compared:
    left, right, offsets, rows = draw.use()
    if draw.chance(0.3):
        # A weight for each token: kept tokens lie in short runs.
        offsets = torch.arange(len(right) + 1)
    exact, sizes = gradients(left, right, offsets, rows)
    units, shape = len(offsets) - 1, (rows, right.shape[1])
    out = draw.laid_out(torch.randn(shape))
    old, weights, others = out.double(), draw.weights(units), draw.weights(units)
    mask = draw.mask(*shape)
    matrix = left if left.dim() == 2 and draw.chance(0.5) else right
    if draw.chance(0.5):
        poison([matrix], weights.unsqueeze(0), offsets)
        got = ops.weighted_sum(left, right, weights, out, offsets=offsets)
        return within(got, old + summed(exact, weights), old.abs() + summed(sizes, weights.abs()))
    poison([matrix], (weights.abs() + others.abs()).unsqueeze(0), offsets)
    got = ops.masked_weighted_sum(left, right, weights, others, mask, out, offsets)
    truth = torch.where(mask, summed(exact, weights), summed(exact, others))
    return within(got, old + truth, old.abs() + summed(sizes, weights.abs() + others.abs()))


def reductions(draw: Draw) -> Compared:
    left, right, offsets, rows = draw.use(ids=False)
    bounds = list(zip(offsets.tolist(), offsets.tolist()[1:]))
    kind = draw.turn("per_unit", "columns", "affine")
    if kind == "per_unit":
        return within(ops.per_unit(left, right, offsets), *gradients(left, right, offsets, rows))
    if kind == "columns":
        truth, size = (torch.stack([x[a:b].sum(0) for a, b in bounds]) for x in (left.double(), left.double().abs()))
        return within(ops.column_sums(left, offsets), truth, size)
    x, mean, rstd = draw.factor(*right.shape), torch.randn(len(right)), torch.rand(len(right))
    g, scale = right.double(), rstd.double()[:, None]
    terms = torch.stack([g * (x.double() - mean.double()[:, None]) * scale, g])
    sizes = torch.stack([g.abs() * (x.double().abs() + mean.double().abs()[:, None]) * scale, g.abs()])
    truth, size = (torch.stack([y[:, a:b].sum(1) for a, b in bounds], 1) for y in (terms, sizes))
    return within(torch.stack(ops.affine_sums(right, x, mean, rstd, offsets)), truth, size)


def instances(draw: Draw) -> Compared:
    units, shape = draw.pick.randint(1, 9), (draw.size(), draw.size(200)) if draw.chance(0.8) else (draw.size(20_000),)
    x = torch.randn(units, *shape).to(torch.float64 if draw.chance(0.25) else draw.dtype())
    if draw.chance(0.2):
        x = x.transpose(0, -1).contiguous().transpose(0, -1)
    truth, mask = x.double().flatten(1).clone(), draw.mask(*shape)
    chosen, weights, others = mask.reshape(-1), draw.weights(units), draw.weights(units)
    kind = draw.turn("square", "absolute", "masked", "sum", "masked sum", "group", "group norms")
    if kind in ("square", "absolute"):
        terms = truth.square() if kind == "square" else truth.abs()
        got = (ops.instance_sqnorm if kind == "square" else ops.instance_abs_sum)(x)
        return within(got, terms.sum(1), terms.sum(1))
    if kind == "group norms":
        squares = truth.square().sum(1).expand(2, -1)
        return within(ops.instance_sqnorm_group([x, x]), squares, squares)
    if kind == "masked":
        parts = torch.stack([torch.where(one, truth.square(), 0).sum(1) for one in (chosen, ~chosen)])
        return within(ops.instance_masked_sqnorm(x, mask), parts, parts)
    size = summed(truth.abs(), weights.abs() + others.abs())
    for unit in (weights == 0).nonzero()[:1, 0].tolist():
        x[unit] = NAN if kind != "masked sum" else x[unit]
    if kind == "masked sum":
        both = torch.where(chosen, summed(truth, weights), summed(truth, others))
        return within(ops.instance_masked_sum(x, weights, others, mask).flatten(), both, size)
    if kind == "sum":
        return within(ops.instance_sum(x, weights).flatten(), summed(truth, weights), size)
    got = torch.stack(ops.instance_sum_group([x, x], torch.stack([weights, weights])))
    return within(got.flatten(1), summed(truth, weights).expand(2, -1), size.expand(2, -1))


def add_noise(draw: Draw) -> Compared:
    x = torch.randn(draw.size(), draw.size(100)).to(draw.dtype())
    std, first = 10.0 ** draw.pick.uniform(-4, 4), draw.pick.choice((0, 1, 17, draw.pick.randint(0, 9000)))
    before, secure, (stream, at) = x.clone(), draw.chance(0.5), draw.streams()
    ops.add_noise_(x, std, stream, secure_rounding=secure, first=first)
    if secure:
        return (x.double() - on_grid(before, std, at, first).to(x.dtype).double()).abs(), torch.zeros(x.shape)
    z = standard_normals(at, x.numel(), first).view(x.shape)
    truth = before.double() + std * z
    # Below the smallest normal number a type rounds by one step, whatever is rounded.
    size = truth.abs().clamp(min=torch.finfo(x.dtype).smallest_normal)
    return within(x, truth, size * HALF[x.dtype] + std * NORMAL * (z.abs() + 1), 1.0)


def clip_noise(draw: Draw) -> Compared:
    x = torch.randn(draw.pick.randint(1, 9), draw.size(100) if draw.chance(0.7) else draw.size(9000))
    x *= 10.0 ** draw.pick.randint(-38, 38) / x.abs().max()
    bound = 10.0 ** draw.pick.uniform(-30, 30)
    dtype = draw.dtype() if 1e-3 < float(x.abs().max()) < 1e3 else torch.float32
    x = x.to(dtype)
    if draw.chance(0.1):
        x[0, 0] = NAN
    got = ops.clip_noise(x, bound, 0.0, NoiseStream()).double()
    rows = x.double()
    norm = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    truth = torch.where(norm.isfinite(), rows * (bound / norm).clamp(max=1), 0)
    if dtype == torch.float32 and bool((torch.linalg.vector_norm(got, dim=1) > bound).any()):
        return got.new_ones(1), got.new_zeros(1)
    tiny = torch.finfo(dtype).smallest_normal
    return within(got, truth, truth.abs() * (2.0**-20 + HALF[dtype]) + tiny, 1.0)


def clip_backward(draw: Draw) -> Compared:
    rows, length = draw.pick.randint(1, 9), draw.size(100) if draw.chance(0.7) else draw.size(9000)
    g, x = (torch.randn(rows, length).to(torch.float32) for _ in range(2))
    norm, bound = torch.linalg.vector_norm(x.double(), dim=1), 10.0 ** draw.pick.uniform(-3, 3)
    op = OPS["clip_noise_backward"]
    truth = op.reference(g.double(), x.double(), norm, bound)
    factor = (bound / norm).clamp(max=1)[:, None]
    size = factor * (g.abs() + (g * x).double().sum(1).abs()[:, None] / norm.square()[:, None] * x.abs())
    return within(op(g, x, norm, bound), truth.double(), size.double())


def adamw(draw: Draw) -> Compared:
    shape = (draw.size(), draw.size(100))
    dtype = draw.dtype()
    param, total, mean = torch.randn(shape).to(dtype), torch.randn(shape), torch.randn(shape)
    square, axes = torch.rand(shape), draw.chance(0.3)
    rows, columns = torch.rand(shape[0]) + 0.5, torch.rand(shape[1]) + 0.5
    own, wanted = ([x.clone() for x in (param, total, mean, square)] for _ in range(2))
    numbers = (draw.pick.choice((0.0, 0.5)), 4.0, 0.01, 0.9, 0.99, 1e-6, 0.1, draw.pick.randint(1, 99),
               draw.chance(0.5), *(([rows], [columns]) if axes else ([], [])))  # fmt: skip
    _, position = draw.streams()
    op = OPS["adamw_noise_steps_"]
    op(*[[x] for x in own], [], position[None], *numbers)
    op.reference(*[[x] for x in wanted], [], position[None], *numbers)
    errors, bounds = [], []
    for got, truth, old in zip((own[0], *own[2:]), (wanted[0], *wanted[2:]), (param, mean, square)):
        errors.append((got.double() - truth.double()).abs())
        bounds.append(2 * HALF[got.dtype] * truth.double().abs() + 1e-4 * (truth.double() - old.double()).abs() + 1e-6)
    return torch.stack(errors), torch.stack(bounds)


def snapping(draw: Draw) -> Compared:
    d, rows = draw.size(200), draw.size(400)
    table = draw.laid_out(torch.randn(rows, d).to(draw.dtype()))
    if draw.chance(0.3):
        table[rows // 2 :] = table[: rows - rows // 2].clone()
    if draw.chance(0.6):
        x = draw.factor(draw.size(60), d)
        got = ops.snap(x, table)
        noisy = x.double()
    else:
        ids, eta = torch.randint(rows, (draw.size(60),)), 10.0 ** draw.pick.uniform(-2, 4)
        stream, at = draw.streams()
        got = ops.private_snap(ids, table, eta, stream)
        noisy = table.double()[ids] + dchi_noise(at, len(ids), d) / eta
        distances = (noisy[:, None] - table.double()).norm(dim=2)
        slack = 1e-5 * (noisy.norm(dim=1) + (d + 10) / eta + table.double().norm(dim=1).max())
        return (distances.gather(1, got[:, None])[:, 0] - distances.min(1).values).abs(), slack
    distances = (noisy[:, None] - table.double()).square().sum(2)
    return distances.gather(1, got[:, None])[:, 0] - distances.min(1).values, 1e-13 * distances.max(1).values


def dchi_vectors(draw: Draw) -> Compared:
    n, width = draw.size(60), draw.size(200)
    eta = 10.0 ** (torch.rand(n, dtype=torch.float64) * 30 - 20)
    stream, at = draw.streams()
    truth = dchi_noise(at, n, width) / eta[:, None]
    return within(ops.dchi_vectors(eta, width, stream), truth, truth.norm(dim=1, keepdim=True).expand(truth.shape))


def choice(draw: Draw) -> Compared:
    rows, d = draw.size(600), draw.size(100)
    table, ids = draw.laid_out(torch.randn(rows, d).to(draw.dtype())), torch.randint(rows, (draw.size(80),))
    scale = 10.0 ** draw.pick.uniform(-2, 2)
    scales: Any = scale if draw.chance(0.5) else scale * torch.rand(ids.shape)
    prior = torch.where(torch.rand(rows) < 0.3, -math.inf, torch.randn(rows)) if draw.chance(0.3) else None
    if prior is not None:
        prior[0] = 0.0
    options: dict[str, Any] = {"cap": draw.pick.choice((None, 1.5)), "log_prior": prior}
    drawn = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        stream = NoiseStream.unsafe_reproducible(draw.seed)
        drawn.append(ops.exponential_choice(ids, table, scales, stream, **options))
    bad = (drawn[0] != drawn[1]) | (drawn[0] < 0) | (drawn[0] >= rows)
    if prior is not None:
        bad |= prior[drawn[0].clamp(0, rows - 1)].isinf()
    return bad.double(), torch.zeros(bad.shape)


def words(draw: Draw) -> Compared:
    n, (stream, at) = draw.size(5000), draw.streams()
    truth = chacha_words(at, 0, -(-n // 8)).astype("<u4").view("<u8").reshape(-1)[:n]
    wrong, order = (stream.uniform64(n) != truth).sum(), stream.permutation(n)
    return torch.tensor([float(wrong), float(not np.array_equal(np.sort(order.numpy()), np.arange(n)))]), torch.zeros(2)


#: Every family of ops.
FAMILIES: tuple[Callable[[Draw], Compared], ...] = (
    norms, norms, cross_inner, row_products, groups, groups, weighted_sum, weighted_sum, reductions, instances, instances,
    add_noise, clip_noise, clip_noise, clip_backward, adamw, snapping, dchi_vectors, choice, words,
)  # fmt: skip


def call(seed: int) -> tuple[str, float]:
    """The family of a seed's call, and the largest share of its bound that its error takes; infinite for NaN."""
    draw = Draw(seed)
    family = FAMILIES[seed % len(FAMILIES)]
    torch.set_num_threads(draw.pick.choice((1, 2, 3)))
    error, bound = family(draw)
    share = torch.where(error == 0, 0.0, error / bound)
    return family.__name__, float(share.max()) if bool(share.isfinite().all()) else math.inf


def table(seeds: range) -> dict[str, Any]:
    counts: Counter[str] = Counter()
    worst: dict[str, float] = {}
    wrong = []
    for seed in seeds:
        name, share = call(seed)
        counts[name] += 1
        worst[name] = max(worst.get(name, 0.0), share)
        if not share <= 1:
            wrong.append({"seed": seed, "family": name, "share": str(share)})
    return {
        "calls": len(seeds),
        "by_family": dict(sorted(counts.items())),
        "worst_share_of_bound": worst,
        "wrong": wrong,
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("calls", type=int)
    parser.add_argument("--seed", type=int, default=0, help="of the first call")
    args = parser.parse_args()
    # Memory that an op forgets to write holds NaN.
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    figures = table(range(args.seed, args.seed + args.calls))
    write(args.json, figures)
    print(figures)
    sys.exit(bool(figures["wrong"]))


if __name__ == "__main__":
    main()
