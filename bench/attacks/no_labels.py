"""Records without a single label, and an empty one, among others"""

import torch

from . import kit
from .left_padding import model


def attack(system: kit.System) -> float:
    ids = kit.tokens(1, [6], seed=4)[0]["input_ids"]
    silent = {"input_ids": ids, "labels": torch.full_like(ids, -100)}
    one_token = {"input_ids": ids[:1]}
    empty = {"input_ids": ids[:0]}
    task = kit.Task(model, collate=kit.padded)
    return max(kit.moved(system, task, kit.tokens(6, [6, 7]), record, 0.2) for record in (silent, one_token, empty))
