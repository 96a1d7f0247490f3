"""A model that a private run has trained is made private anew, in another ledger: its card tells half of what was spent"""

import torch
from torch.utils.data import DataLoader

import fastdp

from . import kit, systems


def attack(library: systems.FastDP) -> float:
    private, _ = library.accounted()
    spent, model = private.epsilon(), private.model
    private.detach()
    again = fastdp.make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        DataLoader(kit.records(), batch_size=8, collate_fn=kit.stack),  # type: ignore[arg-type]
        noise_multiplier=1.0,
        target_delta=1e-5,
        epochs=1,
    )
    list(library.steps(again, kit.Task(kit.Net)))
    card = again.card()
    told = any(private.ledger.run_id in sentence for sentence in card["assumptions"])
    return 1.0 if told else (spent + again.epsilon()) / again.epsilon()
