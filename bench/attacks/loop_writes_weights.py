"""A training loop that puts the mean of each batch into a trained weight itself, between two releases, through .data or not"""

import torch

from . import kit, systems


def attack(library: systems.FastDP) -> float:
    return library.written_by_the_loop(
        kit.Net,
        lambda model, x: model.first.weight.data.copy_(x),
        lambda model, x: torch.no_grad()(model.first.weight.copy_)(x),
        lambda model, x: model.first.weight.detach().numpy().__setitem__(..., x),
    )
