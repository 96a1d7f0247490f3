"""An average of the records in a buffer whose weight is zero for a warm-up: when it was looked at it held nothing of them"""

import torch

from . import kit, systems


class WarmingUp(kit.Keeping):
    parts = {}
    steps: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def before(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.steps += 1
            self.mean.copy_(torch.where(self.steps > 12, 0.9 * self.mean + 0.1 * x.detach().mean(0), self.mean))
        return x


def attack(library: systems.FastDP) -> float:
    private = library.start(kit.Task(WarmingUp), kit.records(16), 1.0, epochs=30)
    for _ in range(30):
        list(library.steps(private, kit.Task(WarmingUp)))
    return float("inf") if bool(private.model.state_dict()["mean"].any()) else 1.0
