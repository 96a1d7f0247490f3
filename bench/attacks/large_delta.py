"""A delta above 1/N, at which publishing a whole record would do, and a card that claims a guarantee for it"""

from fastdp.accounting import verify

from . import kit, systems


def attack(library: systems.FastDP) -> float:
    options = {"noise_multiplier": 0.3, "target_delta": 0.5, "allow_large_delta": True}
    task = kit.Task(kit.Net, options=options)
    private = library.start(task, kit.records(), 1.0)
    list(library.steps(private, task))
    return float("inf") if verify(private.card()).guarantee else 1.0
