"""From captured uses to clipped sums: norms per unit and group, scales from the policy, weighted sums."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

import fastdp.ops as ops
from fastdp.engine.axes import Scaled
from fastdp.engine.bounds import Norms, UpperNorms, stacked
from fastdp.engine.constants import sent
from fastdp.engine.head import REMEASURED, HeadFactors
from fastdp.engine.layout import Layout
from fastdp.engine.likeness import Compared, Likeness, Noting, require_alike
from fastdp.engine.policy import Policy
from fastdp.engine.ranks import Ranks
from fastdp.engine.uses import Factors, Sink
from fastdp.ops.routes import plan


@dataclass
class _Entry:
    """What one parameter has collected in a backward pass: factor pairs, and instantiated per-unit gradients."""

    factors: list[Factors] = field(default_factory=list)
    #: Uses in this pass, also of those whose factors are measured and let go of.
    uses: int = 0
    instance: torch.Tensor | None = None
    #: Squared norms of ``instance``, where they came with it.
    squared: torch.Tensor | None = None
    #: Of uses that a second pass will add as factors though their norms come from ``instance``: the scale of the rounding
    #: errors of both, and the constant of the largest.
    products: torch.Tensor | None = None
    added: float = 0.0

    def add(self, instance: torch.Tensor, squared: torch.Tensor | None = None) -> None:
        self.squared = squared if self.instance is None else None
        # Some uses know the parameter's shape and some a matrix's.
        self.instance = instance if self.instance is None else self.instance + instance.view_as(self.instance)

    def reach(self, norm: torch.Tensor) -> torch.Tensor | None:
        """`products` of all parts that are added apart, from the norm of the whole; None where the instance is added."""
        # Each part is no longer than the whole and the others together.
        return None if self.products is None else 3 * self.products + norm


@dataclass(frozen=True)
class _Gram:
    """A use whose norms were found by Gram matrices, kept until it is known whether they are good enough."""

    name: str
    left: torch.Tensor
    right: torch.Tensor
    offsets: torch.Tensor
    tokens: int
    squares: torch.Tensor
    products: torch.Tensor


@dataclass(frozen=True)
class Route:
    """How a parameter's norms were found in the latest pass, and the sizes that decided it."""

    name: str
    rows: int
    columns: int
    tokens: int
    units: int


class _Captures:
    """Common to both sinks: which parameter a capture belongs to."""

    def __init__(self, accumulator: Accumulator):
        self.names = accumulator.names
        self.parameters = accumulator.parameters
        self.policy = accumulator.policy

    def _per_unit(self, gradient: torch.Tensor, layout: Layout, laned: bool) -> torch.Tensor:
        """Sum token gradients ``[N, m]`` to ``[units, m]`` float32."""
        tokens = gradient.shape[0]
        if not laned and layout.token_segments is not None:
            if not layout.covers(tokens):
                raise ValueError(f"a bias over {tokens} tokens does not follow the unit map")
            out = gradient.new_zeros((layout.units, gradient.shape[1]), dtype=torch.float32)
            return out.index_add_(0, layout.token_segments.reshape(-1), gradient.float())
        lanes = gradient.view(layout.lanes, -1, gradient.shape[1])
        return layout.sum_lanes(lanes[:, 0].float() if lanes.shape[1] == 1 else lanes.sum(1, dtype=torch.float32))


