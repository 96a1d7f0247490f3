"""Exclusive use of a folder or a file, among all processes of a machine, until it is given up or its holder ends."""

from __future__ import annotations

import fcntl
import os
import time
import weakref
from pathlib import Path
from typing import Any

import fastdp.files as files

_WAIT = 0.05


class Lock:
    """An advisory lock (`flock`) on a file of its own; a context manager.

    Args:
        path: of the lock's file, which is made and stays.
        held: what another holds, for the message.
        seconds: how long to wait for it.

    Raises:
        ValueError: if another process, or another object of this one, has it for all that time.
    """

    def __init__(self, path: Path, held: str, seconds: float = 0.0):
        files.make_folder(path.parent)
        self._descriptor = files.private(path, os.O_RDWR | os.O_CREAT)
        last = time.monotonic() + seconds
        while True:
            if try_lock(self._descriptor):
                break
            if time.monotonic() >= last:
                self.close()
                raise ValueError(f"{held} is in use by another program: wait for it to end")
            time.sleep(_WAIT)
        close_in_children(self)

    @classmethod
    def of_folder(cls, folder: Path) -> Lock:
        """Of a folder and all that is in it, at once or not at all."""
        return cls(folder / ".lock", str(folder))

    def close(self) -> None:
        """Give it up; may be called again."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            self.close()


def try_lock(descriptor: int) -> bool:
    """Lock an open file for this process; False if another holds it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


_LOCK_HOLDERS: weakref.WeakSet[Any] = weakref.WeakSet()


def close_in_children(holder: Any) -> None:
    """Close it in every process forked from this one, which would hold the lock after its parent was killed."""
    _LOCK_HOLDERS.add(holder)


def _close_holders() -> None:
    for holder in list(_LOCK_HOLDERS):
        holder.close()


os.register_at_fork(after_in_child=_close_holders)
