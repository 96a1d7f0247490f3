"""Partition-wise gradient magnitudes of a sample, from the engine's captures (Definition 8)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

import fastdp.ops as ops
from fastdp.distributed.ranks import Ranks
from fastdp.engine.bounds import Norms, UpperNorms
from fastdp.engine.clip.accumulator import Accumulator
from fastdp.engine.clip.norms import Entry, NormSink
from fastdp.engine.clip.policy import Policy
from fastdp.engine.clip.sums import Route
from fastdp.engine.uses.factors import Factors, PerUnit
from fastdp.engine.uses.layout import Layout
from fastdp.methods.frost.magnitudes import Magnitude
from fastdp.methods.frost.partitions import Partition


class AbsoluteSink(NormSink):
    """Sums absolute values where `NormSink` sums squares: its bounds are of L1 norms, ``[partitions, units]``.

    L1 norms of two uses of one parameter do not add up to that of their sum. So the gradient of a parameter that is used more
    than once is put together, one unit at a time.
    """

    def __init__(self, accumulator: Accumulator, layout: Layout, expected: Mapping[str, int], *, keep: bool):
        super().__init__(accumulator, layout, expected, keep=keep)
        self.norms = Norms(len(self.policy.bounds), layout.units, layout.weights.device, order=1)

    def matrix(self, parameter: torch.nn.Parameter, factors: Factors, layout: Layout) -> None:
        name, entry = self.entry(parameter)
        entry.uses += 1
        tokens, columns = factors.right.shape
        rows = factors.width or parameter.shape[0]
        self.routes[name] = Route("absolute", rows, columns, tokens, layout.units)
        entry.factors.append(factors)
        if self.expected.get(name, 1) > 1:
            return
        self.require_once(name, entry)
        rounding, (products, counts) = factors.rounding(), factors.scales_of_errors(layout, 1)
        self.add_powers(
            name,
            factors.by_unit(ops.abs_sum(factors.left, factors.right, factors.offsets(layout))),
            rounding,
            products=products,
            tokens=counts,
            added=rounding.entry().plus(rounding.added()),
        )
        self.drop(entry)

    def finish(self) -> UpperNorms:
        """Upper bounds of the L1 norms ``[partitions, units]``, complete."""
        for name, entry in self.entries.items():
            if entry.factors and (self.expected.get(name, 1) > 1 or entry.instance is not None):
                whole = PerUnit(entry.factors, entry.instance, self.layout, self.parameters[name].shape)
                each = [ops.instance_abs_sum(whole[unit][None]) for unit in range(self.layout.units)]
                # The gradient is put together once more when it is added.
                for use in entry.factors:
                    self.note_products(name, use, order=1)
                sizes = torch.cat(each)
                reach = entry.reach(sizes.double())
                self.add_powers(name, sizes, ops.Rounding(sizes), products=reach, times=1.0)
            elif entry.instance is not None:
                self.add_powers(name, ops.instance_abs_sum(entry.instance), ops.Rounding(entry.instance))
        return self.norms.upper()


class MagnitudeAccumulator(Accumulator):
    """Clipped sums over a sample, as the engine runs it, and the magnitudes of the partitions in them.

    With absolute values (MGNA) a partition's magnitude is the sum of its clipped examples' L1 norms, so no gradient is ever
    formed. MG is a norm of a summed vector, which comes from factor pairs.

    Args:
        parameters: the parameters of the partitions, and no others; all of them trained.
        partitions: what is compared.
        magnitude: which of them, and the clipping.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        partitions: Sequence[Partition],
        magnitude: Magnitude,
    ):
        count = len(partitions)
        owner = {name: index for index, partition in enumerate(partitions) for name in partition.parameters}
        device = next(iter(parameters.values())).device
        self.magnitude = magnitude
        self.partitions = partitions
        self.sizes = torch.tensor([partition.size for partition in partitions], dtype=torch.float64, device=device)
        self.vectors = magnitude.kind == "MG"
        super().__init__(parameters, Policy((1.0,) * count, (0.0,) * count, owner))

    def reset(self) -> None:
        super().reset()
        self.totals = torch.zeros_like(self.sizes)

    def merge(self, ranks: Ranks) -> None:
        """As `Accumulator.merge`, with what has no vector."""
        super().merge(ranks)
        self.totals = ranks.total({"totals": self.totals})["totals"]

    def run(
        self,
        backward: Callable[[bool], None],
        open_sink: Callable[[object], None],
        layout: Layout,
        expected: Mapping[str, int],
        *,
        two_pass: bool,
    ) -> None:
        """Clip and add one micro-batch; in one pass, so with ``two_pass`` its factors stay for as long as the pass."""
        sink = AbsoluteSink(self, layout, expected, keep=self.vectors)
        open_sink(sink)
        backward(False)
        upper = sink.finish()
        scales = self._scales(upper, layout.weights)
        sink.apart()
        factors = scales.expand(len(self.partitions), -1)
        self.take_apart(upper, factors)
        for name in self.in_order(sink.entries) if self.vectors else ():
            entry = sink.entries.pop(name, None) or Entry()
            if entry.instance is not None:
                self.add_instance(name, entry.instance, factors)
            self.add_uses(name, entry.factors, factors, layout)
            self.keep(name)
        if self.vectors:
            self.finish()

    def may_hold(self, layout: Layout) -> int:
        """None, as most magnitudes need no factor once it is measured."""
        return -1

    def add_unit(self, instances: Mapping[str, torch.Tensor], weight: torch.Tensor) -> None:
        """Clip and add one unit from its whole gradients ``[1, ...]``: the one-example route."""
        norms = Norms(len(self.partitions), 1, weight.device, order=1)
        for name, instance in instances.items():
            group, entries = self.policy.group_of[name], instance.numel()
            assert isinstance(group, int)
            norms.add(group, ops.instance_abs_sum(instance), entries, relative=ops.Rounding(instance).squares(entries))
        scales = self._scales(norms.upper(), weight)
        if not self.vectors:
            return
        for name, instance in instances.items():
            self.add_instance(name, instance, scales.expand(len(self.partitions), -1))

    def _scales(self, upper: UpperNorms, weights: torch.Tensor) -> torch.Tensor:
        """Clipping factors ``[units]`` from bounds of the partitions' norms; adds what needs no vector."""
        scales = torch.where(weights > 0, self.magnitude.scales(upper, self.sizes) * weights, 0.0)
        if not self.vectors:
            # What is added is what was measured, which the bound covers.
            self.totals += (torch.where(scales > 0, upper.measured, 0.0) @ scales.double()) / self.sizes
        return scales

    def magnitudes(self) -> torch.Tensor:
        """The magnitudes without noise, float64 ``[partitions]``: private until noise of their sensitivity is added.

        Of weights in pieces every rank must ask.
        """
        if not self.vectors:
            return self.totals
        norms = torch.zeros_like(self.sizes)
        for name in filter(self.weights.counts, self.sums):
            group, total = self.policy.group_of[name], self.sums[name]
            assert isinstance(group, int)
            norms[group] += total.abs().sum(dtype=torch.float64)
        return self.weights.counted(norms) / self.sizes
