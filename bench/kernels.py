"""The cases of the microbenchmarks: every op at one size, how it is checked, and the alternatives it is timed beside."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
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
    """Names of the cases that hold ``only``, or of all."""
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


def _same_noise() -> ops.NoiseStream:
    return ops.NoiseStream.unsafe_reproducible(7)


def _noise(device: torch.device, sizes: Sizes) -> Iterator[Case]:
    n = sizes.elements
    stream = ops.NoiseStream()
    x = torch.zeros(n, device=device)
    scratch = torch.empty_like(x)

    yield Case(
        "add_noise_",
        f"{n} float32",
        lambda: ops.add_noise_(x, 1.0, stream),
        _defined(lambda: ops.add_noise_(torch.zeros(4099, device=device), 1.0, _same_noise()), 1e-5),
        {
            "torch normal_": lambda: scratch.normal_(),
            "torch.normal": lambda: torch.normal(0.0, 1.0, x.shape, device=device, out=scratch),
            **_torch(lambda v: v.add_(torch.randn_like(v)), x),
        },
        bytes=8.0 * n,
    )

    state = [torch.randn(n, device=device).mul_(0.01) for _ in range(3)] + [torch.rand(n, device=device)]
    parameter = torch.nn.Parameter(torch.zeros(n, device=device))
    parameter.grad = state[1]
    fused = torch.optim.AdamW([parameter], lr=1e-4, fused=True)

    def own() -> None:
        weight, grad_sum, first, second = state
        ops.adamw_noise_step_(weight, grad_sum, first, second, 1.0, stream, divisor=256.0, lr=1e-4, step=10)

    def two() -> None:
        ops.add_noise_(state[1], 1.0, stream)
        fused.step()

    base = [torch.randn(1003, device=device) for _ in range(3)] + [torch.rand(1003, device=device)]

    def stepped() -> torch.Tensor:
        weight, grad_sum, first, second = [t.clone() for t in base]
        ops.adamw_noise_step_(
            weight, grad_sum, first, second, 0.5, _same_noise(), divisor=8.0, lr=1e-2, step=4, weight_decay=0.01
        )
        return weight

    yield Case(
        "adamw_noise_step_",
        f"{n} float32",
        own,
        _defined(stepped, 1e-5),
        {"add_noise_ and torch's fused AdamW": two},
        bytes=28.0 * n,
    )
    yield from _clip_noise(device, sizes, stream)


def _clip_noise(device: torch.device, sizes: Sizes, stream: ops.NoiseStream) -> Iterator[Case]:
    hidden = torch.randn(sizes.hidden, device=device)
    upstream = torch.randn_like(hidden)
    size = " x ".join(map(str, sizes.hidden))

    def composed(v: torch.Tensor) -> torch.Tensor:
        scale = (1.0 / v.flatten(1).norm(dim=1)).clamp(max=1.0).view(-1, 1, 1)
        return v * scale + 0.1 * torch.randn_like(v)

    def with_gradient(function: Callable[[torch.Tensor], torch.Tensor], rows: int | None = None) -> torch.Tensor:
        with torch.enable_grad():
            leaf = hidden[:rows].detach().requires_grad_()
            return torch.autograd.grad(function(leaf), leaf, upstream[:rows])[0]

    yield Case(
        "clip_noise",
        f"{size} float32",
        lambda: ops.clip_noise(hidden, 1.0, 0.1, stream),
        _defined(lambda: ops.clip_noise(hidden[:3], 1.0, 0.0, _same_noise()), 1e-6),
        _torch(composed, hidden),
        bytes=12.0 * hidden.numel(),
    )
    yield Case(
        "clip_noise and its gradient",
        f"{size} float32",
        lambda: with_gradient(lambda v: ops.clip_noise(v, 1.0, 0.1, stream)),
        _defined(lambda: with_gradient(lambda v: ops.clip_noise(v, 1.0, 0.1, _same_noise()), 3), 1e-5),
        {"torch": lambda: with_gradient(composed)},
        # Backward reads the upstream gradient and the input twice, for their inner product first.
        bytes=(12.0 + 20.0) * hidden.numel(),
    )


def _dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _against_definition(
    device: torch.device, size: str, run: functools.partial[Any], alternatives: dict[str, Function], **least: float
) -> Case:
    """A case named after the public function that ``run`` calls, checked against its definition on float64 arguments."""

    def check() -> tuple[float, float]:
        with definitions():
            truth = run.func(*map(_wider, run.args), **run.keywords)
        found = run()
        pairs = zip(found, truth) if isinstance(found, (tuple, list)) else ((found, truth),)
        return max(_relative(got, true) for got, true in pairs), 1e-5 if _dtype(device) == torch.float32 else 1e-2

    return Case(run.func.__name__, size, run, check, alternatives, **least)


def _wider(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_wider(v) for v in value)
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


class _Layer:
    """Factors of one layer's use, and what its cases share."""

    def __init__(self, device: torch.device, sizes: Sizes):
        self.dtype = _dtype(device)
        self.units, self.length, self.m, self.n = sizes.units, sizes.length, sizes.rows, sizes.columns
        self.tokens = self.units * self.length
        self.offsets = torch.arange(self.units + 1, device=device) * self.length
        self.left, self.left2 = (self.factor(device, self.m) for _ in range(2))
        self.right = self.factor(device, self.n)
        self.case = functools.partial(_against_definition, device)
        self.size = f"{self.units} x {self.length}, {self.m} x {self.n}"
        self.bytes = float(self.tokens * (self.m + self.n) * self.dtype.itemsize)
        self.direct = {"flops": 2.0 * self.tokens * self.m * self.n, "bytes": self.bytes}

    def factor(self, device: torch.device, columns: int) -> torch.Tensor:
        """Random rows, one a token."""
        return torch.randn(self.tokens, columns, device=device, dtype=self.dtype)

    def batched(self, factor: torch.Tensor) -> torch.Tensor:
        """Rows by unit, [B, T, columns]."""
        return factor.view(self.units, self.length, -1)

    def full_gram(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
        """Inner products of two uses by their T x T products."""
        return (torch.bmm(self.batched(a), self.batched(c).mT) * torch.bmm(self.batched(b), self.batched(d).mT)).sum(
            (1, 2)
        )

    def instantiated(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Per-unit gradients [B, m, n]."""
        return torch.bmm(self.batched(a).mT, self.batched(b)).float()


def _norms(device: torch.device, sizes: Sizes) -> Iterator[Case]:
    layer = _Layer(device, sizes)
    yield from _gram_norms(layer, device)
    yield from _embedding_norms(layer, device)
    yield from _entry_norms(layer, device)


def _gram_norms(layer: _Layer, device: torch.device) -> Iterator[Case]:
    units, length, m, n, of = layer.units, layer.length, layer.m, layer.n, functools.partial
    left, left2, right, offsets = layer.left, layer.left2, layer.right, layer.offsets
    case, size, full_gram = layer.case, layer.size, layer.full_gram

    def products() -> list[torch.Tensor]:
        return [ops.row_products(a, right, offsets) for a in (left, left2)]

    gram = float(units * length**2 * (m + n))
    others = {**_torch(full_gram, left, right, left, right), **_opacus_norm(layer.batched(left), layer.batched(right))}
    others["the layer's weight gradient"] = lambda: left.mT @ right
    yield case(size, of(ops.sqnorm, left, right, offsets), others, flops=gram, bytes=layer.bytes)

    by_tiles = {"torch": lambda: layer.instantiated(left, right).square().sum((1, 2))}
    tiled = case(size, of(ops.sqnorm, left, right, offsets, "direct"), by_tiles, **layer.direct)
    yield replace(tiled, op="sqnorm, direct")

    least = {
        "flops": float(units * length**2 * (2 * m + n)),
        "bytes": float(layer.tokens * (2 * m + n) * layer.dtype.itemsize),
    }
    both: dict[str, Function] = {
        "two sqnorm, row_products": lambda: ([ops.sqnorm(a, right, offsets) for a in (left, left2)], products())
    }
    yield case(f"2 of {size}", of(ops.gram_norms, [left, left2], [right], [2], offsets), both, **least)

    rows = _torch(lambda a, b: (a.double().norm(dim=1) * b.double().norm(dim=1)).view(units, -1).sum(1), left, right)
    yield case(size, of(ops.row_products, left, right, offsets), rows, bytes=layer.bytes)

    chosen = torch.arange(units, device=device) % 4 == 0
    quarter = {"flops": layer.direct["flops"] / 4, "bytes": layer.bytes / 4}
    every = {"sqnorm of all": lambda: ops.sqnorm(left, right, offsets, "direct")}
    yield case(size, of(ops.chosen_sqnorm, [left], [right], offsets, chosen[None]), every, **quarter)

    cross = of(ops.cross_inner, left, right, left2, right, offsets, offsets)
    yield case(size, cross, _torch(full_gram, left, right, left2, right), flops=2 * gram, bytes=2 * layer.bytes)


def _embedding_norms(layer: _Layer, device: torch.device) -> Iterator[Case]:
    units, length, n, of = layer.units, layer.length, layer.n, functools.partial
    right, offsets, batched, case = layer.right, layer.offsets, layer.batched, layer.case
    ids, rows_mask = torch.randint(0, 50, (layer.tokens,), device=device), torch.rand(50, n, device=device) < 0.5
    once, size = float(layer.tokens * n * layer.dtype.itemsize), f"{units} x {length}, {n}"

    def equal_ids(i: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        same = i.view(units, -1, 1) == i.view(units, 1, -1)
        return (torch.bmm(batched(b), batched(b).mT) * same).sum((1, 2))

    table = case(size, of(ops.sqnorm, ids, right, offsets), _torch(equal_ids, ids, right), bytes=once)
    yield replace(table, op="sqnorm of an embedding")

    def by_rows(i: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        table = b.new_zeros(units, 50, n, dtype=torch.float32)
        owner = torch.arange(units, device=device).repeat_interleave(length)
        return _split(table.index_put_((owner, i), b.float(), accumulate=True), rows_mask)

    masked = of(ops.masked_sqnorm, ids, right, offsets, rows_mask)
    table = case(size, masked, _torch(by_rows, ids, right), bytes=once)
    yield replace(table, op="masked_sqnorm of an embedding")


def _entry_norms(layer: _Layer, device: torch.device) -> Iterator[Case]:
    left, right, offsets, of = layer.left, layer.right, layer.offsets, functools.partial
    instantiated, case = layer.instantiated, layer.case
    mask = torch.rand(layer.m, layer.n, device=device) < 0.5
    split = _torch(lambda a, b: _split(instantiated(a, b), mask), left, right)
    yield case(layer.size, of(ops.masked_sqnorm, left, right, offsets, mask), split, **layer.direct)

    absolute = _torch(lambda a, b: instantiated(a, b).abs().sum((1, 2)), left, right)
    yield case(layer.size, of(ops.abs_sum, left, right, offsets), absolute, **layer.direct)

    def count(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return ((layer.batched(a) != 0).any(2) & (layer.batched(b) != 0).any(2)).sum(1).double()

    counted = _torch(count, left, right)
    once = float(layer.tokens * layer.n * layer.dtype.itemsize)
    yield case(layer.size, of(ops.token_counts, [left], right, offsets), counted, bytes=once)


def _split(gradients: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Squared norms inside and outside a mask, of gradients [B, m, n]."""
    square = gradients.square()
    return torch.stack([(square * mask).sum((1, 2)), (square * ~mask).sum((1, 2))])


def _opacus_norm(left: torch.Tensor, right: torch.Tensor) -> dict[str, Function]:
    layer = torch.nn.Linear(right.shape[2], left.shape[2], bias=False, device=left.device, dtype=left.dtype)

    def sampled() -> Any:
        from opacus.grad_sample.linear import compute_linear_norm_sample

        return compute_linear_norm_sample(layer, [right], left)

    return {"Opacus's norm sampler": sampled}


def _sums(device: torch.device, sizes: Sizes) -> Iterator[Case]:
    dtype, units, length, m, n = _dtype(device), sizes.units, sizes.length, sizes.rows, sizes.columns
    offsets = torch.arange(units + 1, device=device) * length
    tokens, width = units * length, dtype.itemsize
    left, right = (torch.randn(tokens, k, device=device, dtype=dtype) for k in (m, n))
    inside, outside = (torch.rand(units, device=device) for _ in range(2))
    weights, others = (each.repeat_interleave(length) for each in (inside, outside))
    size, of = f"{tokens}, {m} x {n}", functools.partial
    case = of(_against_definition, device)
    product = {"flops": 2.0 * tokens * m * n, "bytes": float(tokens * (m + n) * width + 4 * m * n)}

    def scaled(w: torch.Tensor) -> torch.Tensor:
        return (left * w.unsqueeze(1).to(dtype)).mT @ right

    ways = {**_torch(scaled, weights), "unweighted": lambda: left.mT @ right}
    yield case(size, of(ops.weighted_sum, left, right, inside, offsets=offsets), ways, **product)

    ids, table = torch.randint(0, m, (tokens,), device=device), torch.zeros(m, n, device=device)
    ways = _torch(lambda w: table.index_add_(0, ids, (right * w.unsqueeze(1)).to(table.dtype)), weights)
    # Each row is read, and its line of the table read and written.
    rows = case(size, of(ops.weighted_sum, ids, right, weights, rows=m), ways, bytes=float(tokens * n * (width + 8)))
    yield replace(rows, op="weighted_sum of an embedding", run=lambda: ops.weighted_sum(ids, right, weights, table))

    mask = torch.rand(m, n, device=device) < 0.5
    ways = _torch(lambda v, w: torch.where(mask, scaled(v), scaled(w)), weights, others)
    yield case(size, of(ops.masked_weighted_sum, left, right, inside, outside, mask, offsets=offsets), ways, **product)

    ways = _torch(lambda a: a.view(units, length, m).float().sum(1), left)
    size = f"{units} x {length}, {m}"
    yield case(size, of(ops.column_sums, left, offsets), ways, bytes=float(tokens * m * width))

    mean, rstd = torch.rand(tokens, device=device), torch.rand(tokens, device=device)
    ways = _torch(
        lambda g, x: (
            torch.stack([((x - mean[:, None]) * rstd[:, None] * g), g]).float().view(2, units, length, n).sum(2)
        ),
        right,
        right,
    )
    size = f"{units} x {length}, {n}"
    yield case(size, of(ops.affine_sums, right, right, mean, rstd, offsets), ways, bytes=float(2 * tokens * n * width))

    yield from _adapters(device, sizes, offsets)
    yield from _instances(device, sizes)


def _instances(device: torch.device, sizes: Sizes) -> Iterator[Case]:
    units, m, n = sizes.units, sizes.rows, sizes.rank
    instances, mask = torch.randn(units, m, n, device=device), torch.rand(m, n, device=device) < 0.5
    weights, others = torch.rand(units, device=device), torch.rand(units, device=device)
    once, result = 4.0 * units * m * n, 4.0 * m * n

    def summed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (w @ x.flatten(1)).view(m, n)

    for function, arguments, formula, bytes in (
        (ops.instance_sqnorm, (), lambda x: x.square().sum((1, 2)), once),
        (ops.instance_abs_sum, (), lambda x: x.abs().sum((1, 2)), once),
        (ops.instance_masked_sqnorm, (mask,), lambda x: _split(x, mask), once),
        (ops.instance_sum, (weights,), lambda x: summed(x, weights), once + result),
        (
            ops.instance_masked_sum,
            (weights, others, mask),
            lambda x: torch.where(mask, summed(x, weights), summed(x, others)),
            once + result,
        ),
    ):
        run = functools.partial(function, instances, *arguments)
        ways: dict[str, Function] = _torch(formula, instances)
        if function is ops.instance_sqnorm:
            ways["torch's vector norm"] = lambda: torch.linalg.vector_norm(instances, dim=(1, 2)).square()
        yield _against_definition(device, f"{units} x {m} x {n}", run, ways, bytes=bytes)


def _adapters(device: torch.device, sizes: Sizes, offsets: torch.Tensor) -> Iterator[Case]:
    dtype, units, length, k, r, n = _dtype(device), sizes.units, sizes.length, sizes.adapters, sizes.rank, sizes.columns
    tokens, width = units * length, dtype.itemsize
    lefts = [torch.randn(tokens, r, device=device, dtype=dtype) for _ in range(k)]
    rights = [torch.randn(tokens, n, device=device, dtype=dtype) for _ in range(k)]
    size = f"{units} x {length}, {r} x {n}"
    flops, bytes = 2.0 * tokens * r * n, float(tokens * (n + r) * width + 4 * units * r * n)

    def instantiated(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.bmm(a.view(units, length, r).mT, b.view(units, length, n)).float()

    ways = {**_torch(instantiated, lefts[0], rights[0]), "the layer's weight gradient": lambda: lefts[0].mT @ rights[0]}
    run = functools.partial(ops.per_unit, lefts[0], rights[0], offsets)
    yield _against_definition(device, size, run, ways, flops=flops, bytes=bytes)

    def one_by_one() -> list[torch.Tensor]:
        return [instantiated(a, b).flatten(1).square().sum(1) for a, b in zip(lefts, rights)]

    def check_group() -> tuple[float, float]:
        made, norms = ops.per_unit_group(lefts, rights, offsets)
        with definitions():
            truths, squares = ops.per_unit_group(_wider(lefts[:8]), _wider(rights[:8]), offsets)
        error = max(_relative(got, truth) for got, truth in zip([*made[:8], norms[:8]], [*truths, squares]))
        return error, 1e-5 if dtype == torch.float32 else 1e-2

    group = functools.partial(ops.per_unit_group, lefts, rights, offsets)
    least = {"flops": k * flops, "bytes": k * bytes}
    yield Case("per_unit_group", f"{k} of {size}", group, check_group, {"torch, one by one": one_by_one}, **least)


def _snap(device: torch.device, sizes: Sizes) -> Iterator[Case]:
    vocabulary, width, rows = sizes.vocabulary, sizes.width, sizes.queries
    stream = ops.NoiseStream()
    table = torch.randn(vocabulary, width, device=device)
    x = table[torch.randint(0, vocabulary, (rows,), device=device)] + torch.randn(rows, width, device=device)
    ids = torch.randint(0, vocabulary, (rows,), device=device)
    eta = 30.0

    def check_snap() -> tuple[float, float]:
        sample, small = x[:64].double(), table.double()
        distances = small.square().sum(1) - 2 * sample @ small.mT
        found = ops.snap(x[:64], table)
        best = distances.min(1).values
        gap = (distances.gather(1, found.unsqueeze(1)).squeeze(1) - best).clamp(min=0)
        return float((gap / best.abs().clamp(min=1)).max()), 1e-12

    product = {"flops": 2.0 * rows * vocabulary * width, "bytes": 4.0 * (vocabulary + rows) * width}
    yield Case(
        "snap",
        f"{rows} of {vocabulary} x {width}",
        lambda: ops.snap(x, table),
        check_snap,
        {"torch.cdist and argmin": lambda: torch.cdist(x, table).argmin(1), "one matmul": lambda: x @ table.mT},
        **product,
    )

    def check_private() -> tuple[float, float]:
        # At a large eta the noise is far shorter than half the distance between rows: nothing may change.
        return float((ops.private_snap(ids, table, 1e6, stream) != ids).sum()), 0.0

    yield Case(
        "private_snap",
        f"{rows} of {vocabulary} x {width}, eta {eta:g}",
        lambda: ops.private_snap(ids, table, eta, stream),
        check_private,
        {"snap": lambda: ops.snap(x, table)},
        **product,
    )
    distinct = torch.randperm(vocabulary, device=device)[: sizes.distinct]
    many = distinct[torch.randint(0, sizes.distinct, (sizes.draws,), device=device)]
    queries = table[distinct] + 0.1

    def check_choice() -> tuple[float, float]:
        # At a large scale the nearest row, which is the token's own, takes all the probability.
        return float((ops.exponential_choice(many[:500], table, 1e4, stream) != many[:500]).sum()), 0.0

    yield Case(
        "exponential_choice",
        f"{sizes.draws} ids, {sizes.distinct} distinct, of {vocabulary} x {width}",
        lambda: ops.exponential_choice(many, table, 2.0, stream),
        check_choice,
        {"snap of the distinct": lambda: ops.snap(queries, table)},
        flops=2.0 * sizes.distinct * vocabulary * width,
        bytes=4.0 * vocabulary * width,
    )


#: Each makes its inputs when it is reached.
_GROUPS: tuple[Callable[[torch.device, Sizes], Iterator[Case]], ...] = (_noise, _norms, _sums, _snap)


@functools.cache
def _members(group: Callable[[torch.device, Sizes], Iterator[Case]]) -> tuple[str, ...]:
    """The names of a group's cases, from small ones."""
    return tuple(case.op for case in group(torch.device("cpu"), SIZES["small"]))
