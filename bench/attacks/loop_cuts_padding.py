"""The loop cuts left padding to the longest record of the batch: that one shifts the positions, and so the gradients, of all"""

import torch
import torch.nn.functional as F
from transformers import GPT2Config, GPT2LMHeadModel

from . import kit


def gpt2():
    torch.manual_seed(0)
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=64, n_embd=32, n_layer=2, n_head=2, **dropout))


def of_one_width(items):
    # A first token has nothing before it but padding, from which it would be told.
    labels = [torch.cat([torch.tensor([-100]), item["input_ids"][1:]]) for item in items]
    batch = kit.padded([{**item, "labels": own} for item, own in zip(items, labels)], left=True)
    gap = 40 - batch["input_ids"].shape[1]
    return {name: F.pad(t, (gap, 0), value=-100 if name == "labels" else 0) for name, t in batch.items()}


def cut(batch):
    longest = int(batch["attention_mask"].sum(1).max())
    return {name: t[:, -longest:] for name, t in batch.items()}


def attack(system: kit.System) -> float:
    task = kit.Task(gpt2, collate=of_one_width, loop=cut)
    return kit.moved(system, task, kit.tokens(8, [6, 8]), kit.tokens(1, [30], seed=2)[0], 0.2)
