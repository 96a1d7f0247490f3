"""The engine: joins a model's forward and backward passes to accumulator and release, one micro-batch at a time."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import torch

from fastdp.engine import selfcheck
from fastdp.engine.accumulator import Accumulator
from fastdp.engine.batches import has_rows, map_tensors, take_rows, tensors
from fastdp.engine.boundary import LossBoundary, OutputBoundary, find_loss, plain_gradients, replace_loss
from fastdp.engine.intercept import PatchedForward, Reads
from fastdp.engine.layout import Layout, Ticket
from fastdp.engine.losses import LossTerms, combine, intercepted, masked_mean
from fastdp.engine.policy import Policy, Unclipped
from fastdp.engine.trace import Trace, trace
from fastdp.engine.uses import Tap, UnsupportedUse

#: How per-example gradients are obtained.
USES, ONE_EXAMPLE, ORDINARY = "uses", "one-example", "ordinary"


@dataclasses.dataclass
class Pass:
    """One forward pass that waits for its backward: what to differentiate, and for whom."""

    ticket: Ticket
    layout: Layout
    backward: Callable[[Any, bool], None]
    tap: Tap
    verify: bool
    used: bool = False


class Engine:
    """Per-example gradients of a model's trained parameters, clipped and summed as a policy says.

    Args:
        model: the user's model; only the `forward` attribute of some of its modules is patched, and only until `close`.
        policy: the method's decisions.
        tickets: the loader's queue: a forward pass reads its head, the backward pass removes it.
        loss_reduction: "mean" or "sum" over the rows, for a criterion outside the model; None for a model that returns
            its loss.
        two_pass: run the backward pass twice and keep no factors; None decides by whether checkpointing is on.
        check: compare the first micro-batch with one-at-a-time autograd before anything is released.
        accumulator: takes the captures instead of an `Accumulator`, for other sums of per-example gradients than clipped ones.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        policy: Policy,
        tickets: deque[Ticket],
        *,
        loss_reduction: str | None = None,
        two_pass: bool | None = None,
        check: bool = True,
        accumulator: Accumulator | None = None,
        on_route: Callable[[str, str | None], None] = lambda route, reason: None,
    ):
        self.model = model
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.accumulator = accumulator or Accumulator(self.parameters, policy)
        self.tickets = tickets
        self.loss_reduction = loss_reduction
        self.two_pass = two_pass
        self.check = check
        self.on_route = on_route
        self.route: str | None = ORDINARY if isinstance(policy, Unclipped) else None
        self.reason: str | None = None
        self.trace: Trace | None = None
        self.reads = Reads(self.parameters)
        self.expected: Counter[str] = Counter()
        self.complete = False
        self.backwards = 0
        self._patches: list[PatchedForward] = []
        self._preparing = False
        self._root = _RootForward(model, self)

    def plain_forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own forward pass, with nothing intercepted."""
        return self._root.plain(*args, **kwargs)

    def close(self) -> None:
        """Give the model its own forwards back."""
        for patch in reversed(self._patches):
            patch.remove()
        self._patches.clear()
        self._root.remove()

    def abandon(self) -> None:
        """Forget a logical batch that was begun and not released: the loader starts anew."""
        self.accumulator.reset()
        self.complete = False

    def forward(self, args: Any, kwargs: Any) -> Any:
        """A training forward pass on the micro-batch at the head of the queue."""
        if not self.tickets:
            raise RuntimeError(
                "no batch is outstanding: iterate over the data_loader that make_private returned, and use "
                "model.eval() with torch.no_grad() to evaluate"
            )
        ticket = self.tickets[0]
        if not has_rows((args, kwargs), ticket.rows):
            shapes = [list(t.shape) for t in tensors((args, kwargs))]
            raise ValueError(
                f"the loader handed out {ticket.rows} rows but the model was called with {shapes}: each batch of the "
                "private loader must go through forward and backward once, in order"
            )
        verify = self.route is None
        if verify:
            self._prepare(args, kwargs, ticket)
        return self.run_forward(args, kwargs, ticket, verify=verify or self.backwards == 0)

    def run_forward(self, args: Any, kwargs: Any, ticket: Ticket, *, verify: bool) -> Any:
        """The forward pass by the chosen route, its loss or outputs replaced by a boundary."""
        device = next(iter(self.parameters.values())).device
        layout = ticket.layout(device)
        layout.constants, layout.meetings, layout.learning = self._constants(), self.reads.meetings, self._preparing
        if self.route == ONE_EXAMPLE:
            return self._one_at_a_time(args, kwargs, ticket, layout)
        tap, terms = Tap(layout), LossTerms(layout)
        self.reads.tap = tap if self.route == USES else None
        try:
            with intercepted(terms):
                output = self._root.original(*args, **kwargs)
        finally:
            self.reads.tap = None
        if self.loss_reduction is not None:
            return self._outputs(output, ticket, layout, tap, verify)
        total = find_loss(output)
        if total is None:
            raise ValueError(
                "the model returned no loss: pass labels to it, or state loss_reduction='mean' (or 'sum') to make_private "
                "and compute the loss outside"
            )
        if not terms.scalars:
            raise UnsupportedUse(terms.unmapped or "the model computes its loss without torch's loss functions")
        per_unit = combine(total, terms, verify=verify)

        def backward(_upstream: Any, retain: bool) -> None:
            # A unit that takes no part sends back exact zeros; its weight of 0 then selects it out of every sum.
            torch.autograd.backward(per_unit, (layout.weights > 0).to(per_unit.dtype), retain_graph=retain)

        waiting = Pass(ticket, layout, backward, tap, verify)
        value = masked_mean(per_unit.detach(), layout.weights)
        return replace_loss(output, self._loss(value, waiting))

    def _constants(self) -> frozenset[int]:
        fixed = (p for p in self.model.parameters() if id(p) not in self.reads.names)
        return frozenset(t.untyped_storage().data_ptr() for t in (*self.model.buffers(), *fixed))

    def _loss(self, value: torch.Tensor, waiting: Pass) -> torch.Tensor:
        def enter(upstream: torch.Tensor) -> None:
            if (waiting.verify or upstream.device.type == "cpu") and not float(upstream) > 0:
                raise ValueError(
                    f"the loss was scaled by {float(upstream)} before backward(): scales are divided out, so it must be "
                    "positive; change the sign inside the model's loss"
                )
            self._backward(waiting, upstream)

        anchor = torch.zeros((), device=value.device, requires_grad=True)
        return LossBoundary.apply(anchor, value, enter)

    def _outputs(self, output: Any, ticket: Ticket, layout: Layout, tap: Tap, verify: bool) -> Any:
        found = [t for t in tensors(output) if t.requires_grad and t.dim() > 0]
        if not found:
            raise ValueError("the model returned no tensor that a loss could be computed from")
        scale = float(ticket.rows) if self.loss_reduction == "mean" else 1.0

        def backward(upstream: Any, retain: bool) -> None:
            pairs = [(t, g * scale) for t, g in zip(found, upstream) if g is not None]
            torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs], retain_graph=retain)

        waiting = Pass(ticket, layout, backward, tap, verify)
        anchor = torch.zeros((), device=found[0].device, requires_grad=True)
        outer = OutputBoundary.apply(anchor, lambda upstream: self._backward(waiting, upstream), found)
        replaced = {id(t): o for t, o in zip(found, outer)}
        return map_tensors(output, lambda t: replaced.get(id(t), t))

    def _backward(self, waiting: Pass, upstream: Any) -> None:
        if waiting.used:
            raise RuntimeError(
                "a second backward() on one batch: each batch of the private loader may be differentiated once"
            )
        waiting.used = True
        if not self._preparing:
            if not self.tickets or self.tickets[0] is not waiting.ticket:
                raise RuntimeError("backward passes must come in the order in which the loader handed out the batches")
            if self.complete:
                raise RuntimeError(
                    "a logical batch is complete and optimizer.step() has not been called; call it after every backward()"
                )
            self._refuse_foreign_gradients("before the backward pass")
        self.differentiate(waiting, upstream)
        if self._preparing:
            return
        self.backwards += 1
        self.tickets.popleft()
        self.complete = waiting.ticket.is_last

    def differentiate(self, waiting: Pass, upstream: Any) -> None:
        """Run the backward pass of one micro-batch into the accumulator."""
        two_pass = self.two_pass if self.two_pass is not None else _checkpoints(self.model)
        self.reads.tap = waiting.tap if self.route == USES else None
        try:
            if self.route == ORDINARY:
                waiting.backward(upstream, False)
                self._take_ordinary(waiting)
            elif self.route == ONE_EXAMPLE:
                waiting.backward(upstream, False)
            else:
                self.accumulator.run(
                    lambda retain: waiting.backward(upstream, retain),
                    lambda sink: setattr(waiting.tap, "sink", sink),
                    waiting.layout,
                    self.expected,
                    two_pass=two_pass,
                )
                self._refuse_foreign_gradients("in the backward pass")
        finally:
            self.reads.tap = None
            waiting.tap.sink = None

    def _take_ordinary(self, waiting: Pass) -> None:
        accumulator = self.accumulator
        accumulator.units = accumulator.units + (waiting.layout.weights > 0).sum()
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                gradient, parameter.grad = parameter.grad.float(), None
                accumulator.sums[name] = accumulator.sums[name] + gradient if name in accumulator.sums else gradient

    def _refuse_foreign_gradients(self, when: str) -> None:
        """Every covered use returns no gradient to autograd, so a `.grad` that appears is one nothing has clipped."""
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                parameter.grad = None
                if self._preparing:
                    raise UnsupportedUse(
                        f"{name} is read where no module's forward runs, as in a checkpointed function"
                    )
                raise RuntimeError(
                    f"{name} holds a gradient {when} that was not clipped: call optimizer.zero_grad() after step(), and "
                    "let no loss term use parameters directly"
                )

    def _prepare(self, args: Any, kwargs: Any, ticket: Ticket) -> None:
        """Trace the model, patch it, and compare a few examples with one-at-a-time autograd."""
        self._preparing = True
        try:
            self.trace = trace(self.model, self._root.original, args, kwargs, ticket.rows, self.parameters)
            reason = self.trace.conflict
            if reason is None:
                reason = self._try_uses(args, kwargs, ticket)
        finally:
            self._preparing = False
            self.accumulator.reset()
        if reason is not None:
            self.route, self.reason = ONE_EXAMPLE, reason
            if ticket.token_units is not None:
                raise ValueError(
                    f"packed rows need a per-example rule for every parameter, and one is missing: {reason}"
                )
            warnings.warn(
                f"this model takes the one-example route, exact but several times slower: {reason}", stacklevel=2
            )
        self.on_route(str(self.route), reason)

    def _try_uses(self, args: Any, kwargs: Any, ticket: Ticket) -> str | None:
        assert self.trace is not None
        self.reads.carries_rows = self.trace.carries_rows
        self.expected, self.accumulator.tables = self.trace.uses, self.trace.tables
        modules = dict(self.model.named_modules())
        for name in self.trace.modules:
            if name:
                self._patches.append(PatchedForward(modules[name], self.reads))
        if "" in self.trace.modules:
            self._root.wrap(PatchedForward(self.model, self.reads))
        self.route = USES
        try:
            if self.check:
                selfcheck.compare(self, args, kwargs, ticket)
            else:
                selfcheck.attempt(self, args, kwargs, ticket)
            return None
        except UnsupportedUse as error:
            for patch in reversed(self._patches):
                patch.remove()
            self._patches.clear()
            return str(error)

    def _one_at_a_time(self, args: Any, kwargs: Any, ticket: Ticket, layout: Layout) -> Any:
        """The universal route: each row is a batch of its own, so any model is differentiated exactly."""
        outputs = []
        for row in range(ticket.rows):
            index = torch.tensor([row])
            sub_args, sub_kwargs = take_rows(args, index, ticket.rows), take_rows(kwargs, index, ticket.rows)
            outputs.append(self._root.original(*sub_args, **sub_kwargs))
        tap = Tap(layout)
        if self.loss_reduction is None:
            losses = [find_loss(output) for output in outputs]
            if any(loss is None for loss in losses):
                raise ValueError(
                    "the model returned no loss: pass labels to it, or state loss_reduction to make_private"
                )
            rows = torch.stack([loss.reshape(()) for loss in losses])  # type: ignore[union-attr]
            targets = [[(loss, None)] for loss in losses]
        else:
            found = [[t for t in tensors(o) if t.requires_grad and t.dim() > 0] for o in outputs]
            targets = [[(t, None) for t in row] for row in found]

        def backward(upstream: Any, retain: bool) -> None:
            for unit in range(layout.units):
                if float(layout.weights[unit]) == 0:
                    continue
                own = (ticket.row_units == unit).nonzero().reshape(-1).tolist()
                self._one_unit(unit, [(r, targets[r]) for r in own], upstream, layout, ticket.rows)

        waiting = Pass(ticket, layout, backward, tap, verify=True)
        merged = _merge_outputs(outputs)
        if self.loss_reduction is None:
            value = masked_mean(layout.sum_lanes(rows.detach().float()), layout.weights)
            return replace_loss(merged, self._loss(value, waiting))
        flat = [torch.cat([row[i] for row in found]) for i in range(len(found[0]))]
        anchor = torch.zeros((), device=flat[0].device, requires_grad=True)
        outer = OutputBoundary.apply(anchor, lambda upstream: self._backward(waiting, upstream), flat)
        queue = deque(outer)
        return map_tensors(merged, lambda t: queue.popleft() if t.requires_grad and t.dim() > 0 else t)

    def _one_unit(self, unit: int, rows: list[Any], upstream: Any, layout: Layout, count: int) -> None:
        tops, seeds = [], []
        for row, targets in rows:
            for position, (tensor, _) in enumerate(targets):
                tops.append(tensor)
                if self.loss_reduction is None:
                    seeds.append(torch.ones_like(tensor))
                elif upstream[position] is None:
                    tops.pop()
                else:
                    scale = float(count) if self.loss_reduction == "mean" else 1.0
                    seeds.append(upstream[position][row : row + 1] * scale)
        gradients = plain_gradients(tops, seeds, self.parameters.values())
        instances = {
            name: gradient.float().unsqueeze(0)
            for name, gradient in zip(self.parameters, gradients)
            if gradient is not None
        }
        self.accumulator.add_unit(instances, layout.weights[unit : unit + 1])


class _RootForward:
    """The model's own forward, through the engine while training."""

    def __init__(self, model: torch.nn.Module, engine: Engine):
        self.model, self.engine = model, engine
        self.had_own = "forward" in model.__dict__
        self.original: Callable[..., Any] = model.forward
        self.plain = self.original
        # Signature-driven callers (Trainer's column removal) look at `forward`.
        self.__wrapped__ = self.original
        model.forward = self  # type: ignore[method-assign]

    def wrap(self, patch: PatchedForward) -> None:
        """Let the root's own reads of parameters be intercepted too."""
        patch.original = self.plain
        self.original = patch
        self.model.forward = self  # type: ignore[method-assign]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (self.model.training and torch.is_grad_enabled()):
            return self.plain(*args, **kwargs)
        return self.engine.forward(args, kwargs)

    def remove(self) -> None:
        if self.had_own:
            self.model.forward = self.plain  # type: ignore[method-assign]
        else:
            self.model.__dict__.pop("forward", None)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return functools.partial(type(self.model).forward, memo[id(self.model)])

    def __reduce__(self) -> Any:
        return functools.partial, (type(self.model).forward, self.model)


def _merge_outputs(outputs: list[Any]) -> Any:
    """One output for all rows: tensors with a row dimension concatenated, everything else from the first row."""
    columns = [list(tensors(output)) for output in outputs]
    position = iter(range(len(columns[0])))

    def merge(t: torch.Tensor) -> torch.Tensor:
        index = next(position)
        parts = [column[index] for column in columns]
        same = t.dim() > 0 and all(p.shape[1:] == t.shape[1:] for p in parts)
        return torch.cat(parts) if same else t

    return map_tensors(outputs[0], merge)


def _checkpoints(model: torch.nn.Module) -> bool:
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
