"""Lightning's Trainer over a private loader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastdp.private.run import Private


class Batches:
    """What to give Lightning's ``fit`` for training: the micro-batches of a private run, without a length.

    Lightning ends an epoch after as many batches as a loader is long, and a private loader's length counts logical steps, each
    of which may take several micro-batches. Without a length it goes on to the end, and takes each batch while the one before
    is not differentiated yet, which is allowed here, of one batch and no more.

    Args:
        private: what `fastdp.make_private` returned.

    Raises:
        RuntimeError: while it is iterated over, if a batch was never differentiated, as the next one would be taken for it, or if
            the trainer accumulates gradients.
    """

    def __init__(self, private: Private):
        self.private = private

    def __iter__(self) -> Iterator[Any]:
        loader = self.private.data_loader
        loader.look_ahead = loader.takes_ahead = True
        try:
            for batch in loader:
                # This one's, and that of the batch which Lightning hands out next.
                self._require_consumed(but=2)
                loader.owner.require_step()
                yield batch
            self._require_consumed(but=1)
        finally:
            loader.look_ahead = loader.takes_ahead = False

    def _require_consumed(self, but: int) -> None:
        if len(self.private.data_loader.tickets) > but:
            raise RuntimeError(
                "a batch was skipped: training_step must return the loss of every batch, or differentiate it by manual_backward"
            )
