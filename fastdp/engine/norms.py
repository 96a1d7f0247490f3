"""Upper bounds of each unit's norms by group, from the captures of a backward pass as they arrive."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch

import fastdp.ops as ops
from fastdp.engine.bounds import Errors, Norms, UpperNorms, stacked
from fastdp.engine.constants import sent
from fastdp.engine.factors import Factors, PerUnit, joined
from fastdp.engine.head import REMEASURED
from fastdp.engine.layout import Layout
from fastdp.engine.sums import Captures, Route, Sums, as_matrix
from fastdp.ops.routes import plan

_T = TypeVar("_T")
#: The narrower side of matrices whose gradients wait for others, at most: wider ones fill a GPU by themselves.
_NARROW = 64
#: Sizes of uses whose constants are kept, at most.
_KEPT = 1 << 14


@dataclass(slots=True)
class Entry:
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


class _Constants(NamedTuple):
    """Of one use: the errors of its norms by Gram matrices and by the direct route."""

    gram: Errors
    direct: Errors


class _Found(NamedTuple):
    """One use of a parameter, the route to its norms, and their errors."""

    name: str
    use: Factors
    route: Route
    errors: _Constants


class _Grams(NamedTuple):
    """Uses whose norms were found by Gram matrices, ``[uses, units]``, kept until it is known whether they are good enough."""

    own: list[_Found]
    squares: torch.Tensor
    products: torch.Tensor


#: By the arithmetic and the sizes that they depend on, which are the same in every step.
_CONSTANTS: dict[tuple[object, ...], Any] = {}


def _once(sizes: tuple[object, ...], find: Callable[[], _T]) -> _T:
    """What ``find`` gives, which depends on ``sizes`` alone."""
    found = _CONSTANTS.get(sizes)
    if found is None:
        if len(_CONSTANTS) >= _KEPT:
            _CONSTANTS.clear()
        found = _CONSTANTS[sizes] = find()
    return found  # type: ignore[no-any-return]


class NormSink(Captures):
    """Computes upper bounds of norms as captures arrive; keeps what the weighted sums will need unless a second pass follows."""

    def __init__(
        self,
        sums: Sums,
        layout: Layout,
        expected: Mapping[str, int],
        *,
        keep: bool,
        instances: bool = False,
    ):
        super().__init__(sums)
        self.all_whole = instances
        self.layout = layout
        self.expected = expected
        self.keep = keep
        self.routes = sums.routes
        self.tables = sums.tables
        self.entries: dict[str, Entry] = {}
        self.norms = Norms(len(self.policy.bounds), layout.units, layout.weights.device)
        self._grams: list[_Grams] = []
        #: Uses that wait for their Gram matrices, in groups that read the same input (where it lies), by their axis of tokens.
        self._waiting: dict[tuple[int, bool], list[tuple[tuple[Any, ...], list[_Found]]]] = {}
        self._small: dict[tuple[int, bool], list[tuple[str, torch.Tensor, torch.Tensor]]] = {}
        self._held_bytes = 0
        #: Routes of uses, and their errors, by their sizes: a model has many of few.
        self._kinds: dict[tuple[object, ...], tuple[Route, _Constants]] = {}
        self.may_hold_bytes = may_hold(layout.weights.device) if keep else 0

    def entry(self, parameter: torch.nn.Parameter) -> tuple[str, Entry]:
        """A parameter's name, and what it has collected."""
        name = self.names[id(parameter)]
        found = self.entries.get(name)
        if found is None:
            found = self.entries[name] = Entry()
        return name, found

    def whole(self, parameter: torch.nn.Parameter, gradients: torch.Tensor, route: str, tokens: int) -> None:
        name, entry = self.entry(parameter)
        self.routes[name] = Route(route, parameter.numel(), 1, tokens, self.layout.units)
        entry.add(gradients)

    def matrix(self, parameter: torch.nn.Parameter, factors: Factors, layout: Layout) -> None:
        name, entry = self.entry(parameter)
        entry.uses += 1
        masked = bool(self.policy.masks) and name in self.policy.masks
        if masked:
            factors = factors.dense()
        found = self._found(name, factors)
        route = found.route.name
        # The gradient of a table has no small form, and its cross term with this use needs both as factors.
        small = route == "instantiate" and name not in self.tables
        self.routes[name] = Route("masked", *found.route[1:]) if masked and not small else found.route
        if small:
            self._instantiate(name, factors)
            return
        entry.factors.append(factors)
        if masked or self.expected.get(name, 1) > 1:
            return
        if entry.uses > 1:
            self.require_once(name, entry)
        if route == "gram":
            self._defer(found)
        else:
            add = self._add_tiled if factors.tiled else self._add_direct
            add(found)
            self.drop(entry)

    def _found(self, name: str, use: Factors) -> _Found:
        """A use with what its sizes and its arithmetic say of it."""
        left, right, entries = use.left, use.right, self.parameters[name].numel()
        kind = (entries, left.shape, left.dtype, right.shape, right.dtype, right.device, use.laned, use.tiled)
        known = self._kinds.get(kind)
        if known is None:
            rows = use.width or self.parameters[name].shape[0]
            route = Route(self._route(use, rows), rows, right.shape[1], right.shape[0], self.layout.units)
            known = self._kinds[kind] = route, self._constants(use, entries)
        return _Found(name, use, *known)

    def _route(self, use: Factors, rows: int) -> str:
        """How the norms of one use are found."""
        if use.tiled:
            return "tiles"
        if use.one_hot:
            return "row sums"
        if self.all_whole:
            return "instantiate"
        right, units = use.right, self.layout.units
        length = right.shape[0] // max(1, units)
        options: dict[str, Any] = {"keeps_factors": self.keep, "dtype": right.dtype, "device": right.device}
        return plan(rows, right.shape[1], length, units, **options)

    def require_once(self, name: str, entry: Entry) -> None:
        """Raise RuntimeError if a parameter that the trace saw used once has come again."""
        if entry.uses > 1:
            raise RuntimeError(f"{name} was used more often than when the model was traced; its norm cannot be trusted")

    def _add_tiled(self, found: _Found) -> None:
        """A vocabulary's head, whose tiles gave its norms in the forward pass."""
        (squares, products), poor = found.use.powers(self.layout), found.use.poor
        self._take(found, found.errors.direct, squares * poor, products * poor)
        self._take(found, found.errors.gram, squares * ~poor, products * ~poor)

    def _add_direct(self, found: _Found) -> None:
        use, offsets = found.use, found.use.offsets(self.layout)
        squares = ops.sqnorm(use.left, use.right, offsets, "direct")
        self._take(found, found.errors.direct, squares, use.row_products(self.layout))

    def _take(self, found: _Found, errors: Errors, squares: torch.Tensor, products: torch.Tensor) -> None:
        group = self.policy.group_of[found.name]
        assert isinstance(group, int)
        self.norms.add_rows([group], squares.unsqueeze(0), [errors], products.unsqueeze(0))

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

    def _instantiate(self, name: str, factors: Factors) -> None:
        """Wait for other small matrices (LoRA's): a GPU makes the gradients of all of them in one launch."""
        left, right = factors.oriented
        if not self.keep:
            self.note_products(name, factors)
        if min(left.shape[1], right.shape[1]) > _NARROW:
            self.entries[name].add(ops.per_unit(left, right, factors.offsets(self.layout)))
            return
        self._small.setdefault((right.shape[0], factors.laned), []).append((name, left, right))
        self._held_bytes += left.nbytes + right.nbytes
        if self._held_bytes > self.may_hold_bytes:
            self._flush_small()

    def _flush_small(self) -> None:
        for (tokens, laned), uses in self._small.items():
            names, lefts, rights = zip(*uses)
            gradients, squared = ops.per_unit_group(lefts, rights, self.layout.offsets(tokens, laned=laned))
            for name, gradient, row in zip(names, gradients, squared):
                self.entries[name].add(gradient, row)
        self._small.clear()
        self._held_bytes = 0

    def _defer(self, found: _Found) -> None:
        """Wait for other uses that read the same input (q, k and v; gate and up): its Gram matrix serves them all.

        On a GPU that keeps factors for the sums anyway, all inputs wait for each other: one launch measures them all.
        """
        right = found.use.right
        place = right.data_ptr(), right.shape, right.stride()
        groups = self._waiting.setdefault((right.shape[0], found.use.laned), [])
        if not groups or groups[-1][0] != place:
            if not self.may_hold_bytes:
                self._flush()
                groups = self._waiting.setdefault((right.shape[0], found.use.laned), [])
            groups.append((place, []))
        groups[-1][1].append(found)

    def _flush(self) -> None:
        for (tokens, laned), groups in self._waiting.items():
            if not groups:
                continue
            offsets = self.layout.offsets(tokens, laned=laned)
            pairs = [([found.use.left for found in own], own[0].use.right) for _, own in groups]
            squares, products = ops.gram_norms(pairs, offsets)
            self._grams.append(_Grams([found for _, own in groups for found in own], squares, products))
            for found in self._grams[-1].own if not self.keep else ():
                self.drop(self.entries[found.name])
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
        every = [found for grams in self._grams for found in grams.own]
        own = [group for found in every if isinstance(group := self.policy.group_of[found.name], int)]
        groups = sent(tuple(own), torch.int64, self.layout.weights.device)
        squares = stacked([found.squares for found in self._grams])
        products = stacked([found.products for found in self._grams])
        errors = [found.errors.gram for found in every]
        hidden = products.square()
        hidden *= sent(tuple([error.gram for error in errors]), torch.float64, hidden.device).unsqueeze(1)
        known = self.norms.measured().index_add_(0, groups, squares)
        poor = (torch.zeros_like(known).index_add_(0, groups, hidden) > REMEASURED * known)[groups]
        anew = poor.device.type != "cpu" or bool(poor.any())
        rests = products
        if anew:
            squares, products = squares.masked_fill(poor, 0), products.masked_fill(poor, 0)
            rests = rests.masked_fill(~poor, 0)
            self._measure([found.use for found in every], own, poor, rests, [found.errors.direct for found in every])
        self.norms.add_rows(own, squares, errors, products)
        self._grams.clear()

    def _measure(
        self,
        uses: Sequence[Factors],
        groups: Sequence[int],
        chosen: torch.Tensor,
        products: torch.Tensor,
        errors: Sequence[Errors],
    ) -> None:
        """Take norms by the direct route of chosen units, bool ``[uses, units]``, and 0 of the others."""
        axes: dict[tuple[int, bool], list[int]] = {}
        for at, use in enumerate(uses):
            axes.setdefault((use.right.shape[0], use.laned), []).append(at)
        for members in axes.values():
            own = [uses[at] for at in members]
            theirs, reach = chosen, products
            if len(axes) > 1:
                rows = sent(tuple(members), torch.int64, chosen.device)
                theirs, reach = chosen.index_select(0, rows), products.index_select(0, rows)
            lefts, rights = [use.left for use in own], [use.right for use in own]
            again = ops.chosen_sqnorm(lefts, rights, own[0].offsets(self.layout), theirs)
            self.norms.add_rows([groups[at] for at in members], again, [errors[at] for at in members], reach)

    def _constants(self, use: Factors, entries: int) -> _Constants:
        """The errors of one use, computed once for all of its size and arithmetic."""
        right, tokens, units, columns = use.right, use.longest(self.layout), self.layout.units, use.right.shape[1]

        def find() -> _Constants:
            rounding = use.rounding()
            relative, added = rounding.squares(entries), rounding.added(tokens, units)
            gram = Errors(entries, relative, rounding.gram(use.width, columns, tokens), added)
            return _Constants(gram, Errors(entries, relative, added=added + rounding.entry(tokens)))

        left = None if use.tiled else use.left.dtype
        return _once((left, right.dtype, right.device.type, use.width, columns, tokens, units, entries), find)

    def drop(self, entry: Entry) -> None:
        """Let go of factors that are measured, unless the weighted sums will need them."""
        if not self.keep:
            entry.factors.clear()

    def note_products(self, name: str, use: Factors, order: int = 2) -> None:
        """Of a use that is measured as an instance but added as factors: how far the two may be apart."""
        products, rounding = use.row_products(self.layout, order), use.rounding()
        entry = self.entries[name]
        entry.products = products if entry.products is None else entry.products + products
        # An instance may be made by a BLAS as well, in an order that is not known.
        entry.added += 2 * rounding.added(use.longest(self.layout), self.layout.units)

    def _add_instances(self, entries: dict[str, Entry]) -> None:
        """Take the norms of whole gradients, finding in one launch those that did not come with them."""
        unknown = {name: entry for name, entry in entries.items() if entry.squared is None}
        if unknown:
            instances = [entry.instance for entry in unknown.values() if entry.instance is not None]
            rows = ops.instance_sqnorm_group(instances)
            if all(entry.products is None for entry in unknown.values()):
                groups = [group for name in unknown if isinstance(group := self.policy.group_of[name], int)]
                errors = [self._of_instance(name, own) for name, own in zip(unknown, instances)]
                self.norms.add_rows(groups, rows, errors)
            else:
                for entry, row in zip(unknown.values(), rows):
                    entry.squared = row
        for name, entry in entries.items():
            if entry.squared is not None and entry.instance is not None:
                # An instance is added as it was measured.
                products = None if entry.products is None else entry.reach(entry.squared.double().sqrt())
                self.add_powers(name, entry.squared, ops.Rounding(entry.instance), products=products, added=entry.added)
            if not self.keep:
                entry.instance = entry.squared = None

    def _of_instance(self, name: str, instance: torch.Tensor) -> Errors:
        """The errors of a whole gradient's norm, which is added as it was measured."""
        entries = self.parameters[name].numel()
        return _once(
            (instance.dtype, instance.device.type, entries),
            lambda: Errors(entries, ops.Rounding(instance).squares(entries)),
        )

    def finish(self) -> UpperNorms:
        """Upper bounds of what each unit adds, complete."""
        self._flush()
        self._flush_small()
        self._judge()
        whole: dict[str, Entry] = {}
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

    def _several(self, name: str, entry: Entry) -> None:
        """Norm of a parameter used several times: of the summed gradient, cross terms included (rule 5)."""
        if entry.instance is not None:
            self._put_together(name, entry)
            return
        uses = joined([use.straight for use in entry.factors], self.layout)
        if len(uses) > 1:
            self._crossed(name, uses)
        elif uses[0].one_hot:
            self._add_direct(self._found(name, uses[0]))
        else:
            squares, products = uses[0].powers(self.layout)
            self._grams.append(_Grams([self._found(name, uses[0])], squares.unsqueeze(0), products.unsqueeze(0)))
        self.drop(entry)

    def _put_together(self, name: str, entry: Entry) -> None:
        """Make one whole gradient by unit of all that a parameter has collected."""
        uses = [use.dense() for use in entry.factors]
        if not self.keep:
            for use in uses:
                self.note_products(name, use)
        shape = self.parameters[name].shape
        if entry.instance is None:
            total = torch.zeros(self.layout.units, *shape, device=self.layout.weights.device)
        else:
            # Not in place: a second pass gets the same instance again, and other captures may be the same tensor.
            total = entry.instance.view(-1, *shape).clone()
        for use in uses:
            use.each_to(total.flatten(2), self.layout)
        entry.instance, entry.squared = total, None
        entry.factors.clear()

    def _crossed(self, name: str, uses: list[Factors]) -> None:
        """Uses of different kinds: a square each, and twice the inner product of each two."""
        group = self.policy.group_of[name]
        assert isinstance(group, int)
        square = torch.zeros(self.layout.units, dtype=torch.float64, device=self.layout.weights.device)
        products = torch.zeros_like(square)
        gram, tokens = 0.0, 0
        # What is tiled asks the others for an inner product.
        uses = sorted(uses, key=lambda use: use.tiled)
        for index, use in enumerate(uses):
            rounding, longest = use.rounding(), use.longest(self.layout)
            tokens += longest
            squares, sizes = use.powers(self.layout)
            square += squares
            products += sizes
            # The square of a table's rows is found from their sums, whose error counts twice.
            gram = max(gram, rounding.gram(use.width, use.right.shape[1], longest), 3 * rounding.entry(longest))
            for other in uses[:index]:
                square += 2 * use.inner(other, self.layout)
        rounding = ops.Rounding(*(factor for use in uses for factor in (use.left, use.right)))
        added = rounding.added(tokens, self.layout.units)
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

    def _masked(self, name: str, entry: Entry) -> None:
        mask = self.policy.masks[name]
        if len(entry.factors) == 1 and entry.instance is None:
            use = entry.factors[0]
            squared = ops.masked_sqnorm(*use.oriented, use.offsets(self.layout), as_matrix(mask))
            rounding, tokens = use.rounding(), use.longest(self.layout)
            added = rounding.entry(tokens) + rounding.added(tokens, self.layout.units)
            products: torch.Tensor | None = use.row_products(self.layout)
            self.drop(entry)
        else:
            if entry.factors:
                self._put_together(name, entry)
            assert entry.instance is not None
            squared = ops.instance_masked_sqnorm(entry.instance.view(-1, *mask.shape), mask)
            rounding, added = ops.Rounding(entry.instance), entry.added
            products = entry.reach(squared.double().sum(0).sqrt())
            if not self.keep:
                entry.instance = None
        self.add_powers(name, squared, rounding, products=products, added=added)


def may_hold(device: torch.device) -> int:
    """Bytes of factors that small matrices may hold back until they are multiplied in one launch.

    Every use holds what ordinary training has let go of by then. On a GPU a 32nd of its memory is far below what the
    activations of the layers between have left behind; on a processor there is no launch to save, so nothing waits.
    """
    return torch.cuda.get_device_properties(device).total_memory // 32 if device.type == "cuda" else 0
