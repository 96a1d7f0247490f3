"""A weight normalised by a parametrization that was added after the run was made private"""

import torch

from . import kit, systems


def attack(system: kit.System) -> float:
    library = systems.only_fastdp(system)
    task, worst = kit.Task(kit.Net), 0.0
    for record in kit.records(3, 20.0, 5):
        private = library.start(task, [record], 0.05, epochs=2)
        list(library.steps(private, task))
        torch.nn.utils.parametrizations.weight_norm(private.model.first)
        (sums,) = library.steps(private, task)
        worst = max(worst, float(torch.cat([s.flatten() for s in sums.values()]).norm()) / 0.05)
    return worst
