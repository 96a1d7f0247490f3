"""Lightning's Trainer over a private loader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastdp.private.run import Private


class Batches:
    """What to give Lightning's ``fit`` for training: the micro-batches of a private run, without a length.

    Lightning ends an epoch after as many batches as a loader is long, and a private loader's length counts logical steps, each
    of which may take several micro-batches. Without a length it goes on to the end, and takes each batch while the one before
    is not differentiated yet, which is allowed here.

    Args:
        private: what `fastdp.make_private` returned.
    """

    def __init__(self, private: Private):
        self.private = private

    def __iter__(self) -> Iterator[Any]:
        self.private.data_loader.look_ahead = True
        return iter(self.private.data_loader)
