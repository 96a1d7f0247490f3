"""A noise schedule that is edited while its run is on takes the noise away, and leaves epsilon and the card as they were"""

import torch

import fastdp

from . import kit, systems


def attack(system: kit.System) -> float:
    library, schedule = systems.only_fastdp(system), {0: 1.0}
    method = fastdp.DPSGD(noise_schedule=schedule)
    task = kit.Task(kit.Net, options={"noise_multiplier": 1.0, "target_delta": 1e-5, "method": method, "epochs": 4})
    private = library.start(task, kit.records(), 1.0)
    list(library.steps(private, task))
    before = private.epsilon(1e-5)
    schedule.update({0: 1e-3, 1: 1e-3})
    (sums,) = library.steps(private, task)
    std = float(torch.cat([total.flatten() for total in sums.values()]).std())
    return 1.0 if std > 0.5 or private.epsilon(1e-5) > 1000 * before else 1.0 / std
