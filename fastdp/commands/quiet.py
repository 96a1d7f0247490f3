"""The libraries' own bars and notices, turned off for commands that draw their own."""

from __future__ import annotations

import os


def quiet_libraries() -> None:
    """Leave errors, and the warnings that Python's `warnings` carries; FASTDP_TRACEBACK=1 leaves everything."""
    if os.environ.get("FASTDP_TRACEBACK"):
        return
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
