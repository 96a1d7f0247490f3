"""A record whose gradient is not finite reaches every parameter"""

import math

import torch

from . import kit


def attack(system: kit.System) -> float:
    def extreme(value: float) -> kit.Record:
        return {"x": torch.full((kit.FEATURES,), value), "labels": 0}

    return max(
        kit.moved(system, kit.Task(kit.Net), kit.records(), extreme(value)) for value in (math.nan, math.inf, -math.inf)
    )
