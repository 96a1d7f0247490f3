"""Audits: what a run gives away about examples planted in it, and the attacks of the papers."""

from fastdp.audit.attributes import AttributeResult, attribute_inference, pooled
from fastdp.audit.bound import best_possible, guesses_needed, lower_bound, p_value
from fastdp.audit.canaries import Canaries
from fastdp.audit.example_canaries import ExampleCanaries, mislabelled, random_sequences, with_canaries
from fastdp.audit.extraction import ExtractionResult, NameFinder, extraction, generate
from fastdp.audit.gradient_canaries import GradientCanaries
from fastdp.audit.guessing import AuditResult, Guess, conclude
from fastdp.audit.inversion import InversionResult, from_embeddings, inversion, nearest_tokens, optimised_tokens
from fastdp.audit.losses import example_losses
from fastdp.audit.membership import MembershipResult, likelihood_ratio, membership
from fastdp.audit.prove import Evidence, prove
from fastdp.audit.reconstruction import (
    ReconstructionResult,
    Target,
    reconstruction,
    sampled_candidates,
    strike_out,
)
from fastdp.audit.repeated import RepeatedReleaseResult, repeated_release

__all__ = [
    "AttributeResult",
    "AuditResult",
    "Canaries",
    "Evidence",
    "ExampleCanaries",
    "ExtractionResult",
    "GradientCanaries",
    "Guess",
    "InversionResult",
    "MembershipResult",
    "NameFinder",
    "ReconstructionResult",
    "RepeatedReleaseResult",
    "Target",
    "attribute_inference",
    "best_possible",
    "conclude",
    "example_losses",
    "extraction",
    "from_embeddings",
    "generate",
    "guesses_needed",
    "inversion",
    "likelihood_ratio",
    "lower_bound",
    "membership",
    "mislabelled",
    "nearest_tokens",
    "optimised_tokens",
    "p_value",
    "pooled",
    "prove",
    "random_sequences",
    "reconstruction",
    "repeated_release",
    "sampled_candidates",
    "strike_out",
    "with_canaries",
]
