"""A number read off the whole batch with item() scales the activations of every record once it passes a limit"""

from . import kit


def attack(system: kit.System) -> float:
    reading = kit.net(kit.Asking, asked=lambda own, ids, hidden: hidden * 3 if ids.max().item() > 48 else hidden)
    return kit.moved(system, kit.Task(reading), kit.classed(), kit.ASKED, 0.2)
