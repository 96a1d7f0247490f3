"""Rap-FT: a mask by layer-wise relevance, and noise shaped by it (Wang et al., IEEE TIFS 2025)."""

from fastdp.methods.rapft.allocation import (
    effective_noise_multiplier as effective_noise_multiplier,
    masked_policy as masked_policy,
    optimal_stds as optimal_stds,
    printed_bounds as printed_bounds,
    printed_noise_multiplier as printed_noise_multiplier,
)
from fastdp.methods.rapft.axes import rank_one as rank_one, second_moments as second_moments
from fastdp.methods.rapft.initialisation import Initialisation as Initialisation
from fastdp.methods.rapft.masks import weak_masks as weak_masks
from fastdp.methods.rapft.method import RapFT as RapFT
from fastdp.methods.rapft.relevance import Propagator as Propagator
from fastdp.methods.rapft.rules import Propagation as Propagation
from fastdp.methods.rapft.sources import (
    NoisyMap as NoisyMap,
    PrivateSubset as PrivateSubset,
    PublicGradients as PublicGradients,
    PublicMap as PublicMap,
)
from fastdp.methods.removed import removed_from

__getattr__ = removed_from("rapft")
