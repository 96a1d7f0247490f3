"""A backward pass that fails half-way, out of memory, and is taken again: what it had added is added twice"""

import torch

from . import kit, systems


class Failing(kit.Net):
    gradient_checkpointing, left = True, 0

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        if hidden.requires_grad:
            hidden.register_hook(self.fail)
        return hidden

    def fail(self, gradient: torch.Tensor) -> None:
        self.left -= 1
        if self.left == 0:
            raise MemoryError


def attack(library: systems.FastDP) -> float:
    private = library.start(kit.Task(Failing), kit.records(1), 0.05)
    (batch,) = private.data_loader
    loss = private.model(**batch)["loss"]
    private.model.left = 2
    try:
        loss.backward()
    except MemoryError:
        private.model(**batch)["loss"].backward()
    private.optimizer.step()
    private.detach()
    return float(kit.flat({n: p.grad for n, p in private.model.named_parameters()}).norm()) / 0.05
