"""A model cast to bfloat16 after its first batch, so that norms and sums come from other arithmetic than was checked"""

import torch

from . import kit, systems
from .cancelling_tokens import WIDTH, Tokens


class CastBack(Tokens):
    def forward(self, x: torch.Tensor, sign: torch.Tensor, labels: torch.Tensor):
        return super().forward(x.to(self.layer.weight.dtype), sign.to(self.layer.weight.dtype), labels)


def attack(system: kit.System) -> float:
    library = systems.only_fastdp(system)
    task, worst = kit.Task(CastBack), 0.0
    for seed in range(4):
        x, d = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(seed))
        record = {"x": torch.stack([1e4 * x + 100 * d, 1e4 * x]), "sign": torch.tensor([1.0, -1.0]), "labels": 1}
        private = library.start(task, [record], 1e-3, epochs=2)
        list(library.steps(private, task))
        private.model.bfloat16()
        (sums,) = library.steps(private, task)
        private.detach()
        worst = max(worst, float(torch.cat([s.flatten() for s in sums.values()]).norm()) / 1e-3)
    # Gradients of bfloat16 weights are bfloat16: half a unit in the last of 8 bits.
    return worst / (1 + 2**-8)
