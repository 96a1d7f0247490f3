"""Features plus a ten-thousandth of the batch's mean: too little for a tolerance to see, until an outlier comes"""

from . import kit


def attack(system: kit.System) -> float:
    mixing = kit.net(before=lambda own, x: x + 1e-4 * x.mean(0))
    return kit.moved(system, kit.Task(mixing), kit.records(32), kit.outlier(1e6), 0.2)
