"""``exponential_choice``: its draws against exact probabilities, and what it depends on.

Statistical tests use fixed streams; each would raise a false alarm for one stream in 10^9, fewer than 40 in 10^9 for
the file.
"""

import math
import multiprocessing
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from scipy import stats

from fastdp import _native
from fastdp.ops import choice_log_probabilities, exponential_choice, private_snap, snap
from fastdp.ops.choice import EXPONENTIAL_CHOICE
from tests.cases import cases
from tests.ops.uses import by_threads, stream

FALSE_ALARM = 1e-9


def rows(v, d, seed=0, spread=1.0):
    return spread * torch.randn(v, d, generator=torch.Generator().manual_seed(seed))


def chi_square(tokens, law):
    """p-value of counts against exact probabilities, cells that expect fewer than five taken together."""
    counts = np.bincount(tokens.numpy().ravel(), minlength=len(law))
    assert counts[law == 0].sum() == 0
    rare = law * counts.sum() < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(law[~rare], law[rare].sum()) * counts.sum()
    if expected[-1] < 5:
        # Too few expected for the approximation; they are bounded on their own.
        assert observed[-1] <= stats.poisson(max(expected[-1], 1e-300)).isf(FALSE_ALARM)
        observed, expected = observed[:-1], expected[:-1]
    if len(observed) < 2:
        return 1.0
    return stats.chisquare(observed, expected * observed.sum() / expected.sum()).pvalue


def by_reference(ids, table, scale, source, cap=None, log_prior=None):
    prior = None if log_prior is None else log_prior.double()
    scale = torch.as_tensor(scale, dtype=torch.float64)
    return EXPONENTIAL_CHOICE.reference(ids, table, scale, source.take(), cap, prior)


PRIOR = torch.linspace(-8, 3, 129)
#: The token's own row is out of reach and all others are far: every weight is far below what a prior would allow.
FAR, OUT_OF_REACH = torch.cat([rows(20, 6), 100 + rows(80, 6)]), torch.where(torch.arange(100) < 20, -math.inf, 0.0)
CASES = {
    "line": (rows(5, 1), 1.0, {}),
    "one row": (rows(1, 4), 1.0, {}),
    "scale 0": (rows(33, 4), 0.0, {}),
    "flat": (rows(300, 40), 0.1, {}),
    "middling": (rows(300, 40), 0.8, {}),
    "steep": (rows(40, 3), 6.0, {}),
    "capped": (rows(300, 7), 1.5, {"cap": 3.0}),
    "prior": (rows(129, 7), 0.5, {"log_prior": PRIOR}),
    "prior far above": (rows(129, 7), 0.5, {"log_prior": PRIOR + 500}),
    "prior against the token": (rows(129, 7), 1.0, {"log_prior": torch.where(torch.arange(129) == 3, -300.0, PRIOR)}),
    "all": (rows(129, 7), 0.7, {"cap": 2.0, "log_prior": PRIOR}),
    "far from all": (FAR, 1.0, {"log_prior": OUT_OF_REACH}),
    "far from all, beyond float32": (FAR, 300.0, {"log_prior": OUT_OF_REACH}),
    "far from all, where float32 counts by thousands": (FAR, 1e8, {"log_prior": OUT_OF_REACH}),
    "prior of forty nats": (rows(700, 70), 0.3, {"log_prior": torch.linspace(0, -40, 700).roll(9)}),
    "more rows than a block": (rows(1030, 65), 0.4, {}),
    "equal rows": (torch.ones(50, 6), 3.0, {}),
    "pairs of rows": (rows(60, 5).repeat(2, 1), 1.0, {}),
    "outlier dimension": (rows(200, 16) * torch.tensor([100.0] + [1.0] * 15), 0.5, {}),
    "far from the origin": (1000 + rows(100, 5), 1.0, {}),
    "large units": (rows(100, 5) * 1e30, 1e-30, {}),
    "small units": (rows(100, 5) * 1e-30, 1e30, {}),
}


