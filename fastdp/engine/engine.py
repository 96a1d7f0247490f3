"""The engine: a training run's passes, in the order in which the loader hands out its batches, each checked before it runs."""

from __future__ import annotations

import gc
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import get_gradient_edge

from fastdp.calls.autograd import graph_of
from fastdp.calls.batches import Call, Inputs, leaves, wrong_rows
from fastdp.calls.errors import out_of_memory
from fastdp.calls.pending import PendingGradients
from fastdp.calls.randomness import BufferSnapshot
from fastdp.distributed.pieces import is_dtensor
from fastdp.distributed.ranks import RankLost
from fastdp.engine.clip.policy import Policy
from fastdp.engine.errors import (
    CALLED_ON_OUTPUTS,
    FAILED_BACKWARD,
    FORWARD_AFTER_BACKWARD,
    NO_BATCH,
    OUTSIDE_OF_LOSS,
    TWO_FORWARDS,
    OwnLoss,
    SelfCheckError,
    UnseenUse,
)
from fastdp.engine.loss.boundary import Junction, forbid_backward, require_positive
from fastdp.engine.passes import ONE_EXAMPLE, ORDINARY, USES, JoinedPasses, Pass, Passes, has_terms
from fastdp.engine.routing import Routing
from fastdp.engine.uses.layout import Ticket

