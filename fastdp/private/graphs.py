"""CUDA graphs of microbatches: one forward and backward pass is recorded, and replayed when its key comes again.

Steps of small models are launch-bound on a GPU, and a replay needs one launch. The key of a graph is what the host knows of a
pass: the shapes of the batch, the unit of each row, the policy, and the modules with their settings and weights. Other passes
run eagerly, as do verified ones. A new graph is used only if its replays give the clipped sums of an eager pass.

transformers drops an attention mask of ones after reading it, which a recording cannot do. So a mask that the host saw to be
all ones is dropped before the model is called.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch

from fastdp.calls.batches import Call, everything, leaves, map_tensors
from fastdp.calls.randomness import version
from fastdp.distributed.pieces import writes
from fastdp.engine.clip.accumulator import Accumulator
from fastdp.engine.clip.policy import Policy
from fastdp.engine.errors import SelfCheckError
from fastdp.engine.loss.boundary import Junction, require_loss
from fastdp.engine.passes import Pass, Passes
from fastdp.engine.uses.layout import Ticket
from fastdp.engine.uses.use import CaptureContext
from fastdp.private.recorder import (
    NO_MEMORY,
    Graph,
    RecordCalls,
    Recorder,
    RecordingRefusal,
    copied_output,
    copy_inputs,
    detached,
    random_state,
    set_random_state,
)

#: The largest number of graphs of a run. They share the memory of a pass, and each holds its outputs.
MAX_GRAPHS = 16
#: The largest number of keys that are remembered until they come again.
_MAX_KEYS = 256
_PLAIN_TYPES = (type(None), bool, int, float, str)
_MASK = "attention_mask"


class _AsyncHostCopy:
    """A boolean tensor copied to the host without a synchronization; read ``value`` once `arrived`."""

    def __init__(self, found: torch.Tensor):
        self.value = found.to("cpu", non_blocking=True)
        self._event = torch.cuda.Event() if found.is_cuda else None
        if self._event is not None:
            self._event.record()

    def arrived(self) -> bool:
        return self._event is None or self._event.query()


class Graphs:
    """The recorded passes of a model by uses.

    Args:
        passes: the eager forward and backward passes of the model.
        watched: refuses a pass that writes buffers, as `Guard.forward` does.
        recorder: makes a function that records a call, and returns the call's results and its replay. CUDA graphs by default.
        force: capture=True: record whatever the gain. Otherwise a model with hooks is left alone, replays must be faster, and
            outputs are copied, since the next replay overwrites them.

    Attributes:
        replays: how many microbatches were replayed.
    """

    def __init__(
        self,
        passes: Passes,
        watched: Callable[[], AbstractContextManager[None]],
        recorder: Callable[[], RecordCalls] | None = None,
        *,
        force: bool = True,
    ):
        self._passes = passes
        self._watched = watched
        self._force = force
        self._recorder = Recorder(passes, recorder, force=force)
        #: The number of the logical batch in which a key was seen first. A key that a later batch repeats is recorded.
        self._seen: dict[Any, int] = {}
        self._batches = 0
        self._graphs: dict[Any, Graph] = {}
        self._closed = False
        #: Whether masks of ones are dropped, and pending checks that a dropped mask was of ones on the device too.
        self._drops_masks = True
        self._mask_answers: deque[_AsyncHostCopy] = deque()
        self.replays = 0

    @property
    def open(self) -> bool:
        """Whether microbatches are recorded or replayed, so that it pays to pad them to shapes that come again."""
        return bool(self._graphs) or not self._closed

    def forward(self, call: Call, ticket: Ticket, junction: Junction) -> tuple[Any, Pass] | None:
        """Replay the forward pass: its output and the pending backward pass. None if the pass must run eagerly."""
        self._batches += ticket.is_last
        # The first pass of a batch that goes through the model again may still be differentiated.
        if not self.open or self._passes.twice():
            return None
        full_call, call = call, self._drop_mask_of_ones(call, ticket)
        key = self._key(call, ticket)
        if key is None:
            return None
        if key not in self._graphs:
            if len(self._seen) >= _MAX_KEYS:
                self._seen.clear()
            now = self._batches - ticket.is_last
            if self._closed or len(self._graphs) >= MAX_GRAPHS or self._seen.setdefault(key, now) == now:
                return None
            graph = self._record_pass(call, ticket, full_call)
            if graph is None:
                return None
            self._graphs[key] = graph
        if call is not full_call:
            self._mask_answers.append(_AsyncHostCopy((full_call[1][_MASK] != 1).any()))
        return self._replay(self._graphs[key], call, ticket, junction)

    def give_up(self) -> bool:
        """Free all graphs when the device runs out of memory. Returns whether there were any."""
        found, self._closed = bool(self._graphs), True
        if found:
            self._passes.accumulator.copy_aliased()
            self._graphs = {}
            self._recorder.forget()
            _warn(NO_MEMORY)
        return found

    def _drop_mask_of_ones(self, call: Call, ticket: Ticket) -> Call:
        """The call without an attention mask of ones, which the host sees in the batch that the loader made."""
        while self._mask_answers and self._mask_answers[0].arrived():
            if bool(self._mask_answers.popleft().value) and self._drops_masks:
                self._drops_masks = False
                warnings.warn(
                    "The loop changed an attention_mask of ones, and a recorded microbatch ran without it. No mask is left "
                    "out any more.",
                    stacklevel=4,
                )
        args, kwargs = call
        mask, source = kwargs.get(_MASK), ticket.source
        if not self._drops_masks or source is None or not isinstance(mask, torch.Tensor):
            return call
        made, seen = next(
            ((t, n) for (p, t), n in zip(source.batch.items(), source.versions) if p == (_MASK,)), (mask, -1)
        )
        same = mask is made or (version(mask) == 0 and mask.shape == made.shape)
        if not same or made.device.type != "cpu" or version(made) != seen or not bool((made == 1).all()):
            return call
        return args, {**kwargs, _MASK: None}

    def _replay(self, graph: Graph, call: Call, ticket: Ticket, junction: Junction) -> tuple[Any, Pass]:
        # Sums of the pass before lie where this one will write.
        self._passes.accumulator.copy_aliased()
        copy_inputs(graph.call, call)
        graph.layout.weights.copy_(ticket.weights, non_blocking=True)
        random = random_state(self._passes.device)
        graph.forward()
        context = CaptureContext(graph.layout)
        waiting = Pass(call, ticket, graph.layout, context, False, junction, [])
        clip = self._passes.accumulator.policy.bounds

        def differentiate(upstream: Any) -> None:
            if upstream is None:
                self._add(graph, clip)
            else:
                self._run_again(call, ticket, random, upstream)

        waiting.replay = differentiate
        output = map_tensors(graph.output, cache(detached if self._force else copied_output))
        beside = {id(t): t for t, _ in self._passes.beside_loss(output, ticket.rows, losses=False)}
        return waiting.replace_loss(output, graph.loss, beside), waiting

    def _run_again(self, call: Call, ticket: Ticket, random: torch.Tensor, upstream: Any) -> None:
        """Run an ordinary pass in the place of a replay, which terms of its outputs have no graph to go back through."""
        passes, after = self._passes, random_state(self._passes.device)
        set_random_state(passes.device, random)
        with torch.enable_grad():
            output, _ = passes.run_forward(call, ticket, verify=False)
        set_random_state(passes.device, after)
        tops = require_loss(output), *(t for t, _ in passes.beside_loss(output, ticket.rows, losses=False))
        pairs = [(t, g) for t, g in zip(tops, upstream) if g is not None]
        torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])

    def _add(self, graph: Graph, clip: tuple[float, ...]) -> None:
        """Replay the backward pass, and add what it gave to the logical batch: sums clipped to the bounds ``clip``."""
        accumulator = self._passes.accumulator
        accumulator.require_one_clip()
        accumulator.bounds = clip
        # Whoever has changed the policy since the forward pass would have noise for other bounds.
        accumulator.require_one_clip()
        graph.backward()
        self.replays += 1
        old = [name for name in graph.sums if name in accumulator.sums]
        if old:
            torch._foreach_add_([accumulator.sums[name] for name in old], [graph.sums[name] for name in old])
        accumulator.alias_graph_buffers({name: total for name, total in graph.sums.items() if name not in old})
        nonfinite, unclipped, units = (count.clone() for count in graph.counts)
        accumulator.nonfinite = accumulator.nonfinite + nonfinite
        accumulator.unclipped = accumulator.unclipped + unclipped
        accumulator.units = accumulator.units + units

    def _key(self, call: Call, ticket: Ticket) -> Any:
        """The key of a pass, as the module describes it; None if such a pass is never recorded."""
        passes, policy = self._passes, self._passes.accumulator.policy
        others = tuple((path, value) for path, value in everything(call) if not isinstance(value, torch.Tensor))
        if (
            ticket.token_units is not None
            or ticket.probe is not None
            # What lies on the host Python may read unseen, and a replay would go on with what it read once.
            or any(t.device != passes.device for _, t in leaves(call))
            or type(passes.accumulator) is not Accumulator
            or type(policy) is not Policy
            or any(not isinstance(value, _PLAIN_TYPES) for _, value in others)
            # Hooks do not run in a replay. Those of the model itself do, round it.
            or not (self._force or all(map(_has_no_own_hooks, list(passes.model.modules())[1:])))
        ):
            return None
        inputs = tuple((path, t.shape, t.dtype, t.device) for path, t in leaves(call))
        modules = tuple(
            (
                *(id(module), id(module.__dict__.get("forward"))),
                # Numbers that Python reads, as a rate of dropout. One that counts passes keeps its model from being recorded.
                *(value for value in module.__dict__.values() if isinstance(value, _PLAIN_TYPES)),
                *(len(module._forward_hooks), len(module._forward_pre_hooks)),
                *((id(p), p.data_ptr(), p.requires_grad) for p in module._parameters.values() if p is not None),
                *((id(b), b.data_ptr()) for b in module._buffers.values() if b is not None),
            )
            for module in passes.model.modules()
        )
        units = (tuple(ticket.row_units.tolist()), ticket.weights.shape[0])
        chosen = (policy.group_of, *policy.masks.values(), *policy.axes.values())
        clip = (policy.bounds, *map(id, chosen), *map(writes, policy.masks.values()))
        autocast = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        return inputs, others, units, modules, clip, autocast

    def _record_pass(self, call: Call, ticket: Ticket, full_call: Call) -> Graph | None:
        """Record a pass and compare it with an eager one. None, with a warning, if that fails or they differ."""
        # Sums of the pass before lie where a recording that is tried writes.
        self._passes.accumulator.copy_aliased()
        self._passes.drop_zero_gradients()
        try:
            with self._watched():
                return self._recorder.record(call, ticket, full_call)
        except SelfCheckError:
            raise
        except RecordingRefusal as error:
            self._closed, reason = True, str(error)
        except Exception as error:
            # The generator gets another state, which earlier graphs do not know.
            self._graphs = {}
            self._recorder.forget()
            short = isinstance(error, torch.OutOfMemoryError)
            reason = NO_MEMORY if short else str(error).split("\n", 1)[0]
            if call is not full_call and not short:
                # Without its mask, a model may fail or give something else: it is recorded with it when it comes again.
                self._drops_masks = False
                return None
            self._closed = True
        if reason:
            _warn(reason)
        return None


def _warn(reason: str) -> None:
    warnings.warn(f"No more microbatches are recorded, and others run one operation at a time: {reason}", stacklevel=5)


def _has_no_own_hooks(module: torch.nn.Module) -> bool:
    """Whether a module has no hooks but transformers', which only shape the pass: an input gradient for checkpoints, outputs."""
    every = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
    return all(
        str(getattr(hook, "__module__", "")).startswith("transformers.") for hooks in every for hook in hooks.values()
    )
