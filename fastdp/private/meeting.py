"""Where ranks meet before a release: once a logical batch, so that no microbatch waits for another process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from fastdp.distributed.ranks import Ranks
from fastdp.engine.engine import Engine

#: What a rank may want of all: to look at a microbatch, and to run two backward passes from the next logical batch on.
_LOOKS, _TWO_PASSES = "looks", "two backward passes"


@contextmanager
def meeting(engine: Engine, ranks: Ranks, stated: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Meanwhile as `Ranks.together`; afterwards all ranks do what any of them wants.

    Raises what a look at a microbatch of this logical batch finds.
    """
    with ranks.together(stated) as wanted:
        wanted |= {name for name, own in ((_LOOKS, engine.checks.looks), (_TWO_PASSES, engine.weights.wanted)) if own}
        yield
    engine.weights.answer(_TWO_PASSES in wanted)
    if _LOOKS in wanted:
        with torch.enable_grad(), engine.chance(), engine.weights.apart():
            engine.checks.look_back()
