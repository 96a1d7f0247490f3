"""A backward pass that shortens the gradients of a whole batch where together they are too long, as those of an outlier are"""

import torch
import torch.nn.functional as F

from . import kit, systems


class Shortened(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
        size = gradient.norm()
        return gradient * (3.0 / size) if size > 3.0 else gradient


class Weighted(kit.Net):
    def forward(self, x, labels, weight=None):
        hidden = Shortened.apply(torch.tanh(self.first(x)))
        return {"loss": F.cross_entropy(self.second(hidden) * weight[:, None], labels)}


def attack(library: systems.FastDP) -> float:
    others = [{**record, "weight": 1.0} for record in kit.records(16)]
    after = {"x": -torch.ones(kit.FEATURES), "labels": 2, "weight": 1e5}
    return kit.beside_a_late(library, kit.Task(Weighted), others, others[0] | {"weight": 1.0}, after)
