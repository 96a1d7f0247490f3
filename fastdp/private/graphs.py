"""Micro-batches recorded once and replayed: on a GPU the host need not say what to do, which takes longest for small models.

A graph belongs to what the host knew when it was recorded: the shapes of the batch, how its rows belong to units, the policy, and
the modules with their modes and weights. Anything else goes the ordinary way. Nothing is recorded of a pass that is
looked at, and each graph must give the sums of an ordinary pass before it is used.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.utils.checkpoint as checkpoint

import fastdp.engine.boundary as boundary
from fastdp.calls.batches import Call, everything, leaves, map_tensors
from fastdp.distributed.pieces import writes
from fastdp.engine.accumulator import Accumulator
from fastdp.engine.errors import SelfCheckError
from fastdp.engine.layout import Layout, Ticket
from fastdp.engine.logits import Logits
from fastdp.engine.passes import Pass, Passes
from fastdp.engine.policy import Policy
from fastdp.engine.uses import Tap
from fastdp.ops.placed import keep_for_graph

#: Ordinary passes of a kind before one is recorded: they compile what has to be, and show that the kind comes again.
_WARMUP_PASSES = 2
#: Graphs of a run at most: each holds the memory of a whole pass.
_MOST = 4
_PLAIN = (type(None), bool, int, float, str)

RecordPass = Callable[[Callable[[], list[torch.Tensor]]], tuple[list[torch.Tensor], Callable[[], None]]]


@dataclass
class _Graph:
    """A recorded pass: what it reads, what it gives, and the two halves to be replayed."""

    call: Call
    layout: Layout
    output: Any
    loss: torch.Tensor
    sums: dict[str, torch.Tensor]
    counts: tuple[torch.Tensor, ...]
    forward: Callable[[], None]
    backward: Callable[[], None]
    #: Tables that it reads; and what its key knows by identity, so that nothing else can come to have that.
    kept: list[Any]
    #: The forward pass whose activations lie in its memory now.
    latest: Pass | None = None


class Graphs:
    """The recorded passes of a model by uses.

    Args:
        passes: of the model.
        watched: refuses a pass that writes buffers, as `Guard.forward` does.
        recorder: gives a function that records another one: its results, and what makes them again.
    """

    def __init__(
        self,
        passes: Passes,
        watched: Callable[[], AbstractContextManager[None]],
        recorder: Callable[[], RecordPass] | None = None,
    ):
        self._passes = passes
        self._watched = watched
        self._recorder = recorder or _on_a_gpu
        self._seen: dict[Any, int] = {}
        self._graphs: dict[Any, _Graph | None] = {}

    def forward(self, call: Call, ticket: Ticket, enter: Callable[[Pass, Any], None]) -> tuple[Any, Pass] | None:
        """The forward pass replayed, and what waits for its backward; None where the pass has to be made in the ordinary way."""
        key = self._key(call, ticket)
        if key is None:
            return None
        if key not in self._graphs:
            self._seen[key] = self._seen.get(key, 0) + 1
            if self._seen[key] <= _WARMUP_PASSES or len(self._graphs) >= _MOST:
                return None
            self._graphs[key] = self._recorded(call, ticket)
        graph = self._graphs[key]
        return None if graph is None else self._replayed(graph, call, ticket, enter)

    def _replayed(
        self, graph: _Graph, call: Call, ticket: Ticket, enter: Callable[[Pass, Any], None]
    ) -> tuple[Any, Pass]:
        # Sums of the pass before lie where this one will write.
        self._passes.accumulator.own()
        _fill(graph, call, ticket)
        graph.forward()
        tap = Tap(graph.layout)
        waiting = Pass(call, ticket, graph.layout, tap, False, enter, [], lambda upstream, retain: None)
        clip = self._passes.accumulator.policy.bounds
        waiting.replay = lambda: self._add(graph, waiting, clip)
        graph.latest = waiting
        # A term of the loss made from another output has no graph to go back through, and is refused there as ever.
        output = map_tensors(graph.output, _detached)
        return boundary.replace_loss(output, waiting.loss(graph.loss), self._passes.twice), waiting

    def _add(self, graph: _Graph, waiting: Pass, clip: tuple[float, ...]) -> None:
        """Replay the backward pass, and add what it gave to the logical batch: sums clipped to the bounds ``clip``."""
        if graph.latest is not waiting:
            raise RuntimeError(
                "Another forward pass took this loss's place, as capture=True keeps one. Call backward() "
                "before the next forward pass."
            )
        graph.latest = None
        accumulator = self._passes.accumulator
        accumulator.require_one_clip()
        accumulator.bounds = clip
        # Whoever has changed the policy since the forward pass would have noise for other bounds.
        accumulator.require_one_clip()
        graph.backward()
        old = [name for name in graph.sums if name in accumulator.sums]
        if old:
            torch._foreach_add_([accumulator.sums[name] for name in old], [graph.sums[name] for name in old])
        accumulator.lend({name: total for name, total in graph.sums.items() if name not in old})
        nonfinite, unclipped, units = (count.clone() for count in graph.counts)
        accumulator.nonfinite = accumulator.nonfinite + nonfinite
        accumulator.unclipped = accumulator.unclipped + unclipped
        accumulator.units = accumulator.units + units

    def _key(self, call: Call, ticket: Ticket) -> Any:
        """What the host knows of a pass; None if it is of a kind that is not recorded."""
        passes, policy = self._passes, self._passes.accumulator.policy
        others = tuple((path, value) for path, value in everything(call) if not isinstance(value, torch.Tensor))
        if (
            ticket.token_units is not None
            or ticket.probe is not None
            # What lies on the host Python may read unseen, and a replay would go on with what it read once.
            or any(t.device != passes.device for _, t in leaves(call))
            or type(passes.accumulator) is not Accumulator
            or type(policy) is not Policy
            or any(not isinstance(value, _PLAIN) for _, value in others)
        ):
            return None
        inputs = tuple((path, t.shape, t.dtype, t.device) for path, t in leaves(call))
        modules = tuple(
            (
                *(id(module), module.training, id(module.__dict__.get("forward"))),
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

    def _recorded(self, call: Call, ticket: Ticket) -> _Graph | None:
        """Record a pass beside an ordinary one of the same batch; None, with a warning, where that fails or they differ."""
        try:
            with self._watched():
                graph = self._compared(call, ticket)
            if self._passes.device.type == "cuda":
                # What ordinary passes had is not needed any more, and the release would have to ask for it piece by piece.
                torch.cuda.empty_cache()
            return graph
        except (torch.OutOfMemoryError, SelfCheckError):
            raise
        except Exception as error:
            _recover(self._passes.device)
            reason = str(error).split("\n", 1)[0]
            warnings.warn(
                f"micro-batches of this kind are not replayed but made one operation at a time: {reason}", stacklevel=4
            )
            return None

    def _compared(self, call: Call, ticket: Ticket) -> _Graph:
        passes, accumulator = self._passes, self._passes.accumulator
        held = map_tensors(call, lambda t: t.detach().clone(memory_format=torch.contiguous_format))
        layout = ticket.layout(passes.device)
        layout.meetings = passes.trace.meetings if passes.trace is not None else {}
        kept = dict(vars(accumulator))
        random = _random_state(passes.device)
        made: dict[str, Any] = {}

        def forward() -> list[torch.Tensor]:
            made["output"], made["waiting"] = passes.run_forward(held, ticket, verify=False, layout=layout)
            found = boundary.require_loss(made["output"])
            return [found, *(t for _, t in leaves(made["output"]) if t is not found and not isinstance(t, Logits))]

        def backward() -> list[torch.Tensor]:
            accumulator.reset()
            passes.differentiate(made["waiting"], None)
            if accumulator.tiles_heads:
                raise RuntimeError("its head is computed tile by tile: give keep_logits=True")
            counts = (accumulator.nonfinite, accumulator.unclipped, accumulator.units)
            made["sums"], made["counts"] = dict(accumulator.sums), counts
            return [*accumulator.sums.values(), *(torch.as_tensor(count) for count in counts)]

        def ordinary(batch: Call) -> dict[str, torch.Tensor]:
            made.clear()
            _copy(held, batch)
            _set_random_state(passes.device, random)
            forward()
            backward()
            return _aside(made.pop("sums"))

        # A batch of nothing but the first row: what a replay should have read anew, and did not, gives other sums.
        other = map_tensors(held, lambda t: t[:1].expand_as(t) if t.dim() and t.shape[0] == ticket.rows else t)
        batches = [map_tensors(batch, torch.clone) for batch in (held, other)]
        try:
            # In the ordinary way, with this layout: what is made once for a layout is then there.
            expected = [ordinary(batch) for batch in batches]
            drawn = not torch.equal(random, _random_state(passes.device))
            made.clear()
            with keep_for_graph() as tables, torch.enable_grad(), nullcontext() if drawn else _states_left_alone():
                record = self._recorder()
                found, again = record(forward)
                _, back = record(backward)
        finally:
            vars(accumulator).update(kept)
        output = map_tensors(made["output"], _detached)
        model = passes.model
        forwards = [module.__dict__.get("forward") for module in model.modules()]
        kept_alive = [*tables, accumulator.policy, *model.modules(), *forwards, *model.parameters(), *model.buffers()]
        graph = _Graph(held, layout, output, found[0].detach(), made["sums"], made["counts"], again, back, kept_alive)
        # What the recording was made with knows its pass, and through autograd's own nodes, which Python's collector does not
        # see, that would hold the model for ever.
        made.clear()
        if set(graph.sums) != set(expected[0]):
            raise RuntimeError("a recorded pass reached other parameters than an ordinary one")
        # Recorded, attention may draw its masks in another order: then the sums are of one size, and no more alike than that.
        alike = _require_one_size if drawn else partial(_require_alike, apart=_tolerance(model, passes.device))
        alike(self._tried(graph, batches[0], random), expected[0])
        first = _aside(graph.sums)
        _overwrite_what_is_free(passes.device)
        _require_alike(self._tried(graph, batches[0], random), first, apart=_tolerance(model, passes.device))
        second = self._tried(graph, batches[1], random)
        alike(second, expected[1])
        if _same(first, second) and not _same(*expected):
            raise RuntimeError("a replayed pass gave the same sums for another batch")
        _set_random_state(passes.device, random)
        return graph

    def _tried(self, graph: _Graph, batch: Call, random: torch.Tensor) -> dict[str, torch.Tensor]:
        _copy(graph.call, batch)
        _set_random_state(self._passes.device, random)
        graph.forward()
        graph.backward()
        return graph.sums


def _tolerance(model: torch.nn.Module, device: torch.device) -> float:
    """How far a sum may be from that of another pass: kernels of others may add in no fixed order, and in 16 bits that grows."""
    halves = any(p.dtype in (torch.bfloat16, torch.float16) for p in model.parameters())
    return 1 / 8 if halves or torch.is_autocast_enabled(device.type) else 1e-2


def _aside(sums: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies in the host's memory: a device may have none left for them."""
    return {name: total.to("cpu", copy=True) for name, total in sums.items()}


