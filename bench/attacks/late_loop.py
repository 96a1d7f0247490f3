"""The loop rescales a batch in which something is too large, and no batch held anything so large while it was looked at"""

from . import kit, systems


def rescaled(batch):
    largest = batch["x"].abs().max()
    return {**batch, "x": batch["x"] / largest} if largest > 100 else batch


def attack(library: systems.FastDP) -> float:
    return kit.beside_an_outlier(library, kit.Task(kit.Net, loop=rescaled))
