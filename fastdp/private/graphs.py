"""CUDA graphs of microbatches: one forward and backward pass is recorded, and replayed when its key comes again.

Steps of small models are launch-bound on a GPU, and a replay needs one launch. The key of a graph is what the host knows of a
pass: the shapes of the batch, the unit of each row, the policy, and the modules with their settings and weights. Other passes
run eagerly, as do verified ones. A new graph is used only if its replays give the clipped sums of an eager pass.

transformers drops an attention mask of ones after reading it, which a recording cannot do. So a mask that the host saw to be
all ones is dropped before the model is called.
"""

from __future__ import annotations

import copy
import logging
import math
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.utils.checkpoint as checkpoint

import fastdp.engine.loss.boundary as boundary
from fastdp.calls.batches import Call, everything, leaves, map_tensors
from fastdp.calls.generators import HeldGenerators
from fastdp.calls.randomness import rng_state, version
from fastdp.distributed.pieces import writes
from fastdp.engine.clip.accumulator import Accumulator
from fastdp.engine.clip.policy import Policy
from fastdp.engine.errors import SelfCheckError
from fastdp.engine.passes import Pass, Passes
from fastdp.engine.uses.layout import Layout, Ticket
from fastdp.engine.uses.logits import Logits
from fastdp.engine.uses.use import CaptureContext
from fastdp.ops.placed import keep_for_graph

#: The largest number of graphs of a run. They share the memory of a pass, and each holds its outputs.
MAX_GRAPHS = 16
#: The largest number of keys that are remembered until they come again.
_MAX_KEYS = 256
#: The largest share of an ordinary pass's time that a replay may take, unless the user asks for it: it takes memory.
MAX_TIME_SHARE = 0.9
_PLAIN_TYPES = (type(None), bool, int, float, str)
_MASK = "attention_mask"
_NO_MEMORY = "the device has too little memory left"

RecordPass = Callable[[Callable[[], list[torch.Tensor]]], tuple[list[torch.Tensor], Callable[[], None]]]


@dataclass
class _Graph:
    """A recorded pass: the tensors that it reads and writes, and the replays of its forward and backward half."""

    call: Call
    layout: Layout
    output: Any
    loss: torch.Tensor
    sums: dict[str, torch.Tensor]
    counts: tuple[torch.Tensor, ...]
    forward: Callable[[], None]
    backward: Callable[[], None]
    #: Tables that the graph reads, and objects whose ids are in its key, kept alive so that no id is used again.
    kept: list[Any]


