"""What a draw of the exponential mechanism costs: against the laws themselves, on small tables of every kind."""

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st

from fastdp.methods.exact import log_normalisers
from fastdp.methods.selective import TokenMechanism

tables = st.builds(
    lambda seed, rows, width, spread: (
        torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))
        * torch.logspace(0, spread, rows)[:, None]
    ),
    st.integers(0, 10**6),
    st.integers(4, 24),
    st.integers(1, 5),
    st.floats(-2, 2),
)


def worst(mechanism, strength):
    """The largest log ratio of two laws, over all pairs of tokens and all candidates."""
    laws = torch.stack([mechanism.log_probabilities(token, strength) for token in range(len(mechanism.table))])
    # What may come out is the same for every token, or one outcome alone would tell.
    assert bool((torch.isfinite(laws) == torch.isfinite(laws[0])).all())
    possible = laws[:, torch.isfinite(laws[0])]
    return float((possible.max(0).values - possible.min(0).values).max())


@given(tables, st.floats(0.05, 60), st.floats(0.05, 1.0), st.booleans())
@settings(max_examples=80)
def test_no_pair_of_tokens_costs_more_than_is_stated(table, strength, radius, some_are_never_drawn):
    candidates = torch.ones(len(table), dtype=torch.bool)
    candidates[0] = not some_are_never_drawn
    cap = float(torch.pdist(table.double()).max()) * radius
    mechanism = TokenMechanism("local", table, cap, 1.0, candidates)
    stated = mechanism.epsilon(strength)
    found = worst(mechanism, strength)
    assert found <= stated * (1 + 1e-9)
    assert stated <= strength
    assert stated >= strength / 2 * (1 - 1e-9)


@given(tables, st.floats(0.1, 30))
@settings(max_examples=60, deadline=None)
def test_a_calibrated_strength_costs_no_more_than_was_asked_for(table, epsilon):
    mechanism = TokenMechanism("local", table, float(torch.pdist(table.double()).median()))
    strength = mechanism.strength(epsilon)
    assert epsilon <= strength < 2 * epsilon
    assert mechanism.epsilon(strength) <= epsilon * (1 + 1e-9)
    assert worst(mechanism, strength) <= epsilon * (1 + 1e-9)


def test_the_bound_is_tight_where_all_tokens_are_alike():
    """Rows at equal distances have equal sums, so that a draw costs half its strength, and twice the strength may be had."""
    mechanism = TokenMechanism("local", torch.eye(32), 2.0)
    assert mechanism.epsilon(8.0) == pytest.approx(8.0 * math.sqrt(2) / 4, rel=0.45)
    mechanism = TokenMechanism("local", torch.eye(32), math.sqrt(2) * (1 - 1e-12))
    assert mechanism.epsilon(8.0) == pytest.approx(4.0, abs=1e-3)
    assert worst(mechanism, 8.0) == pytest.approx(4.0, abs=1e-9)
    assert mechanism.strength(4.0) == pytest.approx(4.0 * (1 + 15 / 16))


def test_the_papers_form_costs_more_than_any_epsilon():
    mechanism = TokenMechanism("paper", torch.eye(8), 1.0)
    assert mechanism.epsilon(1.0) == math.inf
    assert mechanism.strength(1.0) == 1.0


@given(tables, st.floats(0.01, 200), st.integers(0, 10**6), st.booleans())
@settings(max_examples=80, deadline=None)
def test_normalisers_are_within_their_error(table, scale, seed, extras):
    generator = torch.Generator().manual_seed(seed)
    prior = 8 * torch.randn(len(table), generator=generator, dtype=torch.float64) if extras else None
    if prior is not None:
        prior[1] = -math.inf
    (logs,), error = log_normalisers(table, [scale], None, prior)
    wide = table.double()
    exact = -scale * (wide[:, None] - wide[None]).norm(dim=2)
    exact = (exact if prior is None else exact + prior).logsumexp(1)
    assert float((logs - exact).abs().max()) <= error
