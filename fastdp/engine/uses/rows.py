"""Which axis of a tensor holds the batch's rows, and in which order: followed through a forward pass, never guessed.

Most tensors have rows first. Attention in torch's own layers has time first, and layers that flatten it make an axis in
which neighbouring entries belong to different rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from fastdp.calls.marks import Marks
from fastdp.calls.named import functions
from fastdp.engine.errors import UnsupportedUse


class BatchAxis(NamedTuple):
    """Where rows lie: along ``axis``, whose size is a multiple of their number.

    Entries of one row are neighbours there. If ``inner``, only so many of them are: those of the next row follow, and so on.
    None where a row has one entry, so that both are the same and an axis with more of them is not known.
    ``chosen`` says that the data selected the entries of the first axis: a `Selection` has the row of each.
    """

    axis: int = 0
    inner: int | None = 0
    chosen: bool = False

    @property
    def natural(self) -> bool:
        return self.axis == 0 and not self.inner and not self.chosen

    def fits(self, shape: tuple[int, ...], rows: int) -> bool:
        """Whether a tensor of this shape can be cut into the rows."""
        if self.chosen:
            return bool(shape)
        if len(shape) <= self.axis or shape[self.axis] % (rows * (self.inner or 1)):
            return False
        return self.inner is not None or shape[self.axis] == rows

    def with_(self, other: BatchAxis) -> BatchAxis | None:
        """One fold for both: of two that differ in what is known; None if they contradict each other."""
        same = (self.axis, self.chosen) == (other.axis, other.chosen)
        if not same or (self.inner != other.inner and None not in (self.inner, other.inner)):
            return None
        return other if self.inner is None else self

    def require(self, shape: torch.Size, rows: int, operation: str) -> None:
        """Raise `UnsupportedUse` unless the input of an operation `fits`."""
        if not self.fits(tuple(shape), rows):
            raise UnsupportedUse(f"the input of {operation} has shape {list(shape)}, which is not that of {rows} rows")

    def front(self, x: torch.Tensor, rows: int) -> torch.Tensor:
        """The same entries with rows first, in their order: ``[rows * k, ...]``, or ``[rows, ..., k, ...]`` if inner."""
        return x if self.natural else (self.split(x, rows) if self.inner else x).movedim(self.axis, 0)

    def back(self, x: torch.Tensor) -> torch.Tensor:
        """The inverse of `front`, for a tensor whose other sizes may have changed."""
        if self.natural:
            return x
        x = x.movedim(0, self.axis)
        return self.join(x) if self.inner else x

    def unit_offsets(self, tokens: int) -> None:
        """Where units begin among the tokens in the rows' order; None as the layout says."""

    def split(self, x: torch.Tensor, rows: int) -> torch.Tensor:
        """The axis of rows alone, and behind it one of a row's entries."""
        if not self.inner:
            return x.unflatten(self.axis, (rows, -1))
        x = x.unflatten(self.axis, (-1, rows, self.inner)).movedim(self.axis + 1, self.axis)
        return x.flatten(self.axis + 1, self.axis + 2)

    def join(self, x: torch.Tensor) -> torch.Tensor:
        """The inverse of `split`."""
        axis = self.axis
        if not self.inner:
            return x.flatten(axis, axis + 1)
        return x.unflatten(axis + 1, (-1, self.inner)).movedim(axis, axis + 1).flatten(axis, axis + 2)

    def spread(self, lanes: torch.Tensor, size: int, rows: int) -> torch.Tensor:
        """One entry a row ``[rows, ...]`` laid along an axis of this size: ``[size, ...]``."""
        times = size // rows
        if times == 1:
            return lanes
        lanes = lanes.repeat_interleave(self.inner or times, dim=0)
        return lanes.repeat(size // lanes.shape[0], *[1] * (lanes.dim() - 1)) if self.inner else lanes


@dataclass(frozen=True)
class BroadcastLayout:
    """How an operation met a tensor beside what is computed from parameters.

    ``fold`` and ``out`` say where the tensor's and the results' rows lie (None: it has none), ``copies`` where those of the
    values computed from parameters, which a formula may have repeated for every row; ``problem`` why it cannot be said.
    """

    fold: BatchAxis | None = None
    out: tuple[BatchAxis | None, ...] = ()
    copies: tuple[BatchAxis | None, ...] = ()
    problem: str | None = None


#: These move entries and compute nothing: what they do to a tensor they do to the numbers of its rows.
_MOVING = functions(
    "view reshape transpose permute movedim moveaxis swapaxes swapdims t flatten unflatten squeeze unsqueeze expand "
    "expand_as repeat repeat_interleave contiguous clone chunk split tensor_split unbind select narrow __getitem__ cat "
    "concat concatenate stack index_select flip roll view_as reshape_as tile adjoint unfold"
) | {getattr(torch.Tensor, name).__get__ for name in ("T", "mT", "H", "mH")}
#: These compute new dimensions behind those of their argument.
_APPENDING = frozenset({F.embedding, F.one_hot, torch.embedding, torch.diag_embed})
_RESHAPING = functions("view reshape flatten unflatten view_as reshape_as")


@dataclass(frozen=True)
class RowAxis:
    """The axis along which a tensor's rows lie, and the row of each entry there: int16, -1 for none."""

    axis: int
    rows: torch.Tensor

    def over(self, shape: torch.Size) -> torch.Tensor:
        """The row of every entry of a tensor of this shape, as an expanded view."""
        sizes = [1] * len(shape)
        sizes[self.axis] = -1
        return self.rows.view(sizes).expand(shape)

    def fold(self, count: int) -> BatchAxis | None:
        """The fold of these ``count`` rows, if it is one."""
        entries, size = torch.arange(self.rows.shape[0], device=self.rows.device), self.rows.shape[0]
        blocks = (size // count, int((self.rows != 0).int().argmax())) if size and not size % count else ()
        for block in blocks:
            if block and not size % (count * block) and torch.equal(self.rows.long(), entries // block % count):
                return BatchAxis(self.axis, block % (size // count) if size > count else None)
        return None


class RowAxes:
    """Follows the place of rows from the inputs of a forward pass on ``count`` rows, one operation at a time."""

    def __init__(self, inputs: Iterable[torch.Tensor], count: int):
        self._axes: Marks[RowAxis] = Marks()
        #: The place of a tensor's rows; None where it is not known.
        self.of = self._axes.get
        self._count = count
        self.begin(inputs)

    def begin(self, inputs: Iterable[torch.Tensor]) -> None:
        """Note the rows of tensors that have one entry each along their first axis."""
        for t in inputs:
            if t.dim() and t.shape[0] == self._count:
                self._axes[t] = RowAxis(0, torch.arange(self._count, dtype=torch.int16, device=t.device))

    def _note(self, t: torch.Tensor, row_axis: RowAxis | None) -> None:
        if row_axis is None:
            self._axes.pop(t)
        else:
            self._axes[t] = row_axis

    def follow(self, func: Any, args: Any, kwargs: Any, given: list[torch.Tensor], out: Iterable[torch.Tensor]) -> None:
        """Note where the rows of an operation's results lie, as far as that is known."""
        results = [t for t in out if t.dim()]
        if args and results and self.of(results[0]) is not None and any(t is args[0] for t in results):
            return
        moved = self._move(func, args, kwargs, results) if func in _MOVING else []
        if moved:
            for t, rows in zip(results, moved, strict=False):
                self._note(t, _row_axis(rows) if rows.shape == t.shape else None)
            return
        lost, appends = reduced(args, kwargs), func in _APPENDING or _looks_up(func, args)
        sources = [(t, row_axis) for t in given if (row_axis := self.of(t)) is not None]
        for t in results:
            found = None
            for source, row_axis in sources:
                found = found or _computed_axis(source, row_axis, t, appends, lost)
            self._note(t, found)

    def _move(self, func: Any, args: Any, kwargs: Any, results: list[torch.Tensor]) -> list[torch.Tensor]:
        """What the operation makes of the rows of its first argument's entries; nothing where they are not known."""
        first = args[0] if args else None
        if isinstance(first, torch.Tensor):
            row_axis = self.of(first)
            if row_axis is None:
                return []
            if func in _RESHAPING:
                return [_reshape_rows(row_axis, first.shape, t.shape) for t in results]
            marked: Any = row_axis.over(first.shape)
        elif isinstance(first, (list, tuple)) and all(isinstance(t, torch.Tensor) for t in first):
            nobody = torch.full((), -1, dtype=torch.int16)
            row_axes = [(self.of(t), t) for t in first]
            marked = [(nobody.to(t.device).expand(t.shape) if p is None else p.over(t.shape)) for p, t in row_axes]
        else:
            return []
        try:
            out = func(marked, *args[1:], **kwargs)
        except (RuntimeError, TypeError, IndexError, ValueError):
            return []
        return [out] if isinstance(out, torch.Tensor) else list(out)


def _looks_up(func: Any, args: Any) -> bool:
    """Whether an operation looks up entries of its first argument's first axis, whose other axes then come last."""
    if func in (torch.index_select, torch.Tensor.index_select):
        return len(args) > 1 and args[1] == 0
    index = args[1] if func is torch.Tensor.__getitem__ else None
    return isinstance(index[0] if isinstance(index, tuple) and index else index, torch.Tensor)


def _reshape_rows(row_axis: RowAxis, old: torch.Size, new: torch.Size) -> torch.Tensor:
    """The row of every entry after a change of shape; last dimensions that stay need no copies."""
    keep = 0
    while keep < min(len(old) - 1 - row_axis.axis, len(new)) and old[-1 - keep] == new[-1 - keep]:
        keep += 1
    cut_old, cut_new = old[: len(old) - keep], new[: len(new) - keep]
    rows = row_axis.over(torch.Size(cut_old)).reshape(cut_new)
    return rows.reshape(*cut_new, *[1] * keep).expand(new)


def _row_axis(rows: torch.Tensor) -> RowAxis | None:
    """The one axis on which the row of every entry depends; None if there is none."""
    if rows.numel() == 0:
        return None
    # Along an axis without stride all entries are one.
    rows = rows[tuple([slice(0, 1) if stride == 0 else slice(None) for stride in rows.stride()])]
    for axis, size in enumerate(rows.shape):
        if size < 2:
            continue
        lines = rows.movedim(axis, 0).reshape(size, -1)
        most = lines.amax(1)
        least = torch.where(lines < 0, most.unsqueeze(1), lines).amin(1)
        if torch.equal(most, least) and bool((most != most[0]).any()):
            return RowAxis(axis, most)
    return None


def reduced(args: Any, kwargs: Any) -> tuple[int, ...]:
    """The dimensions that an operation was told to reduce, if it reduces any."""
    told = kwargs.get("dim", args[1] if len(args) > 1 else ())
    dims = told if isinstance(told, (list, tuple)) else (told,)
    return tuple(dims) if {int}.issuperset(map(type, dims)) else ()


def _computed_axis(
    source: torch.Tensor, row_axis: RowAxis, out: torch.Tensor, appends: bool, lost: tuple[int, ...]
) -> RowAxis | None:
    """Where rows lie after an operation that computes: on an axis of the same size, where it stood if it can be.

    Dimensions come in front, as they are broadcast, unless the operation ``appends`` them; those ``lost`` are gone where
    the result has so many less. Sizes alone would not do: a text may have as many tokens as there are rows.
    """
    more, size = out.dim() - source.dim(), row_axis.rows.shape[0]
    gone = {d % source.dim() for d in lost} if lost else set()
    if row_axis.axis in gone and (more or out.shape[row_axis.axis] != size):
        return None
    axis = row_axis.axis
    if more > 0 and not appends:
        axis += more
    elif more < 0 and len(gone) == -more:
        axis -= sum(d < axis for d in gone)
    if axis < out.dim() and out.shape[axis] == size:
        return RowAxis(axis, row_axis.rows)
    alike = [axis for axis in range(out.dim()) if out.shape[axis] == size]
    return RowAxis(alike[0], row_axis.rows) if len(alike) == 1 else None


def fold_between(
    fewer: tuple[int, ...],
    more: tuple[int, ...],
    row_axes: tuple[RowAxis | None, RowAxis | None],
    counts: tuple[int, int],
) -> BatchAxis | None:
    """The fold of a tensor that had these shapes on ``counts`` rows, both of them with rows; None if it has no known one.

    A first axis that grows with the rows is taken to hold them in order where nothing else is known.
    """
    grows = [axis for axis, (a, b) in enumerate(zip(fewer, more)) if a != b]
    a, b = row_axes
    if a is not None and b is not None and a.axis == b.axis and a.axis in grows:
        fold = a.fold(counts[0])
        return fold if fold == b.fold(counts[1]) else None
    axis = grows[0]
    if (fewer[axis], more[axis]) == counts:
        return BatchAxis(axis, None)
    return BatchAxis() if axis == 0 and fewer[0] % counts[0] == 0 and more[0] % counts[1] == 0 else None
