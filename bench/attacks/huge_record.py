"""A record so large that the square of its gradient's norm overflows"""

from . import kit


def attack(system: kit.System) -> float:
    def forward(own, x, labels):
        # Without a bounded activation, so that gradients grow as the record does.
        logits = own.second(own.first(x))
        return {"loss": (kit.F.mse_loss(logits[:, 0], labels.float())), "logits": logits}

    task = kit.Task(kit.net(forward=forward))
    return max(kit.moved(system, task, kit.records(), kit.outlier(size)) for size in (1e4, 1e9, 1e12, 1e18, 1e25))
