"""torch.manual_seed, which every training script calls, makes the noise the same in every run"""

from . import kit


def attack(system: kit.System) -> float:
    first, second = (system.release(kit.Task(kit.Net), kit.records(), 1.0, 1.0).sums for _ in range(2))
    return float("inf") if all(kit.same(first[name], second[name]) for name in first) else 1.0
