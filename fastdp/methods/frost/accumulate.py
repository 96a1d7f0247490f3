"""Gradient magnitudes of each partition over a sample, from the engine's captures (MGNA of Definition 8, in L1 norms)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

import fastdp.ops as ops
from fastdp.distributed.ranks import Ranks
from fastdp.engine.bounds import Errors, Norms, UpperNorms
from fastdp.engine.clip.accumulator import Accumulator
from fastdp.engine.clip.norms import NormSink
from fastdp.engine.clip.policy import Policy
from fastdp.engine.clip.sums import Route
from fastdp.engine.uses.factors import Factors, PerUnit
from fastdp.engine.uses.layout import Layout
from fastdp.methods.frost.partitions import Partition
from fastdp.ops.bounds import round_down


def magnitude_bound(partitions: Sequence[Partition], max_grad_norm: float) -> float:
    """c / mean |P|: what an example's normalised gradient is clipped to, and the L2 sensitivity of magnitudes (Lemma 3).

    The partitions are those that remain: with another set's bound the noise would not match.
    """
    return max_grad_norm * (len(partitions) / sum(partition.size for partition in partitions))


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
                # The bound also covers the rounding of the products that the gradient is made of.
                for use in entry.factors:
                    self.note_products(name, use, order=1)
                sizes = torch.cat(each)
                reach = entry.reach(sizes.double())
                self.add_powers(name, sizes, ops.Rounding(sizes), products=reach, times=1.0)
            elif entry.instance is not None:
                self.add_powers(name, ops.instance_abs_sum(entry.instance), ops.Rounding(entry.instance))
        return self.norms.upper()


class MagnitudeAccumulator(Accumulator):
    """The magnitudes of partitions over a sample, as the engine runs it.

    An example's gradient is divided by the size of each partition, made absolute and clipped. A partition's magnitude is the
    sum of its clipped examples' L1 norms, so no gradient is formed. The parameters are those of the partitions, and no others.

    Attributes:
        magnitudes: without noise, float64 ``[partitions]``: private until noise of their sensitivity is added.
    """

    def __init__(
        self, parameters: Mapping[str, torch.nn.Parameter], partitions: Sequence[Partition], max_grad_norm: float
    ):
        count = len(partitions)
        owner = {name: index for index, partition in enumerate(partitions) for name in partition.parameters}
        device = next(iter(parameters.values())).device
        self._bound = magnitude_bound(partitions, max_grad_norm)
        self._sizes = torch.tensor([partition.size for partition in partitions], dtype=torch.float64, device=device)
        super().__init__(parameters, Policy((1.0,) * count, (0.0,) * count, owner))

    def reset(self) -> None:
        super().reset()
        self.magnitudes = torch.zeros_like(self._sizes)

    def merge(self, ranks: Ranks) -> None:
        """As `Accumulator.merge`, with the magnitudes."""
        super().merge(ranks)
        self.magnitudes = ranks.total({"magnitudes": self.magnitudes})["magnitudes"]

    def run(
        self,
        backward: Callable[[bool], None],
        open_sink: Callable[[object], None],
        layout: Layout,
        expected: Mapping[str, int],
        *,
        two_pass: bool,
    ) -> None:
        """Clip and add one micro-batch, in one pass whatever ``two_pass`` is."""
        sink = AbsoluteSink(self, layout, expected, keep=False)
        open_sink(sink)
        backward(False)
        self._add(sink.finish(), layout.weights)

    def may_hold(self, layout: Layout) -> int:
        """-1, for none (see `Accumulator.may_hold`): once measured, most magnitudes need no factors."""
        return -1

    def add_unit(self, instances: Mapping[str, torch.Tensor], weight: torch.Tensor) -> None:
        """Clip and add one unit from its whole gradients ``[1, ...]``: the one-example route."""
        norms = Norms(len(self._sizes), 1, weight.device, order=1)
        for name, instance in instances.items():
            group, entries = self.policy.group_of[name], instance.numel()
            assert isinstance(group, int)
            norms.add(group, ops.instance_abs_sum(instance), Errors(entries, ops.Rounding(instance).squares(entries)))
        self._add(norms.upper(), weight)

    def _add(self, upper: UpperNorms, weights: torch.Tensor) -> None:
        """Add each unit's scaled magnitudes. `round_down` gives scale 0 to a unit that is not finite or 2^40 times too long."""
        scales = round_down(self._bound / (upper.norms / self._sizes.unsqueeze(1)).sum(0))
        scales = torch.where(weights > 0, scales * weights, 0.0)
        # What is added is what was measured, which the bound covers.
        self.magnitudes += (torch.where(scales > 0, upper.measured, 0.0) @ scales.double()) / self._sizes
