"""An observer that puts one record into every sample, in the place of what was drawn; the card goes on to state amplification"""

from fastdp.accounting import verify
from fastdp.private.observer import Observer

from . import kit, systems


class Always(Observer):
    def drawn(self, units: list[int], kind: str) -> list[int]:
        return [0]


def attack(library: systems.FastDP) -> float:
    task = kit.Task(kit.Net, options={"noise_multiplier": 1.0, "target_delta": 1e-5})
    private = library.start(task, kit.records(40), 1.0, batch_size=2)
    private.observe(Always())
    list(library.steps(private, task))
    return float("inf") if verify(private.card()).guarantee else 1.0
