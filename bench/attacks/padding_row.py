"""The row that stands for an empty sample is a record too: its gradient is NaN, or infinite, or simply there"""

import torch

from . import kit, systems


def attack(library: systems.FastDP) -> float:
    worst = 0.0
    for value in (1.0, float("inf"), float("nan")):
        data = kit.records(20)
        data[0] = {"x": torch.full((kit.FEATURES,), value), "labels": 0}
        task = kit.Task(kit.Net, physical=20, options={"unsafe_seed": 3})
        private = library.start(task, data, 1.0, batch_size=1)
        empties = 0
        for batch in private.data_loader:
            empty = float(private.data_loader.tickets[-1].weights.sum()) == 0
            private.optimizer.zero_grad()
            private.model(**batch)["loss"].backward()
            private.optimizer.step()
            gradient = torch.cat([p.grad.flatten() for p in private.model.parameters()])
            if not bool(gradient.isfinite().all()):
                return float("inf")
            if empty:
                empties += 1
                worst = max(worst, float(gradient.norm()))
        assert empties, "the seed draws no empty batch"
        private.detach()
    return worst
