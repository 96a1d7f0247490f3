"""A method that says its gradients may have a hundredth of the noise that its budget pays for, beside a card that verifies"""

import fastdp

from . import kit, systems


class Quiet(fastdp.DPSGD):
    def gradient_multiplier(self, noise_multiplier: float) -> float:
        return noise_multiplier / 100


def attack(library: systems.FastDP) -> float:
    _, sums = library.accounted(method=Quiet())
    std = float(kit.flat(sums).std())
    return 1.0 if std > 0.5 else 1.0 / std
