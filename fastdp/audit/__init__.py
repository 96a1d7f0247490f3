"""Audits: what a run gives away about examples planted in it, and the attacks of the papers."""

from fastdp.audit.bound import best_possible, guesses_needed, lower_bound, p_value
from fastdp.audit.canaries import Canaries
from fastdp.audit.example_canaries import ExampleCanaries, mislabelled, random_sequences, with_canaries
from fastdp.audit.gradient_canaries import GradientCanaries
from fastdp.audit.guessing import AuditResult, Guess, conclude

__all__ = [
    "AuditResult",
    "Canaries",
    "ExampleCanaries",
    "GradientCanaries",
    "Guess",
    "best_possible",
    "conclude",
    "guesses_needed",
    "lower_bound",
    "mislabelled",
    "p_value",
    "random_sequences",
    "with_canaries",
]