#: What a rank may want of all: deferred checks, and two backward passes from the next logical batch on.
_CHECKS, _TWO_PASSES = "checks", "two backward passes"


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause Python's garbage collection: a pass makes thousands of objects, nearly all of them gone by its end."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Engine(Passes):
    """Per-example gradients of a model's trained parameters, clipped and summed batch after batch.

    Args:
        model: the user's model.
        policy: the method's decisions.
        tickets: the loader's queue: a forward pass reads its head, the backward pass removes it.
        verify: makes what verifies batches (`fastdp.verify.Checks`); by default nothing does.
        graphs: makes what replays microbatches of shapes that come again (`fastdp.private.graphs`).
        options: as `Passes`'.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        policy: Policy,
        tickets: deque[Ticket],
        *,
        verify: Callable[[Passes], Routing] = Routing,
        graphs: Callable[[Passes, Callable[[], AbstractContextManager[None]]], Any] | None = None,
        **options: Any,
    ):
        super().__init__(model, policy, self.forward, **options)
        self.tickets = tickets
        #: What `.grad` holds between a backward pass and a step.
        self.pending = PendingGradients(
            model, self.parameters.values(), scaled=lambda: self.mixes or not self.returns_loss
        )
        #: What lives for as long as the model goes through this engine.
        self.holder: Any = None
        self.checks = verify(self)
        self.graphs = None if graphs is None else graphs(self, self.checks.watching)
        #: Whether all of a logical batch had its backward passes, so that the next step releases it.
        self.complete = False
        #: Whether the model has seen some of a logical batch that is not released yet.
        self.begun = False
        #: Why no backward pass may begin: one runs, or one of this logical batch failed after it had perhaps added something.
        self.blocked = ""
        #: Whether the last microbatch of this logical batch had its backward pass; probe batches may still follow it.
        self._ended = False
        #: The batch that went through the model latest, and how many forward passes in a row were of it.
        self._latest: Ticket | None = None
        self._forwards = 0
        #: Where the backward passes of these forward passes come together: they are clipped as one.
        self._junction: Callable[[], Junction | None] = lambda: None
        #: Whether the loop takes each batch before the backward pass of the one before; its last one has none behind it.
        self.takes_ahead = False
        #: Backward passes so far, and how many of them a step of the optimizer has followed.
        self.backwards = self.followed = 0

    @property
    def trains(self) -> bool:
        """Also in evaluation mode, for a batch that was handed out while the model was in it: a loop's own choice."""
        in_training = self.model.training or (bool(self.tickets) and self.tickets[0].in_eval)
        return in_training and torch.is_grad_enabled()

    def twice(self) -> bool:
        return self._forwards > 1

    def may_stray(self) -> bool:
        # In a loop's own backward pass, those are found as pending gradients are placed.
        return not self.blocked or self.trying or self.weights.cut or self.pending.place()

    def probes_come(self) -> bool:
        return not self.takes_ahead or len(self.tickets) > 1

    def abandon(self) -> bool:
        """Forget a logical batch that was begun and not released: the loader starts anew. Whether there was one."""
        begun, self.begun, self.takes_ahead = self.begun, False, False
        self.pending.clear()
        self.penalty.forget()
        self.accumulator.reset()
        self.checks.abandon()
        self.checks.deferred_checks.clear()
        self.complete, self._ended, self.blocked = False, False, ""
        self.followed = self.backwards
        return begun

    def forward(self, args: Any, kwargs: Any) -> Any:
        """A training forward pass on the micro-batch at the head of the queue."""
        if self.pending.placed:
            self.pending.clear()
        if dist.is_available() and dist.is_initialized():
            self.ranks.enter()
        if not self.weights.cut and (
            hasattr(self.model, "reshard") or (self.route is None and any(map(is_dtensor, self.model.parameters())))
        ):
            raise RuntimeError(
                "fully_shard was called after make_private, and nothing would clip what it gathers: call it first, then build "
                "the optimizer, then call make_private"
            )
        if not self.tickets:
            if self.backwards > self.followed:
                raise RuntimeError(FORWARD_AFTER_BACKWARD)
            output = self.forwards.root.plain(*args, **kwargs)
            # Another network that made the inputs, as a GAN's generator, learns by this pass.
            has_graph = any(tensor.grad_fn is not None for _, tensor in leaves((args, kwargs)))
            return output if has_graph else forbid_backward(output, NO_BATCH)
        given = call = args, kwargs
        inputs = leaves(given)
        if [t for _, t in inputs if t.requires_grad and t.is_leaf]:
            raise ValueError(
                "An input requires gradients, which private passes do not return. Make adversarial inputs under model.eval(), or "
                "inside the model's forward()."
            )
        ticket = self.tickets[0]
        again = ticket is self._latest
        self._forwards, self._latest = self._forwards + 1 if again else 1, ticket
        joins = ticket.source is not None and ticket.token_units is None and self.route is None and not self.isolated
        self.joined |= joins and not self.weights.cut and ticket.source.joins_examples(given)
        if not (self.weights.cut or self.joined):
            call = self.forwards.lists.encode(given, ticket.rows, ticket.source, inputs)
            inputs = inputs if call is given else leaves(call)
        if not self.joined and ticket.rows not in [t.shape[0] for _, t in inputs if t.dim()]:
            if again:
                raise RuntimeError(TWO_FORWARDS)
            if ticket.probe is None and not self.isolated:
                raise ValueError(wrong_rows(call, ticket.rows))
        junction = (self._junction() if again else None) or Junction(self._backward)
        # The graph of the outputs keeps it.
        self._junction = weakref.ref(junction)
        if ticket.probe is not None:
            return self.checks.run_probe(call, ticket, junction)
        if self.isolated:
            self.begun, self.route = True, ONE_EXAMPLE
            with self.chance(), self._watched():
                return self.run_forward(call, ticket, verify=True, junction=junction)[0]
        with self._one_pass():
            try:
                return self._checked_forward(call, ticket, inputs, junction)
            except IndexError:
                # An id or a label is out of range: rows alone tell whose.
                self.run_rows(call, ticket)
                raise
            except torch.OutOfMemoryError as error:
                if self.graphs is None or not self.graphs.give_up():
                    raise out_of_memory(ticket.rows) from error
            return self._checked_forward(call, ticket, inputs, junction)

    @contextmanager
    def _one_pass(self) -> Iterator[None]:
        """A pass of a logical batch. Counters advance with the first alone: how many there are follows from the data."""
        with self.chance(), gc_paused(), ExitStack() as end:
            if self.begun and self.derived_buffers:
                end.callback(BufferSnapshot(self.model).restore)
            yield

    def _checked_forward(self, call: Call, ticket: Ticket, inputs: Inputs, junction: Junction) -> Any:
        """The pass itself, after the checks of its batch, which drew the same random numbers."""
        if self.weights.cut:
            self.weights.settle()
        self.begun = True
        verify, follows_sums = self.route is None or self.backwards == 0, self.reductions
        checked = self.checks.before(call, ticket, inputs)
        graphs = self.graphs if self.returns_loss and self.route == USES else None
        if graphs is not None and not (checked or self.forwards.lists):
            replayed = graphs.forward(call, ticket, junction)
            if replayed is not None:
                return replayed[0]
        with self._watched():
            try:
                try:
                    return self._traced_forward(call, ticket, junction, verify=verify, checked=checked)
                except (UnseenUse, OwnLoss) as error:
                    # Other ranks would not follow where weights are in pieces.
                    if self.weights.cut or (follows_sums and isinstance(error, OwnLoss)):
                        raise
                    # The mode of torch's that follows sums also shows loss functions that a script imported by name.
                    self.reductions |= isinstance(error, OwnLoss)
                self.checks.extend(call, ticket)
                return self._traced_forward(call, ticket, junction, verify=verify, checked=checked, extended=True)
            except (SelfCheckError, RankLost, torch.OutOfMemoryError):
                raise
            except Exception as error:
                if self.route != USES:
                    raise
                self.reductions = follows_sums
                self.fall_back(str(error), ticket)
                return self.run_forward(call, ticket, verify=True, junction=junction)[0]

    def _watched(self) -> AbstractContextManager[None]:
        return self.checks.watching() if self.route != ORDINARY else nullcontext()

    def _traced_forward(
        self, call: Call, ticket: Ticket, junction: Junction, *, verify: bool, checked: bool, extended: bool = False
    ) -> Any:
        """A forward pass whose uses are compared with the trace."""
        output, waiting = self.run_forward(call, ticket, verify=verify, junction=junction)
        if self.route == USES:
            with self.weights.apart() if checked else nullcontext():
                self.checks.after(waiting, extended=extended)
        return output

    def _require_one_batch(self, ticket: Ticket) -> None:
        """Raise RuntimeError if this microbatch would join the release of a logical batch before it."""
        if self.complete:
            raise RuntimeError(
                "a logical batch is complete and optimizer.step() has not been called: call it after every "
                "backward(); do not accumulate, but raise the DataLoader's batch_size."
            )
        if self._ended and ticket.probe is None:
            raise RuntimeError(
                "Two logical batches came to one release, which was not made. Take a batch after the step of the one before."
            )

    def _backward(self, parts: JoinedPasses) -> None:
        ticket, every = parts[0][0].ticket, [own for own, _ in parts]
        if self.blocked:
            raise RuntimeError(self.blocked)
        if any(own.used for own in every):
            raise RuntimeError(
                "A second backward() ran on one batch. Add its losses up, and call backward() once on their sum."
            )
        for own in every:
            own.used = True
        alike = len({own.targets is None for own in every}) == 1 and not any(own.replay for own in every)
        joins = alike and not self.weights.cut and not (self.trace and self.trace.heads)
        # Among several batches that wait nothing says whose rows a second pass had.
        foreign = not self.tickets or self.tickets[0] is not ticket
        if foreign or (len(parts) > 1 and not (joins and len(self.tickets) == 1)):
            raise RuntimeError(TWO_FORWARDS)
        terms, weight = self.returns_loss and has_terms(parts), 1.0
        self._require_one_batch(ticket)
        self._expect_penalty(own.tops or sum(own.targets or [], []) for own in every)
        if len(parts) > 1 or terms or self.penalty.expected:
            # One recorded pass is clipped by itself.
            self.graphs = None
        if self.returns_loss and not terms:
            if every[0].verify or self.penalty.expected or self.device.type == "cpu":
                weight = require_positive(parts[0][1][0]) * len(parts)
            parts = [(own, None) for own in every]
        if self.drop_zero_gradients():
            self.refuse_foreign_gradients("before the backward pass")
        self.blocked = CALLED_ON_OUTPUTS
        try:
            with gc_paused(), self._watched():
                if ticket.probe is None:
                    if terms and not self.mixes:
                        self.mixes = True
                        self.checks.verify_terms(parts[0][0].call, ticket)
                    self.differentiate(parts)
                else:
                    parts[0][0].backward(parts, False)
        except BaseException as error:
            self.blocked = FAILED_BACKWARD
            if isinstance(error, torch.OutOfMemoryError):
                raise out_of_memory(ticket.rows) from error
            raise
        self.blocked = ""
        self.backwards += 1
        self.tickets.popleft()
        self._ended |= ticket.is_last
        # Probe batches that were planned while the next batch was out already come behind it, before its release.
        ahead = bool(self.tickets) and self.tickets[0].probe is None
        self.complete = self._ended and (ahead or not self.checks.waiting_probes)
        self._ended &= not self.complete
        if not self.pending.placed:
            self.pending.place()
        if self.penalty.expected:
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._end_backward(parts[0][0], weight))

    def _expect_penalty(self, tops: Iterable[list[torch.Tensor]]) -> None:
        """Find out at the first backward pass whether it goes to weights beside the model, as to a penalty of them."""
        weights = [] if self.backwards else [p for p in self._parameters if p.requires_grad]
        if any(torch._C._will_engine_execute_node(get_gradient_edge(p).node) for p in weights):
            inside = (n for own in tops for top in own for n in graph_of(top) if not hasattr(n, "variable"))
            fixed = self.ranks.size > 1 or self.weights.cut or self.isolated or self.route == ORDINARY
            if fixed or any(map(torch._C._will_engine_execute_node, inside)):
                raise RuntimeError(OUTSIDE_OF_LOSS)
            self.penalty.begin(weights, lambda: self.trying or bool(self.blocked))
        self.penalty.take()

    def _end_backward(self, latest: Pass, weight: float) -> None:
        """The loop's backward pass is over: verify its penalty of weights before anything is released."""
        complete, self.complete, self.blocked = self.complete, False, FAILED_BACKWARD
        if self.penalty.settle(weight) and (complete or not self.checks.waiting_probes):
            self.checks.verify_loop(latest.call, latest.ticket)
            if self.tickets or not self.checks.waiting_probes:
                raise RuntimeError(OUTSIDE_OF_LOSS)
            self._ended, complete = complete, False
        self.complete, self.blocked = complete, ""
        self.pending.place()

    @contextmanager
    def synchronized(self, stated: Mapping[str, Any] | None = None) -> Iterator[None]:
        """Meanwhile as `Ranks.together`; afterwards all ranks do what any of them wants: once a logical batch.

        Raises what the deferred checks of this logical batch find.
        """
        with self.ranks.together(stated) as wanted:
            wanted |= {_CHECKS} if self.checks.deferred_checks else set()
            wanted |= {_TWO_PASSES} if self.weights.wanted else set()
            yield
        self.weights.answer(_TWO_PASSES in wanted)
        if _CHECKS in wanted:
            with torch.enable_grad(), self.chance(), self.weights.apart():
                self.checks.run_deferred_checks()

    def close(self) -> None:
        """Give the model its own forwards back."""
        self.pending.remove()
        self.penalty.remove()
        super().close()
