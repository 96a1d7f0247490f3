"""A method that says its gradients may have a hundredth of the noise that its budget pays for, beside a card that verifies"""

import fastdp

from . import kit, systems


class Quiet(fastdp.DPSGD):
    def gradient_multiplier(self, noise_multiplier: float) -> float:
        return noise_multiplier / 100


def attack(library: systems.FastDP) -> float:
    task = kit.Task(kit.Net, options={"noise_multiplier": 1.0, "target_delta": 1e-5, "method": Quiet()})
    private = library.start(task, kit.records(), 1.0)
    (sums,) = library.steps(private, task)
    std = float(kit.flat(sums).std())
    return 1.0 if std > 0.5 else 1.0 / std