@cases("name", CASES)
def test_draws_follow_the_law(name):
    table, scale, extra = CASES[name]
    at = min(3, len(table) - 1)
    law = choice_log_probabilities(at, table, scale, **extra).exp().numpy()
    tokens = exponential_choice(torch.full((40_000,), at), table, scale, stream(1), **extra)
    assert chi_square(tokens, law) > FALSE_ALARM


@cases("name", ["line", "middling", "all"])
def test_reference_follows_the_law(name):
    table, scale, extra = CASES[name]
    law = choice_log_probabilities(3, table, scale, **extra).exp().numpy()
    assert chi_square(by_reference(torch.full((10_000,), 3), table, scale, stream(2), **extra), law) > FALSE_ALARM


def test_rows_closer_than_eight_bits_tell():
    # Row 0 is among 199 rows at a thousandth of the spread of the others, with a scale at which they hardly ever win:
    # the eight-bit proposals cannot tell them apart, most attempts fail, and the exact distribution must take over.
    table = torch.cat([torch.zeros(1, 12), rows(199, 12, spread=1e-3), rows(20, 12)])
    law = choice_log_probabilities(0, table, 3000.0).exp().numpy()
    assert 0.5 < law[0] < 0.9999
    tokens = exponential_choice(torch.zeros(20_000, dtype=torch.int64), table, 3000.0, stream(3))
    assert chi_square(tokens, law) > FALSE_ALARM
    steep = choice_log_probabilities(0, table, 20_000.0).exp().numpy()
    assert chi_square(exponential_choice(torch.zeros(4_000, dtype=torch.int64), table, 20_000.0, stream(3)), steep) > (
        FALSE_ALARM
    )


def test_many_ids_and_scales():
    table = rows(600, 20)
    ids = torch.arange(120_000).remainder(600)  # more laws than are taken at once
    scales = torch.tensor([0.3, 1.5])[torch.arange(120_000).div(600, rounding_mode="floor").remainder(2)]
    tokens = exponential_choice(ids, table, scales, stream(4))
    # All ids of one scale together: each draw's own probability integral is uniform if and only if each law is right.
    for scale in (0.3, 1.5):
        mine = scales == scale
        laws = torch.stack([choice_log_probabilities(i, table, scale).exp() for i in range(600)])
        ends = laws.cumsum(1)
        token, drawn = ids[mine], tokens[mine]
        low = ends[token, drawn] - laws[token, drawn]
        spread = torch.rand(len(token), generator=torch.Generator().manual_seed(5), dtype=torch.float64)
        assert stats.kstest((low + spread * laws[token, drawn]).numpy(), "uniform").pvalue > FALSE_ALARM
    assert torch.equal(tokens[scales == 0.3], exponential_choice(ids, table, 0.3, stream(4))[scales == 0.3])


def test_place_alone_decides():
    table, ids = rows(700, 24), torch.randint(0, 700, (900,), generator=torch.Generator().manual_seed(1))
    tokens = exponential_choice(ids, table, 1.0, stream(9))
    assert torch.equal(tokens[:123], exponential_choice(ids[:123], table, 1.0, stream(9)))
    other = torch.cat([ids[:60], ids[:60].repeat(14)])
    assert torch.equal(tokens[:60], exponential_choice(other, table, 1.0, stream(9))[:60])
    assert torch.equal(tokens.view(30, 30), exponential_choice(ids.view(30, 30), table, torch.ones(30, 30), stream(9)))
    assert torch.equal(tokens, by_threads(lambda: exponential_choice(ids, table, 1.0, stream(9))))


def test_products_beyond_float64():
    # Scale times distance overflows, but the token's own distance is 0: all weight lies on it.
    table = rows(3, 2)
    for choose in (exponential_choice, by_reference):
        assert choose(torch.full((50,), 2), 1e3 * table, 1.7e308, stream(6)).eq(2).all()
    # Where even the nearest row that may be drawn is out of reach, nothing is drawn at all.
    away = {"log_prior": torch.tensor([-math.inf, 0.0, 0.0])}
    for choose in (exponential_choice, by_reference):
        with pytest.raises(ValueError, match="no row has a weight for id 0"):
            choose(torch.zeros(5, dtype=torch.int64), 1e3 * table, 1.7e308, stream(6), **away)


