"""Parts of the composition of loss distributions, against other ways to the same number."""

import numpy as np
import pytest
from scipy import special

from fastdp.accounting import pld
from tests.cases import cases


@cases("times", [1, 2, 7, 64, 6315])
def test_power_by_squaring(times):
    base = np.exp(2j * np.pi * np.linspace(0, 1, 257)) * np.linspace(0.99, 1, 257)
    before = base.copy()
    expected = np.exp(times * np.log(base.astype(np.clongdouble)))
    assert np.abs(pld.complex_power(base, times) - expected).max() <= 4 * np.finfo(float).eps * times
    np.testing.assert_array_equal(base, before)


@pytest.mark.parametrize(("deviation", "times"), [(2, 50), (40, 300), (400, 20)])
@pytest.mark.parametrize("side", [-1, 1])
def test_little_of_a_composition_lies_beyond_its_window(deviation, times, side):
    """The window is a bound, and no wider than the deviation explains."""
    places = np.arange(-8 * deviation, 24 * deviation)
    masses = np.exp(-0.5 * (places / deviation) ** 2)
    masses /= masses.sum()
    end = pld.window_end(masses, times, side)
    standard = side * (end - 8 * deviation * times) / (deviation * times**0.5)
    assert special.ndtri(1 - 0.5 * 1e-15) < standard < 9


@cases("least", [1, 2, 16, 17, 1000, 65_537, 4_000_001])
def test_lengths_of_transforms(least):
    length = pld.transform_length(least)
    assert least <= length <= max(8, 1.25 * least + 1)
    while length % 2 == 0:
        length //= 2
    assert length in (1, 3, 5, 9, 15)
