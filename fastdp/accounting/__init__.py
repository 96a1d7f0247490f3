"""Privacy accounting: events, epsilon, calibration, schedules, the ledger and the card."""

from fastdp.accounting.accountants import Epsilon as Epsilon, epsilon as epsilon
from fastdp.accounting.calibration import calibrate as calibrate
from fastdp.accounting.card import (
    Card as Card,
    model_name as model_name,
    noise_source as noise_source,
    rounded_to_grid as rounded_to_grid,
)
from fastdp.accounting.claim import (
    Claim as Claim,
    ExternalClaim as ExternalClaim,
    Gaussian as Gaussian,
    Metric as Metric,
    Pure as Pure,
)
from fastdp.accounting.events import (
    EventModel as EventModel,
    chosen as chosen,
    compose as compose,
    dpsgd as dpsgd,
    dpsgd_model as dpsgd_model,
    gaussian as gaussian,
    poisson_gaussian as poisson_gaussian,
)
from fastdp.accounting.exports import export as export
from fastdp.accounting.journal import LedgerError as LedgerError
from fastdp.accounting.ledger import BudgetExceeded as BudgetExceeded, Ledger as Ledger
from fastdp.accounting.meaning import membership_bound as membership_bound
from fastdp.accounting.schedules import (
    epoch_weighted_schedule as epoch_weighted_schedule,
    largest_mu as largest_mu,
    sound_schedule as sound_schedule,
)
from fastdp.accounting.serialisation import deserialise as deserialise, serialise as serialise
from fastdp.accounting.verification import VerificationResult as VerificationResult, verify as verify
