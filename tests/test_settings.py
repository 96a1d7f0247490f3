"""What a setting may be."""

import math

from fastdp.settings import Allowed
from tests.cases import cases


@cases("finite, value, holds", [
    (True, 3.0, True), (True, -1.0, False), (True, math.inf, False), (True, math.nan, False),
    (False, math.inf, True), (False, math.nan, False),
])  # fmt: skip
def test_a_number_within_bounds_is_finite_unless_that_is_not_needed(finite, value, holds):
    assert Allowed((), {"least": 0.0}, finite).holds(value) is holds


def test_words_and_what_has_no_bounds():
    assert Allowed(("one", "other"), {}, True).holds("other")
    assert not Allowed(("one", "other"), {}, True).holds("neither")
    assert Allowed((), {}, True).holds(object())
