"""The laws: the printed figures, exact bounds of the sound forms on small tables, draws against laws, and what is refused."""

import math

import pytest
import torch

from fastdp import NoiseStream
from fastdp.methods.selective import TokenMechanism, paper_probabilities, public_radius
from fastdp.methods.selective.mechanism import diameter_bound
from tests.cases import cases
from tests.ops.test_dchi import FALSE_ALARM, chi_square

LINE = torch.arange(6.0)


def test_printed_figures():
    """The law of equation 5 on the table {0, ..., 5} with d = 2, alpha = 1, epsilon = 1."""
    zero = [0.37576, 0.33160, 0.29264, 0, 0, 0]
    one = [0.24903, 0.28218, 0.24903, 0.21976, 0, 0]
    torch.testing.assert_close(
        paper_probabilities(0, LINE, 1.0, 2.0, 1.0), torch.tensor(zero).double(), atol=5e-6, rtol=0
    )
    torch.testing.assert_close(
        paper_probabilities(1, LINE, 1.0, 2.0, 1.0), torch.tensor(one).double(), atol=5e-6, rtol=0
    )


def hockey_stick(first, second, epsilon):
    return float((first - math.exp(epsilon) * second).clamp(min=0).sum())


def test_paper_has_no_guarantee():
    """At the printed epsilon a fifth of the outcomes of 1 betray it against 0; those of 0 against 5 do always, at any epsilon."""
    law = {token: paper_probabilities(token, LINE, 1.0, 2.0, 1.0) for token in (0, 1, 5)}
    assert hockey_stick(law[1], law[0], 1.0) == pytest.approx(0.2198, abs=5e-5)
    assert hockey_stick(law[0], law[5], 1.0) == pytest.approx(1.0)
    assert hockey_stick(law[0], law[5], 50.0) == pytest.approx(1.0)


def test_paper_sends_an_isolated_token_as_it_is():
    table = torch.tensor([[0.0], [1.0], [2.0], [100.0]])
    drawn = TokenMechanism("paper", table, radius=5.0).draw(torch.full((50,), 3), 0.1, NoiseStream())
    assert (drawn == 3).all()


@cases("form", ["local", "paper"])
def test_draws_follow_the_law(form):
    table = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.5, 1.0], [2.0, 1.0], [0.0, 1.5], [2.5, 0.0], [1.0, 1.0]])
    candidates = torch.tensor([True] * 6 + [False])
    mechanism = TokenMechanism(form, table, 1.6, 1.0, candidates)
    ids = torch.tensor([0, 3, 6]).repeat(40_000)
    stream = NoiseStream()
    drawn = mechanism.draw(ids, 2.5, stream)
    for token in (0, 3, 6):
        law = mechanism.log_probabilities(token, 2.5).exp().numpy()
        assert chi_square(drawn[ids == token], law) > FALSE_ALARM


def test_an_epsilon_for_each_token():
    """A tiny and a huge epsilon in one call: the first spreads, the second stays."""
    table = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
    ids = torch.arange(50).repeat(40)
    epsilons = torch.where(torch.arange(2000) % 2 == 0, 1e-3, 1e4).double()
    for form in ("local", "paper"):
        mechanism = TokenMechanism(form, table, 2.0)
        kept = mechanism.draw(ids, epsilons, NoiseStream()) == ids
        assert kept[1::2].all()
        assert kept[::2].float().mean() < 0.5


def test_radius_and_diameter_come_from_the_table():
    table = torch.tensor([[0.0], [1.0], [3.0]])
    assert public_radius(table) == 2.0
    assert diameter_bound(table) >= 3.0
    mostly_equal = torch.zeros(5000, 2)
    mostly_equal[77] = 1.0
    assert public_radius(mostly_equal) == pytest.approx(math.sqrt(2))


@cases(
    ("build", "message"),
    [
        (lambda: TokenMechanism("laplace", torch.eye(3), 1.0), "mechanism is 'laplace'"),
        (lambda: TokenMechanism("local", torch.ones(4, 2), 1.0), "all rows of the table are equal"),
        (lambda: TokenMechanism("local", torch.eye(3), 0.0), "radius is 0.0"),
        (lambda: TokenMechanism("local", torch.eye(3), None), "radius is None"),
        (lambda: TokenMechanism("paper", torch.eye(3), 1.0, alpha=-1.0), "alpha is -1.0"),
        (lambda: TokenMechanism("local", torch.tensor([[0.0], [math.nan]]), 1.0), "NaN"),
        (
            lambda: TokenMechanism("local", torch.eye(3), 1.0, candidates=torch.tensor([True, False, False])),
            "fewer than two",
        ),
        (
            lambda: TokenMechanism("local", torch.eye(3), 1.0).draw(torch.tensor([0]), 0.0, NoiseStream()),
            "every epsilon",
        ),
        (lambda: paper_probabilities(0, LINE, -1.0, 1.0, 1.0), "epsilon is -1.0"),
    ],
)
def test_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_ids_outside_the_table():
    with pytest.raises(IndexError, match="outside the table"):
        TokenMechanism("local", torch.eye(3), 1.0).draw(torch.tensor([3]), 1.0, NoiseStream())
    with pytest.raises(IndexError, match="outside a table"):
        paper_probabilities(6, LINE, 1.0, 1.0, 1.0)
