"""A switch that is made of all records and stays a tensor, so that the host asks nothing: one record turns all others off"""

from . import kit


def attack(system: kit.System) -> float:
    answers = (
        lambda ids: (ids == 49).any(),
        lambda ids: (ids == 49).sum() > 0,
        lambda ids: (ids == 49).float().amax(dim=(0, 1)),
    )
    models = (kit.net(kit.Asking, asked=lambda own, ids, hidden, on=on: hidden * (1 - 1 * on(ids))) for on in answers)
    return max(kit.moved(system, kit.Task(model), kit.classed(), kit.ASKED, 0.2) for model in models)
