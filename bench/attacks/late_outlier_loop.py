"""A loop that changes every batch a little rescales one in which something is too large, as none was while it was looked at"""

from . import kit, systems


def rescaled(batch):
    x = 1.01 * batch["x"]
    return {**batch, "x": x / x.abs().max() if x.abs().max() > 100 else x}


def attack(library: systems.FastDP) -> float:
    return kit.beside_an_outlier(library, kit.Task(kit.Net, loop=rescaled))
