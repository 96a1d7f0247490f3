"""The use of a vocabulary's head: norms and sums of its gradient from tiles of the logits, of whole units, one at a time.

With P = softmax - onehot the gradient of a unit's loss by the head's weight is ``sum_t w_t P_t h_t^T``, where w_t is how a
token's loss counts in the unit's. A tile holds ``w_t P_t`` of the tokens of a few units: it gives their losses, the gradients
of their hidden states, and either squared norms and products (by `fastdp.ops.gram_norms`, as of any factor pair) or, where
units are longer than twice the width, their whole gradients, which are then the smaller thing to keep. All of it happens in
the forward pass, since a unit's loss enters what is differentiated with one coefficient, which the backward pass brings.
Sums need tiles again, once the units' weights are known: made from the same numbers by the same calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

import fastdp.ops as ops
from fastdp.engine.bounds import REMEASURED, gammas
from fastdp.engine.errors import UnsupportedUse
from fastdp.engine.uses.factors import Factors
from fastdp.engine.uses.layout import Layout
from fastdp.engine.uses.logits import LOSS_CHUNK, TILE, Logits, Step, inputs, quiet, token_losses, widen
from fastdp.engine.uses.use import CaptureContext
from fastdp.ops.bounds import HEAD_SPAN
from fastdp.ops.factors import INT64_MAX
from fastdp.ops.heads import add_product_, cuts, even_rows, most_tokens, on_gpu
from fastdp.ops.placed import CONSTANTS
from fastdp.ops.routes import longest_by_gram

#: A product of a norm and a coefficient, and a weight of both, are rounded a few times to float32.
_ROUNDED = 1 + 2.0**-20
#: Of ids (by where they lie, and how many) and of each unit, the columns of its tile: ``[tokens, ids]``.
Columns = dict[tuple[int, int], dict[int, torch.Tensor]]


@dataclass
class Tiles:
    """Everything that tiles of one use are made of.

    Args:
        hidden: ``[N, d]``, ``weight`` ``[V, d]`` and ``bias`` ``[V]``, without a graph.
        steps: what the model does to the products.
        target, ignored: of the cross-entropy.
        counts: how a token's loss counts in its unit's, ``[N]``.
        offsets: where units begin on the axis of tokens, ``units + 1`` numbers.
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    steps: tuple[Step, ...]
    target: torch.Tensor
    ignored: int
    counts: torch.Tensor
    offsets: list[int]

    def __post_init__(self) -> None:
        self.even, self._bias = self.weight, self.bias
        if on_gpu(self.weight):
            self.even, self._bias = even_rows(self.weight), None if self.bias is None else even_rows(self.bias)

    def tile(self, start: int, end: int, losses: torch.Tensor | None = None) -> torch.Tensor:
        """``w_t P_t`` of some tokens, in the dtype of their products with the weight; fills in ``losses`` ``[N]``.

        On a GPU it may end in columns of zeros, of no entry of the vocabulary.
        """
        width = self.weight.shape[0]
        with quiet(self.hidden):
            tile = torch.nn.functional.linear(self.hidden[start:end], self.even, self._bias)
            if on_gpu(tile) and {widen}.issuperset(self.steps):
                labels = self.target[start:end], self.counts[start:end]
                found = ops.cross_entropy_gradient_(tile, *labels, self.ignored, width)
                if losses is not None:
                    losses[start:end] = found
                return tile
            for a, b in cuts(end - start, self.weight, LOSS_CHUNK):
                here = slice(start + a, start + b)
                with torch.enable_grad():
                    z = tile[a:b, :width].detach().requires_grad_()
                    found = token_losses(z, self.target[here], self.ignored, self.steps)
                    (own,) = torch.autograd.grad(found, z, self.counts[here].to(found.dtype))
                if losses is not None:
                    losses[here] = found.detach()
                tile[a:b, :width] = own
        return tile

    def _spans(self, parts: bool) -> Iterator[tuple[slice, slice]]:
        """Units and tokens of each tile; of units that fit in one together, or else of one that may be longer."""
        first = 0
        for unit in range(1, len(self.offsets)):
            start, end = self.offsets[first], self.offsets[unit]
            if parts:
                parts_of = cuts(end - start, self.weight, TILE)
                yield from ((slice(first, unit), slice(start + a, start + b)) for a, b in parts_of)
                first = unit
            elif unit == len(self.offsets) - 1 or self.offsets[unit + 1] - start > most_tokens(self.weight, TILE):
                yield slice(first, unit), slice(start, end)
                first = unit

    def of_units(
        self, losses: torch.Tensor | None = None, *, only: int | None = None, parts: bool = False
    ) -> Iterator[tuple[slice, slice, torch.Tensor, torch.Tensor]]:
        """The units of each tile (or of that of one unit), their tokens, their offsets among them, and the tile.

        Without tokens there is none. With ``parts`` a tile is of one unit, or of a part of one that is too long.
        """
        for units, tokens in self._spans(parts):
            if tokens.stop > tokens.start and (only is None or units.start <= only < units.stop):
                tile = self.tile(tokens.start, tokens.stop, losses)
                ends = [min(max(end, tokens.start), tokens.stop) for end in self.offsets[units.start : units.stop + 1]]
                yield units, tokens, _offsets(ends, tile.device), tile
                # Two tiles would stand beside each other while the next one is made.
                del tile


