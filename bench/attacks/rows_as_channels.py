"""Records laid out as the channels of one image, and a convolution in groups whose weight is repeated for each of them"""

import torch
import torch.nn.functional as F
from torch import nn

from . import kit


class Grouped(kit.Model):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(4, 1, 3)), nn.Parameter(torch.zeros(4))
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor):
        rows = len(x)
        weight, bias = self.weight.repeat(rows, 1, 1), self.bias.repeat(rows)
        hidden = F.conv1d(x.view(1, rows, -1), weight, bias, groups=rows).view(rows, 4, -1)
        return {"loss": F.cross_entropy(self.head(torch.tanh(hidden).mean(2)), labels)}


def attack(system: kit.System) -> float:
    task = kit.Task(Grouped, physical=4)
    return max(kit.moved(system, task, kit.records(9), kit.outlier(size), 0.05) for size in (1.0, 1e3))
