"""A loss that the user multiplies before backward(), by a number that the batch decides"""

from . import kit


def attack(system: kit.System) -> float:
    def forward(own, x, labels):
        output = kit.Net.forward(own, x, labels)
        return {**output, "loss": output["loss"] * 1e-3 * x.detach().square().sum()}

    return kit.moved(system, kit.Task(kit.net(forward=forward)), kit.records(12, 0.5), kit.outlier(1e3), 0.3)
