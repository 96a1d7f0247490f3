"""Experts with a capacity over the whole batch: a record that takes a place turns another away"""

import torch

from . import kit


def attack(system: kit.System) -> float:
    def routed(own, hidden):
        chosen = torch.nn.functional.one_hot(own.gate(hidden).argmax(1), 2)
        kept = chosen * (chosen.cumsum(0) <= 4)
        return sum((kept[:, i : i + 1] * expert(hidden) for i, expert in enumerate(own.experts)), hidden)

    experts = lambda: torch.nn.ModuleList([torch.nn.Linear(16, 16) for _ in range(2)])  # noqa: E731
    task = kit.Task(kit.net(between=routed, parts={"gate": lambda: torch.nn.Linear(16, 2), "experts": experts}))
    extras = kit.records(6, 1.0, 5)
    return max(kit.moved(system, task, kit.records(16), extra, 0.2, first=True) for extra in extras)
