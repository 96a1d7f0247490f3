"""The server's arithmetic: equation 7, weights, every refusal with the sum unchanged, clipping and noise."""

import math

import pytest
import torch
from scipy.stats import kstest

from fastdp import NoiseStream
from fastdp.federated import Aggregator, RefusedUpdate, UpdateBounds, aggregation
from fastdp.federated.wire import pack_adapter
from tests.cases import cases

START = {"a.down": torch.ones(3, 2), "b.up": torch.full((4,), 2.0)}
BOUNDS = UpdateBounds(max_norm=50.0, max_examples=100)


def update(value):
    return {"a.down": torch.full((3, 2), float(value)), "b.up": torch.full((4,), -float(value))}


def add(aggregator, state, examples=1):
    return aggregator.add(pack_adapter(state), examples)


def test_mean_is_equation_7():
    aggregator = Aggregator(START, BOUNDS)
    for value, examples in ((1.0, 7), (2.0, 90), (6.0, 1)):
        add(aggregator, update(value), examples)
    mean = aggregator.mean()
    torch.testing.assert_close(mean["a.down"], torch.full((3, 2), 3.0))
    torch.testing.assert_close(mean["b.up"], torch.full((4,), -3.0))
    assert list(mean) == list(START)


def test_weighted_by_examples():
    aggregator = Aggregator(START, BOUNDS, weighted=True)
    add(aggregator, update(1.0), examples=3)
    add(aggregator, update(5.0), examples=1)
    torch.testing.assert_close(aggregator.mean()["a.down"], torch.full((3, 2), 2.0))


def shifted(norm):
    """An update whose difference from the global adapter has this norm."""
    entries = sum(tensor.numel() for tensor in START.values())
    return {name: tensor + norm / entries**0.5 for name, tensor in START.items()}


def changed(**tensors):
    return {**update(3.0), **tensors}


def renamed():
    return {"a.down": torch.ones(3, 2), "b.other": torch.ones(4)}


REFUSALS = {
    "a further name": (changed(**{"c.extra": torch.ones(1)}), 1, "'c.extra' that the adapter lacks"),
    "another name": (renamed(), 1, "'b.other'"),
    "a missing name": ({"a.down": torch.ones(3, 2)}, 1, "lacks the tensor 'b.up'"),
    "another shape": (changed(**{"b.up": torch.ones(2, 2)}), 1, "has shape"),
    "another dtype": (changed(**{"b.up": torch.ones(4, dtype=torch.int32)}), 1, "is torch.int32, not torch.float32"),
    "a NaN": (changed(**{"b.up": torch.tensor([1.0, math.nan, 1.0, 1.0])}), 1, "NaN or an infinity"),
    "an infinity": (changed(**{"b.up": torch.tensor([1.0, math.inf, 1.0, 1.0])}), 1, "NaN or an infinity"),
    "no example": (update(3.0), 0, "number of examples is 0"),
    "a negative count": (update(3.0), -5, "number of examples is -5"),
    "too many examples": (update(3.0), 101, "outside 1 to 100"),
    "a fraction of an example": (update(3.0), 2.5, "no whole number"),
    "a boolean count": (update(3.0), True, "no whole number"),
    "a norm a little beyond the bound": (shifted(1.01 * BOUNDS.max_norm), 1, "beyond the bound 50"),
}


@cases("case", REFUSALS)
def test_refused_and_the_rest_goes_on(case):
    """The mean is to the bit what it is without the refused update."""
    state, examples, message = REFUSALS[case]
    aggregator, without = Aggregator(START, BOUNDS), Aggregator(START, BOUNDS)
    for one in (aggregator, without):
        assert add(one, shifted(0.99 * BOUNDS.max_norm)) == pytest.approx(0.99 * BOUNDS.max_norm)
    with pytest.raises(RefusedUpdate, match=message):
        add(aggregator, state, examples)
    for one in (aggregator, without):
        add(one, update(4.0))
    assert aggregator.accepted == without.accepted == 2
    for name, tensor in aggregator.mean().items():
        assert torch.equal(tensor, without.mean()[name])


