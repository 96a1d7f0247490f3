"""Tensor cores truncate: a model of them in place of the interpreter's product, at the widths of real models.

Sixteen exact products are added to an accumulator, all cut off two bits below the last place of the largest, and the sum is cut
to float32: the worst that docs/clipping.md allows for, and always towards zero, so that norms come out too small.
"""

import numpy as np
import pytest
import torch
from fastdp.kernels import direct, gram, weighted
from triton.runtime import interpreter

from fastdp.engine.bounds import REMEASURED
from fastdp.ops.bounds import HEAD_SPAN, Rounding, Roundings
from fastdp.ops.factors import SQUARE
from tests.ops.uses import factor, gradients, offsets_of


def _cut(x, quantum):
    return np.trunc(x / quantum) * quantum


def truncating(a, b, start):
    total = start.astype(np.float64)
    for first in range(0, a.shape[1], 16):
        products = a[:, first : first + 16, None].astype(np.float64) * b[None, first : first + 16].astype(np.float64)
        largest = np.maximum(np.abs(products).max(1), np.abs(total))
        quantum = np.exp2(np.floor(np.log2(np.where(largest == 0.0, 1.0, largest))) - 25)
        total = _cut(total, quantum) + _cut(products, quantum[:, None]).sum(1)
        exact, total = total, total.astype(np.float32)
        total = np.where(np.abs(total) > np.abs(exact), np.nextafter(total, np.float32(0)), total).astype(np.float64)
    return total.astype(np.float32)


@pytest.fixture
def tensor_cores(monkeypatch):
    def create_dot(a, b, d, *_):
        return interpreter.TensorHandle(truncating(a.data, b.data, d.data), d.dtype.scalar)

    monkeypatch.setattr(interpreter.interpreter_builder, "create_dot", create_dot)


@pytest.fixture
def rounding(monkeypatch):
    """The constants of Triton's arithmetic, for factors that lie on a processor here."""
    constants = Rounding(torch.zeros(1, 1))
    constants.arithmetic = "triton"
    return constants


@pytest.mark.parametrize("width", [14_336, pytest.param(128_256, marks=pytest.mark.slow)])
def test_norms_by_gram_matrices(tensor_cores, rounding, width):
    offsets = offsets_of((5,))
    left, right = factor(5, width, 0, torch.bfloat16).abs(), factor(5, 40, 1, torch.bfloat16).abs()
    truth = gradients(left, right, offsets).square().sum((1, 2))
    scale = (left.double().norm(dim=1) * right.double().norm(dim=1)).sum()
    for span in (width, HEAD_SPAN):
        rounding.span, parts = span, left.split(span, 1)
        squares, products = gram.gram_norms(parts, [right], [len(parts)], offsets)
        lost = (truth - squares.double().sum(0)).item()
        # An accumulator that went on to the end would lose up to 1e-3.
        assert 0 < lost < 1e-6 * truth.item()
        assert lost <= rounding.gram(width, 40).gamma(5) * scale.square().item()
        assert products.sum().item() * (1 + 2.0**-10) >= scale.item()
    # Parts of a head's rows are rounded so seldom that 1,024 orthogonal tokens are not measured again.
    assert 1024 * rounding.gram(128_256, 2048).gamma(0) < REMEASURED


def test_gradients_and_sums_of_long_units(tensor_cores, rounding):
    """What truncating accumulators lose grows with a unit, and stays below the bound."""
    tokens = 4096
    offsets = offsets_of((tokens,))
    left, right = factor(tokens, 3, 0, torch.bfloat16).abs(), factor(tokens, 5, 1, torch.bfloat16).abs()
    truth = gradients(left, right, offsets)[0]
    scale = (left.double().norm(dim=1) * right.double().norm(dim=1)).sum().item()
    measured = direct.direct_norms(left, right, offsets, SQUARE)[0].double().sqrt().item()
    lost = truth.norm().item() - measured
    assert 0 < lost <= rounding.entry().gamma(tokens) * scale
    weight, out = torch.tensor([[0.3]]), torch.zeros(3, 5)
    weighted.weighted_sums_([out], [left], [right], weight, offsets, [True], dealt=(1, 1))
    error = (out.double() / weight.double() - truth).norm().item()
    assert 0 < error <= rounding.added().gamma(tokens) * scale


def test_a_unit_beside_others(tensor_cores, rounding):
    """What one unit adds, by the difference of sums with it and without: its own rounding, and that among the others."""
    lengths = (40, 7, 33, 20, 28)
    offsets, tokens = offsets_of(lengths), sum(lengths)
    left, right = factor(tokens, 3, 0, torch.bfloat16).abs(), factor(tokens, 5, 1, torch.bfloat16).abs()
    products = (left.double().norm(dim=1) * right.double().norm(dim=1)).split(lengths)
    scales = torch.stack([each.sum() for each in products])
    weights = torch.tensor([0.7, 2.0**-40, 1.0, 3e-3, 0.11])
    truth = gradients(left, right, offsets)
    for unit in range(len(lengths)):
        sums = []
        for own in (weights, torch.where(torch.arange(5) == unit, 0.0, weights)):
            sums.append(torch.zeros(3, 5))
            weighted.weighted_sums_([sums[-1]], [left], [right], own[None], offsets, [True], dealt=(1, 1))
        gap = (sums[0].double() - sums[1].double() - weights[unit].double() * truth[unit]).norm()
        shares = weights.double() * scales
        others = 2 * Roundings(tokens + 24 + 10).gamma(0) * (shares.sum() - shares[unit])
        assert gap <= rounding.added().gamma(max(lengths)) * shares[unit] + others