class _RecordingRefusal(Exception):
    """A correct recording that is not worth its memory. Its text is the reason to warn of, if any."""


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
        recorder: Callable[[], RecordPass] | None = None,
        *,
        force: bool = True,
    ):
        self._passes = passes
        self._watched = watched
        self._recorder = recorder or _cuda_recorder
        self._force = force
        #: Made once, so that all graphs share their memory.
        self._record: RecordPass | None = None
        #: The number of the logical batch in which a key was seen first. A key that a later batch repeats is recorded.
        self._seen: dict[Any, int] = {}
        self._batches = 0
        self._graphs: dict[Any, _Graph] = {}
        #: Where every graph leaves its sums.
        self._sums: dict[str, torch.Tensor] = {}
        self._closed = False
        #: Whether masks of ones are dropped, and pending checks that a dropped mask was of ones on the device too.
        self._drops_masks = True
        self._mask_answers: deque[_AsyncHostCopy] = deque()
        self.replays = 0

    @property
    def open(self) -> bool:
        """Whether microbatches are recorded or replayed, so that it pays to pad them to shapes that come again."""
        return bool(self._graphs) or not self._closed

    def forward(self, call: Call, ticket: Ticket, junction: boundary.Junction) -> tuple[Any, Pass] | None:
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
            self._graphs, self._sums, self._record = {}, {}, None
            torch.cuda.empty_cache()
            _warn(_NO_MEMORY)
        return found

    def _drop_mask_of_ones(self, call: Call, ticket: Ticket) -> Call:
        """The call without an attention mask of ones, which the host sees in the batch that the loader made."""
        while self._mask_answers and self._mask_answers[0].arrived():
            if bool(self._mask_answers.popleft().value) and self._drops_masks:
                self._drops_masks = False
                warnings.warn(
                    "The loop changed an attention_mask that the loader had made of ones, and a recorded microbatch ran without "
                    "it. From here on no mask is left out.",
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

    def _replay(self, graph: _Graph, call: Call, ticket: Ticket, junction: boundary.Junction) -> tuple[Any, Pass]:
        # Sums of the pass before lie where this one will write.
        self._passes.accumulator.copy_aliased()
        _fill(graph, call, ticket)
        random = _random_state(self._passes.device)
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
        output = map_tensors(graph.output, _detach if self._force else _copy_output)
        beside = {id(t): t for t, _ in self._passes.beside_loss(output, ticket.rows, losses=False)}
        return waiting.replace_loss(output, graph.loss, beside), waiting

    def _run_again(self, call: Call, ticket: Ticket, random: torch.Tensor, upstream: Any) -> None:
        """Run an ordinary pass in the place of a replay, which terms of its outputs have no graph to go back through."""
        passes, after = self._passes, _random_state(self._passes.device)
        _set_random_state(passes.device, random)
        with torch.enable_grad():
            output, _ = passes.run_forward(call, ticket, verify=False)
        _set_random_state(passes.device, after)
        tops = boundary.require_loss(output), *(t for t, _ in passes.beside_loss(output, ticket.rows, losses=False))
        pairs = [(t, g) for t, g in zip(tops, upstream) if g is not None]
        torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])

    def _add(self, graph: _Graph, clip: tuple[float, ...]) -> None:
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

    def _record_pass(self, call: Call, ticket: Ticket, full_call: Call) -> _Graph | None:
        """Record a pass and compare it with an eager one. None, with a warning, if that fails or they differ."""
        device, sums = self._passes.device, dict(self._sums)
        # Sums of the pass before lie where a recording that is tried writes.
        self._passes.accumulator.copy_aliased()
        self._passes.drop_zero_gradients()
        try:
            needed, trace = _required_memory(device), self._passes.trace
            if trace is not None and any(read.operation == "grouped_mm" for read in trace.reads):
                raise _RecordingRefusal("the host reads how many tokens each trained expert gets")
            with self._watched():
                graph = self._record_and_compare(call, ticket, full_call)
            if device.type == "cuda":
                # What ordinary passes had is not needed any more, and the release would have to ask for it piece by piece.
                torch.cuda.empty_cache()
                free, total = torch.cuda.mem_get_info(device)
                if free < needed:
                    raise _RecordingRefusal(_NO_MEMORY)
                if self._passes.checkpointed and not self._force and free < total / 2:
                    # Whoever checkpoints is short of memory, and gets it rather than time.
                    raise _RecordingRefusal
            return graph
        except SelfCheckError:
            raise
        except _RecordingRefusal as error:
            self._sums, self._closed, reason = sums, True, str(error)
        except Exception as error:
            # The generator gets another state, which earlier graphs do not know.
            self._graphs, self._sums, self._record = {}, {}, None
            _reset_generator(device)
            short = isinstance(error, torch.OutOfMemoryError)
            reason = _NO_MEMORY if short else str(error).split("\n", 1)[0]
            if call is not full_call and not short:
                # Without its mask, a model may fail or give something else: it is recorded with it when it comes again.
                self._drops_masks = False
                return None
            self._closed = True
        if reason:
            _warn(reason)
        return None

    def _record_and_compare(self, call: Call, ticket: Ticket, full_call: Call) -> _Graph:
        """Record a pass. Raises if its replay does not give what ordinary passes give."""
        passes, trial = self._passes, _Trial(self._passes, call, ticket, self._sums)
        kept = dict(vars(passes.accumulator))
        try:
            expected = self._ordinary_sums(trial, full_call)
            eager_seconds = trial.seconds
            graph = self._recorded(trial)
        finally:
            vars(passes.accumulator).update(kept)
        # What the recording was made with knows its pass, and through autograd's own nodes, which Python's collector does not
        # see, that would hold the model for ever.
        trial.made.clear()
        self._compare(graph, trial, expected)
        replay_seconds = _seconds(passes.device, graph.forward) + _seconds(passes.device, graph.backward)
        _set_random_state(passes.device, trial.random)
        if not self._force and replay_seconds > MAX_TIME_SHARE * eager_seconds:
            raise _RecordingRefusal
        return graph

    def _ordinary_sums(self, trial: _Trial, full_call: Call) -> list[dict[str, torch.Tensor]]:
        """The sums of both batches of a trial in the ordinary way. Raises RuntimeError for a pass that no replay repeats."""
        device, masked = self._passes.device, trial.given is full_call
        # With this layout: what is made once for a layout is then there.
        own = HeldGenerators(self._passes.model)
        host = *rng_state()[device.type == "cpu" :], *own.states()
        # transformers may warn that a mask is missing, which the user gave.
        with _patched_attribute(logging.getLogger("transformers.modeling_utils"), "disabled", not masked):
            expected = [trial.ordinary(batch) for batch in trial.batches]
        trial.drawn = not torch.equal(trial.random, _random_state(device))
        if host != (*rng_state()[device.type == "cpu" :], *own.states()):
            raise RuntimeError("the model draws random numbers on the host, which a replay would not")
        if not masked:
            # Clipped sums may be alike where losses are not.
            compared = [
                {
                    **trial.ordinary(trial.batches[0], own),
                    "the loss": boundary.require_loss(trial.output).detach().cpu(),
                }
                for own in (full_call, trial.held)
            ]
            _require_alike(*compared, tolerance=_tolerance(self._passes.model, device))
        return expected

    def _recorded(self, trial: _Trial) -> _Graph:
        model, accumulator = self._passes.model, self._passes.accumulator
        trial.made.clear()
        # What is known of these numbers from before would not be found again in a replay.
        torch.autograd.graph.increment_version([t for _, t in leaves(trial.held)])
        with (
            keep_for_graph() as tables,
            torch.enable_grad(),
            _generated_masks_disabled(trial.held),
            _caches_disabled(model),
        ):
            self._record = self._record or self._recorder()
            # No recording may read a device's random state, as checkpoints do, in vain where nothing is drawn.
            unread = _patched_attribute(checkpoint, "get_device_states", lambda *args: ([], []))
            with nullcontext() if trial.drawn else unread:
                found, forward = self._record(trial.forward)
                _, backward = self._record(trial.backward_to_shared)
        forwards = [module.__dict__.get("forward") for module in model.modules()]
        kept = [*tables, accumulator.policy, *model.modules(), *forwards, *model.parameters(), *model.buffers()]
        output, made = map_tensors(trial.output, _detach), trial.made
        return _Graph(
            *(
                trial.held,
                trial.layout,
                output,
                found[0].detach(),
                made["sums"],
                made["counts"],
                forward,
                backward,
                kept,
            )
        )

    def _compare(self, graph: _Graph, trial: _Trial, expected: list[dict[str, torch.Tensor]]) -> None:
        """Raise RuntimeError if replays do not give the sums of ordinary passes, or not of the batch at hand."""
        model, device = self._passes.model, self._passes.device
        if set(graph.sums) != set(expected[0]):
            raise RuntimeError("a recorded pass reached other parameters than an ordinary one")
        same = partial(_require_alike, tolerance=_tolerance(model, device))
        # Recorded, attention may draw its masks in another order: then the sums are of one size, and no more alike than that.
        alike = _require_one_size if trial.drawn else same
        alike(trial.replayed(graph, 0), expected[0])
        first = _copy_to_host(graph.sums)
        _poison_free_memory(device)
        same(trial.replayed(graph, 0), first)
        second = trial.replayed(graph, 1)
        alike(second, expected[1])
        if _equal(first, second) and not _equal(*expected):
            raise RuntimeError("a replayed pass gave the same sums for another batch")