class NormSink(_Captures):
    """Computes upper bounds of norms as captures arrive; keeps what the weighted sums will need unless a second pass follows."""

    def __init__(
        self,
        accumulator: Accumulator,
        layout: Layout,
        expected: Mapping[str, int],
        *,
        keep: bool,
        instances: bool = False,
    ):
        super().__init__(accumulator)
        self.whole = instances
        self.layout = layout
        self.expected = expected
        self.keep = keep
        self.routes = accumulator.routes
        self.tables = accumulator.tables
        self.entries: dict[str, _Entry] = {}
        self.norms = Norms(len(self.policy.bounds), layout.units, layout.weights.device)
        self._grams: list[_Gram] = []
        #: Uses that wait for their Gram matrices, in groups that read the same input, by their axis of tokens.
        self._waiting: dict[tuple[int, bool], list[tuple[torch.Tensor, list[tuple[str, torch.Tensor]]]]] = {}
        self._small: dict[tuple[int, bool], list[tuple[str, torch.Tensor, torch.Tensor]]] = {}
        self._held_bytes = 0
        self._may_hold_bytes = _may_hold(layout.weights.device) if keep else 0

    def entry(self, parameter: torch.nn.Parameter) -> tuple[str, _Entry]:
        """A parameter's name, and what it has collected."""
        name = self.names[id(parameter)]
        return name, self.entries.setdefault(name, _Entry())

    def tokens(self, parameter: torch.nn.Parameter, gradient: torch.Tensor, layout: Layout, laned: bool) -> None:
        name, entry = self.entry(parameter)
        self.routes[name] = Route("token sums", gradient.shape[1], 1, gradient.shape[0], layout.units)
        entry.add(self._per_unit(gradient, layout, laned))

    def vector(self, parameter: torch.nn.Parameter, lanes: torch.Tensor, layout: Layout) -> None:
        name, entry = self.entry(parameter)
        self.routes[name] = Route("expanded", parameter.numel(), 1, layout.lanes, layout.units)
        entry.add(layout.sum_lanes(lanes.float()))

    def instances(self, parameter: torch.nn.Parameter, gradients: torch.Tensor, layout: Layout) -> None:
        name, entry = self.entry(parameter)
        self.routes[name] = Route("instantiate", parameter.numel(), 1, layout.units, layout.units)
        entry.add(gradients.float())

    def matrix(self, parameter: torch.nn.Parameter, factors: Factors, layout: Layout) -> None:
        name, entry = self.entry(parameter)
        entry.uses += 1
        if isinstance(factors, HeadFactors):
            if name not in self.policy.masks:
                self._head(name, entry, factors)
                return
            factors = factors.dense()
        offsets = layout.offsets(factors.right.shape[0], laned=factors.laned)
        single = self.expected.get(name, 1) == 1
        tokens, columns = factors.right.shape
        rows = parameter.shape[0] if factors.one_hot else factors.left.shape[1]
        route = "instantiate"
        if factors.one_hot or not self.whole:
            route = plan(
                rows,
                columns,
                tokens // max(1, layout.units),
                layout.units,
                one_hot=factors.one_hot,
                keeps_factors=self.keep,
                dtype=factors.right.dtype,
                device=factors.right.device,
            )
        self.routes[name] = Route("row sums" if factors.one_hot else route, rows, columns, tokens, layout.units)
        # The gradient of a table has no small form, and its cross term with this use needs both as factors.
        if route == "instantiate" and not factors.one_hot and name not in self.tables:
            self._instantiate(name, factors)
            return
        if name in self.policy.masks:
            self.routes[name] = Route("masked", rows, columns, tokens, layout.units)
            entry.factors.append(factors)
            return
        entry.factors.append(factors)
        if not single:
            return
        self._require_once(name, entry)
        if route == "gram" and not factors.one_hot:
            self._defer(name, factors)
        else:
            self._add_direct(name, factors, offsets)
            self.drop(entry)

    def _require_once(self, name: str, entry: _Entry) -> None:
        if entry.uses > 1:
            raise RuntimeError(f"{name} was used more often than when the model was traced; its norm cannot be trusted")

    def _head(self, name: str, entry: _Entry, use: HeadFactors) -> None:
        """A vocabulary's head, whose tiles gave its norms in the forward pass."""
        self.routes[name] = Route("tiles", use.rows, use.right.shape[1], use.right.shape[0], self.layout.units)
        entry.factors.append(use)
        if self.expected.get(name, 1) > 1:
            return
        self._require_once(name, entry)
        rounding, longest, (squares, products) = use.rounding(), use.longest, use.powers()
        added = rounding.added(longest)
        both = added + rounding.entry(longest)
        poor = use.norms.poor
        self.add_powers(name, squares * poor, rounding, products=products * poor, added=both)
        gram = rounding.gram(use.rows, use.right.shape[1], longest)
        squares, products = squares * ~poor, products * ~poor
        self.add_powers(name, squares, rounding, products=products, gram=gram, added=added)
        self.drop(entry)

    def add_powers(
        self,
        name: str,
        powers: torch.Tensor,
        rounding: ops.Rounding,
        *,
        products: torch.Tensor | None = None,
        gram: float = 0.0,
        added: float = 0.0,
    ) -> None:
        """Take the powers of a parameter's gradient into its group, or of both its parts into two."""
        group, entries = self.policy.group_of[name], self.parameters[name].numel()
        parts = [(group, powers)] if isinstance(group, int) else list(zip(group, powers))
        for own, power in parts:
            relative = rounding.squares(entries)
            self.norms.add(own, power, entries, relative=relative, products=products, gram=gram, added=added)

    def _add_direct(self, name: str, use: Factors, offsets: torch.Tensor) -> None:
        rounding, tokens = ops.Rounding(use.left, use.right), self.longest(use)
        self.add_powers(
            name,
            ops.sqnorm(use.left, use.right, offsets, "direct"),
            rounding,
            products=ops.row_products(use.left, use.right, offsets),
            added=rounding.entry(tokens) + rounding.added(tokens),
        )

    def longest(self, use: Factors) -> int:
        """Tokens of the unit with the most of them."""
        return self.layout.longest(use.right.shape[0], laned=use.laned)

    def _instantiate(self, name: str, factors: Factors) -> None:
        """Wait for other small matrices (LoRA's): a GPU makes the gradients of all of them in one launch."""
        left, right = factors.oriented
        if not self.keep:
            self.note_products(name, factors)
        self._small.setdefault((right.shape[0], factors.laned), []).append((name, left, right))
        self._held_bytes += left.nbytes + right.nbytes
        if self._held_bytes > self._may_hold_bytes:
            self._flush_small()

    def _flush_small(self) -> None:
        for (tokens, laned), uses in self._small.items():
            names, lefts, rights = zip(*uses)
            gradients, squared = ops.per_unit_group(lefts, rights, self.layout.offsets(tokens, laned=laned))
            for name, gradient, row in zip(names, gradients, squared):
                self.entries[name].add(gradient, row)
        self._small.clear()
        self._held_bytes = 0

    def _defer(self, name: str, factors: Factors) -> None:
        """Wait for other uses that read the same input (q, k and v; gate and up): its Gram matrix serves them all.

        On a GPU that keeps factors for the sums anyway, all inputs wait for each other: one launch measures them all.
        """
        right = factors.right
        groups = self._waiting.setdefault((right.shape[0], factors.laned), [])
        same = (
            groups
            and groups[-1][0].data_ptr() == right.data_ptr()
            and groups[-1][0].shape == right.shape
            and groups[-1][0].stride() == right.stride()
        )
        if not same:
            if not self._may_hold_bytes:
                self._flush()
                groups = self._waiting.setdefault((right.shape[0], factors.laned), [])
            groups.append((right, []))
        groups[-1][1].append((name, factors.left))

    def _flush(self) -> None:
        for (tokens, laned), groups in self._waiting.items():
            if not groups:
                continue
            offsets = self.layout.offsets(tokens, laned=laned)
            longest = self.layout.longest(tokens, laned=laned)
            squares, products = ops.gram_norms([([left for _, left in own], right) for right, own in groups], offsets)
            uses = [(right, name, left) for right, own in groups for name, left in own]
            for (right, name, left), square, product in zip(uses, squares, products):
                self._grams.append(_Gram(name, left, right, offsets, longest, square, product))
                self.drop(self.entries[name])
        self._waiting.clear()
        if not self.keep:
            self._judge()

    def _judge(self) -> None:
        """Take the norms found by Gram matrices, and find those of the units anew for which they are not good enough.

        A unit's group decides, over all that is known of it, so that a matrix whose gradient vanishes beside the others' is
        not measured twice. On a GPU the units are chosen on the device, and nothing waits.
        """
        if not self._grams:
            return
        constants = [
            ops.Rounding(use.left, use.right).gram(use.left.shape[1], use.right.shape[1], use.tokens)
            for use in self._grams
        ]
        own = [self.policy.group_of[use.name] for use in self._grams]
        groups = sent(tuple(own), torch.int64, self.layout.weights.device)
        squares = stacked([use.squares for use in self._grams])
        products = stacked([use.products for use in self._grams])
        hidden = products.square()
        hidden *= sent(tuple(constants), torch.float64, hidden.device).unsqueeze(1)
        known = self.norms.measured().index_add_(0, groups, squares)
        poor = (torch.zeros_like(known).index_add_(0, groups, hidden) > REMEASURED * known)[groups]
        anew = poor.device.type != "cpu" or bool(poor.any())
        rests = products
        if anew:
            squares, products = squares.masked_fill(poor, 0), products.masked_fill(poor, 0)
            rests = rests.masked_fill(~poor, 0)
        for use, gram, square, product, rest, chosen in zip(self._grams, constants, squares, products, rests, poor):
            rounding = ops.Rounding(use.left, use.right)
            added = rounding.added(use.tokens)
            if anew:
                again = ops.chosen_sqnorm(use.left, use.right, use.offsets, chosen)
                both = rounding.entry(use.tokens) + added
                self.add_powers(use.name, again, rounding, products=rest, added=both)
            self.add_powers(use.name, square, rounding, products=product, gram=gram, added=added)
        self._grams.clear()

    def drop(self, entry: _Entry) -> None:
        """Let go of factors that are measured, unless the weighted sums will need them."""
        if not self.keep:
            entry.factors.clear()

    def note_products(self, name: str, use: Factors, order: int = 2) -> None:
        """Of a use that is measured as an instance but added as factors: how far the two may be apart."""
        offsets = self.layout.offsets(use.right.shape[0], laned=use.laned)
        products = ops.row_products(use.left, use.right, offsets, order)
        rounding, tokens = ops.Rounding(use.left, use.right), self.longest(use)
        entry = self.entries[name]
        entry.products = products if entry.products is None else entry.products + products
        # An instance may be made by a BLAS as well, in an order that is not known.
        entry.added += 2 * rounding.added(tokens)

    def _add_instances(self, entries: dict[str, _Entry]) -> None:
        """Take the norms of whole gradients, finding in one launch those that did not come with them."""
        unknown = [entry for entry in entries.values() if entry.squared is None]
        if unknown:
            rows = ops.instance_sqnorm_group([entry.instance for entry in unknown if entry.instance is not None])
            for entry, row in zip(unknown, rows):
                entry.squared = row
        for name, entry in entries.items():
            assert entry.instance is not None
            assert entry.squared is not None
            # An instance is added as it was measured.
            products = None if entry.products is None else entry.reach(entry.squared.double().sqrt())
            self.add_powers(name, entry.squared, ops.Rounding(entry.instance), products=products, added=entry.added)
            if not self.keep:
                entry.instance = entry.squared = None

    def finish(self) -> UpperNorms:
        """Upper bounds of what each unit adds, complete."""
        self._flush()
        self._flush_small()
        self._judge()
        whole: dict[str, _Entry] = {}
        for name, entry in self.entries.items():
            if name in self.policy.masks:
                self._masked(name, entry)
                continue
            if entry.factors and (self.expected.get(name, 1) > 1 or entry.instance is not None):
                self._several(name, entry)
            if entry.instance is not None:
                whole[name] = entry
                if not self.keep:
                    self._add_instances(whole)
                    whole.clear()
        self._add_instances(whole)
        self._judge()
        return self.norms.upper()

    def _several(self, name: str, entry: _Entry) -> None:
        """Norm of a parameter used several times: of the summed gradient, cross terms included (rule 5)."""
        layout = self.layout
        if entry.instance is not None:
            for use in entry.factors:
                if use.one_hot:
                    self._add_rows(name, entry, use)
                    continue
                use = use.dense() if isinstance(use, HeadFactors) else use
                left, right = use.oriented
                if not self.keep:
                    self.note_products(name, use)
                entry.add(ops.per_unit(left, right, layout.offsets(left.shape[0], laned=use.laned)))
            entry.factors.clear()
            return
        uses = _merge([use.straight for use in entry.factors], layout)
        if len(uses) == 1:
            self._one(name, uses[0])
        else:
            self._crossed(name, uses)
        self.drop(entry)

    def _add_rows(self, name: str, entry: _Entry, use: Factors) -> None:
        """Add what a table's rows got to whole gradients of a head that shares it: these were there anyway."""
        assert entry.instance is not None
        if not self.keep:
            self.note_products(name, use)
            # The second pass gets the same instance again.
            entry.instance = entry.instance.clone()
        every = torch.ones(use.right.shape[0], device=use.right.device)
        bounds = self.layout.offsets(use.right.shape[0], laned=use.laned).tolist()
        for gradient, a, b in zip(entry.instance, bounds, bounds[1:]):
            ops.weighted_sum(use.left[a:b], use.right[a:b], every[a:b], gradient.view(gradient.shape[0], -1))
        entry.squared = None

    def _one(self, name: str, use: Factors) -> None:
        """Uses that were joined to one."""
        offsets = self.layout.offsets(use.right.shape[0], laned=use.laned)
        if use.one_hot:
            self._add_direct(name, use, offsets)
            return
        squares, products = ops.gram_norms([([use.left], use.right)], offsets)
        self._grams.append(_Gram(name, use.left, use.right, offsets, self.longest(use), squares[0], products[0]))

    def _crossed(self, name: str, uses: list[Factors]) -> None:
        """Uses of different kinds: a square each, and twice the inner product of each two."""
        group = self.policy.group_of[name]
        assert isinstance(group, int)
        square = torch.zeros(self.layout.units, dtype=torch.float64, device=self.layout.weights.device)
        products = torch.zeros_like(square)
        gram, tokens = 0.0, 0
        for index, use in enumerate(uses):
            offsets = self.layout.offsets(use.right.shape[0], laned=use.laned)
            rounding, longest = ops.Rounding(use.left, use.right), self.longest(use)
            tokens += longest
            width = 0 if use.one_hot else use.left.shape[1]
            if isinstance(use, HeadFactors):
                width = use.rows
                squares, sizes = use.powers()
                square += squares
                products += sizes
            elif use.one_hot:
                square += ops.sqnorm(use.left, use.right, offsets)
                products += ops.row_products(use.left, use.right, offsets)
            else:
                squares, sizes = ops.gram_norms([([use.left], use.right)], offsets)
                square += squares[0]
                products += sizes[0]
            # The square of a table's rows is found from their sums, whose error counts twice.
            gram = max(gram, rounding.gram(width, use.right.shape[1], longest), 3 * rounding.entry(longest))
            for other in uses[:index]:
                others = self.layout.offsets(other.right.shape[0], laned=other.laned)
                if isinstance(use, HeadFactors):
                    square += 2 * use.inner(other, others)
                    continue
                if isinstance(other, HeadFactors):
                    square += 2 * other.inner(use, offsets)
                    continue
                square += 2 * ops.cross_inner(use.left, use.right, other.left, other.right, offsets, others)
        rounding = ops.Rounding(*(factor for use in uses for factor in (use.left, use.right)))
        added = rounding.added(tokens)
        poor = gram * products.square() > REMEASURED * (self.norms.measured()[group] + square)
        if poor.device.type == "cpu" and bool(poor.any()):
            # Such a unit's gradient is put together, one at a time; elsewhere its weight is what the bound allows.
            whole = PerUnit(uses, None, self.layout, self.parameters[name].shape)
            again = torch.zeros_like(square)
            for unit in poor.nonzero()[:, 0].tolist():
                again[unit] = ops.instance_sqnorm(whole[unit][None])[0]
            self.add_powers(name, again, rounding, products=torch.where(poor, products, 0), added=2 * added)
            square, products = torch.where(poor, 0, square), torch.where(poor, 0, products)
        self.add_powers(name, square, rounding, products=products, gram=gram, added=added)

    def _masked(self, name: str, entry: _Entry) -> None:
        mask = self.policy.masks[name]
        if len(entry.factors) == 1 and entry.instance is None:
            use = entry.factors[0]
            offsets = self.layout.offsets(use.right.shape[0], laned=use.laned)
            left, right = use.oriented
            squared = ops.masked_sqnorm(left, right, offsets, _as_matrix(mask))
            rounding, tokens = ops.Rounding(left, right), self.longest(use)
            added = rounding.entry(tokens) + rounding.added(tokens)
            products: torch.Tensor | None = ops.row_products(left, right, offsets)
            self.drop(entry)
        else:
            if not self.keep:
                for use in entry.factors:
                    self.note_products(name, use)
            if entry.factors:
                entry.instance = _materialise(entry, self.layout, mask.shape)
                entry.factors.clear()
            assert entry.instance is not None
            squared = ops.instance_masked_sqnorm(entry.instance.view(-1, *mask.shape), mask)
            rounding, added = ops.Rounding(entry.instance), entry.added
            products = entry.reach(squared.double().sum(0).sqrt())
            if not self.keep:
                entry.instance = None
        self.add_powers(name, squared, rounding, products=products, added=added)


