"""A data set that subtracts the mean of what was read before: each record that is read changes all that come after it"""

from typing import Any

import torch

from . import kit, systems


class Centred(list[kit.Record]):
    total, read = torch.zeros(kit.FEATURES), 0

    def __getitem__(self, index: Any) -> Any:
        record = super().__getitem__(index)
        self.total, self.read = self.total + record["x"], self.read + 1
        return {**record, "x": record["x"] - self.total / self.read}


def attack(library: systems.FastDP) -> float:
    one, other = (
        library.train(kit.Task(kit.Net), Centred([*extra, *kit.records(16)]), 0.2, 1)[0]
        for extra in ([], kit.records(1, 100.0, 5))
    )
    return kit.apart(one, other) / 0.2
