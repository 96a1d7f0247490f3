"""A record of NaN that reaches the others where rows meet zeros: what 0 times it gives has all of them dropped with it"""

import math

import torch

from . import kit


class Backward(torch.autograd.Function):
    """Nothing forward; backward nothing times the mean of all gradients."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient + 0 * gradient.mean(0)


def experts(own: kit.Net, hidden: torch.Tensor) -> torch.Tensor:
    """Two experts, and places in them, chosen by matrices of zeros and ones."""
    chosen = torch.nn.functional.one_hot((hidden[:, :2] > 0).long().argmax(1), 2).to(hidden)
    places = torch.einsum("be,bs->bes", chosen, torch.eye(len(hidden)))
    return torch.einsum("bes,esh->bh", places, torch.tanh(torch.einsum("bes,bh->esh", places, hidden)))


def attack(system: kit.System) -> float:
    models = (
        kit.net(before=lambda own, x: x + 0 * x.mean(0)),
        kit.net(before=lambda own, x: x + 0 * x.detach().mean(0)),
        kit.net(before=lambda own, x: x.nan_to_num() * x.isfinite().all()),
        kit.net(between=experts),
        kit.net(between=lambda own, hidden: Backward.apply(hidden)),
    )
    extras = ({"x": torch.full((kit.FEATURES,), value), "labels": 0} for value in (math.nan, math.inf))
    return max(kit.moved(system, kit.Task(model), kit.records(), e, 0.2) for e in extras for model in models)
