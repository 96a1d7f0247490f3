"""One logical batch clipped and added up: norms by unit and group, scales from the policy, weighted sums."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping

import torch

import fastdp.engine.clip.norms as sinks
import fastdp.ops as ops
from fastdp.distributed.blocks import CaptureOrder
from fastdp.distributed.ranks import Ranks
from fastdp.engine.bounds import Errors, Norms, UpperNorms
from fastdp.engine.clip.axes import ScalingSink
from fastdp.engine.clip.norms import Entry, FactorBatch, NormSink
from fastdp.engine.clip.policy import Policy
from fastdp.engine.clip.sums import Sums, SumSink
from fastdp.engine.uses.layout import Layout
from fastdp.engine.uses.use import Sink

#: In how many launches sums are made at least where they are large: what one of them makes, it holds beside all its factors.
_LAUNCHES = 8
#: The place of counts among sums by parameter.
_COUNTS = "(counts)"
_TRAINED = operator.attrgetter("requires_grad")


class _TrainedOnly:
    """Let captures of parameters that were frozen later on go by."""

    def __init__(self, sink: Sink):
        self._sink = sink

    def __getattr__(self, kind: str) -> Callable[..., None]:
        take = getattr(self._sink, kind)
        return lambda parameter, *captured: take(parameter, *captured) if parameter.requires_grad else None


class Accumulator(Sums):
    """Clipped sums of one logical batch, float32, and what may be said about how they came about.

    Its policy may be replaced between logical batches.
    """

    def reset(self) -> None:
        """Forget the sums: a new logical batch begins."""
        super().reset()
        self.nonfinite: torch.Tensor | int = 0
        #: What `unclipped` comes to so far, and which units have come since, with their norms and the policy.
        self._unclipped: torch.Tensor | float = 0.0
        self._clipped: list[tuple[torch.Tensor, UpperNorms, Policy]] = []
        self.units: torch.Tensor | int = 0
        #: The bounds that this batch is clipped by, once its first unit was.
        self.bounds: tuple[float, ...] | None = None
        #: Sums whose memory another batch will write to, without noise: nobody may keep these.
        self.aliased: frozenset[str] = frozenset()

    @property
    def unclipped(self) -> torch.Tensor | float:
        """How many units were left whole; each counts by how far its norm is below the bound: `Policy.unclipped`."""
        for kept, upper, policy in self._clipped:
            self._unclipped = self._unclipped + torch.where(kept, policy.unclipped(upper), 0.0).sum()
        self._clipped.clear()
        return self._unclipped

    @unclipped.setter
    def unclipped(self, count: torch.Tensor) -> None:
        self._unclipped = count
        self._clipped.clear()

    def alias_graph_buffers(self, sums: Mapping[str, torch.Tensor]) -> None:
        """Take sums of parameters that have none yet as they lie in a recorded pass, until `copy_aliased`."""
        self.sums.update(sums)
        self.aliased |= sums.keys()

    def copy_aliased(self) -> None:
        """Copy what lies in a recorded pass: a recorded pass is about to write where it lies."""
        self.sums.update({name: self.sums[name].clone() for name in self.aliased & self.sums.keys()})
        self.aliased = frozenset()

    def merge(self, ranks: Ranks) -> None:
        """Make the sums, and what is said about them, those of the whole logical batch: of all ranks' micro-batches."""
        if ranks.size == 1:
            return
        if self.weights.cut and not self.weights.cuts_sums:
            self.cut()
        whole = {name: p for name, p in self.parameters.items() if not self.weights.cuts(name)}
        sums = {name: self.sums[name] for name in whole if name in self.sums}
        device = next(iter(self.parameters.values())).device
        # With the sums, so that the host reads nothing.
        counts = (torch.as_tensor(count, device=device) for count in (self.units, self.unclipped, self.nonfinite))
        sums[_COUNTS] = torch.stack([count.float() for count in counts])
        ranks.add(sums, {**whole, _COUNTS: sums[_COUNTS]})
        self.units, self.unclipped, self.nonfinite = sums.pop(_COUNTS).unbind()
        self.sums.update(sums)

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
        sink = self._scaling_sink(norms)
        order = CaptureOrder(sink, self.names) if two_pass and self.weights.cuts_sums else None
        open_sink(order or sink)
        backward(two_pass)
        upper = norms.finish()
        unit_scales = self.unit_scales(upper, layout.weights)
        self.take_apart(upper, unit_scales)
        if two_pass:
            # Ranks whose captures come in another order could not add them up as they come.
            at_once = order is not None and self.weights.alike(order.checksum)
            open_sink(self._scaling_sink(SumSink(self, unit_scales, at_once=at_once)))
            backward(False)
            self.finish()
            return
        most = self._launch_bytes(norms)
        if self.weights.cuts_sums:
            norms.apart()
        for batch in reversed(norms.batches):
            self._add_batch(batch, unit_scales, most)
        while norms.repeats:
            batch = norms.repeats.pop()
            gradients, _ = ops.per_unit_group(*batch.sides, batch.offsets)
            self.add_instances(dict(zip(batch.names, gradients)), unit_scales)
        whole, held = norms.wholes, 0
        for name in self.in_order(norms.entries):
            entry = norms.entries.pop(name, None) or Entry()
            if entry.instance is not None:
                whole[name], entry.instance = entry.instance, None
                held += 4 * self.parameters[name].numel()
            self.add_uses(name, entry.factors, unit_scales, layout)
            if held > most or self.weights.cuts_sums:
                self.add_instances(whole, unit_scales)
                whole, held = {}, 0
            self.keep(name)
        self.add_instances(whole, unit_scales)
        self.finish()

    def _add_batch(self, batch: FactorBatch, unit_scales: torch.Tensor, most: int) -> None:
        """Add the sums of matrices that were measured together, the last captured first, in launches of about ``most`` bytes."""
        held, end = 0, len(batch.names)
        for at in reversed(range(end)):
            held += 4 * self.parameters[batch.names[at]].numel()
            if held > most or at == 0:
                own = batch.taken(tuple(range(at, end)))
                self.add_matrices(own.names, *own.sides, unit_scales, batch.offsets)
                del own, batch.lefts[at:], batch.rights[at:]
                held, end = 0, at

    def _launch_bytes(self, norms: NormSink) -> int:
        """Bytes of sums that are made in one launch: few beside all of them, or beside what captures may hold back."""
        names = [name for batch in norms.batches for name in batch.names]
        every = 4 * sum([self.parameters[name].numel() for name in (*names, *norms.wholes, *norms.entries)])
        return min(norms.may_hold_bytes, max(every // _LAUNCHES, norms.may_hold_bytes // 32))

    def may_hold(self, layout: Layout) -> int:
        """Bytes of gradients of small matrices' outputs that may wait until the backward pass is over; -1 for none at all."""
        return sinks.may_hold(layout.weights.device) or -1

    def _scaling_sink(self, sink: Sink) -> Sink:
        """The sink, or one before it that divides by the policy's axes."""
        for name, axes in self.policy.axes.items():
            axes.check(name, self.parameters[name].shape)
        if not all(map(_TRAINED, self.parameters.values())):
            sink = _TrainedOnly(sink)
        return ScalingSink(sink, self.policy.axes, self.names) if self.policy.axes else sink

    def add_unit(self, instances: Mapping[str, torch.Tensor], weight: torch.Tensor) -> None:
        """Clip and add one unit from its whole gradients ``[1, ...]``, weight ``[1]``: the one-example route."""
        policy, axes = self.policy, self.policy.axes
        norms = Norms(len(policy.bounds), 1, weight.device)
        instances = {n: axes[n].over(g, self.parameters[n].shape) if n in axes else g for n, g in instances.items()}
        for name, instance in instances.items():
            group, entries = policy.group_of[name], instance.numel()
            errors = Errors(entries, ops.Rounding(instance).squares(entries))
            if isinstance(group, tuple):
                parts = ops.instance_masked_sqnorm(instance, policy.masks[name])
                for side, squared in zip(group, parts):
                    norms.add(side, squared, errors)
            else:
                norms.add(group, ops.instance_sqnorm(instance), errors)
        unit_scales = self.unit_scales(norms.upper(), weight)
        for name, instance in instances.items():
            self.add_instance(name, instance, unit_scales)

    def unit_scales(self, upper: UpperNorms, weights: torch.Tensor) -> torch.Tensor:
        """Scales ``[groups, units]`` of the policy times the units' weights, counting what was dropped or left whole."""
        self.require_one_clip()
        self.bounds = self.policy.bounds
        scales = torch.where(weights > 0, self.policy.scales(upper) * weights, 0.0)
        kept, real = (scales > 0).any(0), torch.count_nonzero(weights)
        self.nonfinite = self.nonfinite + (real - torch.count_nonzero(kept))
        self._clipped.append((kept, upper, self.policy))
        self.units = self.units + real
        return scales

    def require_one_clip(self) -> None:
        """Raise RuntimeError if the policy's bounds are not those that this batch was clipped by so far."""
        if self.bounds not in (None, self.policy.bounds):
            raise RuntimeError(
                f"This logical batch was clipped to {self.bounds}, and the policy now says "
                f"{self.policy.bounds}: change bounds between logical batches alone."
            )
