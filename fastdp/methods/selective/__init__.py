"""Federated selective DP, the clients' part: private tokens found and perturbed once at the source."""

from fastdp.methods.selective.mechanism import (
    TokenMechanism,
    balanced_partition,
    paper_probabilities,
    public_radius,
)
from fastdp.methods.selective.perturbation import PerturbedTexts, SelectivePerturbation
from fastdp.methods.selective.presidio import PresidioDetector
from fastdp.methods.selective.quality import DetectorQuality, measure_detector, read_labelled_spans
from fastdp.methods.selective.rules import RuleDetector
from fastdp.methods.selective.spans import AnyOf, PrivacyDetector, PrivacyPolicy, Span, token_mask
from fastdp.methods.selective.token_classification import TokenClassificationDetector

__all__ = [
    "AnyOf",
    "DetectorQuality",
    "PerturbedTexts",
    "PresidioDetector",
    "PrivacyDetector",
    "PrivacyPolicy",
    "RuleDetector",
    "SelectivePerturbation",
    "Span",
    "TokenClassificationDetector",
    "TokenMechanism",
    "balanced_partition",
    "measure_detector",
    "paper_probabilities",
    "public_radius",
    "read_labelled_spans",
    "token_mask",
]
