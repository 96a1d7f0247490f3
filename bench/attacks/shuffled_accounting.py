"""Shuffled batches accounted as if they were Poisson samples: the true epsilon over the stated one"""

from typing import Any

import torch
from dp_accounting import GaussianDpEvent
from torch.utils.data import DataLoader

import fastdp

from . import kit, systems

DELTA = 1e-5


def attack(system: kit.System) -> float:
    data: Any = kit.records(1000)
    run: Any = kit.Net().train()
    run = run, torch.optim.SGD(run.parameters(), lr=0.0), DataLoader(data, batch_size=10)
    if isinstance(system, systems.FastDP):
        run = fastdp.make_private(*run, noise_multiplier=2.0, target_delta=DELTA, epochs=1, sampling="shuffled")
    elif type(system) is systems.Opacus:
        from opacus import PrivacyEngine

        engine, options = PrivacyEngine(), {"noise_multiplier": 2.0, "max_grad_norm": 1.0, "poisson_sampling": False}
        run = engine.make_private(module=run[0], optimizer=run[1], data_loader=run[2], **options)
    else:
        raise kit.NotApplicable
    model, optimizer, loader = run
    for batch in loader:
        optimizer.zero_grad()
        model(**batch)["loss"].backward()
        optimizer.step()
    stated = run.epsilon() if isinstance(system, systems.FastDP) else engine.get_epsilon(DELTA)
    # Who knows the order and all the others sees one Gaussian release of a record, even where it is only set to nothing.
    return float(fastdp.accounting.epsilon(GaussianDpEvent(2.0), DELTA)) / stated
