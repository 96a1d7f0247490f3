"""How the rows and tokens of a micro-batch belong to units, the things whose contribution is clipped."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fastdp.calls.batches import Call, take_tokens
from fastdp.engine.errors import UnsupportedUse
from fastdp.engine.uses.rows import BroadcastLayout
from fastdp.ops.placed import ReplayCache, copy_to_device
from fastdp.validate import first_line


@dataclass(frozen=True)
class Ticket:
    """What the loader tells the engine about one micro-batch.

    Args:
        row_units: for each row of the micro-batch its unit, non-decreasing and without gaps, ``[rows]`` int64.
        weights: one weight a unit, 1 for a real unit and 0 for padding, ``[units]`` float32.
        is_last: whether this micro-batch completes its logical batch.
        token_units: for packed rows, the unit of every token, ``[rows, tokens]`` int64, -1 where there is none; each
            unit is one contiguous run of the flattened rows.
        source: how the micro-batch was collated, where a loader knows.
        probe: for a batch that only verifies the training loop and adds to no sum, what it is to show.
        lengths: elements of each example before collation, where a loader knows them.
        in_eval: whether the model was in evaluation mode as the loader handed it out, and so is trained in it.
    """

    row_units: torch.Tensor
    weights: torch.Tensor
    is_last: bool
    token_units: torch.Tensor | None = None
    source: Any = None
    probe: Any = None
    lengths: tuple[int, ...] = ()
    in_eval: bool = False

    @functools.cached_property
    def rows(self) -> int:
        return (self.row_units if self.token_units is None else self.token_units).shape[0]

    def chosen_rows(self) -> list[int]:
        """Up to three rows, in their order: the shortest, the longest, and another drawn at random."""
        lengths, rows = self.lengths, range(self.rows)
        ends = {0, self.rows - 1}
        if len(lengths) == self.rows:
            # Of examples of one length, the first and the last.
            ends = {min(rows, key=lengths.__getitem__), max(reversed(rows), key=lengths.__getitem__)}
        rest = [row for row in rows if row not in ends]
        return sorted({*ends, *random.SystemRandom().sample(rest, min(3 - len(ends), len(rest)))})

    def failure(self, row: int, error: Exception) -> ValueError:
        """The refusal of a row on which the model fails when it is run alone."""
        example = f"row {row}" if self.source is None else f"example {self.source.indices[row]}"
        return ValueError(
            f"The model fails on {example} alone, as sampling may draw it. Repair it, or what the loop adds; this batch was not "
            f"released. ({first_line(error)})"
        )

    def segments(self, call: Call) -> Iterator[tuple[int, Call]]:
        """Of a call on packed rows each unit by itself, with its number among the layout's segments."""
        assert self.token_units is not None
        shape, layout = (self.token_units.shape[0], self.token_units.shape[1]), self.layout(torch.device("cpu"))
        assert layout.token_segments is not None
        for segment in layout.weights.nonzero()[:, 0].tolist():
            where = (layout.token_segments == segment).nonzero()
            row, start, end = int(where[0, 0]), int(where[0, 1]), int(where[-1, 1]) + 1
            if int(where[-1, 0]) != row:
                raise ValueError("a packed unit runs over the end of its row; keep each in one row")
            args, kwargs = call
            yield segment, (take_tokens(args, row, start, end, shape), take_tokens(kwargs, row, start, end, shape))

    def layout(self, device: torch.device) -> Layout:
        """The layout on ``device``; raises ValueError if a packed unit is not one contiguous run."""
        if self.token_units is None:
            units = self.weights.shape[0]
            # No unit is without a row.
            identity = units == self.row_units.shape[0]
            counts = torch.ones_like(self.row_units) if identity else torch.bincount(self.row_units, minlength=units)
            units_of = self.row_units.to(device, non_blocking=True)
            return Layout(self.rows, units_of, self.weights.to(device, non_blocking=True), counts, identity)
        flat = self.token_units.reshape(-1).cpu()
        starts = torch.ones_like(flat, dtype=torch.bool)
        starts[1:] = flat[1:] != flat[:-1]
        ids = flat[starts]
        real = ids[ids >= 0]
        if real.unique().numel() != real.numel():
            raise ValueError("a packed unit must be one contiguous run of tokens; one of this batch is split in two")
        weights = torch.where(ids >= 0, self.weights[ids.clamp(min=0)], 0.0)
        segments = starts.cumsum(0) - 1
        return Layout(
            self.rows,
            torch.arange(ids.numel(), device=device),
            weights.to(device, non_blocking=True),
            torch.bincount(segments),
            identity=True,
            token_segments=segments.view(self.token_units.shape).to(device, non_blocking=True),
        )


