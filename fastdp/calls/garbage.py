"""A pause of Python's garbage collection, while a step makes and drops thousands of small objects."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """Search for circles after this rather than within it, if they are searched for at all.

    Python looks through its younger objects each time that some hundreds have been made, and a pass makes thousands, nearly all
    of them gone by its end.
    """
    searched = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if searched:
            gc.enable()
