"""Federated selective DP, the clients' part: private tokens found and perturbed once at the source."""

from fastdp.methods.selective.mechanism import (
    TokenMechanism as TokenMechanism,
    paper_probabilities as paper_probabilities,
    public_radius as public_radius,
)
from fastdp.methods.selective.perturbation import (
    PerturbedTexts as PerturbedTexts,
    SelectivePerturbation as SelectivePerturbation,
)
from fastdp.methods.selective.presidio import PresidioDetector as PresidioDetector
from fastdp.methods.selective.quality import (
    DetectorQuality as DetectorQuality,
    measure_detector as measure_detector,
    read_labelled_spans as read_labelled_spans,
)
from fastdp.methods.selective.rules import RuleDetector as RuleDetector
from fastdp.methods.selective.spans import (
    AnyOf as AnyOf,
    PrivacyDetector as PrivacyDetector,
    PrivacyPolicy as PrivacyPolicy,
    Span as Span,
    token_mask as token_mask,
)
from fastdp.methods.selective.token_classification import TokenClassificationDetector as TokenClassificationDetector
from fastdp.methods.selective.typed import TypedCells as TypedCells