def _as_matrix(mask: torch.Tensor) -> torch.Tensor:
    """A mask of two dimensions as it is, so that its packed bits are found again; others flattened behind the first."""
    return mask if mask.dim() == 2 else mask.flatten(1)


def _may_hold(device: torch.device) -> int:
    """Bytes of factors that small matrices may hold back until they are multiplied in one launch.

    Every use holds what ordinary training has let go of by then. On a GPU a 32nd of its memory is far below what the
    activations of the layers between have left behind; on a processor there is no launch to save, so nothing waits.
    """
    return torch.cuda.get_device_properties(device).total_memory // 32 if device.type == "cuda" else 0


def _merge(uses: list[Factors], layout: Layout) -> list[Factors]:
    """Join uses of one kind and length along each unit's tokens, so that k uses need one Gram and not k^2 cross terms."""
    first = uses[0]
    alike = not any(isinstance(u, HeadFactors) for u in uses) and all(
        u.one_hot == first.one_hot
        and u.swap == first.swap
        and u.laned == first.laned
        and u.right.shape == first.right.shape
        for u in uses
    )
    if len(uses) < 2 or not alike or layout.token_segments is not None:
        return uses

    def join(parts: list[torch.Tensor]) -> torch.Tensor:
        blocks = [p.reshape(layout.lanes, -1, *p.shape[1:]) for p in parts]
        return torch.cat(blocks, dim=1).flatten(0, 1)

    return [Factors(join([u.left for u in uses]), join([u.right for u in uses]), first.laned, first.swap)]


