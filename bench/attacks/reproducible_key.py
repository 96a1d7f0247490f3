"""A run whose noise anyone can draw again states a finite epsilon"""

from . import kit, systems


def attack(library: systems.FastDP) -> float:
    options = {"noise_multiplier": 1.0, "target_delta": 1e-5, "unsafe_seed": 3}
    task = kit.Task(kit.Net, options=options)
    private = library.start(task, kit.records(), 1.0)
    list(library.steps(private, task))
    return float("inf") if private.epsilon() < float("inf") else 1.0
