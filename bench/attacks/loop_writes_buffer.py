"""A training loop that keeps a mean of its records in a buffer of the model between releases: it leaves with the state dict"""

import torch

from . import kit, systems


class Counting(kit.Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(kit.FEATURES))


def attack(library: systems.FastDP) -> float:
    refused = []
    for write in (
        lambda model, x: model.mean.copy_(x),
        lambda model, x: model.mean.data.copy_(x),
        lambda model, x: setattr(model, "mean", x.clone()),
    ):
        private = library.start(kit.Task(Counting), kit.records(16), 1.0, epochs=8)
        try:
            for _ in range(8):
                for batch in private.data_loader:
                    private.optimizer.zero_grad()
                    private.model(**batch)["loss"].backward()
                    private.optimizer.step()
                    write(private.model, batch["x"].mean(0))
        except RuntimeError as error:
            refused.append(error)
        finally:
            private.detach()
    if len(refused) == 3:
        raise refused[-1]
    return float("inf")
