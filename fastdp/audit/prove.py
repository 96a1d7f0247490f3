"""`prove` for a model, a loader and a loss that no run has been opened for yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader

from fastdp.entry import make_private
from fastdp.methods.dpsgd import DPSGD
from fastdp.private.prove import Evidence, Trial, extremes

__all__ = ["Evidence", "Trial", "extremes", "prove"]


def prove(
    model: torch.nn.Module,
    data_loader: DataLoader,
    *,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    method: Any = None,
    longest: int | None = None,
    **options: Any,
) -> Evidence:
    """Replay neighbouring data sets through the user's own model, collator and loss, and measure how far releases move.

    Nothing is trained: a copy of the model takes single steps at a learning rate of 0, without noise. See `docs/audit.md`
    for what this shows and what it does not.

    Args:
        model: as for `make_private`.
        data_loader: some of its data set's records are replayed, by its collator.
        loss: (model, batch) -> loss; by default the one that the model returns.
        method: as for `make_private`; one whose preparation reads private data is proved by `Private.prove`.
        longest: most tokens of a record that is made longer; by default 8 times the longest, if the model takes so many.
        options: further arguments of `make_private`, such as ``unit_map``. Raises ValueError for records that it refuses.

    >>> import torch
    >>> from fastdp import audit
    >>> loader = torch.utils.data.DataLoader([(torch.randn(3), k % 2) for k in range(8)], batch_size=4)
    >>> def loss(model, batch):
    ...     return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
    >>> audit.prove(torch.nn.Linear(3, 2), loader, loss=loss, loss_reduction="mean").holds
    True
    """
    method = DPSGD() if method is None else method
    if method.prepares_at(0):
        raise ValueError("this method prepares itself from the data: make the run private, and call private.prove()")
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
    options = {"epochs": 1, "noise_multiplier": 0.0, **options}
    private = make_private(model, optimizer, data_loader, method=method, **options)
    try:
        return private.prove(loss=loss, longest=longest)
    finally:
        private.detach()
