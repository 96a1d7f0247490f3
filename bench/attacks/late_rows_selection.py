"""A branch on how many records a batch has: none that was looked at had so many, and beyond it they mix"""

from . import kit, systems


def attack(library: systems.FastDP) -> float:
    crowded = kit.net(before=lambda own, x: x + x.cumsum(0) if len(x) > 11 else x)
    task = kit.Task(crowded, options={"batch_size": 12, "epochs": 12, "unsafe_seed": 4})
    both = ([*kit.records(1, size, 5), *kit.records(31)] for size in (1.0, 30.0))
    one, other = (library.train(task, data, 0.2, 4) for data in both)
    # One record was exchanged for another, which may move a sum by two bounds.
    return max(map(kit.apart, one, other)) / 0.2 / 2
