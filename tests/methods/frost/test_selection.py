"""PSEL on magnitudes that are known."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from fastdp.methods.frost import Partition, select_partitions
from fastdp.methods.frost.selection import fill
from tests.cases import cases

RATE = 0.5


def partitions(sizes):
    return [Partition(f"p{i}", (f"p{i}.weight",), size) for i, size in enumerate(sizes)]


def select(sizes, true, *, noise=0.0, seed=0, **options):
    """PSEL over observations at lambda = RATE, with sensitivity 1."""
    rng = np.random.default_rng(seed)
    asked = []

    def observe(t, remaining):
        asked.append(list(remaining))
        return RATE * np.array(true)[list(remaining)] + noise * rng.standard_normal(len(remaining)), 1.0

    settings_ = {"steps": 3, "unfreezing_ratio": 0.5, "gap_coefficient": 5.0, "selection_rate": RATE, **options}
    found = select_partitions(observe, partitions(sizes), noise_multiplier=noise, **settings_)
    for t, remaining in enumerate(asked, start=1):
        earlier = np.flatnonzero((found.iteration > 0) & (found.iteration < t))
        assert not set(earlier) & set(remaining)
        assert np.isnan(found.observed[t - 1, earlier]).all()
    return found


@cases(
    ("sizes", "true", "options", "iterations"),
    [
        # 120 parameters, 60 of which are trained: 20 by each of three iterations, or all at once.
        ([10] * 12, range(12), {}, [0] * 6 + [3, 3, 2, 2, 1, 1]),
        ([10] * 12, range(12), {"steps": 1}, [0] * 6 + [1] * 6),
        # A partition that does not fit is skipped.
        ([100, 10, 10, 10], [9.0, 3.0, 2.0, 1.0], {"steps": 1, "unfreezing_ratio": 0.2}, [0, 1, 1, 0]),
    ],
)
def test_takes_the_largest_magnitudes_that_fit(sizes, true, options, iterations):
    assert select(sizes, true, **options).iteration.tolist() == iterations
    if options.get("steps") == 1:
        assert fill(true, partitions(sizes), options.get("unfreezing_ratio", 0.5)).tolist() == iterations


def test_waits_where_nothing_stands_out_and_fills_up_at_the_end():
    """Equal magnitudes: no gap of five deviations, so no early choice, and the printed loop would not end."""
    found = select([10] * 12, [1.0] * 12, noise=0.01)
    assert set(found.iteration.tolist()) == {0, 3}
    assert (found.iteration > 0).sum() == 6


def test_an_early_choice_stands_out_by_the_gap():
    true = [1.0, 1.1, 1.2, 1.3, 1.4, 50.0]
    eager = select([10] * 6, true, noise=0.05, gap_coefficient=5)
    shy = select([10] * 6, true, noise=0.05, gap_coefficient=1e6)
    assert eager.iteration[5] == 1
    assert shy.iteration[5] == 3


@settings(max_examples=100)
@given(
    sizes=st.lists(st.integers(1, 1000), min_size=2, max_size=12),
    steps=st.integers(1, 5),
    ratio=st.floats(0.01, 0.99),
    seed=st.integers(0, 2**32 - 1),
)
def test_never_passes_the_limit(sizes, steps, ratio, seed):
    rng = np.random.default_rng(seed)
    if min(sizes) > ratio * sum(sizes):
        with pytest.raises(ValueError, match="smallest partition"):
            select(sizes, rng.uniform(size=len(sizes)), steps=steps, unfreezing_ratio=ratio)
        return
    options = {"steps": steps, "unfreezing_ratio": ratio, "gap_coefficient": 1.0, "estimation_iterations": 10}
    found = select(sizes, rng.uniform(size=len(sizes)), noise=0.1, seed=seed, **options)
    limit = ratio * sum(sizes)
    for t in range(1, steps + 1):
        assert np.array(sizes)[(found.iteration > 0) & (found.iteration <= t)].sum() <= t * limit / steps + 1e-9
    left = limit - np.array(sizes)[found.iteration > 0].sum()
    frozen = np.array(sizes)[found.iteration == 0]
    assert not len(frozen) or left < frozen.min()


def test_a_ratio_below_the_smallest_partition_names_it():
    """RoBERTa-base: at a ratio of .25^4 no matrix of an encoder fits."""
    matrices = [590_592] * 48 + [2_362_368, 2_360_064] * 12 + [124_647_170 - 48 * 590_592 - 12 * 4_722_432]
    with pytest.raises(ValueError, match=r"leaves 486,903 of 124,647,170 .* p0, has 590,592"):
        fill(np.zeros(len(matrices)), partitions(matrices), 0.25**4)


@cases("ratio", [0.0, 1.5, -0.5])
def test_refuses_a_ratio_out_of_range(ratio):
    with pytest.raises(ValueError, match="unfreezing_ratio"):
        fill([1.0, 2.0], partitions([1, 1]), ratio)
