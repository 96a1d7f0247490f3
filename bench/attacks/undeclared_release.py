"""A method whose preparation makes a release that its budget does not hold, or makes one twice for the price of one"""

import fastdp

from . import kit, systems


class Greedy(fastdp.DPSGD):
    def prepares_at(self, step: int) -> bool:
        return step == 0

    def prepare(self, preparation):
        sample = preparation.release("selection")
        like = {"x": preparation.parameters["first.weight"][0]}
        for _ in range(2):
            sample.total(lambda batch: iter([{"x": batch["x"]}]), 1.0, like)


def attack(library: systems.FastDP) -> float:
    task = kit.Task(kit.Net, options={"noise_multiplier": 1.0, "target_delta": 1e-5})
    private = library.start(task, kit.records(), 1.0, method=Greedy())
    list(library.steps(private, task))
    return float("inf")
