"""Correctness of every GPU op on the GPU at hand, against its definition in float64: JSON, and a non-zero exit on failure.

Besides values: that two runs give the same bits, that nothing waits for the device where offsets live on it, that a
model's adapters are one launch, and that other batches compile no kernel anew. What the test suite checks under the
interpreter is checked here on machine code. Values are checked by functions of a device, so that the suite can run them
on a processor: a bound that a right implementation misses is found without a GPU.

    python -m bench.gpu_check --json bench/results/gpu/check.json
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import multiprocessing
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor, as_completed
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import fastdp
from fastdp import ops
from fastdp.data import Collator
from fastdp.engine.clip.policy import Policy
from fastdp.engine.engine import Engine
from fastdp.engine.uses.layout import Ticket
from fastdp.ops.dchi import dchi_noise
from fastdp.ops.grid import on_grid
from fastdp.ops.noise import standard_normals
from fastdp.ops.table import OPS
from fastdp.private.observer import Observer

from . import fuzz
from .fuzz_ops import gradients
from .gpu_methods import methods
from .record import environment, parser_of, write
from .simulate import build
from .workloads import Case, examples

NORMS = 1e-5  # what docs/kernels.md promises
#: Of a float32 normal relative to its radius: its roundings, the polynomials and the device's square root.
NORMALS = 8 * 2.0**-24 + 6e-8
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
LENGTHS = {"ragged": (7, 0, 1, 65, 4, 129, 16, 0, 300), "equal": (128,) * 6}
#: dtype, lengths, rows and columns, whether the left factor is strided. Every dtype and layout of a kernel is a compilation
#: of seconds, and the suite has them all under the interpreter: here are those that models use, and one that none does.
NORM_CASES = ((torch.bfloat16, "equal", 768, 768, False), (torch.float32, "ragged", 257, 123, True))
SUM_CASES = ((torch.bfloat16, 1024, 768, 768), (torch.float32, 129, 7, 133))
#: What is recorded, and run eagerly beside that; small, so that the host takes longer than the device.
RECORDED = Case("gpt2", 4, 256, 1024, 4, 4, 512, 32, 128, dropout=0.0, dtype=torch.float32)
TUNINGS = (("LoRA of rank 16", 16), ("everything", 0))
INSTANCE_CASES = ((torch.float32, 7, 33, 129),)
#: The error that a check found, and the largest that passes.
Result = tuple[float, float]


def offsets_of(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def factor(device: str, tokens: int, columns: int, dtype: torch.dtype, transposed: bool = False) -> Tensor:
    shape = (columns, tokens) if transposed else (tokens, columns)
    values = torch.randn(shape, device=device).to(dtype)
    return values.T if transposed else values


def max_error(got: Tensor, truth: Tensor, size: Tensor | None = None) -> float:
    """Largest error relative to ``size``, or to the truth itself; infinite if something is not finite."""
    if not bool(torch.isfinite(got).all()):
        return float("inf")
    size = truth.abs() if size is None else size
    error = (got.double() - truth).abs()
    return float(torch.where(error == 0, 0.0, error / size).max()) if error.numel() else 0.0


def norms(device: str) -> Iterator[tuple[str, Result]]:
    for dtype, name, m, n, strided in NORM_CASES:
        lengths = LENGTHS[name]
        offsets = offsets_of(lengths).to(device)
        tokens = sum(lengths)
        left, right = factor(device, tokens, m, dtype, strided), factor(device, tokens, n, dtype)
        truth, _ = gradients(left, right, offsets, m)
        squares = truth.square()
        label = f"{str(dtype)[6:]} {name} {m}x{n}"
        square = squares.sum((1, 2))
        for route in ("gram", "direct", "auto"):
            yield f"sqnorm {route} {label}", (max_error(ops.sqnorm(left, right, offsets, route), square), NORMS)
        both = torch.stack([square] * 2)
        squared, products = ops.gram_norms([left, left], [right], [2], offsets)
        yield f"gram_norms {label}", (max_error(squared, both), NORMS)
        left_norms, right_norms = (x.norm(dim=1, dtype=torch.float64)[:, None] for x in (left, right))
        rows, _ = gradients(left_norms, right_norms, offsets, 1)
        for got in (*products, ops.row_products(left, right, offsets)[0]):
            # An upper bound, raised by what covers its own rounding and by 2^-42 an entry.
            yield f"row_products {label}", (max_error(got, rows[:, 0, 0]), 2.0**-9)
        adds = (left != 0).any(1) & (right != 0).any(1)
        counts = torch.stack([unit.sum() for unit in adds.split(list(lengths))])
        yield f"token_counts {label}", (max_error(ops.token_counts([left], [right], offsets)[0], counts), 0.0)
        yield f"row_products, counts {label}", (max_error(ops.row_products(left, right, offsets)[1], counts), 0.0)
        chosen = torch.rand(offsets.shape[0] - 1, device=device) < 0.5
        got = ops.chosen_sqnorm([left], [right], offsets, chosen[None])[0]
        yield f"chosen_sqnorm {label}", (max_error(got, square * chosen), NORMS)
        if not strided:
            yield f"abs_sum {label}", (max_error(ops.abs_sum(left, right, offsets), truth.abs().sum((1, 2))), NORMS)
            mask = torch.rand(m, n, device=device) < 0.3
            parts = torch.stack([(squares * mask).sum((1, 2)), (squares * ~mask).sum((1, 2))])
            yield f"masked_sqnorm {label}", (max_error(ops.masked_sqnorm(left, right, offsets, mask), parts), NORMS)
        yield from _unit_sums(left, right, offsets, lengths, label)
        ids = torch.randint(0, m, (tokens,), device=device)
        table, _ = gradients(ids, right, offsets, m)
        of_table = table.square().sum((1, 2))
        yield f"sqnorm ids {label}", (max_error(ops.sqnorm(ids, right, offsets), of_table), NORMS)
        # Rows of a tied head are a vocabulary long, seldom a multiple of 16: these begin at no such multiple either.
        head = left if strided else torch.nn.functional.pad(left, (0, 8))[:, :m]
        got = ops.cross_inner(ids, right, head, right, offsets, offsets)
        yield f"cross_inner {label}", (max_error(got, (truth * table).sum((1, 2)), (square * of_table).sqrt()), NORMS)


def _unit_sums(
    left: Tensor, right: Tensor, offsets: Tensor, lengths: tuple[int, ...], label: str
) -> Iterator[tuple[str, Result]]:
    """Gradients by unit, and sums over a unit's tokens."""
    tokens, device = len(left), left.device
    bound = (max(lengths) + 8) * 2.0**-24
    every = torch.ones(tokens, 1, device=device)
    truth, terms = gradients(left, right, offsets, 0)
    yield f"per_unit {label}", (max_error(ops.per_unit(left, right, offsets), truth, terms), bound)
    if left.dtype == torch.bfloat16:
        got = ops.per_unit(left, right, offsets_of(lengths))
        yield f"per_unit by torch's product {label}", (max_error(got, truth, terms), bound)
    (got, transposed), rows = ops.per_unit_group([left, right], [right, left], offsets)
    worst = max(max_error(got, truth, terms), max_error(transposed.mT, truth, terms))
    yield f"per_unit_group {label}", (worst, bound)
    both = torch.stack([truth.square().sum((1, 2))] * 2)
    yield f"per_unit_group norms {label}", (max_error(rows, both), NORMS)
    sums, terms = (found[:, :, 0] for found in gradients(left, every, offsets, 0))
    yield f"column_sums {label}", (max_error(ops.column_sums(left, offsets), sums, terms), bound)
    mean, rstd = torch.rand(tokens, device=device), torch.rand(tokens, device=device)
    size = right.double().abs()
    normed = (right.double() - mean[:, None]) * rstd[:, None] * right.double()
    sizes = (size + mean[:, None]) * rstd[:, None] * size
    sums, terms = (gradients(x, every, offsets, 0)[0][:, :, 0] for x in (normed, sizes))
    yield f"affine_sums {label}", (max_error(ops.affine_sums(right, right, mean, rstd, offsets)[0], sums, terms), bound)


