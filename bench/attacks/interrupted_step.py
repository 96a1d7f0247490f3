"""A step interrupted after its noise was drawn is taken again: releases that were made over those accounted for"""

from typing import Any

import torch

from . import kit, systems


class Interrupted(torch.optim.SGD):
    seen: list[torch.Tensor] = []

    def step(self, closure=None):
        self.seen.append(self.param_groups[0]["params"][0].grad)
        if len(self.seen) == 1:
            raise KeyboardInterrupt
        return super().step(closure)


def attack(system: systems.FastDP) -> float:
    import fastdp

    rows: Any = kit.records()
    model = kit.Net().train()
    Interrupted.seen = []
    loader: Any = torch.utils.data.DataLoader(rows, batch_size=8)
    private = fastdp.make_private(
        model, Interrupted(model.parameters(), lr=0.0), loader, noise_multiplier=1.0, epochs=2
    )
    for batch in private.data_loader:
        private.model(**batch)["loss"].backward()
        try:
            private.optimizer.step()
        except KeyboardInterrupt:
            private.optimizer.step()
    made = {tuple(grad.flatten().tolist()) for grad in Interrupted.seen if grad is not None}
    return len(made) / private.steps_done
