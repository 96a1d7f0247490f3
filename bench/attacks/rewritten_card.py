"""A card whose unit, data set or delta was rewritten, and its digest made anew, still verifies"""

from fastdp.accounting import verify
from fastdp.accounting.card import digest

from . import kit, systems


def attack(system: kit.System) -> float:
    fastdp = systems.only_fastdp(system)
    task = kit.Task(kit.Net, options={"noise_multiplier": 1.0, "target_delta": 1e-5})
    private = fastdp.start(task, kit.records(), 1.0)
    list(fastdp.steps(private, task))
    card = dict(private.card())
    if not verify(card):
        raise ValueError("the card as it was written does not verify")
    for name, value in {"unit": "user (at most 99 examples)", "dataset_size": 10**9}.items():
        forged = {**card, name: value}
        forged["digest"] = digest(forged)
        if verify(forged).guarantee:
            return float("inf")
    return 1.0