def sums(device: str) -> Iterator[tuple[str, Result]]:
    for dtype, tokens, m, n in SUM_CASES:
        rounding = ROUNDING[dtype]
        # Where models have bfloat16 the layout is theirs.
        left, right = factor(device, tokens, m, dtype), factor(device, tokens, n, dtype, dtype is torch.float32)
        weights, others = torch.rand(tokens, device=device), torch.rand(tokens, device=device)
        weights[5] = others[5] = 0.0
        left[5], right[5, 0] = float("nan"), float("inf")
        kept = weights != 0
        clean, clear = left[kept].double(), right[kept].double()

        def exact(w: Tensor, clean: Tensor = clean, clear: Tensor = clear, kept: Tensor = kept) -> Tensor:
            return clean.T @ (w[kept, None].double() * clear)

        size = clean.abs().T @ clear.abs()
        bound = (tokens + 8) * 2.0**-24 + (0.0 if dtype is torch.float32 else rounding)
        label = f"{str(dtype)[6:]} {tokens} {m}x{n}"
        yield f"weighted_sum {label}", (max_error(ops.weighted_sum(left, right, weights), exact(weights), size), bound)
        if dtype is torch.bfloat16:
            mask = torch.rand(m, n, device=device) < 0.3
            got = ops.masked_weighted_sum(left, right, weights, others, mask)
            truth = torch.where(mask, exact(weights), exact(others))
            yield f"masked_weighted_sum {label}", (max_error(got, truth, size), bound)
        ids = torch.randint(0, m, (tokens,), device=device)
        truth = torch.zeros(m, n, dtype=torch.float64, device=device)
        size = truth.index_add(0, ids[kept], clear.abs())
        truth = truth.index_add(0, ids[kept], weights[kept, None].double() * clear)
        got = ops.weighted_sum(ids, right, weights, rows=m)
        yield f"weighted_sum ids {label}", (max_error(got, truth, size.clamp_min(1e-30)), (tokens + 8) * 2.0**-24)


