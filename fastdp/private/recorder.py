"""Recording of a microbatch's passes as CUDA graphs, whose replays are compared with ordinary passes before they are used."""

from __future__ import annotations

import copy
import logging
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.utils.checkpoint as checkpoint

from fastdp.calls.batches import Call, leaves, map_tensors
from fastdp.calls.generators import HeldGenerators
from fastdp.calls.randomness import rng_state
from fastdp.engine.loss.boundary import require_loss
from fastdp.engine.passes import Passes
from fastdp.engine.uses.layout import Layout, Ticket
from fastdp.engine.uses.logits import Logits
from fastdp.ops.placed import keep_for_graph

#: The largest share of an ordinary pass's time that a replay may take, unless the user asks for it: it takes memory.
MAX_TIME_SHARE = 0.9
NO_MEMORY = "the device has too little memory left"

RecordCalls = Callable[[Callable[[], list[torch.Tensor]]], tuple[list[torch.Tensor], Callable[[], None]]]


@dataclass
class Graph:
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


class RecordingRefusal(Exception):
    """A correct recording that is not worth its memory. Its text is the reason to warn of, if any."""


class Recorder:
    """Records passes of a model.

    Args:
        passes: the eager forward and backward passes.
        recorder: makes a function that records a call, and returns the call's results and its replay. CUDA graphs by default.
        force: whether to record whatever the gain.

    Attributes:
        sums: where every graph leaves its sums.
    """

    def __init__(self, passes: Passes, recorder: Callable[[], RecordCalls] | None, *, force: bool):
        self._passes, self._force = passes, force
        self._recorder = recorder or _cuda_recorder
        #: Made once, so that all graphs share their memory.
        self._record_call: RecordCalls | None = None
        self.sums: dict[str, torch.Tensor] = {}

    def forget(self) -> None:
        """Let go of the memory that graphs share, none of which is replayed any more."""
        self.sums, self._record_call = {}, None
        _reset_generator(self._passes.device)

    def record(self, call: Call, ticket: Ticket, full_call: Call) -> Graph:
        """Record a pass. Raises `RecordingRefusal` where it does not pay, and for whatever else it fails by.

        Args:
            call: what the model is called with, maybe without a mask of ones.
            full_call: what the loop called it with.
        """
        device, sums = self._passes.device, dict(self.sums)
        try:
            needed, trace = _required_memory(device), self._passes.trace
            if trace is not None and any(read.operation == "grouped_mm" for read in trace.reads):
                raise RecordingRefusal("the host reads how many tokens each trained expert gets")
            graph = self._record_and_compare(call, ticket, full_call)
            if device.type == "cuda":
                # What ordinary passes had is not needed any more, and the release would have to ask for it piece by piece.
                torch.cuda.empty_cache()
                free, total = torch.cuda.mem_get_info(device)
                if free < needed:
                    raise RecordingRefusal(NO_MEMORY)
                if self._passes.checkpointed and not self._force and free < total / 2:
                    # Whoever checkpoints is short of memory, and gets it rather than time.
                    raise RecordingRefusal
            return graph
        except RecordingRefusal:
            self.sums = sums
            raise

    def _record_and_compare(self, call: Call, ticket: Ticket, full_call: Call) -> Graph:
        """Record a pass. Raises if its replay does not give what ordinary passes give."""
        passes, trial = self._passes, _Trial(self._passes, call, ticket, self.sums)
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
        set_random_state(passes.device, trial.random)
        if not self._force and replay_seconds > MAX_TIME_SHARE * eager_seconds:
            raise RecordingRefusal
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
        trial.drawn = not torch.equal(trial.random, random_state(device))
        if host != (*rng_state()[device.type == "cpu" :], *own.states()):
            raise RuntimeError("the model draws random numbers on the host, which a replay would not")
        if not masked:
            # Clipped sums may be alike where losses are not.
            compared = [
                {**trial.ordinary(trial.batches[0], own), "the loss": require_loss(trial.output).detach().cpu()}
                for own in (full_call, trial.held)
            ]
            _require_alike(*compared, tolerance=_tolerance(self._passes.model, device))
        return expected

    def _recorded(self, trial: _Trial) -> Graph:
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
            record = self._record_call = self._record_call or self._recorder()
            # No recording may read a device's random state, as checkpoints do, in vain where nothing is drawn.
            unread = _patched_attribute(checkpoint, "get_device_states", lambda *args: ([], []))
            with nullcontext() if trial.drawn else unread:
                found, forward = record(trial.forward)
                _, backward = record(trial.backward_to_shared)
        forwards = [module.__dict__.get("forward") for module in model.modules()]
        kept = [*tables, accumulator.policy, *model.modules(), *forwards, *model.parameters(), *model.buffers()]
        output, sums, counts = map_tensors(trial.output, detached), trial.made["sums"], trial.made["counts"]
        loss = found[0].detach()
        return Graph(trial.held, trial.layout, output, loss, sums, counts, forward, backward, kept)

    def _compare(self, graph: Graph, trial: _Trial, expected: list[dict[str, torch.Tensor]]) -> None:
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
        self.layout = passes.layout_of(ticket)
        self.random = random_state(passes.device)
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
        self.made["output"], found = output, require_loss(output)
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
        copy_inputs(self.held, batch)
        set_random_state(self._passes.device, self.random)
        self.seconds = _seconds(self._passes.device, lambda: (self.forward(call), self.backward()))
        return _copy_to_host(self.made.pop("sums"))

    def replayed(self, graph: Graph, batch: int) -> dict[str, torch.Tensor]:
        copy_inputs(graph.call, self.batches[batch])
        set_random_state(self._passes.device, self.random)
        graph.forward()
        graph.backward()
        return graph.sums


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


def _replayed_logits(logits: Logits) -> Logits:
    """Those of a replay, which writes what logits of the replay before are computed from."""
    torch.autograd.graph.increment_version(logits.source.hidden)
    source = copy.copy(logits.source)
    source.versions = source.written()
    return Logits(source, logits.dtype, logits.token_index, logits.steps, logits.history)


def detached(t: torch.Tensor) -> torch.Tensor:
    """Without its graph, which a replay does not make."""
    return _replayed_logits(t) if isinstance(t, Logits) else t.detach().requires_grad_(t.requires_grad)


def copied_output(t: torch.Tensor) -> torch.Tensor:
    """As `detached`, in memory that the next replay does not write."""
    return _replayed_logits(t) if isinstance(t, Logits) else t.detach().clone().requires_grad_(t.requires_grad)


def copy_inputs(held: Call, call: Call) -> None:
    """Into what a graph reads."""
    given = dict(leaves(call))
    for path, own in leaves(held):
        own.copy_(given[path], non_blocking=True)


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


def random_state(device: torch.device) -> torch.Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def set_random_state(device: torch.device, state: torch.Tensor) -> None:
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


def _cuda_recorder() -> RecordCalls:
    """CUDA graphs that share their memory: the backward pass finds what the forward pass left there."""
    pool = torch.cuda.graph_pool_handle()

    def record(function: Callable[[], list[torch.Tensor]]) -> tuple[list[torch.Tensor], Callable[[], None]]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="relaxed"):
            found = function()
        return found, graph.replay

    return record
