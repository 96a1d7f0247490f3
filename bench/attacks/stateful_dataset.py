"""A data set that subtracts the mean of what was read before: each record that is read changes all that come after it"""

from typing import Any

import torch

from . import kit, systems


class Centred(list[kit.Record]):
    total, read = torch.zeros(kit.FEATURES), 0

    def __getitem__(self, index: Any) -> Any:
        record = super().__getitem__(index)
        self.total, self.read = self.total + record["x"], self.read + 1
        return {**record, "x": record["x"] - self.total / self.read}


def attack(system: kit.System) -> float:
    import fastdp

    systems.only_fastdp(system)
    sums = []
    for extra in ([], kit.records(1, 100.0, 5)):
        model = kit.Net()
        data = Centred([*extra, *kit.records(16)])
        loader: Any = torch.utils.data.DataLoader(data, batch_size=len(data), collate_fn=kit.stack)  # type: ignore[arg-type]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        method = fastdp.DPSGD(max_grad_norm=0.2)
        private = fastdp.make_private(model, optimizer, loader, method=method, noise_multiplier=0.0, epochs=1)
        for batch in private.data_loader:
            private.model(**batch)["loss"].backward()
            private.optimizer.step()
        sums.append(torch.cat([(p.grad * len(data)).flatten() for p in model.parameters() if p.grad is not None]))
        private.detach()
    return float((sums[0] - sums[1]).norm()) / 0.2
