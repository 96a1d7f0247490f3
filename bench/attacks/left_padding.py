"""Stock GPT-2 with left padding: one long record shifts the positions, and so the gradients, of everyone else"""

import functools

import torch
import transformers

from . import kit


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=50, n_positions=64, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def attack(system: kit.System) -> float:
    task = kit.Task(model, collate=functools.partial(kit.padded, left=True))
    return kit.moved(system, task, kit.tokens(12, [6, 7, 9]), kit.tokens(1, [40], seed=3)[0])
