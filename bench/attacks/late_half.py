"""A model cast to bfloat16 after its first batch, so that norms and sums come from other arithmetic than was checked"""

import torch

from . import kit, systems
from .cancelling_tokens import WIDTH, Tokens


class CastBack(Tokens):
    def forward(self, x: torch.Tensor, sign: torch.Tensor, labels: torch.Tensor):
        return super().forward(x.to(self.layer.weight.dtype), sign.to(self.layer.weight.dtype), labels)


def attack(library: systems.FastDP) -> float:
    worst = 0.0
    for seed in range(4):
        x, d = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(seed))
        record = {"x": torch.stack([1e4 * x + 100 * d, 1e4 * x]), "sign": torch.tensor([1.0, -1.0]), "labels": 1}
        _, sums = library.train(kit.Task(CastBack), [record], 1e-3, 2, lambda private: private.model.bfloat16())
        worst = max(worst, float(kit.flat(sums).norm()) / 1e-3)
    # Gradients of bfloat16 weights are bfloat16: half a unit in the last of 8 bits.
    return worst / (1 + 2**-8)
