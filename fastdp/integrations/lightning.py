"""Lightning's Trainer over a private loader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastdp.private.run import Private


class Batches:
    """The microbatches of a private run, without a length: give it to Lightning's ``fit`` for training.

    Lightning ends an epoch after ``len(loader)`` batches, and a private loader's length counts logical batches. Of an iterable
    without a length it takes all batches, and fetches each before the backward pass of the one before.

    Args:
        private: what `fastdp.make_private` returned.

    Raises:
        RuntimeError: during iteration, if a batch had no backward pass, or the trainer accumulates gradients.
    """

    def __init__(self, private: Private):
        self.private = private

    def __iter__(self) -> Iterator[Any]:
        loader = self.private.data_loader
        # Backward passes are checked here, as they lag one batch behind.
        loader.look_ahead = loader.takes_ahead = True
        try:
            for batch in loader:
                # Pending are this batch and the one before, which Lightning trains on next.
                self._require_consumed(pending=2)
                loader.owner.begin_microbatch()
                yield batch
            self._require_consumed(pending=1)
        finally:
            loader.look_ahead = loader.takes_ahead = False

    def _require_consumed(self, pending: int) -> None:
        if len(self.private.data_loader.tickets) > pending:
            raise RuntimeError(
                "a batch was skipped: training_step must return the loss of every batch, or differentiate it by manual_backward"
            )
