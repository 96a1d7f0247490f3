"""A collator's unit map that counts one record as two: it is clipped twice"""

import torch
import torch.nn.functional as F

from . import kit


class Tagger(kit.Words):
    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor):
        logits = self.head(torch.tanh(self.table(input_ids)))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def packed(items):
    ids, units = [], []
    for number, item in enumerate(items):
        tokens = item["input_ids"]
        ids.append(tokens)
        split = number + 1 < len(items) and len(items[number + 1]["input_ids"]) == 0
        cut = len(tokens) // 2 if split else len(tokens)
        units.append(torch.tensor([number] * cut + [number + 1] * (len(tokens) - cut), dtype=torch.int64))
    row = torch.cat(ids)[None]
    return {"input_ids": row, "labels": row, "units": torch.cat(units)[None]}


def attack(system: kit.System) -> float:
    task = kit.Task(Tagger, collate=packed, options={"unit_map": "units"})
    empty = {"input_ids": torch.zeros(0, dtype=torch.int64)}
    others = kit.tokens(3, [4])
    less = system.release(task, others, 0.05).sums
    more = system.release(task, [*others, kit.tokens(1, [8], seed=3)[0], empty], 0.05).sums
    # Two records were added, one of which is empty and moves nothing.
    return kit.apart(more, less) / 0.05
