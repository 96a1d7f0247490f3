"""Weighted sums over the units of a logical batch, by parameter, from factors and from whole gradients."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

import fastdp.ops as ops
from fastdp.distributed.blocks import BlockReducer, LocalPieces
from fastdp.distributed.shards import UnshardedParameters
from fastdp.engine.bounds import UpperNorms
from fastdp.engine.clip.policy import Policy
from fastdp.engine.uses.factors import Factors, PerUnit
from fastdp.engine.uses.layout import Layout
from fastdp.ops.placed import CONSTANTS
from fastdp.ops.routes import NARROW


class Route(NamedTuple):
    """How a parameter's norms were found in the latest pass, and the sizes that decided it."""

    name: str
    rows: int
    columns: int
    tokens: int
    units: int


class Sums:
    """Float32 sums by parameter, and what is known of the parameters.

    Args:
        parameters: the trained parameters by name, as modules read them.
        policy: their groups, masks and axes.
        weights: says what of each sum this process keeps.
    """

    _reducer: BlockReducer | LocalPieces

    def __init__(
        self, parameters: Mapping[str, torch.nn.Parameter], policy: Policy, weights: UnshardedParameters | None = None
    ):
        self.policy = policy
        self.routes: dict[str, Route] = {}
        #: How uses that come together are measured, by their names and form: `fastdp.engine.clip.norms` makes them.
        self.plans: dict[Any, Any] = {}
        #: Parameters that some use reads by row; the engine's trace says which.
        self.tables: frozenset[str] = frozenset()
        self.read(parameters, weights or UnshardedParameters())

    def read(self, parameters: Mapping[str, torch.nn.Parameter], weights: UnshardedParameters) -> None:
        """Take captures of these parameters from here on."""
        self.parameters, self.weights = parameters, weights
        self.names = {id(p): name for name, p in parameters.items()}
        self.reset()

    def reset(self) -> None:
        """Forget the sums: a new logical batch begins."""
        #: Complete sums by parameter.
        self.sums: dict[str, torch.Tensor] = {}
        self._uncut: dict[str, torch.Tensor] = {}
        if self.weights.cut:
            self._reducer = self.weights.reducer(self.parameters, functools.partial(_keep_piece, self.sums))
        #: Units of the micro-batch at hand whose sums are made on their own: `take_apart`.
        self.cancelling: list[int] = []
        #: Whether the logits of a head were computed tile by tile.
        self.tiles_heads = False

    @property
    def _whole(self) -> dict[str, torch.Tensor]:
        """Where whole sums are added up: in `_uncut`, one parameter at a time, if this process keeps only pieces of them."""
        return self._uncut if self.weights.cuts_sums else self.sums

    def in_order(self, captured: dict[str, Any]) -> list[str]:
        """Names of the sums to make: the last captured first. With sharded weights every parameter's, block by block.

        Ranks reduce a block together: where this one has captured nothing, another may have.
        """
        return self.weights.in_order(self.parameters) if self.weights.cuts_sums else list(reversed(captured))

    def whole(self, name: str) -> torch.Tensor:
        """A parameter's whole sum, zero where nothing was captured. Collective if weights are sharded."""
        if name not in self.sums:
            return torch.zeros(self.parameters[name].shape, device=self.parameters[name].device)
        return self.weights.joined(name, self.sums[name])

    def _weights(self, name: str, unit_scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The weights of a parameter's units, and those outside of its mask, by `Accumulator.unit_scales` ``[groups, units]``."""
        group = self.policy.group_of[name]
        if isinstance(group, tuple):
            return unit_scales[group[0]], unit_scales[group[1]]
        return unit_scales[group], None

    def _plain_weights(self, names: Sequence[str], unit_scales: torch.Tensor) -> torch.Tensor:
        """Weights ``[names, units]`` of parameters without a mask."""
        own = [group for name in names if isinstance(group := self.policy.group_of[name], int)]
        return unit_scales.index_select(0, CONSTANTS[tuple(own), torch.int64, unit_scales.device])

    def add_instances(self, instances: Mapping[str, torch.Tensor], unit_scales: torch.Tensor) -> None:
        """Add instantiated gradients ``[units, ...]`` of several parameters: in one launch all that have no mask."""
        plain = []
        for name, instance in instances.items():
            if isinstance(self.policy.group_of[name], tuple):
                self.add_instance(name, instance, unit_scales)
            else:
                plain.append(name)
        if not plain:
            return
        weights = self._plain_weights(plain, unit_scales)
        shaped = [instances[name].reshape(-1, *self.parameters[name].shape) for name in plain]
        totals = dict(zip(plain, ops.instance_sum_group(shaped, weights)))
        again = [name for name in plain if name in self._whole]
        if again:
            torch._foreach_add_([self._whole[name] for name in again], [totals.pop(name) for name in again])
        self._whole.update(totals)

    def add_instance(self, name: str, instance: torch.Tensor, unit_scales: torch.Tensor) -> None:
        """Add instantiated per-unit gradients ``[units, ...]``; rows of weight 0 are selected out, NaN and all."""
        weights, outside = self._weights(name, unit_scales)
        instance = instance.reshape(-1, *self.parameters[name].shape)
        if outside is None:
            total = ops.instance_sum(instance, weights)
        else:
            total = ops.instance_masked_sum(instance, weights, outside, self.policy.masks[name])
        self._sum(name, total)

    def add_gradient(self, name: str, gradient: torch.Tensor) -> None:
        """Add a gradient as it is: one of ordinary training, or one that is clipped already."""
        self._sum(name, gradient.float())
        self.keep(name)

    def keep(self, name: str) -> None:
        """Reduce a parameter's sum of this microbatch to the piece that this process keeps."""
        if self.weights.cuts_sums:
            self._reducer.add(name, self._uncut.pop(name, None))

    def finish(self) -> None:
        """`keep` what is left of this microbatch. Collective if weights are sharded."""
        for name in list(self._uncut):
            self.keep(name)
        if self.weights.cuts_sums:
            self._reducer.finish()

    def cut(self) -> None:
        """Reduce sums that stayed whole over a logical batch to pieces. Collective."""
        whole = dict(self.sums)
        self.sums.clear()
        for name in self.weights.in_order(self.parameters):
            self._reducer.add(name, whole.pop(name, None))
        self._reducer.finish()

    def _sum(self, name: str, total: torch.Tensor) -> None:
        if name in self._whole:
            self._whole[name] += total
        else:
            self._whole[name] = total

    def take_apart(self, upper: UpperNorms, unit_scales: torch.Tensor) -> None:
        """From here on, add units whose tokens cancel one by one.

        A product over all tokens rounds at the size of the tokens, and in an order that other units change. Only on CPUs, where
        reading which units these are needs no synchronization.
        """
        some = unit_scales.device.type == "cpu" and True in upper.cancelling.tolist()
        self.cancelling = (upper.cancelling & (unit_scales > 0).any(0)).nonzero()[:, 0].tolist() if some else []

    def add_uses(self, name: str, uses: list[Factors], unit_scales: torch.Tensor, layout: Layout) -> None:
        """Add the weighted sums of all uses of a parameter, and let go of them."""
        if self.cancelling:
            dense = [use for use in uses if not use.one_hot]
            gradients = PerUnit(dense, None, layout, self.parameters[name].shape)
            for unit in self.cancelling if dense else ():
                self.add_instance(name, gradients[unit][None], unit_scales[:, unit : unit + 1])
            del gradients, dense
        while uses:
            self._add_factors(name, uses.pop(), unit_scales, layout)

    def _add_factors(self, name: str, use: Factors, unit_scales: torch.Tensor, layout: Layout) -> None:
        if self.cancelling and not use.one_hot:
            unit_scales = unit_scales.index_fill(1, torch.tensor(self.cancelling), 0)
        inside, outside = self._weights(name, unit_scales)
        shape, total = self.parameters[name].shape, self._whole.get(name)
        self.tiles_heads |= use.tiled
        if total is None and (use.one_hot or use.finds_norms):
            total = torch.zeros(shape, device=use.right.device)
        flat = None if total is None else total.view(shape[0], -1)
        if outside is None:
            flat = use.add_to(flat, inside, layout)
        else:
            mask = as_matrix(self.policy.masks[name])
            flat = ops.masked_weighted_sum(*use.sides, inside, outside, mask, flat, use.offsets(layout))
        self._whole[name] = flat.view(shape)

    def add_matrices(
        self,
        names: Sequence[str],
        lefts: Sequence[torch.Tensor],
        rights: Sequence[torch.Tensor],
        unit_scales: torch.Tensor,
        offsets: torch.Tensor,
    ) -> None:
        """Add the weighted sums of several parameters without a mask, whose factors are over the same tokens, in one call."""
        if self.cancelling:
            bounds = offsets.tolist()
            for name, left, right in zip(names, lefts, rights):
                for unit in self.cancelling:
                    tokens = slice(bounds[unit], bounds[unit + 1])
                    own = ops.per_unit(left[tokens], right[tokens], torch.tensor([0, tokens.stop - tokens.start]))
                    self.add_instance(name, own, unit_scales[:, unit : unit + 1])
            unit_scales = unit_scales.index_fill(1, torch.tensor(self.cancelling), 0)
        whole = self._whole
        held = [whole.get(name) for name in names]
        outs = [None if total is None else total.view(total.shape[0], -1) for total in held]
        found = ops.weighted_sum_group(lefts, rights, self._plain_weights(names, unit_scales), offsets, outs)
        for name, total in zip(names, found):
            parameter = self.parameters[name]
            # Nearly all are matrices, and a view takes the host as long as a launch.
            whole[name] = total if parameter.dim() == 2 else total.view(parameter.shape)


def _keep_piece(sums: dict[str, torch.Tensor], name: str, piece: torch.Tensor) -> None:
    sums[name] = sums[name].add_(piece) if name in sums else piece


@functools.cache
def launches(device: torch.device) -> bool:
    """Whether many products in one launch take less time than one after another."""
    return device.type != "cpu"


def as_matrix(mask: torch.Tensor) -> torch.Tensor:
    """A mask of two dimensions as it is, so that its packed bits are found again; others flattened behind the first."""
    return mask if mask.dim() == 2 else mask.flatten(1)


class Captures:
    """A sink that turns captures of biases and vectors into gradients by unit; subclasses take these, and matrices."""

    def __init__(self, sums: Sums):
        self.names, self.parameters, self.policy = sums.names, sums.parameters, sums.policy

    def take_instances(self, parameter: torch.nn.Parameter, gradients: torch.Tensor, route: str, tokens: int) -> None:
        """Take whole gradients by unit, made in the way that ``route`` names from so many ``tokens``."""
        raise NotImplementedError  # each kind has its own

    def tokens(self, parameter: torch.nn.Parameter, gradient: torch.Tensor, layout: Layout, laned: bool) -> None:
        """A bias's gradient by token, ``[N, m]``."""
        tokens = gradient.shape[0]
        single = tokens == layout.units and layout.identity
        summed = gradient if single else ops.column_sums(gradient, layout.offsets(tokens, laned=laned))
        self.take_instances(parameter, summed.float(), "token sums", tokens)

    def vector(self, parameter: torch.nn.Parameter, lanes: torch.Tensor, layout: Layout) -> None:
        """The gradient of an expanded parameter, ``[lanes, *shape]``."""
        self.take_instances(parameter, layout.sum_lanes(lanes.float()), "expanded", layout.lanes)

    def instances(self, parameter: torch.nn.Parameter, gradients: torch.Tensor, layout: Layout) -> None:
        """Whole gradients by unit."""
        self.take_instances(parameter, gradients.float(), "instantiate", layout.units)


class SumSink(Captures):
    """The second of two passes: adds each capture to the sums at once, so that no factor outlives its own backward.

    Args:
        at_once: `Sums.keep` each capture's sum as soon as it is made.
    """

    def __init__(self, sums: Sums, unit_scales: torch.Tensor, *, at_once: bool):
        super().__init__(sums)
        self.sums, self.unit_scales = sums, unit_scales
        self._keep = sums.keep if at_once else lambda name: None

    def take_instances(self, parameter: torch.nn.Parameter, gradients: torch.Tensor, route: str, tokens: int) -> None:
        name = self.names[id(parameter)]
        self.sums.add_instance(name, gradients, self.unit_scales)
        self._keep(name)

    def matrix(self, parameter: torch.nn.Parameter, factors: Factors, layout: Layout) -> None:
        name = self.names[id(parameter)]
        route = self.sums.routes[name]
        if launches(layout.weights.device) and route.name == "instantiate" and min(route[1:3]) <= NARROW:
            # A GPU adds what it measured: no rounding is between them.
            left, right = factors.dense().sides
            (gradient,), _ = ops.per_unit_group([left], [right], factors.offsets(layout))
            self.sums.add_instance(name, gradient, self.unit_scales)
        else:
            self.sums.add_uses(name, [factors], self.unit_scales, layout)
        self._keep(name)
