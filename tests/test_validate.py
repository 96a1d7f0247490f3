"""Numbers that are refused are named, in one sentence."""

import pytest

from fastdp.validate import at_least, positive
from tests.cases import cases, pairs


@cases(
    *pairs(
        ("value", [-1.0, float("nan"), float("inf"), "1", None]),
        ("check", [positive, lambda **numbers: at_least(0.0, **numbers)]),
    )
)
def test_what_is_no_number_or_too_small_is_refused_by_name(check, value):
    with pytest.raises(ValueError, match="rate must be a finite number of at least 0"):
        check(delta=1.0, rate=value)


def test_zero_is_not_positive():
    at_least(0.0, rate=0)
    positive(rate=1, delta=1e-300)
    with pytest.raises(ValueError, match="rate must be greater than 0"):
        positive(delta=1.0, rate=0.0)
