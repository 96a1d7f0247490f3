"""Parts of the composition of loss distributions, against other ways to the same number."""

import numpy as np
import pytest
from scipy import special

from fastdp.accounting import pld


def test_normal_tails_are_those_of_scipy():
    x = np.concatenate([np.linspace(-45, 12, 5001), -np.logspace(0, 150, 1001), [0.0, -np.inf, np.inf, np.nan]])
    # The argument over the root of two is rounded, which moves the tail by x^2 roundings; both sides pay that.
    room = 8 * np.finfo(float).eps * (1 + np.where(np.isfinite(x), x, 0) ** 2)
    ours, theirs = pld.normal_mass_below(x), special.ndtr(x)
    wrong = np.abs(ours - theirs) > room * theirs + 1e-300
    assert not wrong.any()
    assert np.isnan(ours[-1])
    ours, theirs = pld.log_normal_mass_below(x), special.log_ndtr(x)
    finite = np.isfinite(theirs)
    absolute = np.abs(ours[finite] - theirs[finite])
    assert np.all(absolute <= room[finite] * np.minimum(1, np.abs(theirs[finite])) + 4e-16 * np.abs(theirs[finite]))
    np.testing.assert_array_equal(ours[~finite], theirs[~finite])


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
