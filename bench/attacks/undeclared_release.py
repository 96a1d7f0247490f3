"""A method whose preparation makes a release that its budget does not hold, or makes one twice for the price of one"""

import fastdp

from . import systems


class Greedy(fastdp.DPSGD):
    def prepares_at(self, step: int) -> bool:
        return step == 0

    def prepare(self, preparation):
        sample = preparation.release("selection")
        like = {"x": preparation.parameters["first.weight"][0]}
        for _ in range(2):
            sample.total(lambda batch: iter([{"x": batch["x"]}]), 1.0, like)


def attack(library: systems.FastDP) -> float:
    library.accounted(method=Greedy())
    return float("inf")
