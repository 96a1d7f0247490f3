"""Which records of a training set were released in the forward pass, and the releases that are used again."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

TOKEN_LABELS = (
    "labels were given for every token: where they are the text itself, training on them reveals what the noise hides"
)
EVALUATE = "evaluate under model.eval() and torch.no_grad(), without example_ids"


class Records:
    """Which of ``size`` records were released in an epoch, and the releases that are used again.

    If they are ``unchecked``, batches may come without ids, and are counted by rows.
    """

    def __init__(self, size: int, unchecked: bool = False):
        self._size, self._unchecked = size, unchecked
        self._rows = 0
        self.seen = torch.zeros(self._size, dtype=torch.bool)
        #: What was released, [N, ...]; None until the first.
        self.codes: Tensor | None = None

    def count(self, rows: int, ids: Tensor | None, epoch: int) -> None:
        """Refuse a batch that would release a record twice in an epoch: by id, or, where that was asked for, by number."""
        if ids is not None:
            if bool(self.seen[ids].any()):
                raise RuntimeError(
                    "A record comes a second time in this epoch. Sample without replacement; " + EVALUATE
                )
            self.seen[ids] = True
        elif not self._unchecked:
            raise ValueError(
                "Training releases each record once an epoch. Pass example_ids [B], or unchecked_records=True; "
                + EVALUATE
            )
        elif self._rows + rows > self._size:
            raise RuntimeError(
                f"more than dataset_size = {self._size} records in epoch {epoch}: a second release would not be covered; call "
                "set_epoch at the start of each epoch"
            )
        self._rows += rows

    def reused(self, code: Tensor, ids: Tensor | None, draw: Callable[[Tensor], Tensor]) -> Tensor:
        """The release of each record, drawn when it first comes."""
        if ids is None:
            raise ValueError("A schedule that releases once needs example_ids [B] with each batch; " + EVALUATE)
        if self.codes is None:
            self.codes = torch.zeros(self._size, *code.shape[1:], dtype=code.dtype)
        new = ~self.seen[ids]
        if bool(new.any()):
            self.codes[ids[new]] = draw(code[new.to(code.device)].detach()).to("cpu")
            self.seen[ids[new]] = True
        return self.codes[ids].to(code.device)