def test_scales_of_another_dtype_in_the_registered_op():
    table, ids, position = rows(40, 3), torch.arange(40), stream(7).take()
    op = torch.ops.fastdp.exponential_choice
    found = [
        op(ids, table, torch.full((40,), 300.0, dtype=d), position, None, None) for d in (torch.float32, torch.float64)
    ]
    assert torch.equal(*found)
    assert torch.equal(found[0], ids)


def test_numbers_flushed_to_zero_leave_a_bound():
    # The kernel raises if a weight is above its bound. Distances of 2^-57 of the table's largest entry.
    tiny = rows(300, 8) * torch.exp2(-torch.linspace(56, 64, 300))[:, None]
    table = torch.cat([tiny, torch.ones(1, 8), -torch.ones(1, 8)])
    torch.set_flush_denormal(True)
    try:
        for scale in (2.0**52, 2.0**56, 2.0**60):
            exponential_choice(torch.arange(300).repeat(20), table, scale, stream(8))
    finally:
        torch.set_flush_denormal(False)


def test_a_forked_process_draws_too():
    table, ids = rows(2000, 32), torch.arange(2000)
    here = exponential_choice(ids, table, 1.0, stream(9)), snap(table, table), private_snap(ids, table, 9.0, stream(9))
    context = multiprocessing.get_context("fork")
    with context.Pool(1) as pool:
        there = pool.apply_async(_drawn, (table.numpy(),)).get(60)
    assert all(torch.equal(a, torch.from_numpy(b)) for a, b in zip(here, there, strict=True))


def _drawn(table):
    torch.set_num_threads(1)
    table, ids = torch.from_numpy(table), torch.arange(len(table))
    drawn = exponential_choice(ids, table, 1.0, stream(9)), snap(table, table), private_snap(ids, table, 9.0, stream(9))
    return [tokens.numpy() for tokens in drawn]


@cases("op, scale", [(exponential_choice, 0.2), (private_snap, 2.0)])
def test_positions(op, scale):
    table, ids = rows(200, 24), torch.randint(0, 200, (300,))
    source = stream(2)
    first, second = op(ids, table, scale, source), op(ids, table, scale, source)
    assert (first != second).sum() > 150
    place = source.at(4, 7)
    op(ids, table, scale, place)
    with pytest.raises(RuntimeError, match="already drawn"):
        op(ids, table, scale, place)


def test_rows_without_prior_are_never_drawn():
    table = rows(40, 3)
    prior = torch.zeros(40)
    prior[::2] = -math.inf
    tokens = exponential_choice(torch.arange(40).repeat(300), table, 0.5, stream(5), log_prior=prior)
    assert (tokens % 2 == 1).all()
    only = torch.full((40,), -math.inf)
    only[7] = -1000.0
    assert (exponential_choice(torch.arange(40), table, 50.0, stream(5), log_prior=only) == 7).all()


def test_strides_dtypes_and_empty():
    table, ids = rows(60, 12), torch.randint(0, 60, (40, 2))
    plain = exponential_choice(ids[:, 0].clone(), table, 1.0, stream(6))
    assert torch.equal(plain, exponential_choice(ids[:, 0], table.t().contiguous().t(), torch.tensor(1), stream(6)))
    half = table.half()
    assert torch.equal(
        exponential_choice(ids, half, 1.0, stream(6)), exponential_choice(ids, half.float(), 1.0, stream(6))
    )
    assert exponential_choice(ids[:0], table, 1.0, stream()).shape == (0, 2)
    assert exponential_choice(torch.tensor(5), table, 1e9, stream()).tolist() == 5
    assert exponential_choice(torch.arange(60), table[:, :0], 1.0, stream()).shape == (60,)