@dataclass(slots=True)
class HeadFactors(Factors):
    """A head's factor pair whose ``left`` is made tile by tile; as it stands here it says what was backpropagated.

    Args:
        left: the coefficient that each token's unit got, ``[N, 1]``; ``right`` the hidden states.
        tiles: what the true left factor is made of.
        shares: the coefficients ``[units]`` float64.
        norms: of the units' gradients before the coefficients.
        columns: of ids that the same matrix was read by as a table, what stood in their columns of the tiles.
    """

    tiles: Tiles = None  # type: ignore[assignment]
    shares: torch.Tensor = None  # type: ignore[assignment]
    norms: _Norms = None  # type: ignore[assignment]
    columns: Columns = field(default_factory=dict)

    tiled: ClassVar[bool] = True
    finds_norms: ClassVar[bool] = True

    @property
    def width(self) -> int:
        """Rows of the matrix, and columns of the factor that is made."""
        return self.tiles.weight.shape[0]

    @property
    def imprecise(self) -> torch.Tensor:
        """As the forward pass found it."""
        return self.norms.imprecise

    def dense(self) -> Factors:
        """The same as an ordinary factor pair, all of it in memory."""
        tiles = self.tiles
        left = torch.cat([tiles.tile(a, b) for a, b in cuts(tiles.hidden.shape[0], tiles.weight, TILE)])
        left = left[:, : self.width]
        return Factors(left * self.left.to(left.dtype), self.right)

    def powers(self, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
        """As the forward pass found them."""
        shares = self.shares
        return self.norms.squares * shares.square() * _ROUNDED, self.norms.products * shares.abs() * _ROUNDED

    def rounding(self) -> ops.Rounding:
        """The arithmetic of tiles."""
        return ops.Rounding(self.right, span=HEAD_SPAN)

    def lengths(self, layout: Layout) -> torch.Tensor:
        """As `Factors.lengths`, by how each token's loss counts."""
        return ops.token_counts([self.tiles.counts.unsqueeze(1)], [self.right], self.offsets(layout))[0]

    def inner(self, other: Factors, layout: Layout) -> torch.Tensor:
        """Inner products with the units' gradients of any other use of the same matrix, ``[units]`` float64."""
        other, bounds = other.dense(), other.offsets(layout, host=True).tolist()
        found = torch.zeros_like(self.shares)
        if not (other.one_hot and _identity(other.left) in self.columns):
            return self.dense().inner(other, layout).double()
        for unit, block in self.columns[_identity(other.left)].items():
            hidden = self.right[slice(*self.tiles.offsets[unit : unit + 2])]
            rows = other.right[slice(*bounds[unit : unit + 2])]
            ids = torch.arange(block.shape[1], device=block.device)
            one, two = (_offsets([0, size], block.device) for size in block.shape)
            found[unit] = ops.cross_inner(block, hidden, ids, rows, one, two)[0].double()
        return found * self.shares

    def add_to(self, total: torch.Tensor | None, weights: torch.Tensor, layout: Layout) -> torch.Tensor:
        """Add the units' gradients by ``weights`` ``[units]`` to ``total`` ``[V, d]``; a weight of 0 is left out."""
        assert total is not None
        self._add(total, weights)
        return total

    def unit_to(self, total: torch.Tensor, unit: int, offsets: Sequence[int]) -> None:
        """Add one unit's gradient to ``total``."""
        every = torch.zeros_like(self.shares, dtype=total.dtype)
        every[unit] = 1
        self._add(total, every, only=unit)

    def _add(self, total: torch.Tensor, weights: torch.Tensor, *, only: int | None = None) -> None:
        weights = torch.where(weights == 0, 0, weights.double() * self.shares).to(total.dtype)
        for units, tokens, offsets, tile in self.tiles.of_units(only=only):
            ops.weighted_sum(tile[:, : self.width], self.right[tokens], weights[units], total, offsets=offsets)
            del tile


def take(
    own: Logits,
    target: torch.Tensor,
    ignored: int,
    reduced: Callable[[torch.Tensor], torch.Tensor],
    context: CaptureContext,
    trained: tuple[torch.nn.Parameter | None, torch.nn.Parameter | None],
) -> torch.Tensor:
    """The units' losses ``[units]`` of a cross-entropy over logits, whose backward pass captures the head's use.

    Args:
        own: the logits ``[N, V]``; ``target`` ``[N]``, and ``ignored`` among them.
        reduced: makes the units' losses of the tokens'; linear, each token in one unit.
        context: of the forward pass.
        trained: weight and bias where they are.

    Raises `UnsupportedUse` where tokens are not in the order of the rows.
    """
    layout, tokens = context.layout, own.token_index.numel()
    if own.source.taken or (own.token_index.reshape(-1).diff() <= 0).any():
        raise UnsupportedUse("the model takes several losses of its logits, or takes them in another order")
    own.source.taken += 1
    hidden, weight, bias = inputs(own)
    with torch.enable_grad():
        leaf = torch.zeros(tokens, device=hidden.device, requires_grad=True)
        (counts,) = torch.autograd.grad(reduced(leaf).sum(), leaf)
    # Padding is no token of a unit's own.
    counts = counts.masked_fill(target == ignored, 0)
    lengths = layout.counts * (tokens // layout.rows) if layout.token_segments is None else layout.counts
    bounds = [0, *lengths.cumsum(0).tolist()]
    if bounds[-1] != tokens:
        raise UnsupportedUse("the model's loss leaves out tokens of packed rows")
    if layout.token_segments is None:
        # The row that a token came from is the row that its loss counts for.
        owners = own.token_index.reshape(-1) // max(1, own.source.hidden.shape[:-1].numel() // layout.rows)
        if not torch.equal(owners, torch.arange(tokens) // max(1, tokens // layout.rows)):
            raise UnsupportedUse("the model's loss leaves out whole rows of its logits")
    plain = hidden.detach(), weight.detach(), None if bias is None else bias.detach()
    made = Tiles(*plain, own.steps, target, ignored, counts, bounds)
    found: torch.Tensor = HeadUse.apply(hidden, weight, bias, made, reduced, context, trained)
    return found


class HeadUse(torch.autograd.Function):
    """Units' losses ``[units]`` of hidden states ``[N, d]``, with weight, bias, both or neither trained."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        made: Tiles,
        reduced: Callable[[torch.Tensor], torch.Tensor],
        context: CaptureContext,
        trained: tuple[torch.nn.Parameter | None, torch.nn.Parameter | None],
    ) -> torch.Tensor:
        units, (rows, width), device = context.layout.units, weight.shape, hidden.device
        losses = torch.zeros(hidden.shape[0], device=device, dtype=torch.promote_types(hidden.dtype, torch.float32))
        found = _HeadPass(made)
        ctx.context, ctx.trained, ctx.found = context, trained, found
        context.drops.append(found.drop)
        if ctx.needs_input_grad[0]:
            found.hidden = torch.zeros_like(made.hidden)
        if trained[1] is not None:
            found.bias = losses.new_zeros(units, rows)
        long = max((b - a for a, b in zip(made.offsets, made.offsets[1:])), default=0)
        read = [t.reshape(-1) for t in context.looked_up.get(id(trained[0]), []) if context.layout.covers(t.numel())]
        looked_up = [(t, context.layout.offsets(t.numel(), host=True).tolist()) for t in read]
        # On a processor the route is each unit's own.
        whole = on_gpu(weight) and ops.routes.is_allowed(
            "instantiate", rows, width, long, units, dtype=weight.dtype, device=device
        )
        if trained[0] is not None and whole:
            found.instances = losses.new_zeros(units, rows, width)
        elif trained[0] is not None:
            found.norms = _Norms(*(torch.zeros(units, dtype=torch.float64, device=device) for _ in range(2)))
        for own, here, offsets, tile in made.of_units(losses, parts=found.norms is None):
            found.back(tile, here)
            if found.bias is not None:
                found.bias[own] += ops.column_sums(tile, offsets)[:, :rows]
            if found.norms is not None:
                found.gather(own, tile, here.start, looked_up)
                found.norms.measure(own, tile, made.hidden[here], offsets)
            elif found.instances is not None:
                add_product_(found.instances[own.start], tile[:, :rows], made.hidden[here])
            del tile
        given: torch.Tensor = reduced(losses)
        return given

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        shares, found, layout = gradients[0], ctx.found, ctx.context.layout
        sink, made, (weight, bias) = ctx.context.open(), found.made, ctx.trained
        lengths = _offsets(made.offsets, shares.device).diff()
        each = shares.repeat_interleave(lengths, output_size=made.hidden.shape[0]).unsqueeze(1)
        if bias is not None:
            sink.instances(bias, _scale_instances(found.bias, shares), layout)
        if found.instances is not None:
            sink.instances(weight, _scale_instances(found.instances, shares), layout)
        elif weight is not None:
            known = {"tiles": made, "shares": shares.double(), "norms": found.norms, "columns": found.columns}
            factors = HeadFactors(each, made.hidden, **known)
            sink.matrix(weight, factors, layout)
        back = None
        if found.hidden is not None:
            # What takes no part sends back exact zeros, whatever it holds.
            back = torch.where(each == 0, 0, found.hidden * each.to(found.hidden.dtype)).to(found.hidden.dtype)
        return back, None, None, None, None, None, None


@dataclass
class _Norms:
    """Squared norms and products of units' gradients ``[units]`` float64, and whose squares the direct route found."""

    squares: torch.Tensor
    products: torch.Tensor

    def __post_init__(self) -> None:
        self.imprecise = torch.zeros_like(self.squares, dtype=torch.bool)

    def measure(self, units: slice, tile: torch.Tensor, hidden: torch.Tensor, offsets: torch.Tensor) -> None:
        """By Gram matrices, or directly where a unit is long or their rounding may hide too much."""
        wide, narrow = tile.shape[1], hidden.shape[1]
        span, most = (HEAD_SPAN, INT64_MAX) if on_gpu(tile) else (wide, longest_by_gram(wide, narrow))
        parts = list(tile.split(span, 1))
        squares = ops.gram_norms(parts, [hidden], [len(parts)], offsets, most)[0].double().sum(0)
        products, tokens = ops.row_products(tile, hidden, offsets)
        gram = ops.Rounding(tile, hidden, span=HEAD_SPAN).gram(wide, narrow)
        imprecise = (tokens > most) | (gammas([gram], tokens)[0] * products.square() > REMEASURED * squares)
        if imprecise.device.type != "cpu" or bool(imprecise.any()):
            squares = torch.where(
                imprecise, ops.chosen_sqnorm([tile], [hidden], offsets, imprecise[None])[0].double(), squares
            )
        self.squares[units], self.products[units], self.imprecise[units] = squares, products, imprecise


@dataclass
class _HeadPass:
    """What a head's forward pass found, until its backward pass is over: before units' coefficients are known."""

    made: Tiles | None
    #: Gradients of the hidden states ``[N, d]``, of the bias ``[units, V]``, and either of the weight or its norms.
    hidden: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    instances: torch.Tensor | None = None
    norms: _Norms | None = None
    columns: Columns = field(default_factory=dict)

    def gather(
        self, units: slice, tile: torch.Tensor, start: int, looked_up: list[tuple[torch.Tensor, list[int]]]
    ) -> None:
        """Keep the columns of a tile that the cross term with a table's rows will ask for."""
        assert self.made is not None
        for ids, ends in looked_up:
            for unit in range(units.start, units.stop):
                a, b = (end - start for end in self.made.offsets[unit : unit + 2])
                block = tile[a:b].index_select(1, ids[ends[unit] : ends[unit + 1]])
                self.columns.setdefault(_identity(ids), {})[unit] = block

    def back(self, tile: torch.Tensor, tokens: slice) -> None:
        """Send a tile back to its hidden states."""
        if self.hidden is not None and self.made is not None:
            with quiet(tile):
                torch.mm(tile, self.made.even, out=self.hidden[tokens])

    def drop(self) -> None:
        """Let go of all of it."""
        self.made = self.hidden = self.bias = self.instances = self.norms = None
        self.columns = {}


def _offsets(bounds: Sequence[int], device: torch.device) -> torch.Tensor:
    """Where units begin behind the first of these places, on the device: the same tensor in every step."""
    return CONSTANTS[tuple([place - bounds[0] for place in bounds]), torch.int64, device]


def _identity(ids: torch.Tensor) -> tuple[int, int]:
    """Ids as the same ones are known again; what is kept of them lives as long as they do."""
    return ids.data_ptr(), ids.numel()


def _scale_instances(instances: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """Whole gradients times their units' coefficients: mostly ones, and a copy of large things then is saved."""
    if instances.device.type == "cpu" and bool((shares == 1).all()):
        return instances
    by = shares.to(instances.dtype).view(-1, *[1] * (instances.dim() - 1))
    return (instances * by).masked_fill_(by == 0, 0)
