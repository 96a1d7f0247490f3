"""A model that centres a batch by its mean in one of twenty passes, by chance: hardly any look falls on one of these"""

import random

from fastdp.engine.errors import SelfCheckError

from . import kit, systems


def attack(library: systems.FastDP) -> float:
    met: list[bool] = []

    def seldom(own, x):
        met.append(len(x) > 1 and random.random() < 0.05)
        return x - x.mean(0) if met[-1] else x

    released, refused = 0, None
    for _ in range(6):
        private = library.start(kit.Task(kit.net(before=seldom)), kit.records(16), 0.2, epochs=30)
        try:
            for _ in range(30):
                for batch in private.data_loader:
                    private.optimizer.zero_grad()
                    private.model(**batch)["loss"].backward()
                    private.optimizer.step()
                    released += met[-1]
        except SelfCheckError as error:
            refused = error
        finally:
            private.detach()
    if refused is not None and not released:
        raise refused
    return float("inf") if released else 1.0
