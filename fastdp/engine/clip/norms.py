"""Upper bounds of each unit's norms by group, from the captures of a backward pass as they arrive."""

from __future__ import annotations

import functools
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch

import fastdp.ops as ops
from fastdp.engine.bounds import NONE, REMEASURED, Errors, Norms, UpperNorms, gammas
from fastdp.engine.clip.grams import FactorBatch, Grams, RoutedUse, RouteErrors
from fastdp.engine.clip.sums import Captures, Route, Sums, as_matrix, launches
from fastdp.engine.uses.experts import join_experts
from fastdp.engine.uses.factors import Factors, PerUnit, join_uses
from fastdp.engine.uses.layout import Layout
from fastdp.ops.matrices import Matrices
from fastdp.ops.placed import CONSTANTS
from fastdp.ops.routes import NARROW, is_allowed, plan_route

_T = TypeVar("_T")
#: Sizes of uses whose constants are kept, at most.
_MOST_CONSTANTS = 1 << 14
#: Bytes of factors that are measured together on a processor.
_IN_CACHE = 1 << 20
#: Plans of a model's uses that are kept, at most: one for each length of batches.
_PLANS = 256


@dataclass(slots=True)
class Entry:
    """What one parameter has collected in a backward pass: factor pairs, and instantiated per-unit gradients."""

    factors: list[Factors] = field(default_factory=list)
    #: Uses in this pass, also of those whose factors are measured and let go of.
    uses: int = 0
    instance: torch.Tensor | None = None
    #: Squared norms of ``instance``, where they came with it.
    squared: torch.Tensor | None = None
    #: Whether the norms of ``instance`` were taken as it came.
    measured: bool = False
    #: For uses whose norms come from ``instance`` and that may be added as factors: their `Factors.row_products`, and by what
    #: share of these rounding may move the sum away from what was measured, ``[units]`` each.
    products: torch.Tensor | None = None
    added: torch.Tensor | None = None

    def add(self, instance: torch.Tensor, squared: torch.Tensor | None = None) -> None:
        self.squared = squared if self.instance is None else None
        # Some uses know the parameter's shape and some a matrix's.
        self.instance = instance if self.instance is None else self.instance + instance.view_as(self.instance)

    def reach(self, norm: torch.Tensor) -> torch.Tensor | None:
        """How far the added sum may be from ``instance``, whose norm is given; None where the instance itself is added."""
        # Each part and their sum round; a part is at most as long as the instance and the other parts (triangle inequality).
        return None if self.products is None or self.added is None else self.added * (3 * self.products + norm)


class _Plan(NamedTuple):
    """How uses that were captured together are measured: the indices of those on each route; routes and errors of all."""

    gram: tuple[int, ...]
    direct: tuple[int, ...]
    small: tuple[int, ...]
    #: Instantiated on a GPU to be measured, and again for the sums, as their factors take less memory meanwhile.
    repeats: tuple[int, ...]
    routes: dict[str, Route]
    errors: tuple[RouteErrors, ...]


#: By the arithmetic and the sizes that they depend on, which are the same in every step.
_CONSTANTS: dict[tuple[object, ...], Any] = {}


def _cached(sizes: tuple[object, ...], find: Callable[[], _T]) -> _T:
    """What ``find`` gives, which depends on ``sizes`` alone."""
    found = _CONSTANTS.get(sizes)
    if found is None:
        if len(_CONSTANTS) >= _MOST_CONSTANTS:
            _CONSTANTS.clear()
        found = _CONSTANTS[sizes] = find()
    return found  # type: ignore[no-any-return]


def _is_small(route: Route, right: torch.Tensor) -> bool:
    """Whether gradients by unit take little memory beside their factors."""
    sizes = route.rows, route.columns, route.tokens // max(1, route.units), route.units
    return route.columns == 1 or is_allowed("instantiate", *sizes, dtype=right.dtype, device=right.device)


