"""Privatized examples on disk: rows appended in order and never changed, read by number.

Both sides keep them so. The customer privatizes each text once and sends what it kept, however often it is killed; the
vendor reads batches from what arrived, so that its memory does not grow with the data.
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import fastdp.files as files
from fastdp.accounting.serialisation import canonical
from fastdp.locks import Lock

ROWS, RECORDS = "rows.bin", "rows.jsonl"


class ExampleStore:
    """Examples of rows [T_i, width] of one dtype.

    An append is durable once it returns: rows are synced before the record that counts them. What a kill leaves of an
    unfinished append is cut off when the store is opened.

    Args:
        folder: made if it is not there.
        width: of a row.
        dtype: of the rows.

    Raises:
        ValueError: if the folder holds rows of another kind, or lost some.
    """

    def __init__(self, folder: Path, width: int, dtype: torch.dtype):
        self.folder, self.width, self.dtype = folder, width, dtype
        self._lock = Lock.of_folder(folder)
        self._ends = array("q", [0])
        self._digests: dict[int, str] = {}
        self._records = files.private(folder / RECORDS, os.O_RDWR | os.O_CREAT)
        self._rows = files.private(folder / ROWS, os.O_RDWR | os.O_CREAT)
        self._recorded = 0
        try:
            self._read_records()
        except BaseException:
            self.close()
            raise

    @property
    def count(self) -> int:
        return len(self._ends) - 1

    @property
    def nbytes(self) -> int:
        return self._ends[-1] * self._row_bytes

    @property
    def _row_bytes(self) -> int:
        return self.width * self.dtype.itemsize

    def lengths(self, first: int, count: int) -> list[int]:
        """Rows of each of ``count`` examples from ``first`` on; fewer where they end."""
        ends = self._ends[first : first + count + 1]
        return [end - begin for begin, end in zip(ends, ends[1:])]

    def append(self, rows: Tensor, lengths: Sequence[int], digest: str = "") -> None:
        """Add examples.

        Args:
            rows: [sum(lengths), width], of the store's dtype.
            lengths: rows of each example.
            digest: of the message that brought them; see `digest_of`.
        """
        assert rows.dtype == self.dtype
        assert tuple(rows.shape) == (sum(lengths), self.width)
        first = self.count
        record = canonical({"first": first, "lengths": list(lengths), "digest": digest}).encode() + b"\n"
        try:
            _write(self._rows, rows.contiguous().view(torch.uint8).numpy().data.cast("B"), self.nbytes)
            _write(self._records, memoryview(record), self._recorded)
        except BaseException:
            # Back to what was there: a part of a record would stand in the way of the next.
            os.ftruncate(self._records, self._recorded)
            os.ftruncate(self._rows, self.nbytes)
            raise
        self._recorded += len(record)
        self._count_in(first, lengths, digest)

    def digest_of(self, first: int) -> str | None:
        """The digest of the append that began with example ``first``, or None if none did."""
        return self._digests.get(first)

    def read(self, first: int, count: int) -> tuple[Tensor, list[int]]:
        """Rows and lengths of consecutive examples, as `append` took them."""
        lengths = self.lengths(first, count)
        rows = torch.empty(sum(lengths), self.width, dtype=self.dtype)
        view = rows.view(torch.uint8).numpy().data.cast("B")
        at = self._ends[first] * self._row_bytes
        while view:
            got = os.preadv(self._rows, [view], at)
            if not got:
                raise OSError(f"{self.folder / ROWS} lost rows that were there")
            view, at = view[got:], at + got
        return rows, lengths

    def batch(self, indices: Sequence[int], *, left: bool) -> tuple[Tensor, Tensor]:
        """Rows of the examples [B, T, width], zeros where they are padded, and their mask int64 [B, T].

        Every index must be that of an example.
        """
        rows, lengths = zip(*(self.read(index, 1) for index in indices))
        return pad_rows(torch.cat(rows), [length for (length,) in lengths], left=left)

    def _read_records(self) -> None:
        kind = canonical({"width": self.width, "dtype": str(self.dtype)}).encode() + b"\n"
        with open(self.folder / RECORDS, "rb") as file:
            found = file.readline()
            if found.endswith(b"\n") and found != kind:
                raise ValueError(f"{self.folder} holds examples of another width or dtype: use another folder")
            if not found.endswith(b"\n"):
                os.ftruncate(self._records, 0)
                _write(self._records, memoryview(kind), 0)
            self._recorded = len(kind)
            for line in file if found == kind else ():
                if not line.endswith(b"\n"):
                    break
                self._read_record(line)
                self._recorded += len(line)
        os.ftruncate(self._records, self._recorded)
        if os.fstat(self._rows).st_size < self.nbytes:
            raise ValueError(f"{self.folder / ROWS} is shorter than its records say: it was damaged")
        os.ftruncate(self._rows, self.nbytes)

    def _read_record(self, line: bytes) -> None:
        try:
            record = json.loads(line)
            first, lengths, digest = record["first"], record["lengths"], record["digest"]
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{self.folder / RECORDS} has a line that is no record: it was damaged") from None
        if first != self.count:
            raise ValueError(f"{self.folder / RECORDS} has a record of example {first} at {self.count}: it was damaged")
        self._count_in(first, lengths, digest)

    def _count_in(self, first: int, lengths: Sequence[int], digest: str) -> None:
        ends = self._ends[-1] + np.cumsum(lengths)
        self._ends.extend(ends.tolist())
        self._digests[first] = digest

    def close(self) -> None:
        if self._rows >= 0:
            os.close(self._records)
            os.close(self._rows)
            self._rows = -1
            self._lock.close()


def _write(descriptor: int, data: memoryview, at: int) -> None:
    """Write all of it at a place, and to the disk."""
    while data:
        written = os.pwrite(descriptor, data, at)
        data, at = data[written:], at + written
    os.fsync(descriptor)


def pad_rows(rows: Tensor, lengths: list[int], *, left: bool) -> tuple[Tensor, Tensor]:
    """Rows [N, d] of consecutive examples as [B, T, d] with zeros, and the mask int64 [B, T]."""
    longest = max(lengths)
    places = torch.arange(longest)
    count = torch.tensor(lengths)[:, None]
    mask = places >= longest - count if left else places < count
    padded = torch.zeros(len(lengths), longest, rows.shape[1], dtype=rows.dtype)
    padded[mask] = rows
    return padded, mask.long()
