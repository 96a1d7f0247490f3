"""Stock GPT-2 with dropout, checkpointed without its random state: norms and sums from two masks"""

import functools

import torch

from . import kit, left_padding


def model(**checkpointing) -> torch.nn.Module:
    made = left_padding.model(dropout=0.1)
    made.gradient_checkpointing_enable(checkpointing)
    return made


def attack(system: kit.System) -> float:
    found = []
    for reentrant in (False, True):
        task = kit.Task(functools.partial(model, use_reentrant=reentrant, preserve_rng_state=False), collate=kit.padded)
        found += [kit.moved(system, task, [], record, 1e-2) for record in kit.tokens(6, [4, 9])]
    return max(found)
