"""Tensors that many launches read: what checks and tables ask of each is asked once, in one go.

A step has hundreds of them, and every question takes the host as long as a line of Python. What is the same in every step,
their form, is one object then, by which tables are known; only addresses are new.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class MatrixForm:
    """Of each of some matrices its columns, strides and dtype: the same object for the same ones, as long as it is in use."""

    columns: tuple[int, ...]
    strides: tuple[tuple[int, int], ...]
    dtypes: tuple[torch.dtype, ...]

    @functools.cached_property
    def eights(self) -> np.ndarray:
        """Of each whether neighbours in a row lie beside each other, and its columns and the way to the next row are eights."""
        each = zip(self.columns, self.strides)
        return np.array([step == 1 and not (columns | row) % 8 for columns, (row, step) in each])

    @functools.cached_property
    def rows_overlap(self) -> bool:
        """Whether a row of any begins before the one before has ended, as in expanded tensors and windows."""
        return any(row < columns for columns, (row, _) in zip(self.columns, self.strides))

    @functools.cached_property
    def changes(self) -> np.ndarray:
        """Of each but the first whether it is of another form than the one before."""
        own = list(zip(self.columns, self.strides, self.dtypes))
        return np.array([one != other for one, other in itertools.pairwise(own)], bool)


_form = functools.lru_cache(maxsize=256)(MatrixForm)


class Tensors(list[Tensor]):
    """A list of tensors, not to be changed."""

    @functools.cached_property
    def shapes(self) -> list[torch.Size]:
        """Of each."""
        return [tensor.shape for tensor in self]

    @functools.cached_property
    def addresses(self) -> np.ndarray:
        """Where they lie, int64."""
        return np.array([tensor.data_ptr() for tensor in self], np.int64)


class Matrices(Tensors):
    """A list of matrices."""

    @classmethod
    def of(cls, matrices: Iterable[Tensor]) -> Matrices:
        """These, or a list of them."""
        return matrices if isinstance(matrices, cls) else cls(matrices)

    @functools.cached_property
    def rows(self) -> int | None:
        """Of each; None if they are not matrices of as many rows."""
        rows = {shape[0] for shape in self.shapes} if {*map(len, self.shapes)} == {2} else set()
        return rows.pop() if len(rows) == 1 else None

    @functools.cached_property
    def form(self) -> MatrixForm:
        """Of matrices alone."""
        columns, dtypes = tuple([shape[1] for shape in self.shapes]), tuple([matrix.dtype for matrix in self])
        return _form(columns, tuple([matrix.stride() for matrix in self]), dtypes)  # type: ignore[arg-type]

    @functools.cached_property
    def wide(self) -> bytes:
        """A byte of each: whether its rows may be read 16 bytes at a time."""
        return ((self.addresses % 16 == 0) & self.form.eights).tobytes()

    @functools.cached_property
    def counts(self) -> list[int]:
        """How often each comes, of those that are the same as the one before."""
        lies, form = self.addresses, self.form
        firsts = [0, *(np.flatnonzero((lies[1:] != lies[:-1]) | form.changes) + 1).tolist(), len(self)]
        return [end - start for start, end in itertools.pairwise(firsts)]

    def taken(self, order: tuple[int, ...]) -> Matrices:
        """Those with these numbers, as a list that knows what this one knows."""
        found = Matrices([self[at] for at in order])
        found.rows, found.form = self.rows, _reordered_form(self.form, order)
        if "addresses" in vars(self):
            found.addresses = self.addresses[list(order)]
        return found


@functools.lru_cache(maxsize=256)
def _reordered_form(form: MatrixForm, order: tuple[int, ...]) -> MatrixForm:
    return _form(*(tuple([of_each[at] for at in order]) for of_each in (form.columns, form.strides, form.dtypes)))