def _offsets(counts: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """The same tensor for the same units, so that tables that kernels make of it are made once; few, as these are long."""
    return copy_to_device(torch.tensor((0, *itertools.accumulate(counts)), dtype=torch.int64), device)


_OFFSETS = ReplayCache(_offsets, 8)


@dataclass
class Layout:
    """A micro-batch's map from rows (or packed tokens) to units, on the device of the model.

    ``lanes`` are the copies that expanded parameters have: one a row, or one a segment of packed rows. Units sum
    over lanes (a user's several rows), segments of padding are units of weight 0.
    """

    rows: int
    lane_units: torch.Tensor
    weights: torch.Tensor
    counts: torch.Tensor
    identity: bool
    token_segments: torch.Tensor | None = None
    #: How an operation (its name, the ids of the parameters on one side, the other's dimensions) meets a tensor, as traced.
    meetings: Mapping[tuple[str, frozenset[int], int], BroadcastLayout] = field(default_factory=dict)
    _offsets: dict[tuple[int, bool, bool], torch.Tensor] = field(default_factory=dict)

    @functools.cached_property
    def units(self) -> int:
        return self.weights.shape[0]

    @functools.cached_property
    def lanes(self) -> int:
        return self.lane_units.shape[0]

    def covers(self, tokens: int) -> bool:
        """Whether a flat axis of this many tokens can be cut into the rows.

        That it is made of the rows, in order, the trace knows: inputs of other shapes are traced anew (`Tracer.require_same`).
        """
        segments = self.token_segments
        return tokens % self.rows == 0 if segments is None else tokens == segments.numel()

    def offsets(self, tokens: int, *, laned: bool = False, host: bool = False) -> torch.Tensor:
        """Boundaries of the units on a flat axis of ``tokens`` tokens, int64 ``[units + 1]``; on the ``host``, or the device.

        ``laned`` says that the axis has one block of equal length a lane, as an expanded parameter has.
        Raises `UnsupportedUse` where the axis cannot be cut. Counts live on the CPU, so a GPU is never waited for.
        """
        key = tokens, laned, host
        if key not in self._offsets:
            packed = self.token_segments is not None
            if (tokens % self.lanes) if laned else not self.covers(tokens):
                raise UnsupportedUse(f"an axis of {tokens} tokens cannot be divided among {self.rows} rows")
            if packed and laned:
                counts = [tokens // self.lanes] * self.units
            else:
                each = 1 if packed else tokens // self.rows
                counts = [each * count for count in self.counts.tolist()]
            device = torch.device("cpu") if host else self.weights.device
            self._offsets[key] = _OFFSETS[tuple(counts), device]
        return self._offsets[key]

    def sum_lanes(self, values: torch.Tensor) -> torch.Tensor:
        """Sum ``[lanes, ...]`` to ``[units, ...]``."""
        if self.identity:
            return values
        out = values.new_zeros((self.units, *values.shape[1:]))
        return out.index_add_(0, self.lane_units, values)

    def by_lane(self, values: torch.Tensor) -> torch.Tensor:
        """Sum ``[k rows, ...]`` to ``[rows, ...]``; raises `UnsupportedUse` where rows are packed, and are no lanes."""
        if self.token_segments is not None or values.shape[0] % self.rows:
            raise UnsupportedUse(f"a value of {values.shape[0]} rows does not follow the unit map of {self.rows} rows")
        return values if values.shape[0] == self.rows else values.unflatten(0, (self.rows, -1)).sum(1)

    def spread(self, lanes: torch.Tensor, leading: torch.Size) -> torch.Tensor:
        """A tensor ``[lanes, ...]`` of packed rows as ``[rows, tokens, ...]``, the leading sizes of an activation.

        Raises `UnsupportedUse` if the activation is not of the map's shape.
        """
        assert self.token_segments is not None
        shape = self.token_segments.shape
        if leading[:2] != shape:
            raise UnsupportedUse(f"an activation of leading shape {tuple(leading[:2])} does not follow the unit map")
        return lanes.index_select(0, self.token_segments.reshape(-1)).unflatten(0, shape)