def _materialise(entry: _Entry, layout: Layout, shape: torch.Size) -> torch.Tensor:
    """Per-unit gradients ``[units, *shape]`` of a masked parameter that is used in several ways."""
    total = torch.zeros((layout.units, *shape), device=layout.weights.device)
    if entry.instance is not None:
        total += entry.instance.view(total.shape)
    flat = total.flatten(2)
    for use in entry.factors:
        offsets = layout.offsets(use.right.shape[0], laned=use.laned)
        if use.one_hot:
            every = torch.ones(use.right.shape[0], device=total.device)
            for unit, (start, end) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist())):
                ops.weighted_sum(use.left[start:end], use.right[start:end], every[start:end], flat[unit])
        else:
            left, right = use.oriented
            flat += ops.per_unit(left, right, offsets)
    return total


class PerUnit:
    """The gradients of one parameter, unit by unit, from all of its uses in a micro-batch; one at a time is in memory."""

    def __init__(self, uses: Sequence[Factors], instance: torch.Tensor | None, layout: Layout, shape: torch.Size):
        self.uses = [(use, layout.offsets(use.right.shape[0], laned=use.laned).tolist()) for use in uses]
        self.instance = instance
        self.shape = shape
        self.device = layout.weights.device

    def __getitem__(self, unit: int) -> torch.Tensor:
        """The gradient of one unit, float32 in the parameter's shape, newly made."""
        total = torch.zeros(self.shape, device=self.device)
        if self.instance is not None:
            total += self.instance[unit].reshape(self.shape)
        flat = total.view(total.shape[0], -1)
        for use, bounds in self.uses:
            here = slice(bounds[unit], bounds[unit + 1])
            if isinstance(use, HeadFactors):
                use.unit_to(flat, unit)
                continue
            left, right = use.oriented
            every = torch.ones(bounds[unit + 1] - bounds[unit], device=self.device)
            ops.weighted_sum(left[here], right[here], every, flat)
        return total


