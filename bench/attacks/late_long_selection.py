"""Batches of longer records take a head that runs on labelled tokens alone, or in the labels' order: only a shape says so"""

import functools

import torch
import torch.nn.functional as F
from torch import nn

from . import kit


class Branching(kit.Model):
    def __init__(self, order: bool) -> None:
        super().__init__()
        self.body, self.head, self.order = nn.Linear(8, 16), nn.Linear(16, 5), order

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, attention_mask: torch.Tensor):
        x, labels = F.one_hot(input_ids % 8, 8).float().flatten(0, 1), labels.flatten()
        if input_ids.shape[1] > 8:
            kept = labels.argsort(stable=True) if self.order else labels != -100
            x, labels = x[kept], labels[kept]
        return {"loss": F.cross_entropy(self.head(torch.tanh(self.body(x))), labels)}


def attack(system: kit.System) -> float:
    def record(tokens: int, labelled: int, seed: int) -> kit.Record:
        ids = kit.tokens(1, [tokens], seed=seed)[0]["input_ids"]
        return {"input_ids": ids, "labels": torch.where(torch.arange(tokens) < labelled, ids % 5, -100)}

    # Long records are rare, so that none is among those that the first batch is looked at with.
    data, found = [record(6, 6, seed) for seed in range(22)] + [record(16, n, 90 + n) for n in (1, 15)], []
    for order in (True, False):
        task = kit.Task(functools.partial(Branching, order), collate=kit.padded, physical=5)
        found.append(max(kit.moved(system, task, data, record(16, n, 99), 0.05) for n in (2, 8, 16)))
    return max(found)
