"""The cases of the microbenchmarks: every op at one size, how it is checked, and the alternatives it is timed beside."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from fastdp import ops
from fastdp.ops.table import definitions

Function = Callable[[], Any]


@dataclass(frozen=True)
class Sizes:
    """How large the cases are.

    Args:
        elements: of the noise ops.
        hidden: rows, tokens and width of the embeddings that are clipped and noised.
        units, length: units in a batch, and tokens of each.
        rows, columns: of a layer's matrix.
        adapters, rank: how many small matrices a LoRA step has, and their rank.
        vocabulary, width: of the table that is snapped to.
        queries: rows to snap.
        draws, distinct: ids of the exponential choice, and how many of them differ.
    """

    elements: int
    hidden: tuple[int, int, int]
    units: int
    length: int
    rows: int
    columns: int
    adapters: int
    rank: int
    vocabulary: int
    width: int
    queries: int
    draws: int
    distinct: int


SIZES = {
    "cpu": Sizes(1 << 24, (64, 128, 768), 8, 128, 2048, 512, 24, 4, 50_257, 768, 1024, 100_000, 2000),
    "cuda": Sizes(1 << 28, (256, 512, 768), 32, 1024, 2048, 512, 128, 16, 50_257, 768, 1024, 100_000, 2000),
    "small": Sizes(1 << 12, (4, 5, 48), 3, 17, 33, 20, 4, 2, 257, 48, 9, 60, 20),
}


@dataclass(frozen=True)
class Case:
    """One op at one size.

    Args:
        run: the op.
        check: relative error of the op against its definition, and the largest that is allowed.
        alternatives: other ways to the same result, by name.
        flops, bytes: the least arithmetic and memory traffic that the result takes.
    """

    op: str
    size: str
    run: Function
    check: Callable[[], tuple[float, float]]
    alternatives: dict[str, Function]
    flops: float = 0.0
    bytes: float = 0.0


def cases(device: torch.device, sizes: Sizes, only: str | None = None) -> Iterator[Case]:
    """Cases whose name holds ``only``, or all; a group makes its inputs when it is reached, and lets go of them after."""
    torch.manual_seed(0)
    for group in _GROUPS:
        if only is None or any(only in name for name in _members(group)):
            yield from (case for case in group(device, sizes) if only is None or only in case.op)


def names(only: str | None = None) -> list[str]:
    return [name for group in _GROUPS for name in _members(group) if only is None or only in name]


def _torch(function: Callable[..., Any], *args: Any) -> dict[str, Function]:
    """The formula in torch, as it is and compiled: on the first call, since the compiler takes seconds to import."""
    compiled = functools.cache(lambda: torch.compile(function, dynamic=False))
    return {"torch": lambda: function(*args), "torch.compile": lambda: compiled()(*args)}


def _relative(got: torch.Tensor, truth: torch.Tensor) -> float:
    gap = float((got.double() - truth.double()).norm())
    return gap / max(float(truth.double().norm()), 1e-300) if math.isfinite(gap) else math.inf


def _defined(function: Callable[[], torch.Tensor], allowed: float) -> Callable[[], tuple[float, float]]:
    """A check of what a function of ops gives, against what it gives by their definitions."""

    def check() -> tuple[float, float]:
        found = function()
        with definitions():
            return _relative(found, function()), allowed

    return check


def _dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _against_definition(run: partial[Any], size: str, ways: dict[str, Function], **least: float) -> Case:
    """A case named after the public function that ``run`` calls, checked against its definition on float64 arguments."""

    def check() -> tuple[float, float]:
        # Of many matrices a few: in float64 all of them could fill a GPU.
        few = [given[:8] if isinstance(given, list) else given for given in run.args]
        with definitions():
            truth = run.func(*map(_wider, few), **run.keywords)
        pairs = zip(_leaves(run.func(*few, **run.keywords)), _leaves(truth))
        first = next(t for t in _leaves(few) if t.is_floating_point())
        return max(_relative(got, true) for got, true in pairs), 1e-5 if first.dtype == torch.float32 else 1e-2

    return Case(run.func.__name__, size, run, check, ways, **least)


def _leaves(found: Any) -> Iterator[torch.Tensor]:
    if isinstance(found, torch.Tensor):
        yield found
    elif isinstance(found, (tuple, list)):
        for value in found:
            yield from _leaves(value)


def _wider(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_wider(v) for v in value)
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _same_noise() -> ops.NoiseStream:
    return ops.NoiseStream.unsafe_reproducible(7)


def _noise(device: torch.device, sizes: Sizes) -> Iterator[Case]:
    n, stream = sizes.elements, ops.NoiseStream()
    x = torch.zeros(n, device=device)
    noised = _defined(lambda: ops.add_noise_(torch.zeros(4099, device=device), 1.0, _same_noise()), 1e-5)
    ways = _torch(lambda v: v.add_(torch.randn_like(v)), x)
    yield Case("add_noise_", f"{n} float32", lambda: ops.add_noise_(x, 1.0, stream), noised, ways, bytes=8.0 * n)

    def state(size: int) -> list[torch.Tensor]:
        return [torch.randn(size, device=device).mul_(0.01) for _ in range(3)] + [torch.rand(size, device=device)]

    held, small = state(n), state(1003)
    parameter = torch.nn.Parameter(torch.zeros(n, device=device))
    parameter.grad = held[1]
    fused = torch.optim.AdamW([parameter], lr=1e-4, fused=True)
    settings: dict[str, Any] = {"divisor": 8.0, "lr": 1e-2, "step": 4, "weight_decay": 0.01}

    def two() -> None:
        ops.add_noise_(held[1], 1.0, stream)
        fused.step()

    def step(own: list[torch.Tensor], std: float, noise: ops.NoiseStream) -> torch.Tensor:
        weight, total, first, second = own
        ops.adamw_noise_step_(weight, total, first, second, std, noise, **settings)
        return weight

    def stepped() -> torch.Tensor:
        return step([t.clone() for t in small], 0.5, _same_noise())

    run = partial(step, held, 1.0, stream)
    ways = {"add_noise_ and torch's fused AdamW": two}
    yield Case("adamw_noise_step_", f"{n} float32", run, _defined(stepped, 1e-5), ways, bytes=28.0 * n)
    yield from _clip_noise(device, sizes, stream)


def _clip_noise(device: torch.device, sizes: Sizes, stream: ops.NoiseStream) -> Iterator[Case]:
    hidden = torch.randn(sizes.hidden, device=device)
    upstream = torch.randn_like(hidden)
    size = " x ".join(map(str, sizes.hidden)) + " float32"

    def composed(v: torch.Tensor) -> torch.Tensor:
        scale = (1.0 / v.flatten(1).norm(dim=1)).clamp(max=1.0).view(-1, 1, 1)
        return v * scale + 0.1 * torch.randn_like(v)

    def clipped(v: torch.Tensor, std: float = 0.1, noise: ops.NoiseStream = stream) -> torch.Tensor:
        return ops.clip_noise(v, 1.0, std, noise)

    def with_gradient(function: Callable[[torch.Tensor], torch.Tensor], rows: int | None = None) -> torch.Tensor:
        with torch.enable_grad():
            leaf = hidden[:rows].detach().requires_grad_()
            return torch.autograd.grad(function(leaf), leaf, upstream[:rows])[0]

    check = _defined(lambda: clipped(hidden[:3], 0.0, _same_noise()), 1e-6)
    yield Case(
        "clip_noise", size, partial(clipped, hidden), check, _torch(composed, hidden), bytes=12.0 * hidden.numel()
    )
    # Backward reads the upstream gradient and the input twice, for their inner product first.
    both = (12.0 + 20.0) * hidden.numel()
    check = _defined(lambda: with_gradient(lambda v: clipped(v, 0.1, _same_noise()), 3), 1e-5)
    ways: dict[str, Function] = {"torch": partial(with_gradient, composed)}
    yield Case("clip_noise and its gradient", size, partial(with_gradient, clipped), check, ways, bytes=both)


class _Layer:
    """Factors of one layer's use, and what its cases share."""

    def __init__(self, device: torch.device, sizes: Sizes):
        self.dtype = _dtype(device)
        self.units, self.length, self.m, self.n = sizes.units, sizes.length, sizes.rows, sizes.columns
        self.tokens = self.units * self.length
        self.offsets = torch.arange(self.units + 1, device=device) * self.length
        self.left, self.left2, self.right = (self.factor(device, columns) for columns in (self.m, self.m, self.n))
        self.size = f"{self.units} x {self.length}, {self.m} x {self.n}"
        self.bytes = float(self.tokens * (self.m + self.n) * self.dtype.itemsize)
        self.product = {"flops": 2.0 * self.tokens * self.m * self.n, "bytes": self.bytes}

    def factor(self, device: torch.device, columns: int) -> torch.Tensor:
        return torch.randn(self.tokens, columns, device=device, dtype=self.dtype)

    def batched(self, factor: torch.Tensor) -> torch.Tensor:
        return factor.view(self.units, self.length, -1)

    def full_gram(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
        one, two = (torch.bmm(self.batched(x), self.batched(y).mT) for x, y in ((a, c), (b, d)))
        return (one * two).sum((1, 2))

    def instantiated(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.bmm(self.batched(a).mT, self.batched(b)).float()


def _split(gradients: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Squared norms inside and outside a mask, of gradients [B, m, n]."""
    square = gradients.square()
    return torch.stack([(square * mask).sum((1, 2)), (square * ~mask).sum((1, 2))])


def _norms(device: torch.device, sizes: Sizes) -> Iterator[Case]:
    layer = _Layer(device, sizes)
    yield from _gram_norms(layer, device)
    yield from _embedding_norms(layer, device)
    left, right, offsets, each = layer.left, layer.right, layer.offsets, layer.instantiated
    mask = torch.rand(layer.m, layer.n, device=device) < 0.5
    split = _torch(lambda a, b: _split(each(a, b), mask), left, right)
    yield _against_definition(
        partial(ops.masked_sqnorm, left, right, offsets, mask), layer.size, split, **layer.product
    )

    absolute = _torch(lambda a, b: each(a, b).abs().sum((1, 2)), left, right)
    yield _against_definition(partial(ops.abs_sum, left, right, offsets), layer.size, absolute, **layer.product)

    def count(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return ((layer.batched(a) != 0).any(2) & (layer.batched(b) != 0).any(2)).sum(1).double()[None]

    once = float(layer.tokens * layer.n * layer.dtype.itemsize)
    counts = partial(ops.token_counts, [left], [right], offsets)
    yield _against_definition(counts, layer.size, _torch(count, left, right), bytes=once)


def _gram_norms(layer: _Layer, device: torch.device) -> Iterator[Case]:
    units, length, m, n, size = layer.units, layer.length, layer.m, layer.n, layer.size
    left, left2, right, offsets = layer.left, layer.left2, layer.right, layer.offsets
    gram = float(units * length**2 * (m + n))
    run: partial[Any]
    ways = _torch(layer.full_gram, left, right, left, right)
    linear = torch.nn.Linear(n, m, bias=False, device=device, dtype=layer.dtype)

    def sampled() -> Any:
        from opacus.grad_sample.linear import compute_linear_norm_sample

        return compute_linear_norm_sample(linear, [layer.batched(right)], layer.batched(left))

    ways["Opacus's norm sampler"] = sampled
    yield _against_definition(partial(ops.sqnorm, left, right, offsets), size, ways, flops=gram, bytes=layer.bytes)

    direct = partial(ops.sqnorm, left, right, offsets, "direct")
    ways = {"torch": lambda: layer.instantiated(left, right).square().sum((1, 2))}
    yield replace(_against_definition(direct, size, ways, **layer.product), op="sqnorm, direct")

    def two() -> Any:
        return [(ops.sqnorm(a, right, offsets), ops.row_products(a, right, offsets)) for a in (left, left2)]

    flops, read = float(units * length**2 * (2 * m + n)), float(layer.tokens * (2 * m + n) * layer.dtype.itemsize)
    run = partial(ops.gram_norms, [left, left2], [right], [2], offsets)
    yield _against_definition(run, f"2 of {size}", {"two sqnorm, row_products": two}, flops=flops, bytes=read)

    ways = _torch(lambda a, b: (a.double().norm(dim=1) * b.double().norm(dim=1)).view(units, -1).sum(1), left, right)
    yield _against_definition(partial(ops.row_products, left, right, offsets), size, ways, bytes=layer.bytes)

    chosen = torch.arange(units, device=device) % 4 == 0
    quarter = {key: value / 4 for key, value in layer.product.items()}
    run = partial(ops.chosen_sqnorm, [left], [right], offsets, chosen[None])
    yield _against_definition(run, size, {"sqnorm of all": direct}, **quarter)

    ways = _torch(layer.full_gram, left, right, left2, right)
    run = partial(ops.cross_inner, left, right, left2, right, offsets, offsets)
    yield _against_definition(run, size, ways, flops=2 * gram, bytes=2 * layer.bytes)


def _embedding_norms(layer: _Layer, device: torch.device) -> Iterator[Case]:
    units, length, n, right, offsets = layer.units, layer.length, layer.n, layer.right, layer.offsets
    ids, mask = torch.randint(0, 50, (layer.tokens,), device=device), torch.rand(50, n, device=device) < 0.5
    once, size = float(layer.tokens * n * layer.dtype.itemsize), f"{units} x {length}, {n}"

    def equal_ids(i: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        same = i.view(units, -1, 1) == i.view(units, 1, -1)
        return (torch.bmm(layer.batched(b), layer.batched(b).mT) * same).sum((1, 2))

    def by_rows(i: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        table = b.new_zeros(units, 50, n, dtype=torch.float32)
        owner = torch.arange(units, device=device).repeat_interleave(length)
        return _split(table.index_put_((owner, i), b.float(), accumulate=True), mask)

    for run, formula in (
        (partial(ops.sqnorm, ids, right, offsets), equal_ids),
        (partial(ops.masked_sqnorm, ids, right, offsets, mask), by_rows),
    ):
        made = _against_definition(run, size, _torch(formula, ids, right), bytes=once)
        yield replace(made, op=f"{made.op} of an embedding")


def _sums(device: torch.device, sizes: Sizes) -> Iterator[Case]:
    layer = _Layer(device, sizes)
    units, length, tokens, m, n, dtype = layer.units, layer.length, layer.tokens, layer.m, layer.n, layer.dtype
    left, right, offsets, width = layer.left, layer.right, layer.offsets, layer.dtype.itemsize
    inside, outside = (torch.rand(units, device=device) for _ in range(2))
    weights, others = (each.repeat_interleave(length) for each in (inside, outside))
    run: partial[Any]
    product, size = layer.product | {"bytes": layer.bytes + 4 * m * n}, f"{tokens}, {m} x {n}"

    def scaled(w: torch.Tensor) -> torch.Tensor:
        return (left * w.unsqueeze(1).to(dtype)).mT @ right

    run = partial(ops.weighted_sum, left, right, inside, offsets=offsets)
    yield _against_definition(run, size, _torch(scaled, weights), **product)

    ids, table = torch.randint(0, m, (tokens,), device=device), torch.zeros(m, n, device=device)
    ways = _torch(lambda w: table.index_add_(0, ids, (right * w.unsqueeze(1)).to(table.dtype)), weights)
    # Each row is read, and its line of the table read and written.
    read = float(tokens * n * (width + 8))
    rows = _against_definition(partial(ops.weighted_sum, ids, right, weights, rows=m), size, ways, bytes=read)
    yield replace(rows, op="weighted_sum of an embedding", run=lambda: ops.weighted_sum(ids, right, weights, table))

    mask = torch.rand(m, n, device=device) < 0.5
    ways = _torch(lambda v, w: torch.where(mask, scaled(v), scaled(w)), weights, others)
    run = partial(ops.masked_weighted_sum, left, right, inside, outside, mask, offsets=offsets)
    yield _against_definition(run, size, ways, **product)

    ways = _torch(lambda a: layer.batched(a).float().sum(1), left)
    run = partial(ops.column_sums, left, offsets)
    yield _against_definition(run, f"{units} x {length}, {m}", ways, bytes=float(tokens * m * width))

    mean, rstd = torch.rand(tokens, device=device), torch.rand(tokens, device=device)

    def affine(g: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        both = torch.stack([(x - mean[:, None]) * rstd[:, None] * g, g])
        return both.float().view(2, units, length, n).sum(2)

    run = partial(ops.affine_sums, right, right, mean, rstd, offsets)
    ways = _torch(affine, right, right)
    yield _against_definition(run, f"{units} x {length}, {n}", ways, bytes=float(2 * tokens * n * width))

    yield from _adapters(layer, device, sizes)
    yield from _instances(device, sizes)


def _instances(device: torch.device, sizes: Sizes) -> Iterator[Case]:
    units, m, n = sizes.units, sizes.rows, sizes.rank
    instances, mask = torch.randn(units, m, n, device=device), torch.rand(m, n, device=device) < 0.5
    weights, others = torch.rand(units, device=device), torch.rand(units, device=device)
    once, result = 4.0 * units * m * n, 4.0 * m * n

    def summed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (w @ x.flatten(1)).view(m, n)

    def masked(x: torch.Tensor) -> torch.Tensor:
        return torch.where(mask, summed(x, weights), summed(x, others))

    for function, arguments, formula, written in (
        (ops.instance_sqnorm, (), lambda x: x.square().sum((1, 2)), 0.0),
        (ops.instance_abs_sum, (), lambda x: x.abs().sum((1, 2)), 0.0),
        (ops.instance_masked_sqnorm, (mask,), lambda x: _split(x, mask), 0.0),
        (ops.instance_sum, (weights,), lambda x: summed(x, weights), result),
        (ops.instance_masked_sum, (weights, others, mask), masked, result),
    ):
        run, ways = partial(function, instances, *arguments), _torch(formula, instances)
        yield _against_definition(run, f"{units} x {m} x {n}", ways, bytes=once + written)


def _adapters(layer: _Layer, device: torch.device, sizes: Sizes) -> Iterator[Case]:
    k, r, n, tokens = sizes.adapters, sizes.rank, layer.n, layer.tokens
    lefts, rights = ([layer.factor(device, columns) for _ in range(k)] for columns in (r, n))
    size = f"{layer.units} x {layer.length}, {r} x {n}"
    flops, moved = 2.0 * tokens * r * n, float(tokens * (n + r) * layer.dtype.itemsize + 4 * layer.units * r * n)
    run: partial[Any] = partial(ops.per_unit, lefts[0], rights[0], layer.offsets)
    ways = _torch(layer.instantiated, lefts[0], rights[0])
    yield _against_definition(run, size, ways, flops=flops, bytes=moved)

    def one_by_one() -> list[torch.Tensor]:
        return [layer.instantiated(a, b).flatten(1).square().sum(1) for a, b in zip(lefts, rights)]

    run, ways = partial(ops.per_unit_group, lefts, rights, layer.offsets), {"torch, one by one": one_by_one}
    yield _against_definition(run, f"{k} of {size}", ways, flops=k * flops, bytes=k * moved)


def _snap(device: torch.device, sizes: Sizes) -> Iterator[Case]:
    vocabulary, width, rows = sizes.vocabulary, sizes.width, sizes.queries
    stream, eta = ops.NoiseStream(), 30.0
    table = torch.randn(vocabulary, width, device=device)
    x = table[torch.randint(0, vocabulary, (rows,), device=device)] + torch.randn(rows, width, device=device)
    ids = torch.randint(0, vocabulary, (rows,), device=device)

    def check_snap() -> tuple[float, float]:
        sample, small = x[:64].double(), table.double()
        distances = small.square().sum(1) - 2 * sample @ small.mT
        found, best = ops.snap(x[:64], table), distances.min(1).values
        gap = (distances.gather(1, found.unsqueeze(1)).squeeze(1) - best).clamp(min=0)
        return float((gap / best.abs().clamp(min=1)).max()), 1e-12

    product = {"flops": 2.0 * rows * vocabulary * width, "bytes": 4.0 * (vocabulary + rows) * width}
    size, snapped = f"{rows} of {vocabulary} x {width}", partial(ops.snap, x, table)
    ways: dict[str, Function] = {"torch.cdist and argmin": lambda: torch.cdist(x, table).argmin(1)}
    yield Case("snap", size, snapped, check_snap, ways, **product)

    def check_private() -> tuple[float, float]:
        # At a large eta the noise is far shorter than half the distance between rows: nothing may change.
        return float((ops.private_snap(ids, table, 1e6, stream) != ids).sum()), 0.0

    run: partial[Any] = partial(ops.private_snap, ids, table, eta, stream)
    yield Case("private_snap", f"{size}, eta {eta:g}", run, check_private, {"snap": snapped}, **product)
    distinct = torch.randperm(vocabulary, device=device)[: sizes.distinct]
    many = distinct[torch.randint(0, sizes.distinct, (sizes.draws,), device=device)]

    def check_choice() -> tuple[float, float]:
        # At a large scale the nearest row, which is the token's own, takes all the probability.
        return float((ops.exponential_choice(many[:500], table, 1e4, stream) != many[:500]).sum()), 0.0

    size = f"{sizes.draws} ids, {sizes.distinct} distinct, of {vocabulary} x {width}"
    run, ways = (
        partial(ops.exponential_choice, many, table, 2.0, stream),
        {"snap of the distinct": partial(ops.snap, table[distinct] + 0.1, table)},
    )
    least = {"flops": 2.0 * sizes.distinct * vocabulary * width, "bytes": 4.0 * vocabulary * width}
    yield Case("exponential_choice", size, run, check_choice, ways, **least)


#: Each makes its inputs when it is reached.
_GROUPS: tuple[Callable[[torch.device, Sizes], Iterator[Case]], ...] = (_noise, _norms, _sums, _snap)


@functools.cache
def _members(group: Callable[[torch.device, Sizes], Iterator[Case]]) -> tuple[str, ...]:
    """The names of a group's cases, from small ones."""
    return tuple(case.op for case in group(torch.device("cpu"), SIZES["small"]))
