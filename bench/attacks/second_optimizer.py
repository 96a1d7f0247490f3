"""A weight unfrozen later and stepped by a plain optimizer of its own moves without noise"""

import torch

from . import kit, systems


def attack(library: systems.FastDP) -> float:
    parts = {"gate": lambda: torch.nn.Parameter(torch.ones(16), requires_grad=False)}
    ends, task = [], kit.Task(kit.net(between=lambda own, hidden: hidden * own.gate, parts=parts))
    for data in (kit.records(), [*kit.records(), *kit.records(1, 100.0, 5)]):
        private = library.start(task, data, 1.0, epochs=3)
        plain = torch.optim.SGD([private.model.gate], lr=1.0)
        for epoch in range(3):
            private.model.gate.requires_grad_(epoch > 0)
            for batch in private.data_loader:
                private.optimizer.zero_grad()
                private.model(**batch)["loss"].backward()
                plain.step()
                private.optimizer.step()
        private.detach()
        ends.append(private.model.gate.detach().clone())
    return 0.0 if torch.equal(*ends) else float("inf")
