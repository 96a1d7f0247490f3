"""A copy of a model that a private run has trained is made private anew: its card tells half of what was spent on it"""

import copy

import torch

from . import kit, systems


def attack(library: systems.FastDP) -> float:
    def run(model: torch.nn.Module):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options = {"noise_multiplier": 1.0, "target_delta": 1e-5, "optimizer": optimizer}
        private = library.start(kit.Task(lambda: model), kit.records(), 1.0, **options)
        list(library.steps(private, kit.Task(kit.Net)))
        private.detach()
        return private

    first = run(kit.Net())
    second = run(copy.deepcopy(first.model))
    told = any(first.ledger.run_id in sentence for sentence in second.card()["assumptions"])
    return 1.0 if told else (first.epsilon() + second.epsilon()) / second.epsilon()
