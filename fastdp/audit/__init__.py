"""Audits: what a run gives away about examples planted in it, and the attacks of the papers."""

import fastdp.methods.removed as removed
from fastdp.audit.bound import (
    best_possible as best_possible,
    guesses_needed as guesses_needed,
    lower_bound as lower_bound,
    p_value as p_value,
)
from fastdp.audit.canaries import Canaries as Canaries
from fastdp.audit.example_canaries import (
    ExampleCanaries as ExampleCanaries,
    mislabelled as mislabelled,
    random_sequences as random_sequences,
    with_canaries as with_canaries,
)
from fastdp.audit.extraction import (
    ExtractionResult as ExtractionResult,
    NameFinder as NameFinder,
    extraction as extraction,
    generate as generate,
)
from fastdp.audit.gradient_canaries import GradientCanaries as GradientCanaries
from fastdp.audit.guessing import AuditResult as AuditResult, Guess as Guess, conclude as conclude
from fastdp.audit.inversion import (
    InversionResult as InversionResult,
    from_embeddings as from_embeddings,
    inversion as inversion,
    nearest_tokens as nearest_tokens,
    optimised_tokens as optimised_tokens,
)
from fastdp.audit.losses import example_losses as example_losses
from fastdp.audit.membership import (
    MembershipResult as MembershipResult,
    likelihood_ratio as likelihood_ratio,
    membership as membership,
)
from fastdp.audit.prove import prove as prove
from fastdp.audit.reconstruction import (
    ReconstructionResult as ReconstructionResult,
    Target as Target,
    reconstruction as reconstruction,
    strike_out as strike_out,
)
from fastdp.private.prove import Evidence as Evidence, Trial as Trial

__getattr__ = removed.removed_from("audit")
