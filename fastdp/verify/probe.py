"""One call of the model run again on chosen rows: what each row gets, and which gradients reach its inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from fastdp.calls.batches import Call, take_rows
from fastdp.calls.modes import in_mode, rounding
from fastdp.calls.randomness import BufferSnapshot, DropoutDisabled, preserve_rng, rng_state
from fastdp.calls.values import RowValues
from fastdp.engine.capture.follow import InputGradients
from fastdp.engine.errors import OwnLoss
from fastdp.engine.loss.boundary import gradient_hooks_disabled, require_loss, take_gradients
from fastdp.engine.loss.losses import LossTerms, combine, divided_terms, intercepted, shares
from fastdp.engine.passes import Passes
from fastdp.engine.uses.layout import Layout, Ticket

#: The tolerance of gradients, relative to that of losses.
GRADIENT_TOLERANCE = 10.0


class Probe:
    """Runs one call of a model again on chosen rows, by plain forward passes; ``passes`` have a trace."""

    def __init__(self, passes: Passes, call: Call, ticket: Ticket):
        assert passes.trace is not None
        self.passes, self.call, self.ticket = passes, call, ticket
        self.carriers, self.packed = passes.trace.carriers, ticket.token_units is not None
        self.rounding = partial(rounding, passes.model, low=passes.trace.low)
        #: Whether the model may drop out, so far as passes showed.
        self.drops = True

    def rows(self, rows: Sequence[int], call: Call | None = None) -> Call:
        """The call (by default the probe's own) on these rows, in this order; a row may come several times."""
        return take_rows(self.call if call is None else call, torch.tensor(rows), self.carriers)

    def layout(self, rows: int, *, packed: bool = False) -> Layout:
        """Each row a unit of its own, or the call's packed units."""
        ticket = self.ticket if packed else Ticket(torch.arange(rows), torch.ones(rows), is_last=True)
        return ticket.layout(self.passes.device)

    def run(
        self,
        call: Call,
        rows: int,
        *,
        training: bool = True,
        packed: bool = False,
        upstream: torch.Tensor | None = None,
        singles: Mapping[int, RowValues] = {},
    ) -> RowValues:
        """One pass on so many ``rows``, or packed units, from the random state as it is, which is restored.

        Args:
            upstream: gradient of each unit's loss ``[rows]``, to be propagated back to the inputs.
            singles: of rows run alone, by which the passes learn which losses the model divides by the number of rows.

        Raises `UnsupportedUse` if the losses cannot be told apart by row.
        """
        passes, layout = self.passes, self.layout(rows, packed=packed)
        mode = nullcontext() if training else in_mode(passes.model, training=False)
        inputs = None if upstream is None else InputGradients(call, self.carriers, rows)
        disabled = DropoutDisabled()
        dropout_mode = disabled if self.drops else nullcontext()
        with preserve_rng(passes.model), torch.enable_grad(), mode:
            before = rng_state(passes.model)
            found, terms, output = self._forward(call, layout, inputs, dropout_mode)
            found.draws = None if (after := rng_state(passes.model)) == before else after
            self.drops &= disabled.used
            if singles and passes.returns_loss:
                passes.divided = divided_terms(found, singles, rows)
            own = zip(found.shares, found.values)
            found.values = [
                v * rows if n in passes.divided and by is None else v for n, (by, v) in enumerate(own)
            ] or found.values
            if upstream is not None and inputs is not None and passes.returns_loss:
                losses = combine(require_loss(output), terms, passes.divided, verify=False)
                del output
                # Checkpointed pieces are computed again.
                with passes.weights.gathered(), dropout_mode:
                    found.inputs = _input_gradients(losses, upstream, inputs)
        return found

    def unit_gradients(
        self, call: Call, rows: int, units: Sequence[int], take: Callable[[int, int, torch.Tensor], None]
    ) -> list[list[torch.Tensor]]:
        """Gradients of single units' losses, with dropout: one forward pass on so many ``rows``, and a backward pass a unit.

        ``take`` is called with a unit, a parameter's number and its gradient, as soon as that is there. Returns for each unit
        the gradients at every embedding and floating-point input, rows first.
        """
        passes, layout = self.passes, self.layout(rows, packed=self.packed)
        parameters = list(passes.read.values())
        inputs = InputGradients(call, self.carriers, rows)
        reached = []
        with preserve_rng(passes.model), torch.enable_grad():
            _, terms, output = self._forward(call, layout, inputs, nullcontext())
            losses = combine(require_loss(output), terms, passes.divided, verify=False) if passes.returns_loss else None
            tops, seeds = passes.check_starts(output, rows, losses, terms)
            del output, losses
            for number, unit in enumerate(units):
                own = [torch.zeros_like(seed) for seed in seeds]
                for seed, chosen in zip(seeds, own):
                    chosen[unit] = seed[unit]
                arriving = take_gradients(parameters, partial(take, unit))
                with passes.weights.gathered(), gradient_hooks_disabled(parameters), arriving:
                    torch.autograd.backward(tops, own, retain_graph=number + 1 < len(units))
                reached.append(inputs.taken())
        return reached

    def _forward(
        self, call: Call, layout: Layout, inputs: InputGradients | None, dropout_mode: AbstractContextManager[Any]
    ) -> tuple[RowValues, LossTerms, Any]:
        """One plain forward pass; ``inputs`` follows the tensors whose gradients are wanted, within ``dropout_mode``."""
        passes, terms = self.passes, self.passes.terms(layout)
        snapshot = BufferSnapshot(passes.model, passes.derived_buffers)
        try:
            with inputs or nullcontext(), intercepted(terms), dropout_mode:
                args, kwargs = call if inputs is None else inputs.call
                output = passes.plain_forward(*args, **kwargs)
        except RuntimeError as error:
            if inputs is None or "requires" not in str(error):
                raise
            # The model sets requires_grad on what it makes of its inputs, or reads them by numpy.
            inputs.clear()
            return self._forward(call, layout, None, dropout_mode)
        snapshot.restore()
        if not passes.returns_loss:
            found = [] if passes.trace is None else passes.trace.outputs.of(output)
            return RowValues([t.detach() for t in found]), terms, output
        total = require_loss(output)
        if passes.trace is None or not passes.trace.mapped:
            raise OwnLoss(terms.unmapped or "the model computes its loss without torch's loss functions")
        known = terms.of(total)
        given = shares(total, known)
        parts = [float((share * term.leaf.detach()).sum()) for share, term in zip(given, known)]
        own = [None if term.mean is None else float(share) for share, term in zip(given, known)]
        values = [t.weighted(by, layout) if t.mean is None else t.per_unit for by, t in zip(given, known)]
        rest = float(total.detach()) - sum(parts)
        if not abs(rest) > 1e-4 * max(map(abs, (float(total.detach()), *parts))):
            rest = 0.0
        return RowValues([t.detach() for t in values], own, rest), terms, output


def same_shape_factor(passes: Passes) -> float:
    """The tolerance between passes of the same shapes, relative to that between passes of different shapes."""
    selects = passes.forwards.lists or (passes.trace is not None and passes.trace.selects)
    return 1.0 if selects else 1e-2


def _input_gradients(losses: torch.Tensor, upstream: torch.Tensor, inputs: InputGradients) -> list[torch.Tensor]:
    """Gradients at these inputs alone; none where checkpoints are reentrant."""
    try:
        if inputs.tensors:
            torch.autograd.backward([losses], [upstream.to(losses)], inputs=inputs.tensors)
    except RuntimeError as error:
        if "use_reentrant=True" not in str(error):
            raise
        inputs.clear()
    return inputs.taken()
