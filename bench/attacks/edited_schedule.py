"""A noise schedule that is edited while its run is on takes the noise away, and leaves epsilon and the card as they were"""

import fastdp

from . import kit, systems


def attack(library: systems.FastDP) -> float:
    schedule = {0: 1.0}
    method = fastdp.DPSGD(noise_schedule=schedule)
    task = kit.Task(kit.Net, options={"noise_multiplier": 1.0, "target_delta": 1e-5, "method": method, "epochs": 4})
    private = library.start(task, kit.records(), 1.0)
    list(library.steps(private, task))
    before = private.epsilon(1e-5)
    schedule.update({0: 1e-3, 1: 1e-3})
    (sums,) = library.steps(private, task)
    std = float(kit.flat(sums).std())
    return 1.0 if std > 0.5 or private.epsilon(1e-5) > 1000 * before else 1.0 / std