GOOD = pack_adapter(update(1.0))


@cases(
    "data",
    [
        *(
            b"",
            b"\0" * 39,
            GOOD[:-1],
            GOOD + b"\0",
            b"\0" * len(GOOD),
            b"\xff" * len(GOOD),
            b"[" * 200,
            b"x" * (1 << 20),
        ),
        *(GOOD.replace(b'"F32"', b'"F99"'), GOOD.replace(b"[3,2]", b"[9,2]"), GOOD.replace(b"a.down", b"a\x00down")),
    ],
)
def test_bytes_that_cannot_be_read(data):
    aggregator = Aggregator(START, BOUNDS)
    with pytest.raises(RefusedUpdate) as refusal:
        aggregator.add(data, 1)
    assert len(str(refusal.value)) < 200
    assert aggregator.accepted == 0


def test_tensors_may_come_in_any_order():
    aggregator = Aggregator(START, BOUNDS)
    add(aggregator, dict(reversed(update(3.0).items())))
    torch.testing.assert_close(aggregator.mean(), update(3.0))


def test_a_failure_that_nobody_foresaw_is_a_refusal(monkeypatch):
    """Whatever a client's bytes break before they are added: refused, and the next update counts alone."""

    def breaking(*arguments):
        raise RecursionError("too deep")

    aggregator = Aggregator(START, BOUNDS)
    with monkeypatch.context() as patch:
        patch.setattr(aggregation, "unpack_adapter", breaking)
        with pytest.raises(RefusedUpdate, match="^it cannot be read: RecursionError$"):
            aggregator.add(GOOD, 1)
    add(aggregator, update(4.0))
    assert aggregator.accepted == 1
    torch.testing.assert_close(aggregator.mean()["a.down"], torch.full((3, 2), 4.0))


@cases("size", [0.5, 1.0, 1.5, 1.999, 2.5, 8.0])
def test_one_update_moves_the_sum_by_its_bound_at_most(size):
    """Norms are given in units of the bound: those a little above it count as much as those far above."""
    clip = 3.0
    aggregator = Aggregator(START, BOUNDS, clip=clip)
    add(aggregator, shifted(size * clip))
    moved = torch.cat([(aggregator.mean()[name].double() - START[name].double()).flatten() for name in START]).norm()
    assert float(moved) == pytest.approx(min(size, 1.0) * clip, rel=1e-5)


def test_no_mean_of_nothing():
    with pytest.raises(ValueError, match="no update was accepted"):
        Aggregator(START, BOUNDS).mean()


def test_noise_of_central_dp():
    """Kolmogorov-Smirnov of 20,000 coordinates against std z C / expected (false alarms: 1 in 10^9)."""
    start = {"w": torch.zeros(20_000)}
    aggregator = Aggregator(start, UpdateBounds(1e9, 100), clip=2.0)
    noisy = aggregator.noisy_mean(1.5, expected=4.0, stream=NoiseStream())["w"].double().numpy()
    assert kstest(noisy, "norm", args=(0, 1.5 * 2.0 / 4.0)).pvalue > 1e-9


def test_central_dp_divides_by_the_expected_number():
    aggregator = Aggregator({"w": torch.zeros(4)}, UpdateBounds(1e9, 100), clip=10.0)
    for _ in range(3):
        add(aggregator, {"w": torch.ones(4)})
    result = aggregator.noisy_mean(1e-9, expected=6.0, stream=NoiseStream())["w"]
    torch.testing.assert_close(result, torch.full((4,), 0.5))


def test_what_central_dp_refuses():
    with pytest.raises(ValueError, match="equal weights"):
        Aggregator(START, BOUNDS, weighted=True, clip=1.0)
    with pytest.raises(ValueError, match="not clipped"):
        Aggregator(START, BOUNDS).noisy_mean(1.0, 1.0, NoiseStream())
    with pytest.raises(ValueError, match="noise_multiplier is 0.0: it must be a finite number above 0"):
        Aggregator(START, BOUNDS, clip=1.0).noisy_mean(0.0, 1.0, NoiseStream())
