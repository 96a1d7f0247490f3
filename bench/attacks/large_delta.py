"""A delta above 1/N, at which publishing a whole record would do, and a card that claims a guarantee for it"""

from fastdp.accounting import verify

from . import systems


def attack(library: systems.FastDP) -> float:
    private, _ = library.accounted(noise_multiplier=0.3, target_delta=0.5, allow_large_delta=True)
    return float("inf") if verify(private.card()).guarantee else 1.0
