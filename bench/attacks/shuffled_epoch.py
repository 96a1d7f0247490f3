"""Shuffled batches: leaving a record out shifts the cut, so that another takes its place and the last batch loses one"""

import math

import torch

from . import kit, systems


class Line(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.slope = torch.nn.Linear(1, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.slope(x)


def attack(fastdp: systems.FastDP) -> float:
    def epoch(data: list[kit.Record], seed: int) -> tuple[float, ...]:
        options = {"sampling": "shuffled", "unsafe_seed": seed}
        task = kit.Task(Line, criterion=lambda out, _: out.mean(), options=options)
        return tuple(float(step["slope.weight"]) for step in fastdp.train(task, data, 1.0, 1, batch_size=30))

    ones = [{"x": torch.ones(1)} for _ in range(32)]
    with_it = {epoch([*ones[:31], {"x": -torch.ones(1)}], seed) for seed in range(12)}
    without = {epoch(ones[:31], seed) for seed in range(12)}
    # Each outcome needs one of the other data set within the bound, or no pairing of the two does.
    return max(min(math.dist(a, b) for b in without) for a in with_it)