class SumSink(_Captures):
    """The second of two passes: adds each capture to the sums at once, so that no factor outlives its own backward."""

    def __init__(self, accumulator: Accumulator, factors: torch.Tensor):
        super().__init__(accumulator)
        self.accumulator = accumulator
        self.factors = factors

    def tokens(self, parameter: torch.nn.Parameter, gradient: torch.Tensor, layout: Layout, laned: bool) -> None:
        self._add(parameter, self._per_unit(gradient, layout, laned))

    def vector(self, parameter: torch.nn.Parameter, lanes: torch.Tensor, layout: Layout) -> None:
        self._add(parameter, layout.sum_lanes(lanes.float()))

    def instances(self, parameter: torch.nn.Parameter, gradients: torch.Tensor, layout: Layout) -> None:
        self._add(parameter, gradients.float())

    def _add(self, parameter: torch.nn.Parameter, instance: torch.Tensor) -> None:
        self.accumulator.add_instance(self.names[id(parameter)], instance, self.factors)

    def matrix(self, parameter: torch.nn.Parameter, factors: Factors, layout: Layout) -> None:
        self.accumulator.add_factors(self.names[id(parameter)], factors, self.factors, layout)


class Accumulator:
    """Clipped sums of one logical batch, float32, and what may be said about how they came about.

    Args:
        parameters: the trained parameters by name.
        policy: groups, bounds and noise; may be replaced between logical batches.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], policy: Policy):
        self.parameters = parameters
        self.names = {id(p): name for name, p in parameters.items()}
        self.policy = policy
        self.routes: dict[str, Route] = {}
        #: Parameters that some use reads by row; the engine's trace says which.
        self.tables: frozenset[str] = frozenset()
        #: The most tokens that one product added up, of all units and of one.
        self.most_tokens = self.longest = 1
        self.reset()

    def reset(self) -> None:
        """Forget the sums: a new logical batch begins."""
        self.sums: dict[str, torch.Tensor] = {}
        self.nonfinite: torch.Tensor | int = 0
        self.unclipped: torch.Tensor | int = 0
        self.units: torch.Tensor | int = 0
        #: The bounds that this batch is clipped by, once its first unit was.
        self.bounds: tuple[float, ...] | None = None
        #: Of each micro-batch in two passes, which captures the second made otherwise.
        self.compared: list[Compared] = []

    def require_alike(self) -> None:
        """Raise `SelfCheckError`, naming a parameter, if a second backward pass added what the first had not measured.

        On a GPU this waits for the device, so it is for the release to ask.
        """
        for compared in self.compared:
            require_alike(compared)
        self.compared.clear()

    def merge(self, ranks: Ranks) -> None:
        """Make the sums, and what is said about them, those of the whole logical batch: of all ranks' micro-batches."""
        if ranks.size == 1:
            return
        ranks.add(self.sums, self.parameters)
        counts = [int(count) for count in (self.units, self.unclipped, self.nonfinite)]
        every, most, longest = zip(*ranks.gather((counts, self.most_tokens, self.longest)))
        self.units, self.unclipped, self.nonfinite = map(sum, zip(*every))
        self.most_tokens, self.longest = max(most), max(longest)

    def run(
        self,
        backward: Callable[[bool], None],
        open_sink: Callable[[object], None],
        layout: Layout,
        expected: Mapping[str, int],
        *,
        two_pass: bool,
        instances: bool = False,
    ) -> None:
        """Clip and add one micro-batch.

        Args:
            backward: runs the model's backward pass; its argument says whether the graph must survive it.
            open_sink: connects the pass's captures to a sink.
            expected: how often each parameter is used in a forward pass, as traced.
            two_pass: run the backward pass twice and keep no factor: for gradient checkpointing, where memory is short.
            instances: make each unit's gradient of every matrix at once and keep no factor, in one pass: see `fit`.
        """
        norms = NormSink(self, layout, expected, keep=not two_pass, instances=instances)
        first, again = Likeness(self.names), Likeness(self.names)
        open_sink(Noting(self._scaled(norms), first) if two_pass else self._scaled(norms))
        backward(two_pass)
        factors = self.factors(norms.finish(), layout.weights)
        self.most_tokens = max(self.most_tokens, *(route.tokens for route in self.routes.values()), 1)
        self.longest = max(self.longest, *(route.tokens // max(1, route.units) for route in self.routes.values()), 1)
        if two_pass:
            again.places = first.places
            open_sink(Noting(self._scaled(SumSink(self, factors)), again))
            backward(False)
            self.compared.append(first.compared(again))
            if layout.weights.device.type == "cpu":
                self.require_alike()
            return
        whole: dict[str, torch.Tensor] = {}
        held, most = 0, _may_hold(layout.weights.device)
        while norms.entries:
            name, entry = norms.entries.popitem()
            if entry.instance is not None:
                whole[name], entry.instance = entry.instance, None
                held += whole[name].nbytes
                if held > most:
                    self.add_instances(whole, factors)
                    whole, held = {}, 0
            while entry.factors:
                self.add_factors(name, entry.factors.pop(), factors, layout)
        self.add_instances(whole, factors)

    def _scaled(self, sink: Sink) -> Sink:
        """The sink, or one before it that divides by the policy's axes."""
        for name, axes in self.policy.axes.items():
            axes.check(name, self.parameters[name].shape)
        return Scaled(sink, self.policy.axes, self.names) if self.policy.axes else sink

    def fit(self, units: int, available: int) -> bool:
        """Whether every unit's whole gradient of all parameters takes at most ``available`` bytes, and can be made at all."""
        return not self.tables and 4 * units * sum(p.numel() for p in self.parameters.values()) <= available

    def add_unit(self, instances: Mapping[str, torch.Tensor], weight: torch.Tensor) -> None:
        """Clip and add one unit from its whole gradients ``[1, ...]``, weight ``[1]``: the one-example route."""
        policy = self.policy
        norms = Norms(len(policy.bounds), 1, weight.device)
        if policy.axes:
            whole = {name: axes.whole(self.parameters[name].shape) for name, axes in policy.axes.items()}
            instances = {name: own / whole[name] if name in whole else own for name, own in instances.items()}
        for name, instance in instances.items():
            group, entries = policy.group_of[name], instance.numel()
            relative = ops.Rounding(instance).squares(entries)
            if isinstance(group, tuple):
                parts = ops.instance_masked_sqnorm(instance, policy.masks[name])
                for side, squared in zip(group, parts):
                    norms.add(side, squared, entries, relative=relative)
            else:
                norms.add(group, ops.instance_sqnorm(instance), entries, relative=relative)
        factors = self.factors(norms.upper(), weight)
        for name, instance in instances.items():
            self.add_instance(name, instance, factors)

    def factors(self, upper: UpperNorms, weights: torch.Tensor) -> torch.Tensor:
        """Scales ``[groups, units]`` of the policy times the units' weights, counting what was dropped or left whole."""
        self.require_one_clip()
        self.bounds = self.policy.bounds
        real = weights > 0
        scales = self.policy.scales(upper)
        self.nonfinite = self.nonfinite + (real & (scales == 0).all(0)).sum()
        self.unclipped = self.unclipped + (real & (scales >= 1).all(0)).sum()
        self.units = self.units + real.sum()
        return torch.where(real, scales * weights, 0.0)

    def require_one_clip(self) -> None:
        """Raise RuntimeError if the policy's bounds are not those that this batch was clipped by so far."""
        if self.bounds not in (None, self.policy.bounds):
            raise RuntimeError(
                f"this logical batch was clipped to {self.bounds} and the policy now says {self.policy.bounds}: change bounds "
                "between logical batches alone, as noise belongs to the bounds that the sums were clipped to"
            )

    def _weights(self, name: str, factors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        group = self.policy.group_of[name]
        if isinstance(group, tuple):
            return factors[group[0]], factors[group[1]]
        return factors[group], None

    def add_instances(self, instances: Mapping[str, torch.Tensor], factors: torch.Tensor) -> None:
        """Add instantiated gradients ``[units, ...]`` of several parameters: in one launch all that have no mask."""
        plain = []
        for name, instance in instances.items():
            if isinstance(self.policy.group_of[name], tuple):
                self.add_instance(name, instance, factors)
            else:
                plain.append(name)
        if not plain:
            return
        own = [group for name in plain if isinstance(group := self.policy.group_of[name], int)]
        weights = factors.index_select(0, sent(tuple(own), torch.int64, factors.device))
        shaped = [instances[name].reshape(-1, *self.parameters[name].shape) for name in plain]
        totals = dict(zip(plain, ops.instance_sum_group(shaped, weights)))
        again = [name for name in plain if name in self.sums]
        if again:
            torch._foreach_add_([self.sums[name] for name in again], [totals.pop(name) for name in again])
        self.sums |= totals

    def add_instance(self, name: str, instance: torch.Tensor, factors: torch.Tensor) -> None:
        """Add instantiated per-unit gradients ``[units, ...]``; rows of weight 0 are selected out, NaN and all."""
        weights, outside = self._weights(name, factors)
        instance = instance.reshape(-1, *self.parameters[name].shape)
        if outside is None:
            total = ops.instance_sum(instance, weights)
        else:
            total = ops.instance_masked_sum(instance, weights, outside, self.policy.masks[name])
        self._sum(name, total)

    def _sum(self, name: str, total: torch.Tensor) -> None:
        if name in self.sums:
            self.sums[name] += total
        else:
            self.sums[name] = total

    def add_factors(self, name: str, use: Factors, factors: torch.Tensor, layout: Layout) -> None:
        """Add one use's weighted sum."""
        inside, outside = self._weights(name, factors)
        if isinstance(use, HeadFactors) and outside is not None:
            use = use.dense()
        offsets = layout.offsets(use.right.shape[0], laned=use.laned)
        shape = self.parameters[name].shape
        out = self.sums.get(name)
        if out is None and use.one_hot:
            out = self.sums[name] = torch.zeros(shape, device=use.right.device)
        flat = None if out is None else out.view(shape[0], -1)
        if isinstance(use, HeadFactors):
            if flat is None:
                out = self.sums[name] = torch.zeros(shape, device=use.right.device)
                flat = out.view(shape[0], -1)
            use.add_to(flat, inside)
            self.compared += use.unlike(name)
            if flat.device.type == "cpu":
                self.require_alike()
            return
        left, right = use.oriented
        if outside is None:
            flat = ops.weighted_sum(left, right, inside, flat, offsets=offsets)
        else:
            mask = _as_matrix(self.policy.masks[name])
            flat = ops.masked_weighted_sum(left, right, inside, outside, mask, flat, offsets)
        if out is None:
            self.sums[name] = flat.view(shape)
