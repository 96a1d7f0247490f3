"""A few ordinary steps on public data, so that parameters which start at zero have some relevance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fastdp.engine.loss.boundary import find_loss


def warm_up(
    model: torch.nn.Module, batches: Sequence[Mapping[str, Any]], learning_rate: float = 1e-3, steps: int | None = None
) -> None:
    """Train on public batches with AdamW, without privacy; call it before `make_private`.

    LoRA's B and an adapter's last matrix start at zero, and the relevance of a zero is zero: after a step or two they
    can be ranked. The batches must be public: nothing here is accounted for.

    Args:
        model: returns its loss; its parameters that require gradients are trained in place.
        batches: mappings of its arguments, labels included.
        steps: how many, going round the batches; one pass over them by default.

    Raises ValueError without batches, or for a model that returns no loss.
    """
    if not batches:
        raise ValueError("warm_up needs public batches, and there are none")
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=learning_rate)
    for step in range(len(batches) if steps is None else steps):
        loss = find_loss(model(**batches[step % len(batches)]))
        if loss is None:
            raise ValueError("the model returned no loss: warm_up needs batches with labels")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