def instances(device: str) -> Iterator[tuple[str, Result]]:
    """Per-unit gradients that are there as they are: norms relative to themselves, sums to the sums of absolute values."""
    for dtype, units, m, n in INSTANCE_CASES:
        made, mask = factor(device, units * m, n, dtype).view(units, m, n), torch.rand(m, n, device=device) < 0.3
        weights, others = torch.rand(units, device=device), torch.rand(units, device=device)
        wide, label = made.double(), f"{str(dtype)[6:]} {units} x {m}x{n}"
        squares = wide.square()
        parts = torch.stack([(squares * mask).sum((1, 2)), (squares * ~mask).sum((1, 2))])
        yield f"instance_sqnorm {label}", (max_error(ops.instance_sqnorm(made), squares.sum((1, 2))), NORMS)
        yield f"instance_abs_sum {label}", (max_error(ops.instance_abs_sum(made), wide.abs().sum((1, 2))), NORMS)
        yield f"instance_masked_sqnorm {label}", (max_error(ops.instance_masked_sqnorm(made, mask), parts), NORMS)
        sums = [torch.einsum("b,bmn->mn", w.double(), wide) for w in (weights, others)]
        size = wide.abs().sum(0)
        yield f"instance_sum {label}", (max_error(ops.instance_sum(made, weights), sums[0], size), NORMS)
        got = ops.instance_masked_sum(made, weights, others, mask)
        yield f"instance_masked_sum {label}", (max_error(got, torch.where(mask, sums[0], sums[1]), size), NORMS)


