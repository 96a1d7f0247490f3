"""A training loop that keeps a mean of its records in a buffer of the model between releases: it leaves with the state dict"""

import torch

from . import kit, systems


class Counting(kit.Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(kit.FEATURES))


def attack(library: systems.FastDP) -> float:
    return library.written_by_the_loop(
        Counting,
        lambda model, x: model.mean.copy_(x),
        lambda model, x: model.mean.data.copy_(x),
        lambda model, x: setattr(model, "mean", x.clone()),
    )
