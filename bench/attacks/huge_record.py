"""A record so large that the square of its gradient's norm overflows"""

from . import kit


class Linear(kit.Net):
    """Without a bounded activation, so that gradients grow as the record does."""

    def between(self, hidden):
        return hidden

    def before(self, x):
        return x

    def forward(self, x, labels):
        logits = self.second(self.first(x))
        return {"loss": (kit.F.mse_loss(logits[:, 0], labels.float())), "logits": logits}


def attack(system: kit.System) -> float:
    return max(
        kit.moved(system, kit.Task(Linear), kit.records(), kit.records(1, size, 5)[0])
        for size in (1e4, 1e9, 1e12, 1e18, 1e25)
    )
