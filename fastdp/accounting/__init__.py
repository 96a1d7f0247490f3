"""Privacy accounting: events, epsilon, calibration, schedules, the ledger and the card."""

from fastdp.accounting.accountants import Epsilon, epsilon
from fastdp.accounting.calibration import calibrate
from fastdp.accounting.events import (
    EventModel,
    compose,
    dpsgd,
    dpsgd_model,
    gaussian,
    joint_multiplier,
    poisson_gaussian,
    selection,
)
from fastdp.accounting.journal import LedgerError
from fastdp.accounting.ledger import BudgetExceeded, Ledger
from fastdp.accounting.serialisation import deserialise, serialise

__all__ = [
    "BudgetExceeded",
    "Epsilon",
    "EventModel",
    "Ledger",
    "LedgerError",
    "calibrate",
    "compose",
    "dpsgd",
    "dpsgd_model",
    "deserialise",
    "epsilon",
    "gaussian",
    "joint_multiplier",
    "poisson_gaussian",
    "selection",
    "serialise",
]
