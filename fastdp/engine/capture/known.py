"""Which calls the trace of the first one explains, and what later ones add to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from fastdp.calls.batches import Call, Path, RowNumbers, leaves, tensors
from fastdp.calls.randomness import unchanged
from fastdp.engine.capture.trace import Trace, Tracer
from fastdp.engine.errors import Unseen, UnsupportedUse
from fastdp.engine.uses.use import Tap

#: Each is looked at as the first batch is.
_MOST_WAYS = 16


class TraceCache:
    """The shapes of inputs that were explained, with those that uses then had.

    Args:
        tracer: of the model.
        plain: the model's own forward pass.
    """

    def __init__(self, tracer: Tracer, plain: Callable[..., Any]):
        self._tracer, self._plain = tracer, plain
        self._shapes: dict[Any, frozenset[Any]] = {}
        #: The ways through the model that were looked at: a pass's kinds of uses, whatever the lengths of inputs.
        self._ways: set[frozenset[Any]] = set()
        #: The uses of passes that were explained, by the rows and the shapes of their inputs: asked first.
        self.explained: dict[Any, frozenset[Any]] = {}
        #: Whether the trace has learned something since that no pass of a whole batch was looked at for.
        self.learned = False

    def new(self, first: Trace | None, inputs: list[tuple[Path, torch.Tensor]], rows: int) -> bool:
        """Whether a call has tensors, or sizes, that need a look of their own."""
        assert first is not None
        found = dict(inputs)
        return not _plain(first, found, rows) or (bool(self._shapes) and _inputs(first, found) not in self._shapes)

    def add(self, first: Trace | None, call: Call, rows: int) -> None:
        """Decide again what carries rows where a call has tensors, or sizes, that the first one did not explain.

        Raises ValueError for a call of another number of rows.
        """
        assert first is not None
        found = dict(leaves(call))
        lengths = [len(found[path]) for path in first.carriers & found.keys() if found[path].dim()]
        if lengths and rows not in lengths:
            raise ValueError(wrong_rows(call, rows))
        if _plain(first, found, rows):
            return
        self.explained.clear()
        with unchanged(self._tracer.model):
            latest = self._tracer.trace(self._plain, call, rows)
        first.carriers = latest.carriers | (first.carriers - found.keys())
        first.paths = first.paths | latest.paths

    def explain(self, first: Trace | None, call: Call, rows: int) -> None:
        """Have the trace learn where a call goes that it has not seen, as one without padding does.

        All rows are traced, since a few of them may go another way. Raises `UnsupportedUse` where this trace contradicts the
        first, or ways are too many to look at.
        """
        assert first is not None
        if len(self._ways) > _MOST_WAYS:
            raise UnsupportedUse(f"batches go more than {_MOST_WAYS} ways through the model")
        self.learned = True
        self.explained.clear()
        with unchanged(self._tracer.model):
            first.add(self._tracer.trace(self._plain, call, rows, (max(2, rows), max(2, rows) + 1)))

    def stray(self, first: Trace | None, call: Call, rows: int) -> UnsupportedUse | None:
        """What says that a call goes another way through the model than the first one did; None if it does not."""
        assert first is not None
        try:
            with unchanged(self._tracer.model):
                self._tracer.require_same(first, self._plain, call, rows)
        except UnsupportedUse as error:
            return error
        return None

    def require(self, first: Trace | None, call: Call, rows: int, tap: Tap, *, looked_at: bool) -> bool:
        """Raise `UnsupportedUse` unless a trace explains inputs of these shapes, and the uses' shapes follow from them.

        Or from the way that the pass went, if one that went so was ``looked_at``, as the first is; `Unseen` if none was.

        Returns whether the shapes of the inputs tell those of the uses.
        """
        assert first is not None
        found = dict(leaves(call))
        inputs = sizes = _inputs(first, found)
        if looked_at or not self._ways:
            self._ways.add(_way(sizes, tap))
            self.learned = False
        if self.learned:
            raise Unseen("a look at a few rows met what the batch as a whole was not looked at for")
        told = RowNumbers not in map(type, found.values())
        if not told:
            # The shape of a list does not tell how long its entries are.
            inputs |= tap.shapes
        # The first pass is the one that was traced.
        if self._shapes and inputs not in self._shapes:
            with unchanged(self._tracer.model):
                self._tracer.require_same(first, self._plain, call, rows)
        seen = self._shapes.setdefault(inputs, frozenset(tap.shapes))
        gone = {operation for operation, _ in seen - tap.shapes} if tap.shapes - seen else set()
        for operation, shape in tap.shapes - seen:
            reason = f"the input of {operation} has shape {list(shape)} a row, by no reason of the batch's shapes"
            if operation in gone:
                raise UnsupportedUse(reason)
            if _way(sizes, tap) not in self._ways:
                raise Unseen(reason)
        self._shapes[inputs] = seen | tap.shapes
        return told


def _way(inputs: frozenset[Any], tap: Tap) -> frozenset[Any]:
    """A pass's kinds of uses, in whose shapes the lengths of inputs are named and not told."""
    ordered = sorted(inputs, key=str)
    names = {size: (path, axis) for path, shape in reversed(ordered) for axis, size in enumerate(shape)}
    return frozenset([(operation, tuple([names.get(size, size) for size in shape])) for operation, shape in tap.shapes])


def _plain(first: Trace, found: Mapping[Path, torch.Tensor], rows: int) -> bool:
    """Whether what carried rows in the first call does in this one, and nothing new does."""
    long = {path for path, t in found.items() if t.dim() and t.shape[0] == rows}
    carriers = first.carriers & found.keys()
    return bool(carriers) and carriers <= long and not (long - carriers - first.paths)


def _inputs(first: Trace, found: Mapping[Path, torch.Tensor]) -> frozenset[Any]:
    """The shapes of a call's tensors; a row's, of those that carry rows."""
    return frozenset([(path, t.shape[1:] if path in first.carriers else t.shape) for path, t in found.items()])


def wrong_rows(call: Call, rows: int) -> str:
    """The refusal of a call that is not what the loader handed out."""
    found = {path: t.shape for path, t in leaves(call) if t.dim() > 1}
    if rows > 1 and found and all(shape[0] == 1 for shape in found.values()):
        lacking = any(path[-1] == "seq_idx" for path in found)
        return "This collator packs examples into one row. Pass unit_map='seq_idx' and set use_cache=False." + (
            "" if lacking else " Make the collator with return_seq_idx=True."
        )
    sizes = sorted({t.shape[0] for t in tensors(call) if t.dim()})
    return (
        f"the loader handed out {rows} rows but the model was called with {', '.join(map(str, sizes)) or 'none'}: pass each "
        "batch once, and concatenate inside a wrapper module's forward()"
    )
