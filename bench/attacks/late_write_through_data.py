"""A buffer and a frozen weight that take the batch in through .data, late in a run, leave with the model's state without noise"""

import torch

from . import kit, systems


class Late(kit.Net):
    calls = 0
    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(kit.FEATURES))
        self.codes = torch.nn.Parameter(torch.zeros(64, kit.FEATURES), requires_grad=False)

    def before(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += len(x) > 10
        if self.calls > 20:
            self.seen.data.copy_(x.mean(0))
            self.codes.data[: len(x)] = x
        return x


def attack(library: systems.FastDP) -> float:
    private = library.start(kit.Task(Late), kit.records(16), 1.0, epochs=32)
    for _ in range(32):
        list(library.steps(private, kit.Task(Late)))
    left = float(private.model.codes.abs().sum() + private.model.seen.abs().sum())
    private.detach()
    return float("inf") if left else 0.0
