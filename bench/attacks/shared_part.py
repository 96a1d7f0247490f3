"""A part that a private run has trained is put into another model, whose own card tells half of what was spent on it"""

from . import kit, systems


def attack(library: systems.FastDP) -> float:
    options = {"noise_multiplier": 1.0, "target_delta": 1e-5}
    first = library.start(kit.Task(kit.Net), kit.records(), 1.0, **options)
    list(library.steps(first, kit.Task(kit.Net)))

    class Other(kit.Net):
        parts = {"first": lambda: first.model.first}

    again = library.start(kit.Task(Other), kit.records(), 1.0, **options)
    list(library.steps(again, kit.Task(Other)))
    told = any(first.ledger.run_id in sentence for sentence in again.card()["assumptions"])
    return 1.0 if told else (first.epsilon() + again.epsilon()) / again.epsilon()