class _Trial:
    """Passes of one microbatch, in the ordinary way and as they are recorded, and what the latest one made.

    Args:
        passes: the eager passes.
        call, ticket: of the microbatch.
        shared: where every graph leaves its sums.
    """

    def __init__(self, passes: Passes, call: Call, ticket: Ticket, shared: dict[str, torch.Tensor]):
        self._passes, self._ticket, self._shared, self.given = passes, ticket, shared, call
        self.held: Call = map_tensors(call, lambda t: t.detach().clone(memory_format=torch.contiguous_format))
        self.layout = ticket.layout(passes.device)
        self.layout.meetings = passes.trace.meetings if passes.trace is not None else {}
        self.random = _random_state(passes.device)
        #: Whether passes draw random numbers.
        self.drawn = False
        self.seconds = 0.0
        self.made: dict[str, Any] = {}
        rows = ticket.rows
        # A batch of nothing but the first row: what a replay should have read anew, and did not, gives other sums.
        other = map_tensors(self.held, lambda t: t[:1].expand_as(t) if t.dim() and t.shape[0] == rows else t)
        self.batches: list[Call] = [map_tensors(batch, torch.clone) for batch in (self.held, other)]

    @property
    def output(self) -> Any:
        return self.made["output"]

    def forward(self, call: Call | None = None) -> list[torch.Tensor]:
        """The forward pass: its loss, and the other tensors that the model returned."""
        own = self.held if call is None else call
        output, self.made["waiting"] = self._passes.run_forward(own, self._ticket, verify=False, layout=self.layout)
        self.made["output"], found = output, boundary.require_loss(output)
        return [found, *(t for _, t in leaves(output) if t is not found and not isinstance(t, Logits))]

    def backward(self) -> list[torch.Tensor]:
        """The backward pass into empty sums: these, and the counts of units."""
        accumulator = self._passes.accumulator
        accumulator.reset()
        self._passes.differentiate([(self.made["waiting"], None)])
        if accumulator.tiles_heads and self._passes.device.type == "cpu":
            raise RuntimeError("its head is computed tile by tile: give keep_logits=True")
        counts = (accumulator.nonfinite, accumulator.unclipped, accumulator.units)
        self.made["sums"], self.made["counts"] = dict(accumulator.sums), counts
        return [*accumulator.sums.values(), *(torch.as_tensor(count) for count in counts)]

    def backward_to_shared(self) -> list[torch.Tensor]:
        """The same into the memory that all graphs share."""
        found, sums = self.backward(), self.made["sums"]
        for name, total in sums.items():
            there = self._shared.setdefault(name, total)
            if there is not total:
                there.copy_(total)
            sums[name] = there
        return [*sums.values(), *found[len(sums) :]]

    def ordinary(self, batch: Call, call: Call | None = None) -> dict[str, torch.Tensor]:
        """The sums of an ordinary pass of a batch, on the host; ``seconds`` says how long it took."""
        self.made.clear()
        _copy(self.held, batch)
        _set_random_state(self._passes.device, self.random)
        self.seconds = _seconds(self._passes.device, lambda: (self.forward(call), self.backward()))
        return _copy_to_host(self.made.pop("sums"))

    def replayed(self, graph: _Graph, batch: int) -> dict[str, torch.Tensor]:
        _copy(graph.call, self.batches[batch])
        _set_random_state(self._passes.device, self.random)
        graph.forward()
        graph.backward()
        return graph.sums


