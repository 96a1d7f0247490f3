"""A training loop that puts the mean of each batch into a trained weight itself, between two releases, through .data or not"""

import torch

from . import kit, systems


def attack(library: systems.FastDP) -> float:
    refused = []
    for write in (
        lambda p, x: p.data.copy_(x),
        lambda p, x: torch.no_grad()(p.copy_)(x),
        lambda p, x: p.numpy().__setitem__(..., x),
    ):
        private = library.start(kit.Task(kit.Net), kit.records(16), 1.0, epochs=8)
        try:
            for epoch in range(8):
                for batch in private.data_loader:
                    private.optimizer.zero_grad()
                    private.model(**batch)["loss"].backward()
                    private.optimizer.step()
                    if epoch == 4:
                        write(private.model.first.weight.detach(), batch["x"].mean(0))
        except RuntimeError as error:
            refused.append(error)
        finally:
            private.detach()
    if len(refused) == 3:
        raise refused[-1]
    return float("inf")
