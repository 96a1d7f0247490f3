"""A branch that only batches with a certain token take, and in which records mix: no checked row needs to hold it"""

from . import kit


def attack(system: kit.System) -> float:
    asking = kit.net(
        kit.Asking, asked=lambda own, ids, hidden: hidden + hidden.mean(0) if (ids == 49).any() else hidden
    )
    return kit.moved(system, kit.Task(asking), kit.classed(), kit.ASKED, 0.2)