def _warn(reason: str) -> None:
    warnings.warn(f"No more microbatches are recorded, and others run one operation at a time: {reason}", stacklevel=5)


def _has_no_own_hooks(module: torch.nn.Module) -> bool:
    """Whether a module has no hooks but transformers', which only shape the pass: an input gradient for checkpoints, outputs."""
    every = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
    return all(
        str(getattr(hook, "__module__", "")).startswith("transformers.") for hooks in every for hook in hooks.values()
    )


def _seconds(device: torch.device, function: Callable[[], object]) -> float:
    """How long a function takes, on the device too."""
    wait = partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
    wait()
    begun = time.perf_counter()
    function()
    wait()
    return time.perf_counter() - begun


def _required_memory(device: torch.device) -> int:
    """Bytes above those in use now that eager passes needed at their peak, and will need beside a recording."""
    if device.type != "cuda":
        return 0
    return torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)


def _tolerance(model: torch.nn.Module, device: torch.device) -> float:
    """The relative distance allowed between sums of two passes: some kernels add in no fixed order, and 16 bits magnify that."""
    halves = any(p.dtype in (torch.bfloat16, torch.float16) for p in model.parameters())
    return 1 / 8 if halves or torch.is_autocast_enabled(device.type) else 1e-2


def _copy_to_host(sums: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies in the host's memory: a device may have none left for them."""
    return {name: total.to("cpu", copy=True) for name, total in sums.items()}


def _equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(total, other[name].to(total.device)) for name, total in one.items())


def _norms(sums: Iterable[tuple[str, torch.Tensor]]) -> dict[str, float]:
    return {name: float(torch.linalg.vector_norm(total, dtype=torch.float64)) for name, total in sums}


