"""A card whose figures follow the records: one that is longer than the others shows in what is published with the weights"""

from typing import Any

import torch

from . import kit, systems

#: What follows from the noised weights, or is drawn.
RELEASED = ("weights", "run_id", "digest", "created", "ledger_head")


def collated(items: Any) -> Any:
    return {name: t for name, t in kit.padded(items).items() if name != "attention_mask"}


def attack(library: systems.FastDP) -> float:
    cards = []
    for length in (8, 64):
        records = [*kit.tokens(7, [8]), {"input_ids": torch.full((length,), 7)}]
        task = kit.Task(kit.Next, collated, options={"noise_multiplier": 1.0, "target_delta": 1e-5})
        private = library.start(task, records, 1.0)
        list(library.steps(private, task))
        cards.append({name: value for name, value in private.card().items() if name not in RELEASED})
        private.detach()
    return 1.0 if cards[0] == cards[1] else float("inf")
