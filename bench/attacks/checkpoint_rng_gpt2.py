"""Stock GPT-2 with dropout, checkpointed without its random state: norms and sums from two masks"""

import functools

import torch
import transformers

from . import kit


def model(**checkpointing) -> torch.nn.Module:
    torch.manual_seed(0)
    made = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=50, n_positions=64, n_embd=32, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2
        )
    )
    made.gradient_checkpointing_enable(checkpointing)
    return made


def attack(system: kit.System) -> float:
    found = []
    for reentrant in (False, True):
        task = kit.Task(functools.partial(model, use_reentrant=reentrant, preserve_rng_state=False), collate=kit.padded)
        found += [kit.moved(system, task, [], record, 1e-2) for record in kit.tokens(6, [4, 9])]
    return max(found)