def _require_one_size(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Raise RuntimeError if all sums together are not of the size of those of another pass."""
    size, whole = (math.hypot(*_norms(sums.items()).values()) for sums in (found, expected))
    if not whole / 4 <= size <= 4 * whole:
        raise RuntimeError(f"a replayed pass gave sums of norm {size:.3g} and an ordinary one of {whole:.3g}")


def _require_alike(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], *, tolerance: float) -> None:
    """Raise RuntimeError, naming a parameter, if its sum is not that of another pass."""
    norms = _norms(expected.items())
    whole = math.hypot(*norms.values())
    for name, gap in _norms(
        (name, found[name] - total.to(found[name].device)) for name, total in expected.items()
    ).items():
        # Gradients that should be zero, as of the keys' biases, are all rounding: they may differ, and stay small.
        if not gap <= tolerance * (norms[name] + tolerance * whole):
            raise RuntimeError(
                f"a replayed pass gave another sum for {name} than one before: {gap:.2g} of {norms[name]:.2g}"
            )


def _poison_free_memory(device: torch.device) -> None:
    """Fill free memory with NaN, so that a replay that reads freed tensors gives other sums."""
    if device.type != "cuda":
        return
    free = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    sizes = [1 << power for power in range(9, 27) for _ in range(8)]
    held = [torch.full((size // 4,), float("nan"), device=device) for size in sizes if size <= free // 16]
    del held


def _replayed(logits: Logits) -> Logits:
    """Those of a replay, which writes what logits of the replay before are computed from."""
    torch.autograd.graph.increment_version(logits.source.hidden)
    source = copy.copy(logits.source)
    source.versions = source.written()
    return Logits(source, logits.dtype, logits.token_index, logits.steps, logits.history)


def _detach(t: torch.Tensor) -> torch.Tensor:
    return _replayed(t) if isinstance(t, Logits) else t.detach().requires_grad_(t.requires_grad)


def _copy_output(t: torch.Tensor) -> torch.Tensor:
    return _replayed(t) if isinstance(t, Logits) else t.detach().clone().requires_grad_(t.requires_grad)


def _copy(held: Call, call: Call) -> None:
    given = dict(leaves(call))
    for path, own in leaves(held):
        own.copy_(given[path], non_blocking=True)


def _fill(graph: _Graph, call: Call, ticket: Ticket) -> None:
    _copy(graph.call, call)
    graph.layout.weights.copy_(ticket.weights, non_blocking=True)


@contextmanager
def _patched_attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _generated_masks_disabled(call: Call) -> ExitStack:
    """Keep transformers from making float masks for rows that may be packed, or because a stream is being recorded.

    Rows whose positions the model counts itself are not packed.
    """
    masks = sys.modules.get("transformers.masking_utils")
    kept = ExitStack()
    if hasattr(masks, "find_packed_sequence_indices") and all(path[-1] != "position_ids" for path, _ in leaves(call)):
        kept.enter_context(_patched_attribute(masks, "find_packed_sequence_indices", lambda position_ids: None))
    traced = getattr(masks, "is_tracing", None)
    if traced is not None:
        # Some releases make a mask of none at all while they trace.
        kept.enter_context(
            _patched_attribute(masks, "is_tracing", lambda given=None: given is not None and traced(given))
        )
    return kept


def _caches_disabled(model: torch.nn.Module) -> ExitStack:
    """Keep transformers from making a cache of keys: training reads none, and one of a sliding window copies from the host."""
    kept = ExitStack()
    for config in {
        id(c): c for m in model.modules() if getattr(c := getattr(m, "config", None), "use_cache", False)
    }.values():
        kept.enter_context(_patched_attribute(config, "use_cache", False))
    return kept


def _random_state(device: torch.device) -> torch.Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_random_state(device: torch.device, state: torch.Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


def _reset_generator(device: torch.device) -> None:
    """Give the generator a new state: after a recording that failed, the old one takes it to be under way still."""
    if device.type == "cuda":
        generator = torch.cuda.default_generators[device.index or 0]
        generator.graphsafe_set_state(generator.clone_state())
        torch.cuda.empty_cache()


def _cuda_recorder() -> RecordPass:
    """CUDA graphs that share their memory: the backward pass finds what the forward pass left there."""
    pool = torch.cuda.graph_pool_handle()

    def record(function: Callable[[], list[torch.Tensor]]) -> tuple[list[torch.Tensor], Callable[[], None]]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="relaxed"):
            found = function()
        return found, graph.replay

    return record
