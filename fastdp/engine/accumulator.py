"""From captured uses to clipped sums: norms per unit and group, scales from the policy, weighted sums."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

import fastdp.ops as ops
from fastdp.engine.layout import Layout
from fastdp.engine.policy import Policy
from fastdp.engine.uses import Factors, UnsupportedUse
from fastdp.ops.routes import plan


@dataclass
class _Entry:
    """What one parameter has collected in a backward pass: factor pairs, and instantiated per-unit gradients."""

    factors: list[Factors] = field(default_factory=list)
    instance: torch.Tensor | None = None
    #: Squared norms of ``instance``, where they came with it.
    squared: torch.Tensor | None = None

    def add(self, instance: torch.Tensor, squared: torch.Tensor | None = None) -> None:
        self.squared = squared if self.instance is None else None
        self.instance = instance if self.instance is None else self.instance + instance


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
    """Computes norms as captures arrive; keeps what the weighted sums will need unless a second pass follows."""

    def __init__(self, accumulator: Accumulator, layout: Layout, expected: Mapping[str, int], *, keep: bool):
        super().__init__(accumulator)
        self.layout = layout
        self.expected = expected
        self.keep = keep
        self.routes = accumulator.routes
        self.tables = accumulator.tables
        self.entries: dict[str, _Entry] = {}
        self.squared = torch.zeros(len(self.policy.bounds), layout.units, device=layout.weights.device)
        self._pending: list[tuple[str, torch.Tensor]] = []
        self._shared: torch.Tensor | None = None
        self._shared_laned = False
        self._small: dict[tuple[int, bool], list[tuple[str, torch.Tensor, torch.Tensor]]] = {}
        self._held_bytes = 0
        self._may_hold_bytes = _may_hold(layout.weights.device) if keep else 0

    def _entry(self, parameter: torch.nn.Parameter) -> tuple[str, _Entry]:
        name = self.names[id(parameter)]
        return name, self.entries.setdefault(name, _Entry())

    def tokens(self, parameter: torch.nn.Parameter, gradient: torch.Tensor, layout: Layout, laned: bool) -> None:
        name, entry = self._entry(parameter)
        self.routes[name] = Route("token sums", gradient.shape[1], 1, gradient.shape[0], layout.units)
        entry.add(self._per_unit(gradient, layout, laned))

    def vector(self, parameter: torch.nn.Parameter, lanes: torch.Tensor, layout: Layout) -> None:
        name, entry = self._entry(parameter)
        self.routes[name] = Route("expanded", parameter.numel(), 1, layout.lanes, layout.units)
        entry.add(layout.sum_lanes(lanes.float()))

    def matrix(self, parameter: torch.nn.Parameter, factors: Factors, layout: Layout) -> None:
        name, entry = self._entry(parameter)
        offsets = layout.offsets(factors.right.shape[0], laned=factors.laned)
        single = self.expected.get(name, 1) == 1
        tokens, columns = factors.right.shape
        rows = parameter.shape[0] if factors.one_hot else factors.left.shape[1]
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
        if len(entry.factors) > 1:
            raise RuntimeError(f"{name} was used more often than when the model was traced; its norm cannot be trusted")
        if route == "gram" and not factors.one_hot:
            self._defer(name, factors)
        else:
            self._square(name, ops.sqnorm(factors.left, factors.right, offsets, route))
            self._drop(entry)

    def _instantiate(self, name: str, factors: Factors) -> None:
        """Wait for other small matrices (LoRA's): a GPU makes the gradients of all of them in one launch."""
        left, right = (factors.right, factors.left) if factors.swap else (factors.left, factors.right)
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
        """Wait for other uses that read the same input (q, k and v; gate and up): its Gram matrix serves them all."""
        shared = self._shared
        same = (
            shared is not None
            and shared.data_ptr() == factors.right.data_ptr()
            and shared.shape == factors.right.shape
            and shared.stride() == factors.right.stride()
            and self._shared_laned == factors.laned
        )
        if not same:
            self._flush()
            self._shared, self._shared_laned = factors.right, factors.laned
        self._pending.append((name, factors.left))

    def _flush(self) -> None:
        if self._shared is None:
            return
        offsets = self.layout.offsets(self._shared.shape[0], laned=self._shared_laned)
        squared = ops.sqnorm_group([left for _, left in self._pending], self._shared, offsets)
        for (name, _), row in zip(self._pending, squared):
            self._square(name, row)
            self._drop(self.entries[name])
        self._pending, self._shared = [], None

    def _drop(self, entry: _Entry) -> None:
        if not self.keep:
            entry.factors.clear()

    def _square(self, name: str, squared: torch.Tensor) -> None:
        group = self.policy.group_of[name]
        assert isinstance(group, int)
        self.squared[group] += squared

    def finish(self) -> torch.Tensor:
        """Squared norms ``[groups, units]``, complete."""
        self._flush()
        self._flush_small()
        for name, entry in self.entries.items():
            if name in self.policy.masks:
                self._masked(name, entry)
                continue
            if entry.factors and (self.expected.get(name, 1) > 1 or entry.instance is not None):
                self._several(name, entry)
            if entry.instance is not None:
                squared = entry.squared if entry.squared is not None else entry.instance.flatten(1).square().sum(1)
                self._square(name, squared)
                if not self.keep:
                    entry.instance = None
        return self.squared

    def _several(self, name: str, entry: _Entry) -> None:
        """Norm of a parameter used several times: of the summed gradient, cross terms included (rule 5)."""
        layout = self.layout
        if entry.instance is not None:
            for use in entry.factors:
                if use.one_hot:
                    raise UnsupportedUse(f"{name} is read as a table and in another way")
                left, right = (use.right, use.left) if use.swap else (use.left, use.right)
                entry.add(ops.per_unit(left, right, layout.offsets(left.shape[0], laned=use.laned)))
            entry.factors.clear()
            return
        uses = _merge(entry.factors, layout)
        for index, use in enumerate(uses):
            offsets = layout.offsets(use.right.shape[0], laned=use.laned)
            self._square(name, ops.sqnorm(use.left, use.right, offsets))
            for other in uses[:index]:
                others = layout.offsets(other.right.shape[0], laned=other.laned)
                if use.swap != other.swap:
                    raise UnsupportedUse(f"{name} is used both as it is and transposed")
                cross = ops.cross_inner(use.left, use.right, other.left, other.right, offsets, others)
                self._square(name, 2 * cross)
        self._drop(entry)

    def _masked(self, name: str, entry: _Entry) -> None:
        inside, outside = self.policy.group_of[name]  # type: ignore[misc]
        mask = self.policy.masks[name]
        if len(entry.factors) == 1 and entry.instance is None:
            use = entry.factors[0]
            offsets = self.layout.offsets(use.right.shape[0], laned=use.laned)
            left, right = (use.right, use.left) if use.swap else (use.left, use.right)
            squared = ops.masked_sqnorm(left, right, offsets, _as_matrix(mask))
            self._drop(entry)
        else:
            if entry.factors:
                entry.instance = _materialise(entry, self.layout, mask.shape)
                entry.factors.clear()
            assert entry.instance is not None
            squared = ops.instance_masked_sqnorm(entry.instance.view(-1, *mask.shape), mask)
            if not self.keep:
                entry.instance = None
        self.squared[inside] += squared[0]
        self.squared[outside] += squared[1]


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
    alike = all(
        u.one_hot == first.one_hot
        and u.swap == first.swap
        and u.laned == first.laned
        and u.right.shape == first.right.shape
        for u in uses
    )
    if len(uses) < 3 or not alike or layout.token_segments is not None:
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
            left, right = (use.right, use.left) if use.swap else (use.left, use.right)
            flat += ops.per_unit(left, right, offsets)
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
        self.reset()

    def reset(self) -> None:
        """Forget the sums: a new logical batch begins."""
        self.sums: dict[str, torch.Tensor] = {}
        self.nonfinite: torch.Tensor | int = 0
        self.unclipped: torch.Tensor | int = 0
        self.units: torch.Tensor | int = 0

    def run(
        self,
        backward: Callable[[bool], None],
        open_sink: Callable[[object], None],
        layout: Layout,
        expected: Mapping[str, int],
        *,
        two_pass: bool,
    ) -> None:
        """Clip and add one micro-batch.

        Args:
            backward: runs the model's backward pass; its argument says whether the graph must survive it.
            open_sink: connects the pass's captures to a sink.
            expected: how often each parameter is used in a forward pass, as traced.
            two_pass: run the backward pass twice and keep no factor: for gradient checkpointing, where memory is short.
        """
        norms = NormSink(self, layout, expected, keep=not two_pass)
        open_sink(norms)
        backward(two_pass)
        factors = self.factors(norms.finish(), layout.weights)
        if two_pass:
            open_sink(SumSink(self, factors))
            backward(False)
            return
        while norms.entries:
            name, entry = norms.entries.popitem()
            if entry.instance is not None:
                self.add_instance(name, entry.instance, factors)
            while entry.factors:
                self.add_factors(name, entry.factors.pop(), factors, layout)

    def add_unit(self, instances: Mapping[str, torch.Tensor], weight: torch.Tensor) -> None:
        """Clip and add one unit from its whole gradients ``[1, ...]``, weight ``[1]``: the one-example route."""
        policy = self.policy
        squared = torch.zeros(len(policy.bounds), 1, device=weight.device)
        for name, instance in instances.items():
            group = policy.group_of[name]
            if isinstance(group, tuple):
                squared[list(group)] += ops.instance_masked_sqnorm(instance, policy.masks[name])
            else:
                squared[group] += ops.instance_sqnorm(instance)
        factors = self.factors(squared, weight)
        for name, instance in instances.items():
            self.add_instance(name, instance, factors)

    def factors(self, squared: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Scales ``[groups, units]`` of the policy times the units' weights, counting what was dropped or left whole."""
        real = weights > 0
        finite = torch.isfinite(squared).all(0)
        scales = self.policy.scales(squared)
        self.nonfinite = self.nonfinite + (real & ~finite).sum()
        self.unclipped = self.unclipped + (real & finite & (scales >= 1).all(0)).sum()
        self.units = self.units + real.sum()
        return torch.where(real, scales * weights, 0.0)

    def _weights(self, name: str, factors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        group = self.policy.group_of[name]
        if isinstance(group, tuple):
            return factors[group[0]], factors[group[1]]
        return factors[group], None

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
        tokens = use.right.shape[0]
        weights = layout.per_token(inside, tokens, laned=use.laned)
        shape = self.parameters[name].shape
        out = self.sums.get(name)
        if out is None and use.one_hot:
            out = self.sums[name] = torch.zeros(shape, device=use.right.device)
        left, right = (use.right, use.left) if use.swap else (use.left, use.right)
        flat = None if out is None else out.view(shape[0], -1)
        if outside is None:
            flat = ops.weighted_sum(left, right, weights, flat)
        else:
            other = layout.per_token(outside, tokens, laned=use.laned)
            flat = ops.masked_weighted_sum(left, right, weights, other, _as_matrix(self.policy.masks[name]), flat)
        if out is None:
            self.sums[name] = flat.view(shape)