def heads(device: str) -> Iterator[tuple[str, Result]]:
    """Losses of a head's logits and the gradient in their place, beside columns of padding."""
    tokens, words = 129, 5003
    logits, weights = 4 * factor(device, tokens, words + 5, torch.bfloat16), torch.rand(tokens, device=device)
    target = torch.randint(0, words, (tokens,), device=device)
    target[::3] = -100
    z = logits[:, :words].double().requires_grad_()
    truth = torch.nn.functional.cross_entropy(z, target, reduction="none")
    (gradient,) = torch.autograd.grad(truth, z, weights.double())
    losses = ops.cross_entropy_gradient_(logits, target, weights, -100, words)
    yield "cross_entropy_gradient_ losses", (max_error(losses, truth.detach(), truth.detach() + 1), 1e-5)
    size = gradient.abs() + weights[:, None] * z.detach().softmax(1)
    yield "cross_entropy_gradient_", (max_error(logits[:, :words], gradient, size + 1e-30), 2.0**-8)
    yield "cross_entropy_gradient_ padding", (float(logits[:, words:].abs().max()), 0.0)


def position(tensor: int = 1, rounds: int = 20) -> Tensor:
    return ops.NoiseStream.unsafe_reproducible(7, rounds).at(3, tensor).take()


def noise(device: str) -> Iterator[tuple[str, Result]]:
    for n in (1, 16, 2061, 1 << 20):
        x = torch.zeros(n, device=device)
        OPS["add_noise_"](x, 1.0, position(), False)
        error = float((x.cpu().double() - standard_normals(position(), n)).abs().max())
        yield f"add_noise_ {n}", (error, NORMALS * 9.5)
        # Rounded to the grid the noise is the same on every device, to the bit.
        x = 100 * torch.randn(n, generator=torch.Generator().manual_seed(n))
        found = x.to(device, copy=True)
        OPS["add_noise_"](found, 1.0, position(), True)
        yield f"add_noise_ rounded {n}", (float((found.cpu() != on_grid(x, 1.0, position())).sum()), 0.0)
    x = 100 * torch.randn(2061, generator=torch.Generator().manual_seed(1))
    found, at = x.to(device, copy=True), position(rounds=12)
    OPS["add_noise_"](found, 1.0, at, True)
    yield "add_noise_ rounded, 12 rounds", (float((found.cpu() != on_grid(x, 1.0, at)).sum()), 0.0)
    dtype, rounding = torch.bfloat16, ROUNDING[torch.bfloat16]
    x, grad = ((3 * torch.randn(5, 129, 17, device=device)).to(dtype), torch.randn(5, 129, 17, device=device).to(dtype))
    x[1, 0, 0] = float("nan")
    clip, back = OPS["clip_noise"], OPS["clip_noise_backward"]
    got, norm = clip(x, 2.0, 0.5, position(), False)
    truth, true_norm = clip.reference(x.cpu(), 2.0, 0.5, position(), False)
    label = str(dtype)[6:]
    yield f"clip_noise {label}", (max_error(got.cpu(), truth.double(), truth.double().abs() + 0.1), 4 * rounding + 1e-5)
    finite = true_norm.isfinite()
    yield f"clip_noise norms {label}", (max_error(norm.cpu()[finite], true_norm[finite]), 1e-12)
    got = back(grad, x, norm, 2.0)
    truth = back.reference(grad.cpu(), x.cpu(), true_norm, 2.0).double()
    yield f"clip_noise_backward {label}", (max_error(got.cpu(), truth, truth.abs() + 0.1), 4 * rounding + 1e-5)
    axes = [torch.rand(k, device=device) + 0.1 for k in (257, 123)]
    state = [torch.randn(257, 123, device=device).to(dtype), *torch.rand(3, 257, 123, device=device)]
    host = [x.cpu().clone() for x in state]
    numbers = (0.7, 8.0, 1e-2, 0.9, 0.999, 1e-8, 0.1, 5)
    at, here = position()[None], [[a.cpu()] for a in axes]
    OPS["adamw_noise_steps_"](*[[x] for x in state], [], at, *numbers, False, *[[a] for a in axes])
    OPS["adamw_noise_steps_"].reference(*[[x] for x in host], [], at, *numbers, False, *here)
    worst = max(max_error(a.cpu(), b.double(), b.double().abs() + 0.1) for a, b in zip(state, host))
    yield f"adamw_noise_step_ with axes {label}", (worst, 4 * rounding + 1e-5)
    # Rounded noise and moments in half precision, as models have them.
    shapes, drawn = ((2061,), (256, 128)), torch.stack([position(i) for i in (1, 2)])
    many = [
        [torch.rand(shape, device=device).to(kind) for shape in shapes] for kind in (dtype, torch.float32, dtype, dtype)
    ]
    hosts = [[x.cpu().clone() for x in own] for own in many]
    OPS["adamw_noise_steps_"](*many, [], drawn, *numbers, True, [], [])
    OPS["adamw_noise_steps_"].reference(*hosts, [], drawn, *numbers, True, [], [])
    pairs = [pair for own, other in zip(many, hosts) for pair in zip(own, other)]
    worst = max(max_error(a.cpu(), b.double(), b.double().abs() + 0.1) for a, b in pairs)
    yield f"adamw_noise_steps_ rounded {label}", (worst, 4 * rounding + 1e-5)


