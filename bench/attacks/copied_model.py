"""A deep copy of a private model goes on training by an optimizer of its own, through the run's own forward"""

import copy

import torch

from . import kit, systems


def attack(library: systems.FastDP) -> float:
    ends = []
    for data in (kit.records(), [*kit.records(), *kit.records(1, 100.0, 5)]):
        task = kit.Task(kit.Net)
        private = library.start(task, data, 1.0, epochs=3)
        list(library.steps(private, task))
        twin = copy.deepcopy(private.model)
        plain = torch.optim.SGD(twin.parameters(), lr=1.0)
        for batch in private.data_loader:
            private.optimizer.zero_grad()
            (private.model(**batch)["loss"] + twin(**batch)["loss"]).backward()
            private.optimizer.step()
        plain.step()
        ends.append({name: p.detach().clone() for name, p in private.model.named_parameters()})
    # The copy is a model that nobody made private; what counts is that the private one does not move with it.
    return 0.0 if all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0]) else float("inf")
