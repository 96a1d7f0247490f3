"""Two runs that share a part, both made before either trains: neither card tells what the other one spent on it"""

from . import kit, systems


def attack(library: systems.FastDP) -> float:
    options = {"noise_multiplier": 1.0, "target_delta": 1e-5}
    first = library.start(kit.Task(kit.Net), kit.records(), 1.0, **options)

    class Other(kit.Net):
        parts = {"first": lambda: first.model.first}

    second = library.start(kit.Task(Other), kit.records(), 1.0, **options)
    for private in (first, second):
        list(library.steps(private, kit.Task(kit.Net)))
    told = any(first.ledger.run_id in sentence for sentence in second.card()["assumptions"])
    return 1.0 if told else (first.epsilon() + second.epsilon()) / second.epsilon()