def snapping(device: str) -> Iterator[tuple[str, Result]]:
    x, table = factor(device, 129, 304, torch.float32), factor(device, 5003, 304, torch.float32)
    table[200] = table[7]
    x[0] = table[7]
    distance = torch.stack([(table.double() - row.double()).square().sum(1) for row in x])
    wrong = (ops.snap(x, table) != distance.argmin(1)).double().mean()
    yield "snap float32 129 5003 304", (float(wrong), 0.0)
    table, ids = factor(device, 900, 96, torch.float32), torch.randint(0, 900, (129,), device=device)
    eta = torch.rand(129, dtype=torch.float64, device=device) * 20 + 5
    got = OPS["private_snap"](ids, table, eta, position())
    rows = (table[ids].double() + dchi_noise(position(), 129, 96).to(device) / eta[:, None]).float().double()
    distance = torch.stack([(table.double() - row).square().sum(1) for row in rows])
    taken = distance.gather(1, got[:, None])[:, 0]
    yield "private_snap", (float((taken / distance.amin(1) - 1).max()), 1e-5)
    got = OPS["dchi_vectors"](eta, 96, position())
    truth = dchi_noise(position(), 129, 96) / eta.cpu()[:, None]
    yield "dchi_vectors", (max_error(got.cpu(), truth, truth.norm(dim=1, keepdim=True)), 1e-6)
    scale = torch.tensor(1.5, dtype=torch.float64, device=device)
    stream = ops.NoiseStream.unsafe_reproducible(7)
    many = torch.zeros(20000, dtype=torch.int64, device=device)
    draws = ops.exponential_choice(many, table[:50], float(scale), stream)
    law = ops.choice_log_probabilities(0, table[:50], float(scale)).exp().cpu()
    seen = torch.bincount(draws.cpu(), minlength=50).double()
    deviation = (seen - 20000 * law).abs() / (20000 * law * (1 - law)).sqrt().clamp_min(1.0)
    # A normal passes 6.5 once in 10^10; 50 rows.
    yield "exponential_choice frequencies, in standard deviations", (float(deviation.max()), 6.5)


def _trained(device: str, rank: int, rows: int) -> tuple[Case, torch.nn.Module]:
    """A small Llama whose adapters, if it has some, are none of them zero."""
    case = Case("llama", 2, 64, 128, 4, 4, 512, rows, 96, rank=rank, dtype=torch.float32)
    model = build(case, torch.device(device))
    for parameter in model.parameters():
        # The second factor of an untrained adapter is zero, and so would be the gradient of the first.
        if rank and parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.05)
    return case, model


class _RecordingPolicy(Policy):
    """A clipping policy that keeps the weights that it last gave."""

    given: Tensor

    def scales(self, upper: Any) -> Tensor:
        self.given = super().scales(upper)
        return self.given


