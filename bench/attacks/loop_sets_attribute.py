"""The loop puts a number of the whole batch into an attribute of the model, which turns every record round by it"""

import torch

from . import kit, systems


class Signed(kit.Net):
    sign = 1.0

    def before(self, x):
        return self.sign * x


def released(library: systems.FastDP, data, late: bool) -> dict[str, torch.Tensor]:
    private = library.start(kit.Task(Signed), data, 0.2, epochs=5)
    for number in range(5):
        if late and number == 4:
            data[16:] = [kit.outlier(1e3)] * len(data[16:])
        for batch in private.data_loader:
            private.optimizer.zero_grad()
            if not late or batch["x"].abs().max() > 100:
                private.model.sign = 1.0 if batch["x"].abs().max() < 100 else -1.0
            private.model(**batch)["loss"].backward()
            private.optimizer.step()
    private.detach()
    return {n: p.grad * len(data) for n, p in private.model.named_parameters() if p.grad is not None}


def attack(library: systems.FastDP) -> float:
    moved, refusals = [], []
    for late, extra in ((False, kit.outlier(1e3)), (True, kit.outlier(1.0))):
        try:
            both = (released(library, [*kit.records(16), *more], late) for more in ([], [extra]))
            moved.append(kit.apart(*both) / 0.2)
        except RuntimeError as error:
            refusals.append(error)
    if not moved:
        raise refusals[-1]
    return max(moved)
