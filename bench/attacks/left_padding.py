"""Stock GPT-2 with left padding: one long record shifts the positions, and so the gradients, of everyone else"""

import functools

import torch
import transformers

from . import kit


def model(dropout: float = 0.0) -> transformers.GPT2LMHeadModel:
    torch.manual_seed(0)
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    sizes = {"vocab_size": 50, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **rates, bos_token_id=1, eos_token_id=2))


def attack(system: kit.System) -> float:
    task = kit.Task(model, collate=functools.partial(kit.padded, left=True))
    return kit.moved(system, task, kit.tokens(12, [6, 7, 9]), kit.tokens(1, [40], seed=3)[0])
