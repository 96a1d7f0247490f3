"""Randomised response: the bound of the law that integers draw from, to the last bit; and the draws against that law."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings, strategies as st

from fastdp.methods.response import (
    LARGEST_EPSILON,
    SMALLEST_EPSILON,
    changes_below,
    keep_probability,
    randomised_response,
)
from fastdp.ops import NoiseStream
from tests.cases import cases
from tests.ops.test_dchi import FALSE_ALARM, chi_square


def integer_law(k, epsilon):
    """Probability of the symbol itself, and the least and largest of another's, of 64-bit words exactly."""
    change = Fraction(changes_below(k, epsilon), 1 << 64)
    words = 1 << 64
    # Of 2^64 words floor(w (k - 1) / 2^64) is each of k - 1 values this often, or once more.
    fewest, most = words // (k - 1), -(-words // (k - 1))
    return 1 - change, change * Fraction(fewest, words), change * Fraction(most, words)


@given(st.integers(2, (1 << 31) - 1), st.floats(SMALLEST_EPSILON, LARGEST_EPSILON))
@settings(max_examples=100)
def test_no_answer_is_more_than_exp_epsilon_times_as_likely(k, epsilon):
    kept, least, most = integer_law(k, epsilon)
    assert kept > 0
    # exp rounded down by more than math.exp errs.
    limit = Fraction(math.exp(epsilon)) * (1 - Fraction(1, 1 << 50))
    for ratio in (kept / least, most / kept, most / least):
        assert ratio <= limit
    # Nothing is given away for the rounding: what is kept is what the formula keeps, to a billionth of the rest.
    assert float(kept) == pytest.approx(keep_probability(k, epsilon), rel=1e-7, abs=1e-9)


@cases(("k", "epsilon"), [(2, 0.3), (3, 2.0), (5, 1.0), (7, 4.0)])
def test_draws_follow_the_law(k, epsilon):
    stream = NoiseStream.unsafe_reproducible(k)
    for symbol in range(k):
        drawn = randomised_response(torch.full((20_001,), symbol), k, epsilon, stream)
        kept = keep_probability(k, epsilon)
        law = torch.full((k,), (1 - kept) / (k - 1), dtype=torch.float64)
        law[symbol] = kept
        assert chi_square(drawn, law.numpy()) > FALSE_ALARM


def test_each_answer_is_its_own():
    """Pairs of neighbours in one call are independent: their joint counts follow the product of the laws."""
    drawn = randomised_response(torch.zeros(40_000, dtype=torch.int64), 3, 1.0, NoiseStream.unsafe_reproducible(1))
    kept = keep_probability(3, 1.0)
    law = torch.tensor([kept, (1 - kept) / 2, (1 - kept) / 2], dtype=torch.float64)
    pairs = drawn.view(-1, 2)
    assert chi_square(pairs[:, 0] * 3 + pairs[:, 1], torch.outer(law, law).flatten().numpy()) > FALSE_ALARM


def test_shapes_and_refusals():
    stream = NoiseStream()
    assert randomised_response(torch.zeros(2, 3, dtype=torch.int64), 4, 1.0, stream).shape == (2, 3)
    assert randomised_response(torch.empty(0, dtype=torch.int64), 4, 1.0, stream).numel() == 0
    for k, epsilon in ((1, 1.0), (True, 1.0), (3, 0.0), (3, math.nan), (3, math.inf), (3, 31.0), (3, 1e-7)):
        with pytest.raises(ValueError):
            randomised_response(torch.zeros(1, dtype=torch.int64), k, epsilon, stream)
    with pytest.raises(IndexError):
        randomised_response(torch.tensor([3]), 3, 1.0, stream)
    with pytest.raises(TypeError):
        randomised_response(torch.zeros(1), 3, 1.0, stream)