def _same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(total, other[name].to(total.device)) for name, total in one.items())


def _norms(sums: Iterable[tuple[str, torch.Tensor]]) -> dict[str, float]:
    return {name: float(torch.linalg.vector_norm(total, dtype=torch.float64)) for name, total in sums}


def _require_one_size(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Raise RuntimeError if all sums together are not of the size of those of another pass."""
    size, whole = (math.hypot(*_norms(sums.items()).values()) for sums in (found, expected))
    if not whole / 4 <= size <= 4 * whole:
        raise RuntimeError(f"a replayed pass gave sums of norm {size:.3g} and an ordinary one of {whole:.3g}")


def _require_alike(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], *, apart: float) -> None:
    """Raise RuntimeError, naming a parameter, if its sum is not that of another pass."""
    norms = _norms(expected.items())
    whole = math.hypot(*norms.values())
    for name, gap in _norms(
        (name, found[name] - total.to(found[name].device)) for name, total in expected.items()
    ).items():
        # Gradients that should be zero, as of the keys' biases, are all rounding: they may differ, and stay small.
        if not gap <= apart * (norms[name] + apart * whole):
            raise RuntimeError(
                f"a replayed pass gave another sum for {name} than one before: {gap:.2g} of {norms[name]:.2g}"
            )


def _overwrite_what_is_free(device: torch.device) -> None:
    """Fill memory that nobody holds, so that a replay that reads what was let go of gives something else."""
    if device.type != "cuda":
        return
    free = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    sizes = [1 << power for power in range(9, 27) for _ in range(8)]
    held = [torch.full((size // 4,), float("nan"), device=device) for size in sizes if size <= free // 16]
    del held


def _detached(t: torch.Tensor) -> torch.Tensor:
    return t if isinstance(t, Logits) else t.detach().requires_grad_(t.requires_grad)


def _copy(held: Call, call: Call) -> None:
    given = dict(leaves(call))
    for path, own in leaves(held):
        own.copy_(given[path], non_blocking=True)


def _fill(graph: _Graph, call: Call, ticket: Ticket) -> None:
    _copy(graph.call, call)
    graph.layout.weights.copy_(ticket.weights, non_blocking=True)


@contextmanager
def _states_left_alone() -> Iterator[None]:
    """Checkpoints do not read a device's random state, which no recording allows: for passes that draw nothing."""
    read = checkpoint.get_device_states
    checkpoint.get_device_states = lambda *args: ([], [])
    try:
        yield
    finally:
        checkpoint.get_device_states = read


def _random_state(device: torch.device) -> torch.Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_random_state(device: torch.device, state: torch.Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


def _recover(device: torch.device) -> None:
    """A recording that fails leaves the generator believing that it goes on: give it a state that knows nothing of it."""
    if device.type == "cuda":
        generator = torch.cuda.default_generators[device.index or 0]
        generator.graphsafe_set_state(generator.clone_state())
        torch.cuda.empty_cache()


def _on_a_gpu() -> RecordPass:
    """CUDA graphs that share their memory: the backward pass finds what the forward pass left there."""
    pool = torch.cuda.graph_pool_handle()

    def record(function: Callable[[], list[torch.Tensor]]) -> tuple[list[torch.Tensor], Callable[[], None]]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="relaxed"):
            found = function()
        return found, graph.replay

    return record