def batch_mates(device: str) -> Iterator[tuple[str, Result]]:
    """How far the clipping weights of a record's batch-mates move if it gets longer, or leaves, in float32."""
    for name, rank in TUNINGS:
        case, model = _trained(device, rank, 33)
        trained = [name for name, p in model.named_parameters() if p.requires_grad]
        ids = torch.stack([row["input_ids"] for row in examples(case, 33)]).to(device)
        found = []
        for rows, longest in ((33, 24), (33, 96), (32, 24)):
            policy = _RecordingPolicy((1e-3,), (0.0,), dict.fromkeys(trained, 0))
            running = Engine(model, policy, deque([Ticket(torch.arange(rows), torch.ones(rows), True)]))
            labels = ids[:rows, :longest].clone()
            labels[:32, 24:] = -100
            model(input_ids=ids[:rows, :longest], labels=labels).loss.backward()
            running.close()
            found.append(policy.given[0, :32].double())
        for event, other in zip(("gets longer", "leaves"), found[1:]):
            yield f"others' weights, {name}, one record {event}", (float((other / found[0] - 1).abs().max()), 1e-4)


def engine(device: str) -> Iterator[tuple[str, Result]]:
    """The whole engine, against autograd on one example at a time on the same device: LoRA on all layers, and everything."""
    for name, rank in TUNINGS:
        case, model = _trained(device, rank, 4)
        rows = examples(case, 4)
        batch = {key: torch.stack([row[key] for row in rows]).to(device) for key in rows[0]}
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        gradients = fuzz.alone(model, batch)
        sizes = fuzz.norms(gradients)
        # Unclipped, and at the median: what bounds of norms are above them is at most 1 / 64.
        for bound, error in ((float(sizes.max()) * 4, 1e-5), (float(sizes.median()), 2.0**-6)):
            tickets = deque([Ticket(torch.arange(4), torch.ones(4), True)])
            running = Engine(model, Policy((bound,), (0.0,), dict.fromkeys(trained, 0)), tickets)
            model(**batch).loss.backward()
            running.close()
            scales = (bound / sizes).clamp(max=1.0)
            worst = 0.0
            for parameter_name, total in running.accumulator.sums.items():
                truth = torch.stack([s * own[parameter_name].double() for s, own in zip(scales, gradients)]).sum(0)
                worst = max(worst, float((total.double() - truth).norm() / truth.norm()))
            yield f"engine, {name}, bound {bound / float(sizes.median()):.1f}", (worst, error)