@settings(max_examples=40)
@given(
    size=st.tuples(st.integers(1, 70), st.integers(1, 40), st.integers(0, 2**31)),
    magnitude=st.integers(-30, 30),
    scale=st.floats(0, 1e4),
    cap=st.none() | st.floats(1e-3, 1e3),
)
def test_no_weight_is_above_its_bound(size, magnitude, scale, cap):
    # The kernel raises if a weight is; few tokens, many shapes.
    v, d, seed = size
    table = rows(v, d, seed) * 10.0**magnitude * torch.rand(v, 1, generator=torch.Generator().manual_seed(seed)) ** 8
    cap = None if cap is None else cap * 10.0**magnitude
    prior = 20 * rows(v, 1, seed)[:, 0]
    extra = {"cap": cap, "log_prior": prior}
    tokens = exponential_choice(torch.arange(v).repeat(3), table, scale * 10.0**-magnitude, stream(seed), **extra)
    assert int(tokens.min()) >= 0
    assert int(tokens.max()) < v


def test_refusals():
    table, ids = torch.randn(5, 8), torch.tensor([0, 4])
    nan = table.clone()
    nan[3, 1] = float("nan")
    for args, extra, error, message in (
        ((torch.tensor([5]), table, 1.0), {}, IndexError, "id 5 is outside"),
        ((torch.tensor([-1]), table, 1.0), {}, IndexError, "id -1 is outside"),
        ((ids, table[:0], 1.0), {}, ValueError, "0 rows"),
        ((ids, nan, 1.0), {}, ValueError, "row 3 of table"),
        ((ids, table, -1.0), {}, ValueError, "at least 0"),
        ((ids, table, float("nan")), {}, ValueError, "at least 0"),
        ((ids, table, torch.tensor([1.0, math.inf])), {}, ValueError, "at least 0"),
        ((ids, table, 1.0), {"cap": 0.0}, ValueError, "cap"),
        ((ids, table, 1.0), {"cap": float("nan")}, ValueError, "cap"),
        ((ids, table, 1.0), {"log_prior": torch.full((5,), -math.inf)}, ValueError, "log_prior"),
        ((ids, table, 1.0), {"log_prior": torch.full((5,), math.inf)}, ValueError, "log_prior"),
        ((ids, table, 1.0), {"log_prior": torch.full((5,), math.nan)}, ValueError, "log_prior"),
        ((ids, torch.zeros(5, 65537), 1.0), {}, ValueError, "at most 65536"),
    ):
        with pytest.raises(error, match=message):
            exponential_choice(*args, stream(), **extra)


# Every instruction set below this machine's answers as it does.
_PATHS = ("portable", "avx2", "avx512")
_PROGRAM = """
import sys, torch
from fastdp import _native
from fastdp.ops import NoiseStream, exponential_choice, private_snap, snap
assert _native.isa() == sys.argv[2]
given = torch.load(sys.argv[1])
ids, table = given["ids"], given["table"]
at = NoiseStream.unsafe_reproducible(1)
torch.save((snap(given["x"], table), private_snap(ids, table, 9.0, at), exponential_choice(ids, table, 0.9, at)), sys.argv[3])
"""


@pytest.mark.parametrize("isa", _PATHS[: _PATHS.index(_native.isa()) + _native.has_matrix_tiles()])
def test_lower_instruction_sets_agree(isa, tmp_path):
    table = rows(333, 37)
    # So many that one rounding in 150,000 is found, as where a compiler joins a product and a sum.
    x, ids = rows(150, 37, 1), torch.arange(150_000).remainder(333)
    at = stream(1)
    here = snap(x, table), private_snap(ids, table, 9.0, at), exponential_choice(ids, table, 0.9, at)
    torch.save({"x": x, "table": table, "ids": ids}, tmp_path / "given")
    subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(tmp_path / "given"), isa, str(tmp_path / "out")],
        check=True,
        env={**os.environ, "FASTDP_ISA": isa},
    )
    there = torch.load(tmp_path / "out")
    assert all(torch.equal(own, other) for own, other in zip(here, there))
