"""A criterion that leaves a batch out whose mean loss is too large, so that one record takes all others along with it"""

import torch
import torch.nn.functional as F

from . import kit, systems


class Linear(kit.Model):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(kit.FEATURES, kit.CLASSES)

    def forward(self, x: torch.Tensor, **_: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def losses(output, batch):
    found = F.cross_entropy(output, batch["labels"], reduction="none")
    return found * (found.detach().mean() < 10)


def attack(library: systems.FastDP) -> float:
    released = []
    for extra in (kit.records(1)[0], kit.outlier(1e4)):
        data = kit.records(17)
        private = library.start(kit.Task(Linear), data, 1.0, epochs=2, loss_reduction=None, criterion=losses)
        for number in range(2):
            if number == 1:
                data[16] = {**extra, "labels": 0}
            for batch in private.data_loader:
                private.optimizer.zero_grad()
                private.loss(private.model(**batch), batch).backward()
                private.optimizer.step()
        released.append({n: 17 * p.grad for n, p in private.model.named_parameters()})
    return kit.apart(*released) / 2.0
