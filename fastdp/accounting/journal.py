"""An append-only file of hash-chained JSON lines with one writer: what the ledger writes to."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fastdp.files as files
from fastdp.accounting.serialisation import canonical
from fastdp.locks import close_in_children, try_lock
from fastdp.untrusted import read_bytes

_START = "0" * 64


class LedgerError(RuntimeError):
    """A ledger that cannot be used as asked: damaged, locked, closed, or without budget."""


class EmptyLedgerError(LedgerError):
    """A ledger without a complete record."""


@dataclass(frozen=True)
class History:
    """What a journal file holds: its records, first to last, and the digest of each."""

    bodies: list[dict[str, Any]]
    digests: list[str]
    #: What a process killed while it wrote left at the end; empty if nothing.
    torn: bytes
    #: Whether the file ends with a newline.
    terminated: bool


def _digest(previous: str, body: dict[str, Any]) -> str:
    return hashlib.sha256((previous + canonical(body)).encode()).hexdigest()


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def read(path: Path) -> History:
    """The records of a journal, without its lock.

    Each record is on the disk before the next is written, so only the end can be torn; a torn line further up is one
    that a later opening met, and the record after it says so. A line is torn if it is not JSON: the beginning of a
    record never is. Raises LedgerError, naming the line, for anything else that breaks the chain.
    """
    data = read_bytes(path)
    terminated = data.endswith(b"\n") or not data
    lines = data.split(b"\n")
    if terminated:
        lines.pop()
    bodies: list[dict[str, Any]] = []
    digests: list[str] = []
    previous = _START
    torn: list[bytes] = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            if torn or line:
                torn.append(line)
            continue
        if not (
            isinstance(record, dict)
            and record.keys() == {"body", "digest"}
            and isinstance(record["body"], dict)
            and record["digest"] == _digest(previous, record["body"])
            and (not torn or record["body"].get("torn") == _sha256(b"\n".join(torn)))
        ):
            raise LedgerError(f"{path} was altered or damaged: line {number} does not continue the chain of digests")
        previous, torn = record["digest"], []
        bodies.append(record["body"])
        digests.append(previous)
    return History(bodies, digests, b"\n".join(torn), terminated)


class Journal:
    """The open file. One process holds it: the file is locked until `close` or the process's end."""

    def __init__(self, path: Path, descriptor: int, history: History):
        self.path = path
        #: Digest of the last record; it names the whole history up to there.
        self.head = history.digests[-1] if history.digests else _START
        self._descriptor = descriptor
        self._torn = history.torn
        self._terminated = history.terminated
        close_in_children(self)

    @classmethod
    def create(cls, path: Path, body: dict[str, Any]) -> Journal:
        """A new file with its first record, durable on return. Raises FileExistsError if there is one already."""
        canonical(body)
        descriptor = files.private(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC)
        _lock(descriptor, path)
        journal = cls(path, descriptor, History([], [], b"", terminated=True))
        journal.append(body)
        files.sync(path.parent)
        return journal

    @classmethod
    def open(cls, path: Path) -> tuple[Journal, History]:
        """Continue a journal. A torn end stays in the file; the next record vouches for it."""
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        _lock(descriptor, path)
        try:
            history = read(path)
            if not history.bodies:
                raise EmptyLedgerError(
                    f"{path} holds no complete record: put back a copy, or delete it if its run released nothing"
                )
        except BaseException:
            os.close(descriptor)
            raise
        return cls(path, descriptor, history), history

    @property
    def writable(self) -> bool:
        """False after `close`, after a failed write, and in a process forked from the opener."""
        return self._descriptor >= 0

    def append(self, body: dict[str, Any]) -> None:
        """Add a record; it is on the disk on return.

        Raises LedgerError after `close` and in a process forked from the opener, OSError if the disk refuses; the
        journal is closed then, because what reached the file is unknown.
        """
        if self._descriptor < 0:
            raise LedgerError(f"{self.path} is closed, or belongs to the process this one was forked from")
        if self._torn:
            body = {**body, "torn": _sha256(self._torn)}
        head = _digest(self.head, body)
        line = canonical({"body": body, "digest": head}).encode() + b"\n"
        if not self._terminated:
            line = b"\n" + line
        try:
            written = os.write(self._descriptor, line)
            if written != len(line):
                raise OSError(f"{self.path}: only {written} of {len(line)} bytes were written; is the disk full?")
            os.fsync(self._descriptor)
        except OSError:
            self.close()
            raise
        self.head, self._torn, self._terminated = head, b"", True

    def close(self) -> None:
        """Give up the file and its lock; may be called again."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _lock(descriptor: int, path: Path) -> None:
    if not try_lock(descriptor):
        os.close(descriptor)
        raise LedgerError(f"{path} is in use by another run; wait for it to end, or choose another folder")