def wide(device: str) -> Iterator[tuple[str, Result]]:
    """Sums and norms at the widths of large models, and over a vocabulary of 128k."""
    for label, tokens, m, n in (("feed-forward", 2048, 14336, 4096), ("vocabulary", 512, 128256, 2048)):
        left, right = factor(device, tokens, m, torch.bfloat16), factor(device, tokens, n, torch.bfloat16)
        weights, offsets = torch.rand(2, device=device), torch.tensor([0, tokens // 2, tokens], device=device)
        got = ops.weighted_sum(left, right, weights, offsets=offsets)
        each = weights.repeat_interleave(tokens // 2)
        some = slice(0, m, max(1, m // 256))
        truth = (left[:, some].double() * each[:, None].double()).T @ right.double()
        size = (left[:, some].double().abs() * each[:, None].double()).T @ right.double().abs()
        yield f"weighted_sum {label}", (max_error(got[some], truth, size), 2.0**-8)
        squares = torch.stack(
            [
                (left[a:b].double() @ left[a:b].double().T).mul(right[a:b].double() @ right[a:b].double().T).sum()
                for a, b in ((0, tokens // 2), (tokens // 2, tokens))
            ]
        )
        yield f"gram_norms {label}", (max_error(ops.gram_norms([left], [right], [1], offsets)[0][0], squares), NORMS)


def behaviour(device: str) -> Iterator[tuple[str, Result]]:
    """Two runs give the same bits, nothing waits for the device, and another batch or more adapters add no kernel."""
    from fastdp.kernels import direct, gram, grouped, onehot, weighted

    grouped_kernel = grouped._grouped_kernel
    kernels = (gram._gram_kernel, direct._direct_kernel, onehot._norm_kernel, weighted._weighted_kernel, grouped_kernel)

    def batch(lengths: tuple[int, ...], vocabulary: int) -> list[Tensor]:
        offsets = offsets_of(lengths).to(device)
        tokens = sum(lengths)
        left, right = factor(device, tokens, 256, torch.bfloat16), factor(device, tokens, 128, torch.bfloat16)
        ids, weights = torch.randint(0, vocabulary, (tokens,), device=device), torch.rand(tokens, device=device)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            return [
                *(ops.sqnorm(left, right, offsets, route) for route in ("gram", "direct")),
                ops.sqnorm(ids, right, offsets),
                ops.weighted_sum(left, right, weights),
                ops.cross_inner(left, right, left, right, offsets, offsets),
                ops.per_unit(left, right, offsets),
                *ops.per_unit_group([left] * 128, [right] * 128, offsets)[0],
                ops.column_sums(left, offsets),
                ops.affine_sums(left, left, weights, weights, offsets)[0],
            ]
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def kernels_so_far() -> int:
        return sum(len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in kernels)

    torch.manual_seed(1)
    first = batch((100, 128, 71), 50)
    before = kernels_so_far()
    torch.manual_seed(1)
    second = batch((100, 128, 71), 50)
    yield "runs that differ", (float(sum(not torch.equal(a, b) for a, b in zip(first, second))), 0.0)
    batch((99, 127), 51)
    batch((97, 65, 128, 101, 80), 1000)
    yield "kernels compiled for another batch", (float(kernels_so_far() - before), 0.0)
    grids: list[Any] = []

    class Counted:
        def __getitem__(self, grid: Any) -> Any:
            grids.append(grid)
            return grouped_kernel[grid]

    narrow, wide = factor(device, 64, 8, torch.bfloat16), factor(device, 64, 256, torch.bfloat16)
    try:
        grouped._grouped_kernel = Counted()
        ops.per_unit_group([narrow, wide] * 64, [wide, narrow] * 64, offsets_of((30, 34)).to(device))
    finally:
        grouped._grouped_kernel = grouped_kernel
    yield "launches for 128 adapters beyond one", (float(len(grids) - 1), 0.0)


class _SumRecorder(Observer):
    """Keeps the clipped sums of each step, as one vector."""

    def __init__(self) -> None:
        self.steps: list[Tensor] = []

    def before_release(self, accumulator: Any) -> None:
        self.steps.append(torch.cat([accumulator.sums[name].flatten() for name in sorted(accumulator.sums)]))


def recording(device: str) -> Iterator[tuple[str, Result]]:
    """Poisson draws of 64 in microbatches of 32, as recorded by default and eagerly: sums, eager share, padding, masks."""
    attention = torch.nn.functional.scaled_dot_product_attention
    counts: Counter[str] = Counter()

    def attend(*args: Any, **options: Any) -> Tensor:
        if device != "cpu" and torch.cuda.is_current_stream_capturing():
            counts["masks"] += options.get("attn_mask") is not None
        return attention(*args, **options)

    def trained(case: Case, rows: list[Any], capture: Any) -> tuple[list[Tensor], dict[str, int]]:
        model = build(case, torch.device(device))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        loader: Any = torch.utils.data.DataLoader(rows, batch_size=64, collate_fn=Collator(pad_token=0))  # type: ignore[arg-type]
        options: dict[str, Any] = {"noise_multiplier": 0.0, "epochs": 4, "self_check": False, "unsafe_seed": 3}
        # Nothing is clipped: bounds of norms grow with padding.
        options["method"] = fastdp.DPSGD(max_grad_norm=1e4)
        private = fastdp.make_private(model, optimizer, loader, max_physical_batch_size=32, capture=capture, **options)
        private.observe(sums := _SumRecorder())
        for _ in range(4):
            for batch in private.data_loader:
                counts["tokens"] += batch["input_ids"].numel()
                model(**{name: t.to(device) for name, t in batch.items()}).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        private.detach()
        return sums.steps, private.microbatches

    generator = torch.Generator().manual_seed(0)
    for kind in ("bert", "gpt2"):
        case = dataclasses.replace(RECORDED, kind=kind)
        for name, shortest in (("masks of ones", case.tokens), ("lengths that vary", 8)):
            rows: list[Any] = []
            for number in range(256):
                longer = float(torch.rand((), generator=generator)) ** 6
                length = int(shortest + (case.tokens - shortest) * longer)
                ids = torch.randint(1, 512, (length,), generator=generator).tolist()
                rows.append({"input_ids": ids, "labels": number % 2 if kind == "bert" else ids})
            plain, _ = trained(case, rows, False)
            before = counts.pop("tokens")
            counts["masks"] = 0
            with mock.patch("torch.nn.functional.scaled_dot_product_attention", attend):
                found, made = trained(case, rows, "auto")
            worst = max(float((a - b).norm() / b.norm()) for a, b in zip(found, plain, strict=True))
            label, varies = f"{kind}, {name}", shortest < case.tokens
            # Padded to other lengths, products add in another order.
            yield f"recording, sums, {label}", (worst, 5e-5 if varies else NORMS)
            # Of 16 steps the first is eager, and the first of each length.
            yield f"recording, eager share, {label}", (made["eager"] / sum(made.values()), 0.6 if varies else 0.1)
            yield f"recording, padding, {label}", (counts.pop("tokens") / before, 1.6)
            yield f"recording, explicit masks, {label}", (float(counts["masks"]), 1e9 if varies else 0.0)


Group = Callable[[str], Iterator[tuple[str, Result]]]
#: Each in a process of its own.
GROUPS: dict[str, Group] = {
    group.__name__: group
    for group in (engine, batch_mates, sums, norms, instances, heads, noise, snapping, wide, methods)
}


def checks(group: Group, device: str) -> Iterator[dict[str, Any]]:
    """One row a check: its name, the error found, the bound, and whether it holds."""
    torch.manual_seed(0)
    try:
        for name, (error, bound) in group(device):
            yield {"check": name, "error": error, "bound": bound, "holds": error <= bound}
    except Exception as reason:  # one broken kernel must not hide what the others do
        yield {"check": group.__name__, "holds": False, "raised": f"{type(reason).__name__}: {reason}"}


def checks_of(name: str, device: str) -> list[dict[str, Any]]:
    return list(checks(GROUPS[name], device))


def rows(names: Iterable[str], device: str) -> Iterator[dict[str, Any]]:
    """The rows of each group as it ends.

    Groups run in processes of their own: their kernels compile at the same time, and a crash of one ends no other.
    """
    with contextlib.ExitStack() as stack:
        context, running = multiprocessing.get_context("spawn"), {}
        for name in names:
            process = stack.enter_context(ProcessPoolExecutor(1, mp_context=context))
            running[process.submit(checks_of, name, device)] = name
        for done in as_completed(running):
            try:
                yield from done.result()
            except BrokenExecutor as reason:
                yield {"check": running[done], "holds": False, "raised": f"{type(reason).__name__}: {reason}"}


def main() -> int:
    arguments = parser_of(__doc__).parse_args()
    if torch.cuda.device_count() == 0:
        print("this checks the kernels of a GPU, and there is none", file=sys.stderr)
        return 2
    known: list[dict[str, Any]] = []
    # The last two have the device to themselves: they count kernels and compare times.
    for row in itertools.chain(rows(GROUPS, "cuda"), checks(behaviour, "cuda"), checks(recording, "cuda")):
        known.append(row)
        write(arguments.json, known)
    failed = [row for row in known if not row["holds"]]
    print(json.dumps({"environment": environment(), "checks": len(known), "failed": failed}, indent=1))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
