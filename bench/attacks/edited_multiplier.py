"""A noise multiplier raised on the run itself changes the card, and not the noise"""

from . import kit, systems


def attack(library: systems.FastDP) -> float:
    options = {"noise_multiplier": 1.0, "target_delta": 1e-5}
    task = kit.Task(kit.Net, options=options)
    stated = []
    for raised in (False, True):
        private = library.start(task, kit.records(), 1.0)
        if raised:
            try:
                private.noise_multiplier = 100.0
            except AttributeError:
                return 0.0  # it cannot be said at all
        list(library.steps(private, task))
        stated.append((private.epsilon(), private.card()["noise_multiplier"]))
    return 1.0 if stated[0] == stated[1] else float("inf")
