"""Norms and weighted sums of instantiated gradients against float64."""

import sys
import time

import pytest
import torch

from fastdp import ops
from fastdp.ops.factors import HAS_KERNELS
from fastdp.ops.table import OPS
from tests.cases import cases
from tests.ops.uses import by_threads


def instances_of(units, shape, seed, dtype=torch.float32):
    return torch.randn(units, *shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def drawn(shape, seed, share=0.5):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share


@cases("units, shape", [(0, (63,)), (5, (0,)), (0, (0, 3))])
def test_nothing_is_zero(units, shape):
    x, mask, weights = torch.ones(units, *shape), torch.ones(shape, dtype=torch.bool), torch.ones(units)
    for norms in (ops.instance_sqnorm(x), ops.instance_abs_sum(x), *ops.instance_masked_sqnorm(x, mask)):
        assert norms.tolist() == [0.0] * units
    for total in (ops.instance_sum(x, weights), ops.instance_masked_sum(x, weights, weights, mask)):
        assert torch.equal(total, torch.zeros(shape))


def test_a_unit_that_is_not_finite_marks_itself_alone():
    instances, mask = torch.ones(3, 130), torch.zeros(130, dtype=torch.bool)
    instances[1, 129], mask[129] = float("nan"), True
    for norms in (ops.instance_sqnorm(instances), ops.instance_abs_sum(instances)):
        assert norms.isfinite().tolist() == [True, False, True]
    masked, unmasked = ops.instance_masked_sqnorm(instances, mask)
    assert masked.isfinite().tolist() == [True, False, True]
    assert unmasked.tolist() == [129, 129, 129]


def test_a_weight_of_zero_keeps_nan_out_of_its_part_only():
    instances, mask = torch.ones(2, 70), drawn((70,), 3)
    instances[0] = float("nan")
    got = ops.instance_masked_sum(instances, torch.tensor([0.0, 2.0]), torch.ones(2), mask)
    assert torch.equal(got.isnan(), ~mask)
    assert bool((got[mask] == 2).all())


def test_threads_do_not_change_the_result():
    instances, mask, weights = instances_of(3, (50_001,), 1), drawn((50_001,), 2), torch.rand(3)

    def compute():
        norms = [ops.instance_sqnorm(instances), *ops.instance_masked_sqnorm(instances, mask)]
        return torch.cat([*norms, ops.instance_masked_sum(instances, weights, -weights, mask)])

    by_threads(compute)


def calls_of(function):
    """How many functions, Python's and others, a call comes to."""
    function()
    count = 0

    def seen(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(seen)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count - 2  # the function itself, and the end of counting


# On the portable instruction set torch's formula stands in the place of a kernel, and its calls are not ours to count.
@pytest.mark.skipif(not HAS_KERNELS, reason="the portable instruction set has no kernel of instances")
def test_small_calls_go_straight_to_their_kernel():
    """Of a few numbers the way there takes longer than the sum: the checks of `Op` alone come to more calls."""
    x, weights = torch.randn(8, 64), torch.rand(8)
    assert calls_of(lambda: ops.instance_sum(x, weights)) <= 18
    assert calls_of(lambda: ops.instance_sqnorm(x)) <= 17
    assert torch.equal(ops.instance_sum(x, weights), OPS["instance_sum"](x, weights, None, None))
    assert torch.equal(ops.instance_sqnorm(x), OPS["instance_norms"](x, 0, None)[0])


def test_a_number_is_no_gradient_of_units():
    with pytest.raises(ValueError, match="instances has no dimensions"):
        ops.instance_sqnorm(torch.tensor(1.0))


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(8, 768, 768), (256, 64, 512)])
def test_norms_and_sums_take_no_longer_than_calls_of_torch(shape):
    # Beyond the second-level cache, where masked loads made norms take twice as long as torch's.
    x, weights = instances_of(shape[0], shape[1:], 0), torch.rand(shape[0]) + 0.1
    pairs = (
        (lambda: ops.instance_sqnorm(x), lambda: torch.linalg.vector_norm(x, dim=(1, 2)).square()),
        (lambda: ops.instance_sum(x, weights), lambda: (weights @ x.flatten(1)).view(shape[1:])),
    )

    def ratio(ours, torchs):
        times = {ours: [], torchs: []}
        for _ in range(100):
            for call, found in times.items():
                begun = time.perf_counter()
                call()
                found.append(time.perf_counter() - begun)
        # Other programs take their part of the larger times.
        return sorted(times[ours])[25] / sorted(times[torchs])[25]

    # Or of a whole round.
    assert all(any(ratio(*pair) <= 1.15 for _ in range(8)) for pair in pairs)
