"""The bound against its definition and against the Gaussian mechanism."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from scipy import stats

from fastdp import audit
from tests.cases import cases

#: How often the simulations of this file may fail with nothing wrong.
FALSE_ALARM = 1e-8


@settings(max_examples=25)
@given(data=st.data(), m=st.integers(1, 30), epsilon=st.floats(0, 6), delta=st.floats(0, 1))
def test_it_is_the_formula_of_theorem_3_1(data, m, epsilon, delta):
    r = data.draw(st.integers(0, m))
    v = data.draw(st.integers(0, r))
    law = stats.binom(r, math.exp(epsilon) / (1 + math.exp(epsilon)))
    beta = sum(law.pmf(w) for w in range(v, r + 1))
    alpha = max(2 / i * sum(law.pmf(w) for w in range(max(0, v - i), v)) for i in range(1, m + 1))
    assert audit.p_value(m, r, v, epsilon, delta) == pytest.approx(
        min(1, beta + m * delta * alpha), rel=1e-9, abs=1e-12
    )


@settings(max_examples=25)
@given(data=st.data(), r=st.integers(1, 150), delta=st.sampled_from([0.0, 1e-9, 1e-5, 1e-3]))
def test_the_lower_bound_is_where_the_p_value_crosses_and_grows_with_what_was_right(data, r, delta):
    v = data.draw(st.integers(0, r))
    bound = audit.lower_bound(2 * r, r, v, delta, 0.95)
    if bound > 0:
        assert audit.p_value(2 * r, r, v, bound, delta) <= 0.05 < audit.p_value(2 * r, r, v, bound + 1e-5, delta)
    else:
        assert audit.p_value(2 * r, r, v, 0.0, delta) > 0.05 or v > r / 2
    assert bound <= audit.lower_bound(2 * r, r, min(r, v + 1), delta, 0.95) <= audit.best_possible(2 * r, r, delta)
    assert bound <= audit.lower_bound(2 * r, r, v, delta, 0.9)


def test_known_values():
    # 100 of 100: q^100 = .05, so e^epsilon = q / (1 - q) with q = .05^(1/100).
    q = 0.05**0.01
    assert audit.lower_bound(100, 100, 100, 0.0) == pytest.approx(math.log(q / (1 - q)), abs=1e-5)
    assert audit.lower_bound(100, 100, 50, 0.0) == 0.0
    assert audit.p_value(10, 0, 0, 1.0) == 1.0
    for epsilon in (0.0, 1.0, 4.0):
        r = audit.guesses_needed(epsilon)
        assert audit.p_value(r, r, r, epsilon) <= 0.05 < audit.p_value(r, r, r - 1, epsilon)
        assert audit.p_value(r - 1, r - 1, r - 1, epsilon) > 0.05


def test_the_gaussian_mechanism_is_never_refuted_and_half_its_noise_is():
    """One release of 20,000 orthogonal canaries at mu = 1/2, claimed epsilon 1.993 at 1e-5 (Gaussian, exact)."""
    m, mu, claimed = 20_000, 0.5, 1.99309

    def bound(noise, confidence):
        included = torch.rand(m) < 0.5
        scores = mu * included + noise * torch.randn(m)
        return audit.conclude(scores, included, claimed=claimed, delta=1e-5, confidence=confidence).epsilon

    assert all(bound(1.0, 1 - FALSE_ALARM / 5) <= claimed for _ in range(5))
    assert np.median([bound(0.5, 0.95) for _ in range(9)]) > claimed


def test_guesses_are_made_at_both_ends():
    included = torch.tensor([True] * 50 + [False] * 50)
    perfect = audit.conclude(included.float(), included, claimed=0.1, delta=0.0, shares=(0.2, 1.0))
    assert [(t.guesses, t.correct) for t in perfect.trials] == [(20, 20), (100, 100)]
    assert perfect.epsilon == perfect.trials[1].epsilon == audit.lower_bound(100, 100, 100, 0.0, 0.975)
    assert perfect.refuted
    assert "REFUTED" in str(perfect)
    upside_down = audit.conclude(-included.float(), included, claimed=0.1, delta=0.0)
    assert upside_down.epsilon == 0
    assert not upside_down.refuted
    assert upside_down.trials[0].correct == 0


@cases(
    ("call", "message"),
    [
        (lambda: audit.p_value(10, 11, 3, 1.0), "correct <= guesses <= canaries"),
        (lambda: audit.p_value(10, 5, 6, 1.0), "correct <= guesses <= canaries"),
        (lambda: audit.p_value(10, 5, 5, -1.0), "epsilon"),
        (lambda: audit.p_value(10, 5, 5, math.nan), "epsilon"),
        (lambda: audit.p_value(10, 5, 5, 1.0, 2.0), "delta"),
        (lambda: audit.lower_bound(10, 5, 5, 0.0, 1.0), "confidence"),
        (lambda: audit.guesses_needed(math.inf), "epsilon"),
        (lambda: audit.guesses_needed(1.0, 0.0), "confidence"),
        (lambda: audit.conclude(torch.zeros(3), torch.ones(4).bool(), claimed=1, delta=0), "both must be"),
        (lambda: audit.conclude(torch.zeros(4), torch.ones(4), claimed=1, delta=0), "bool"),
        (lambda: audit.conclude(torch.tensor([0.0, math.nan]), torch.ones(2).bool(), claimed=1, delta=0), "not finite"),
        (lambda: audit.conclude(torch.zeros(2), torch.ones(2).bool(), claimed=1, delta=0, shares=(1.5,)), "shares"),
        (lambda: audit.conclude(torch.zeros(2), torch.ones(2).bool(), claimed=1, delta=0, shares=()), "shares"),
    ],
)
def test_nonsense_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