class NormSink(Captures):
    """Computes upper bounds of norms as captures arrive; keeps what the weighted sums will need unless a second pass follows."""

    def __init__(self, sums: Sums, layout: Layout, expected: Mapping[str, int], *, keep: bool):
        super().__init__(sums)
        self.layout, self.expected, self.keep = layout, expected, keep
        self.routes, self._cuts_sums = sums.routes, sums.weights.cuts_sums
        self.tables, self.plans = sums.tables, sums.plans
        self.entries: defaultdict[str, Entry] = defaultdict(Entry)
        self.norms = Norms(len(self.policy.bounds), layout.units, layout.weights.device)
        self._launches = launches(layout.weights.device)
        self._grams = Grams(self.norms, self.policy, layout, self._launches)
        #: What was measured together: factors in batches, and per-unit gradients by name.
        self.batches: list[FactorBatch] = []
        self.wholes: dict[str, torch.Tensor] = {}
        #: Factors whose per-unit gradients were measured and freed: the sums make the same gradients again.
        self.repeats: list[FactorBatch] = []
        #: Batches that wait for their Gram matrices; and single uses that do, all of which read the same input.
        self._by_gram: list[FactorBatch] = []
        self._waiting: list[RoutedUse] = []
        #: Uses that wait for all others, where they may: matrices in memory without a mask, each the only one of its parameter.
        self._captured: list[tuple[torch.nn.Parameter, Factors]] = []
        self._held_bytes = 0
        #: Routes of uses, and their errors, by their sizes: a model has many of few.
        self._kinds: dict[tuple[object, ...], tuple[Route, RouteErrors]] = {}
        self.may_hold_bytes = may_hold(layout.weights.device) if keep else 0

    def entry(self, parameter: torch.nn.Parameter) -> tuple[str, Entry]:
        """A parameter's name, and what it has collected."""
        name = self.names[id(parameter)]
        return name, self.entries[name]

    def take_instances(self, parameter: torch.nn.Parameter, gradients: torch.Tensor, route: str, tokens: int) -> None:
        name, entry = self.entry(parameter)
        self.routes[name] = Route(route, parameter.numel(), 1, tokens, self.layout.units)
        entry.add(gradients)

    def matrix(self, parameter: torch.nn.Parameter, factors: Factors, layout: Layout) -> None:
        name, left, right = self.names[id(parameter)], factors.left, factors.right
        single = not self.may_hold_bytes or left.dim() < 2 or factors.tiled
        if single or factors.own_offsets is not None or self.expected.get(name, 1) > 1 or name in self.policy.masks:
            self._measure_single(parameter, factors)
            return
        narrow = min(left.shape[1], right.shape[1]) <= NARROW
        # A wide matrix's gradients by unit are one product of torch's: they gain nothing by waiting for others.
        waits = narrow or (self._launches and self._routed(name, factors).route.name != "instantiate")
        if not waits or (factors.laned and not self._launches):
            self._measure_single(parameter, factors)
            return
        if not self._launches:
            first = self._captured[0][1] if self._captured else factors
            if first.right.shape[0] != right.shape[0] or first.swap != factors.swap:
                self._measure_captured()
        self._captured.append((parameter, factors))
        # Factors of wide matrices are kept for the sums whether they wait or not.
        if narrow:
            self._held_bytes += left.nbytes + right.nbytes
            if self._held_bytes > self.may_hold_bytes:
                self._measure_captured()

    def tokens(self, parameter: torch.nn.Parameter, gradient: torch.Tensor, layout: Layout, laned: bool) -> None:
        # A width that is no multiple of 8 prevents wide loads, also of all matrices in the same launch.
        if layout.token_segments is not None or not (self._launches and self.may_hold_bytes) or gradient.shape[1] % 8:
            super().tokens(parameter, gradient, layout, laned)
            return
        # A matrix with one column, whose inputs are ones: a GPU adds up the tokens of many biases in one launch.
        ones = CONSTANTS[(1.0,), gradient.dtype, gradient.device].expand(gradient.shape[0], 1)
        self.matrix(parameter, Factors(gradient, ones, laned), layout)

    def _measure_captured(self) -> None:
        """Measure the captured matrices by their routes: in one launch, or one call, for each length of tokens."""
        captured, self._captured, self._held_bytes, units = self._captured, [], 0, self.layout.units
        axes: dict[tuple[int, bool, bool], list[tuple[torch.nn.Parameter, Factors]]] = {}
        for own in captured:
            use = own[1]
            axes.setdefault((use.right.shape[0], use.laned, use.swap), []).append(own)
        for (tokens, laned, swap), members in axes.items():
            names = tuple([self.names[id(parameter)] for parameter, _ in members])
            lefts, rights = Matrices([use.left for _, use in members]), Matrices([use.right for _, use in members])
            key = names, lefts.form, rights.form, tokens, laned, units
            plan = self.plans.get(key)
            if plan is None:
                if len(self.plans) >= _PLANS:
                    self.plans.clear()
                plan = self.plans[key] = self._plan(names, members)
            self.routes.update(plan.routes)
            every = FactorBatch(names, lefts, rights, swap, self.layout.offsets(tokens, laned=laned), plan.errors)
            if not self._launches:
                self._measure_narrow(every, plan.small)
            elif plan.small:
                self.wholes.update(zip([names[at] for at in plan.small], self._measure_small(every.taken(plan.small))))
            # In parts, each of whose gradients take about a 32nd of what captures may hold.
            ends = itertools.accumulate(4 * units * self.parameters[names[at]].numel() for at in plan.repeats)
            for _, part in itertools.groupby(zip(ends, plan.repeats), lambda own: 32 * own[0] // self.may_hold_bytes):
                self.repeats.append(every.taken(tuple([at for _, at in part])))
                self._measure_small(self.repeats[-1])
            for at in plan.direct if self._launches else ():
                self._add_direct(RoutedUse(names[at], members[at][1], plan.routes[names[at]], plan.errors[at]))
            if plan.gram or plan.direct:
                self.batches.append(every.taken(tuple(sorted(plan.gram + plan.direct))))
            if plan.gram:
                self._by_gram.append(every.taken(plan.gram))

    def _plan(self, names: Sequence[str], members: Sequence[tuple[torch.nn.Parameter, Factors]]) -> _Plan:
        found = [self._routed(name, use) for name, (_, use) in zip(names, members)]
        numbers: dict[str, list[int]] = {"gram": [], "direct": [], "instantiate": [], "repeat": []}
        for at, (_, use, route, _) in enumerate(found):
            chosen = route.name
            # Only narrow matrices wait for others on a CPU, where Gram matrices do not pay for them.
            if not self._launches:
                chosen = chosen if chosen == "instantiate" else "direct"
            elif chosen == "instantiate" and not (self._cuts_sums or _is_small(route, use.right)):
                chosen = "repeat"
            numbers[chosen].append(at)
        routes, errors = {own.name: own.route for own in found}, tuple([own.errors for own in found])
        gram, direct, small, repeats = (tuple(own) for own in numbers.values())
        return _Plan(gram, direct, small, repeats, routes, errors)

    def _measure_narrow(self, batch: FactorBatch, small: tuple[int, ...]) -> None:
        """Measure narrow matrices on a processor in the order of their captures, and make the gradients of the small ones.

        A unit's norm then does not depend on the routes, which the lengths of others decide.
        """
        squares, products, tokens = ops.direct_norms(batch.lefts, batch.rights, batch.offsets, small)
        if small:
            own = batch.taken(small)
            gradients, squares[list(small)] = ops.per_unit_group(own.lefts, own.rights, own.offsets)
            turned = [gradient.mT.contiguous() for gradient in gradients] if batch.swap else gradients
            self.wholes.update(zip(own.names, turned))
        errors = [each.direct for each in batch.errors]
        self.norms.add_rows(self.policy.groups(batch.names), squares, errors, products, tokens)

    def _measure_small(self, batch: FactorBatch) -> list[torch.Tensor]:
        """Make and measure the gradients of small matrices (LoRA's) in one launch."""
        gradients, squared = ops.per_unit_group(*batch.sides, batch.offsets)
        errors = [self._of_instance(name, gradient) for name, gradient in zip(batch.names, gradients)]
        self.norms.add_rows(self.policy.groups(batch.names), squared, errors)
        return gradients

    def _measure_single(self, parameter: torch.nn.Parameter, factors: Factors) -> None:
        name, entry = self.entry(parameter)
        entry.uses += 1
        masked = bool(self.policy.masks) and name in self.policy.masks
        if masked:
            factors = factors.dense()
        found = self._routed(name, factors)
        route = found.route.name
        several = masked or self.expected.get(name, 1) > 1
        # How several uses are measured must not depend on their length; that of one does not.
        small = route == "instantiate" and (not several or (self._launches and not found.wide))
        self.routes[name] = Route("masked", *found.route[1:]) if masked and not small else found.route
        if small:
            self._instantiate(found)
            return
        entry.factors.append(factors)
        if several:
            return
        if entry.uses > 1:
            self.require_once(name, entry)
        if route == "gram" if self._launches else found.wide:
            self._defer(found)
        else:
            add = self._add_own_norms if factors.finds_norms else self._add_direct
            add(found)
            self.drop(entry)

    def _routed(self, name: str, use: Factors) -> RoutedUse:
        """A use with what its sizes and its arithmetic say of it."""
        left, right, entries, table = use.left, use.right, self.parameters[name].numel(), name in self.tables
        sizes = entries, left.shape, left.dtype, right.shape, right.dtype, right.device
        kind = (*sizes, use.laned, use.tiled, table)
        known = self._kinds.get(kind)
        if known is None:
            rows = use.width or self.parameters[name].shape[0]
            route = Route(self._route(use, rows, table), rows, right.shape[1], right.shape[0], self.layout.units)
            known = self._kinds[kind] = route, self._constants(use, entries)
        return RoutedUse(name, use, *known)

    def _route(self, use: Factors, rows: int, table: bool) -> str:
        """How the norms of one use are found."""
        if use.finds_norms:
            return "tiles" if use.tiled else "experts"
        if use.one_hot:
            return "row sums"
        # A GPU adds what it measures of a narrow one: its bound is the same whatever the lengths of others.
        right, units = use.right, self.layout.units
        if not table and (right.shape[1] == 1 or (self._launches and min(rows, right.shape[1]) <= NARROW)):
            return "instantiate"
        sizes = rows, right.shape[1], right.shape[0] // max(1, units), units
        found = plan_route(*sizes, keeps_factors=self.keep, dtype=right.dtype, device=right.device)
        # The gradient of a table has no small form, and its cross term with a lookup needs both as factors.
        return "direct" if table and found == "instantiate" else found

    def apart(self) -> None:
        """Put what was measured together among the entries."""
        for batch in self.batches:
            for name, left, right in zip(batch.names, batch.lefts, batch.rights):
                self.entries[name] = Entry([Factors(left, right, swap=batch.swap)])
        self.entries |= {name: Entry(instance=gradient) for name, gradient in self.wholes.items()}
        self.batches, self.wholes = [], {}

    def _require_all_once(self) -> None:
        """`require_once` for the uses that were measured together."""
        names = [*itertools.chain(*[batch.names for batch in (*self.batches, *self.repeats)]), *self.wholes]
        if len({*names, *self.entries}) < len(names) + len(self.entries):
            seen = Counter([*names, *self.entries])
            self.require_once(next(name for name, times in seen.items() if times > 1), Entry(uses=2))

    def require_once(self, name: str, entry: Entry) -> None:
        """Raise RuntimeError if a parameter that the trace saw used once has come again."""
        if entry.uses > 1:
            raise RuntimeError(f"{name} was used more often than when the model was traced; its norm cannot be trusted")

    def _add_own_norms(self, found: RoutedUse) -> None:
        """Add the norms that a use finds itself: a vocabulary's head by tiles in the forward pass, or a stack of experts."""
        self._measure_waiting()
        (squares, products), imprecise = found.use.powers(self.layout), found.use.imprecise
        tokens = found.use.lengths(self.layout)
        # Each unit's norm has the error of the route that found it.
        self._add_norms(found, found.errors.direct, squares * imprecise, products * imprecise, tokens)
        self._add_norms(found, found.errors.gram, squares * ~imprecise, products * ~imprecise, tokens)

    def _measure_waiting(self) -> None:
        """On a processor, norms are added up in the order of captures, whatever waits."""
        if self._captured and not self._launches:
            self._measure_captured()

    def _add_direct(self, found: RoutedUse, squares: torch.Tensor | None = None) -> None:
        self._measure_waiting()
        use, offsets = found.use.dense(), found.use.offsets(self.layout)
        if squares is None:
            squares = ops.sqnorm(use.left, use.right, offsets, "direct")
        products, tokens = use.scales_of_errors(self.layout)
        if not self._launches or use.one_hot or found.use.tiled:
            self._add_norms(found, found.errors.direct, squares, products, tokens)
            return
        # Which route a matrix goes on a GPU depends on its neighbours: the bound does not.
        self._grams.add_direct(found, squares, products, tokens)
        if not self.keep:
            self._grams.judge()

    def _add_norms(
        self, found: RoutedUse, errors: Errors, squares: torch.Tensor, products: torch.Tensor, tokens: torch.Tensor
    ) -> None:
        group = self.policy.group_of[found.name]
        assert isinstance(group, int)
        self.norms.add(group, squares, errors, products, tokens)

    def add_powers(
        self,
        name: str,
        powers: torch.Tensor,
        rounding: ops.Rounding,
        *,
        products: torch.Tensor | None = None,
        tokens: torch.Tensor | None = None,
        **errors: Any,
    ) -> None:
        """Take the powers of a parameter's gradient into its group, or of both its parts into two; the rest as of `Errors`."""
        group, entries = self.policy.group_of[name], self.parameters[name].numel()
        parts = [(group, powers)] if isinstance(group, int) else list(zip(group, powers))
        for own, power in parts:
            self.norms.add(own, power, Errors(entries, rounding.squares(entries), **errors), products, tokens)

    def _instantiate(self, found: RoutedUse) -> None:
        """Make the gradients of a small matrix at once."""
        name, use, entry = found.name, found.use, self.entries[found.name]
        offsets, own, launched = use.offsets(self.layout), use.dense(), self._launches
        if launched and not found.wide:
            if self.expected.get(name, 1) > 1:
                # A second pass would add uses one by one: the bound is the same where there is none.
                self.note_products(name, use)
            left, right = own.sides
            (gradient,), squared = ops.per_unit_group([left], [right], offsets)
            entry.add(gradient, squared[0])
            return
        # What a unit is measured by is the same whether or not its gradient is kept, which the lengths of others decide.
        self.require_once(name, entry)
        if launched:
            gradient = own.each(self.layout)
            # One call of many reads each entry once; a call of one is torch's, which copies.
            self._add_direct(found, ops.instance_sqnorm_group([gradient])[0])
        else:
            (gradient,), squared = ops.per_unit_group([own.left], [own.right], offsets)
            gradient = gradient.mT.contiguous() if use.swap and self.keep else gradient
            if found.wide:
                self._grams.add([found], squared)
            else:
                self._add_direct(found, squared[0])
        if self.keep:
            entry.add(gradient)
            entry.measured = True
        elif found.wide:
            self._grams.judge()

    def _defer(self, found: RoutedUse) -> None:
        """Wait for other uses that read the same input (q, k and v; gate and up): its Gram matrix serves them all."""
        if self._waiting:
            one, other = self._waiting[0].use, found.use
            alike = one.right.data_ptr() == other.right.data_ptr() and one.right.stride() == other.right.stride()
            if not alike or one.right.shape != other.right.shape or one.laned != other.laned:
                self._flush()
        self._waiting.append(found)

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        self._grams.add(waiting)
        if not self.keep:
            for found in waiting:
                self.drop(self.entries[found.name])
            self._grams.judge()

    def _constants(self, use: Factors, entries: int) -> RouteErrors:
        """The errors of one use, computed once for all of its size and arithmetic."""
        right, columns = use.right, use.right.shape[1]

        def find() -> RouteErrors:
            rounding = use.rounding()
            relative, direct = rounding.squares(entries), rounding.added().plus(rounding.entry())
            # By Gram matrices as much as by the direct route: which of both it is goes by lengths.
            gram = Errors(entries, relative, rounding.gram(use.width, columns), direct)
            return RouteErrors(gram, Errors(entries, relative, added=direct))

        left = "tiles" if use.tiled else use.left.dtype
        return _cached((left, right.dtype, right.device.type, use.width, columns, entries), find)

    def drop(self, entry: Entry) -> None:
        """Let go of factors that are measured, unless the weighted sums will need them."""
        if not self.keep:
            entry.factors.clear()

    def note_products(self, name: str, use: Factors, order: int = 2) -> None:
        """Of a use that is measured as an instance but added as factors: how far the two may be apart."""
        (products, tokens), added = use.scales_of_errors(self.layout, order), use.rounding().added()
        entry = self.entries[name]
        entry.products = products if entry.products is None else entry.products + products
        # An instance may be made by a BLAS as well, in an order that is not known.
        twice = 2 * gammas([added], tokens)[0]
        entry.added = twice if entry.added is None else entry.added + twice

    def _add_instances(self, entries: dict[str, Entry]) -> None:
        """Take the norms of whole gradients, finding in one launch those that did not come with them."""
        unknown = {name: entry for name, entry in entries.items() if entry.squared is None}
        if unknown:
            instances = [entry.instance for entry in unknown.values() if entry.instance is not None]
            rows = ops.instance_sqnorm_group(instances)
            if all(entry.products is None for entry in unknown.values()):
                errors = [self._of_instance(name, own) for name, own in zip(unknown, instances)]
                self.norms.add_rows(self.policy.groups(unknown), rows, errors)
            else:
                for entry, row in zip(unknown.values(), rows):
                    entry.squared = row
        for name, entry in entries.items():
            if entry.squared is not None and entry.instance is not None:
                # An instance is added as it was measured.
                products = None if entry.products is None else entry.reach(entry.squared.double().sqrt())
                self.add_powers(name, entry.squared, ops.Rounding(entry.instance), products=products, times=1.0)
            if not self.keep:
                entry.instance = entry.squared = None

    def _of_instance(self, name: str, instance: torch.Tensor) -> Errors:
        """The errors of a whole gradient's norm, which is added as it was measured."""
        entries = self.parameters[name].numel()
        return _cached(
            (instance.dtype, instance.device.type, entries),
            lambda: Errors(entries, ops.Rounding(instance).squares(entries)),
        )

    def finish(self) -> UpperNorms:
        """Upper bounds of what each unit adds, complete."""
        self._measure_captured()
        self._flush()
        for batch in self._by_gram:
            self._grams.add_batch(batch)
        self._by_gram.clear()
        self._require_all_once()
        self._grams.judge()
        whole: dict[str, Entry] = {}
        for name, entry in self.entries.items():
            if name in self.policy.masks:
                self._measure_masked(name, entry)
                continue
            if entry.factors and (self.expected.get(name, 1) > 1 or entry.instance is not None):
                self._measure_repeated(name, entry)
            if entry.instance is not None and not entry.measured:
                whole[name] = entry
                if not self.keep:  # Then one gradient at a time is in memory.
                    self._add_instances(whole)
                    whole.clear()
        self._add_instances(whole)
        self._grams.judge()
        return self.norms.upper()

    def _measure_repeated(self, name: str, entry: Entry) -> None:
        """Norm of a parameter used several times: of the summed gradient, cross terms included (rule 5)."""
        if entry.instance is not None:
            self._instantiate_all(name, entry)
            return
        uses = join_uses(join_experts([use.unswapped for use in entry.factors], self.layout.units), self.layout)
        if len(uses) > 1:
            self._add_cross_terms(name, uses)
        elif uses[0].finds_norms:
            self._add_own_norms(self._routed(name, uses[0]))
        elif uses[0].one_hot or min(uses[0].width, uses[0].right.shape[1]) <= NARROW:
            self._add_direct(self._routed(name, uses[0]))
        else:
            self._grams.add([self._routed(name, uses[0])])
        self.drop(entry)

    def _instantiate_all(self, name: str, entry: Entry) -> None:
        """Make one whole gradient by unit of all that a parameter has collected."""
        uses = [use.dense() for use in entry.factors]
        # Also where no second pass adds them apart: memory decides that, and so the lengths of others.
        for use, own in zip(entry.factors, uses):
            self.note_products(name, own if use.tiled else use)
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

    def _add_cross_terms(self, name: str, uses: list[Factors]) -> None:
        """Uses of different kinds: a square each, and twice the inner product of each two."""
        group = self.policy.group_of[name]
        assert isinstance(group, int)
        square = torch.zeros(self.layout.units, dtype=torch.float64, device=self.layout.weights.device)
        products = torch.zeros_like(square)
        gram, tokens = NONE, torch.zeros_like(square)
        # What is tiled asks the others for an inner product.
        uses = sorted(uses, key=lambda use: use.tiled)
        for index, use in enumerate(uses):
            rounding = use.rounding()
            tokens += use.lengths(self.layout)
            squares, sizes = use.powers(self.layout)
            square += squares
            products += sizes
            # The square of a table's rows is found from their sums, whose error counts twice.
            rows = rounding.entry()
            squared = rounding.gram(use.width, use.right.shape[1], crossed=True)
            gram = gram.larger(squared).larger(rows.plus(rows).plus(rows))
            for other in uses[:index]:
                square += 2 * use.inner(other, self.layout)
        rounding = ops.Rounding(*(f for use in uses for f in (use.left, use.right)))
        added = rounding.added()
        known = self.norms.measured()[group] + square
        imprecise = gammas([gram], tokens)[0] * products.square() > REMEASURED * known
        if imprecise.device.type == "cpu" and bool(imprecise.any()):
            # Such a unit's gradient is put together, one at a time; elsewhere its weight is what the bound allows.
            whole = PerUnit(uses, None, self.layout, self.parameters[name].shape)
            again = torch.zeros_like(square)
            for unit in imprecise.nonzero()[:, 0].tolist():
                again[unit] = ops.instance_sqnorm(whole[unit][None])[0]
            direct = torch.where(imprecise, products, 0)
            self.add_powers(name, again, rounding, products=direct, tokens=tokens, added=added.plus(added))
            square, products = torch.where(imprecise, 0, square), torch.where(imprecise, 0, products)
        self.add_powers(name, square, rounding, products=products, tokens=tokens, gram=gram, added=added)

    def _measure_masked(self, name: str, entry: Entry) -> None:
        mask = self.policy.masks[name]
        if len(entry.factors) == 1 and entry.instance is None:
            use = entry.factors[0]
            squared = ops.masked_sqnorm(*use.sides, use.offsets(self.layout), as_matrix(mask))
            rounding, (products, tokens) = use.rounding(), use.scales_of_errors(self.layout)
            added = rounding.entry().plus(rounding.added())
            errors: dict[str, Any] = {"products": products, "tokens": tokens, "added": added}
            self.drop(entry)
        else:
            if entry.factors:
                self._instantiate_all(name, entry)
            assert entry.instance is not None
            squared = ops.instance_masked_sqnorm(entry.instance.view(-1, *mask.shape), mask)
            rounding = ops.Rounding(entry.instance)
            errors = {"products": entry.reach(squared.double().sum(0).sqrt()), "times": 1.0}
            if not self.keep:
                entry.instance = None
        self.add_powers(name, squared, rounding, **errors)


@functools.cache
def may_hold(device: torch.device) -> int:
    """Bytes of factors that narrow matrices may hold back until they are measured together.

    Every use holds what ordinary training has let go of by then. On a GPU a 32nd of its memory is far below what the
    activations of the layers between have left behind; on a processor they shall stay in its cache.
    """
    return torch.cuda.get_device_properties(device).total_memory // 32 if device.type == "cuda" else _IN_CACHE
