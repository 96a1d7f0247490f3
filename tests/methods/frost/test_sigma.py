"""ComputeSigma's figures, printed and sound."""

import pytest

from fastdp import accounting
from fastdp.methods.frost import compute_sigma
from tests.cases import cases

SIZE, BATCH, STEPS = 67349, 1024, 197
DELTA = 1 / (2 * SIZE)


def compute(epsilon, accountant, **options):
    return compute_sigma(SIZE, BATCH, 3, epsilon, DELTA, accountant=accountant, **options)


#: Printed epsilon, sigma_sgd, sigma_ps by RDP, and the epsilon that these really cost.
PRINTED = [(0.5, 2.10175, 1.76514, 0.4200), (2.0, 1.00436, 0.90683, 1.490), (8.0, 0.60197, 0.50410, 6.602)]


def event(sgd, selection):
    return accounting.compose(accounting.dpsgd(sgd, BATCH / SIZE, STEPS), accounting.dpsgd(selection, 0.02, 5))


@cases(("epsilon", "sgd", "selection", "true"), PRINTED)
def test_printed_noise_meets_the_printed_budget_and_is_worth_less(epsilon, sgd, selection, true):
    training = accounting.dpsgd(sgd, BATCH / SIZE, STEPS)
    assert accounting.epsilon(training, DELTA, "rdp") == pytest.approx(0.9 * epsilon, rel=3e-4)
    assert accounting.epsilon(event(sgd, selection), DELTA, "rdp") == pytest.approx(epsilon, rel=3e-4)
    assert accounting.epsilon(event(sgd, selection), DELTA) == pytest.approx(true, rel=6e-4)


@pytest.mark.parametrize(
    ("epsilon", "sgd", "selection", "_true"),
    [PRINTED[0], *(pytest.param(*row, marks=pytest.mark.slow) for row in PRINTED[1:])],
)
def test_printed_search(epsilon, sgd, selection, _true):
    assert compute(epsilon, "rdp") == pytest.approx((sgd, selection), rel=3e-4)


def test_sound_figures():
    found = compute(0.5, "pld")
    assert found == pytest.approx((1.93970, 1.29578), rel=3e-4)
    assert 0.499 < accounting.epsilon(event(*found), DELTA) <= 0.5


def test_repeated_selection_costs_its_releases():
    once, twice = compute(0.5, "pld"), compute(0.5, "pld", selection_steps=10)
    assert once[0] == twice[0]
    assert twice[1] > once[1]


@cases(
    ("options", "message"),
    [
        ({"budget_ratio": 1.0}, "budget_ratio is 1.0"),
        ({"budget_ratio": 0.0}, "budget_ratio is 0.0"),
        ({"selection_steps": 0}, "selection_steps is 0"),
        ({"selection_steps": 2.5}, "selection_steps is 2.5"),
        ({"selection_rate": 0.0}, "selection_rate is 0.0"),
        ({"selection_rate": 1.1}, "selection_rate is 1.1"),
    ],
)
def test_refuses_what_cannot_be_split(options, message):
    with pytest.raises(ValueError, match=message):
        compute(2, "pld", **options)
    for size, batch, epochs, message in ((100, 60, 0.5, "not one step"), (100, 200, 3, "batch_size is 200")):
        with pytest.raises(ValueError, match=message):
            compute_sigma(size, batch, epochs, 2, 1e-5)
