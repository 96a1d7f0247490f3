"""An optimizer whose steps are as long as the loss that its closure returns: one record sets their length"""

import torch

from . import kit, rate_by_loss, systems


class Polyak(torch.optim.SGD):
    """As far as the loss is large."""

    def step(self, closure=None):
        loss = closure()
        self.param_groups[0]["lr"] = float(loss)
        super().step()
        return loss


def attack(library: systems.FastDP) -> float:
    rates = []
    for records in (
        kit.records(),
        [*kit.records(), {"x": torch.full((kit.FEATURES,), 1e3), "labels": torch.tensor(0)}],
    ):
        model = rate_by_loss.Linear()
        private = library.start(
            kit.Task(lambda model=model: model), records, 1.0, optimizer=Polyak(model.parameters(), lr=0.0)
        )
        for batch in private.data_loader:

            def closure(private=private, batch=batch):
                loss = private.model(**batch)["loss"]
                loss.backward()
                return loss.detach()

            private.optimizer.step(closure)
        rates.append(private.optimizer.param_groups[0]["lr"])
        private.detach()
    return 1.0 if len(set(rates)) == 1 else float("inf")
