"""Privacy accounting: events, epsilon, calibration, schedules, the ledger and the card."""

from fastdp.accounting.accountants import Epsilon, epsilon
from fastdp.accounting.calibration import calibrate
from fastdp.accounting.card import Card, model_name, noise_source, public_name, rounded_to_grid
from fastdp.accounting.claim import Claim, Elsewhere, Gaussian, Metric, Pure
from fastdp.accounting.events import (
    EventModel,
    chosen,
    compose,
    dpsgd,
    dpsgd_model,
    gaussian,
    joint_multiplier,
    poisson_gaussian,
    selection,
)
from fastdp.accounting.exports import export
from fastdp.accounting.journal import LedgerError
from fastdp.accounting.ledger import BudgetExceeded, Ledger
from fastdp.accounting.meaning import membership_bound
from fastdp.accounting.schedules import (
    epoch_weighted_schedule,
    largest_mu,
    local_event,
    sound_schedule,
    uniform_schedule,
)
from fastdp.accounting.serialisation import deserialise, serialise
from fastdp.accounting.verification import VerificationResult, verify

__all__ = [
    "BudgetExceeded",
    "Card",
    "Claim",
    "Elsewhere",
    "Epsilon",
    "EventModel",
    "Gaussian",
    "Ledger",
    "LedgerError",
    "Metric",
    "Pure",
    "VerificationResult",
    "calibrate",
    "chosen",
    "compose",
    "dpsgd",
    "dpsgd_model",
    "deserialise",
    "epoch_weighted_schedule",
    "epsilon",
    "export",
    "gaussian",
    "joint_multiplier",
    "largest_mu",
    "local_event",
    "membership_bound",
    "model_name",
    "noise_source",
    "rounded_to_grid",
    "poisson_gaussian",
    "public_name",
    "selection",
    "serialise",
    "sound_schedule",
    "uniform_schedule",
    "verify",
]
