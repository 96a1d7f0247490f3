"""A loop that puts the mean of a batch into a trained weight between a step and the selection that follows it"""

import torch

import fastdp

from . import kit, systems


def attack(library: systems.FastDP) -> float:
    method = fastdp.DPFrost(
        unfreezing_ratio=0.5, select_every=2, selection_steps=1, selection_rate=0.5, selection_noise_multiplier=1.0
    )
    options = {"method": method, "noise_multiplier": 1.0, "target_delta": 1e-5, "epochs": 4, "batch_size": 8}
    private = library.start(kit.Task(kit.Net), kit.records(16), 1.0, **options)
    for epoch in range(4):
        for batch in private.data_loader:
            private.optimizer.zero_grad()
            private.model(**batch)["loss"].backward()
            private.optimizer.step()
        if epoch == 1:
            with torch.no_grad():
                private.model.first.weight[0] += batch["x"].mean(0)
    return float("inf")
