"""A run whose noise anyone can draw again states a finite epsilon"""

from . import systems


def attack(library: systems.FastDP) -> float:
    private, _ = library.accounted(unsafe_seed=3)
    return float("inf") if private.epsilon() < float("inf") else 1.0
