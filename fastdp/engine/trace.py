"""One traced forward: which operations read which trained parameters, in which modules, and what their inputs descend from.

Three things are followed from operation to operation. *Data*: what is computed from the rows of the batch. *Chosen*: data
whose first axis was chosen or ordered by the data's values (a boolean index, `nonzero`, `unique`, a sort, a gather), so
that no shape says which token belongs to whom. *Weights*: what is computed from trained parameters and no data.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from fastdp.engine.batches import Path, as_long_as, leaves, take_rows
from fastdp.engine.intercept import OPERATIONS, operand
from fastdp.engine.losses import LOSSES
from fastdp.engine.uses import is_detach, is_metadata

#: How an operation that is not one of the engine's own met an activation: its name, the dimensions of what is computed
#: from parameters, and those of the other.
Meeting = tuple[str, int, int]


@dataclass(frozen=True)
class Read:
    """One operation of the forward pass that reads a trained parameter (or a loss, whose ``parameter`` is empty).

    ``chosen`` says that the data chose which tokens the operation sees.
    """

    parameter: str
    operation: str
    module: str
    input_shape: tuple[int, ...]
    chosen: bool = False


@dataclass
class Trace:
    """What a model's forward pass does with its trained parameters.

    ``paths`` are the places of the call's tensors in (args, kwargs), ``carriers`` of those that carry rows.
    ``carries_rows`` says for each (operation, parameter, dimensions of the input) whether the input's first size
    follows the number of rows (DoRA calls one layer on activations and on an identity matrix), and ``meetings`` the same
    of a tensor that meets what is computed from parameters.
    ``selects`` says that some operation's result has a size that the data decide, wherever it ends up.
    ``unread`` lists trained parameters that the forward pass never reads: no gradient reaches them in ordinary
    training either.
    """

    reads: list[Read]
    paths: frozenset[Path]
    carriers: frozenset[Path]
    carries_rows: dict[tuple[str, str, int], bool]
    meetings: dict[Meeting, bool]
    unread: list[str]
    #: Whether every token that a loss function sees is known to belong to a row.
    mapped: bool = True
    selects: bool = False
    conflict: str | None = None
    uses: Counter[str] = field(default_factory=Counter)

    @property
    def tables(self) -> frozenset[str]:
        """Parameters whose rows are looked up, whatever else reads them (a tied head does)."""
        return frozenset(read.parameter for read in self.reads if read.operation in _LOOKUPS)

    @property
    def modules(self) -> list[str]:
        return list(dict.fromkeys(read.module for read in self.reads))


def functions(names: str) -> frozenset[Any]:
    """Torch's functions and methods of these names."""
    owners = (torch, torch.Tensor, F)
    return frozenset(f for name in names.split() for owner in owners if (f := getattr(owner, name, None)) is not None)


_LOOKUPS = frozenset({OPERATIONS[F.embedding], OPERATIONS[F.embedding_bag]})
#: The data decide the size of what these return, or which row comes where.
_SELECTING = functions("nonzero argwhere masked_select unique unique_consecutive bincount histc tolist")
_ORDERING = functions("sort argsort topk msort")
_GATHERING = functions("index_select gather take take_along_dim embedding")
#: These write into rows of their first argument, whose own axis stays as it was.
_SCATTERING = functions(
    "index_add index_copy index_put scatter scatter_add scatter_reduce index_reduce masked_scatter index_fill"
)


class Follow(TorchFunctionMode):
    """Follows data and weights through one forward pass.

    Args:
        inputs: the tensors that carry rows.
        weights: the trained parameters.
    """

    def __init__(self, inputs: Iterable[torch.Tensor], weights: Iterable[torch.Tensor] = ()):
        super().__init__()
        # Tensors are held, so that no other takes the place of one in memory.
        self.data = {id(t): t for t in inputs}
        self.weights = {id(t): t for t in weights}
        self.chosen: dict[int, torch.Tensor] = {}
        self.selects = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_metadata(func):
            return func(*args, **kwargs)
        given = list(_flat((args, kwargs)))
        self.note(func, args, kwargs, given)
        out = func(*args, **kwargs)
        self._follow(func, args, kwargs, given, out)
        return out

    def note(self, func: Any, args: Any, kwargs: Any, given: list[torch.Tensor]) -> None:
        """Look at one operation before it runs."""

    def _follow(self, func: Any, args: Any, kwargs: Any, given: list[torch.Tensor], out: Any) -> None:
        data = any(id(t) in self.data for t in given)
        if not data:
            if any(id(t) in self.weights for t in given) and not is_detach(func):
                self.weights.update((id(t), t) for t in _flat(out))
            return
        chosen = self._chooses(func, args, kwargs)
        self.selects |= chosen
        first = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if func in _SCATTERING and first is not None:
            chosen = id(first) in self.chosen
        else:
            chosen = chosen or any(id(t) in self.chosen for t in given)
        if func is torch.Tensor.__setitem__ and first is not None:
            self.data[id(first)] = first
        for result in _flat(out):
            # What is written into keeps its own axis.
            axis = id(result) in self.chosen if result is first else chosen
            self.data[id(result)] = result
            self.weights.pop(id(result), None)
            if axis and result.dim() > 0:
                self.chosen[id(result)] = result

    def _chooses(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether the data decide the first axis of what an operation on data returns."""

        def is_data(value: Any) -> bool:
            return isinstance(value, torch.Tensor) and id(value) in self.data

        if func in _SELECTING:
            return True
        if func is torch.where:
            return len(args) + len(kwargs) == 1
        if func in (torch.repeat_interleave, torch.Tensor.repeat_interleave):
            return any(is_data(v) for v in (*args[1:], *kwargs.values()))
        if func in _ORDERING:
            given = [v for v in (*args[1:], *kwargs.values()) if isinstance(v, int) and not isinstance(v, bool)]
            rank = args[0].dim()
            default = 0 if func in (torch.msort, torch.Tensor.msort) else -1
            dim = kwargs.get("dim", given[-1] if given and (len(given) > 1 or "topk" not in func.__name__) else default)
            return rank == 0 or dim % rank == 0
        if func in _GATHERING:
            indices = [v for v in (*args[1:], *kwargs.values()) if is_data(v)]
            if func is F.embedding:
                return is_data(kwargs.get("weight", args[1] if len(args) > 1 else None))
            if "index_select" in func.__name__ or func.__name__ in ("gather", "take_along_dim"):
                dims = [v for v in (*args[1:], *kwargs.values()) if isinstance(v, int)]
                return bool(indices) and bool(dims) and dims[0] % args[0].dim() == 0
            return bool(indices)
        if func is torch.Tensor.__getitem__:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            first = next((i for i in index if i is not None), None)
            masks = any(is_data(i) and i.dtype in (torch.bool, torch.uint8) for i in index)
            return masks or is_data(first)
        return False


def _flat(values: Any) -> Iterator[torch.Tensor]:
    return (tensor for _, tensor in leaves(values))


class _Recorder(Follow):
    def __init__(self, trained: Mapping[str, torch.nn.Parameter], inputs: Iterable[torch.Tensor], stack: list[str]):
        super().__init__(inputs, trained.values())
        self.names = {id(p): name for name, p in trained.items()}
        self.stack = stack
        self.reads: list[Read] = []
        self.met: list[tuple[str, int, tuple[int, ...], bool]] = []

    def note(self, func: Any, args: Any, kwargs: Any, given: list[torch.Tensor]) -> None:
        found = [self.names[id(t)] for t in given if id(t) in self.names]
        operation = OPERATIONS.get(func, getattr(func, "__name__", str(func)))
        others = [t for t in given if id(t) not in self.weights]
        chosen = any(id(t) in self.chosen for t in others)
        if func in OPERATIONS:
            inputs = [operand(func, args, kwargs)]
        elif func in LOSSES and kwargs.get("reduction", "mean") != "none" and id(given[0]) in self.data:
            self.reads.append(Read("", operation, self.stack[-1], tuple(given[0].shape), chosen))
            return
        else:
            inputs = others
            weights = [t.dim() for t in given if id(t) in self.weights]
            if weights:
                for t in (t for t in others if t.dim() and t.shape[0] > 1):
                    self.met.append((operation, max(weights), tuple(t.shape), id(t) in self.chosen))
        shape = tuple(inputs[0].shape) if inputs else ()
        for name in found:
            self.reads.append(Read(name, operation, self.stack[-1], shape, chosen))


def trace(
    model: torch.nn.Module,
    forward: Callable[..., Any],
    args: Any,
    kwargs: Any,
    rows: int,
    trained: dict[str, torch.nn.Parameter],
) -> Trace:
    """Run ``forward`` on 2 and on 3 rows of the given call, without gradients, and compare what each read saw.

    What carries rows is decided here once: every tensor as long as the batch, unless the forward pass then fails and does
    not when some of them are left whole (a table of positions may be as long as the batch by chance).

    Args:
        model: owner of ``trained``; its hooks, buffers and random state are left as they were.
        rows: number of rows of the call; rows are repeated if there are fewer than three.

    Raises whatever the forward pass raises on a few rows.
    """
    call = (args, kwargs)
    candidates = sorted(as_long_as(call, rows), key=str)
    failure: Exception | None = None
    for size in range(min(3, len(candidates))):
        for constant in itertools.combinations(candidates, size):
            carriers = frozenset(candidates) - set(constant)
            try:
                runs = [_record(model, forward, call, carriers, rows, count, trained) for count in (2, 3)]
            except Exception as error:
                failure = failure or error
                continue
            found = _compare(runs[0], runs[1], carriers, trained)
            found.paths = frozenset(path for path, _ in leaves(call))
            return found
    if failure is None:
        raise ValueError("no tensor of this call has a row for each example")
    raise failure


def _compare(two: _Recorder, three: _Recorder, carriers: frozenset[Path], trained: Mapping[str, Any]) -> Trace:
    carries: dict[tuple[str, str, int], bool] = {}
    conflict, mapped = None, True
    if [(r.parameter, r.operation) for r in two.reads] != [(r.parameter, r.operation) for r in three.reads]:
        conflict = "the model's reads of its parameters depend on the number of rows"
    for a, b in zip(two.reads, three.reads):
        moves = _moves(a.input_shape, b.input_shape)
        what = a.parameter or "the loss"
        if (a.operation in OPERATIONS.values() or not a.parameter) and moves and moves[0] != 0:
            conflict = f"{what}: the input of {a.operation} has its rows in dimension {moves[0]}, not first"
        if a.chosen:
            mapped = mapped and bool(a.parameter)
            conflict = f"{what}: the data choose which tokens {a.operation} sees"
        key = (a.operation, a.parameter, len(a.input_shape))
        if carries.setdefault(key, bool(moves)) != bool(moves):
            conflict = f"{what}: {a.operation} reads it sometimes with rows and sometimes without"
    meetings: dict[Meeting, bool] = {}
    for (name, rank, shape, chosen), (*_, other, _) in zip(two.met, three.met):
        moves = _moves(shape, other)
        if chosen or (moves and moves[0] != 0):
            conflict = f"{name} of a parameter and an activation whose rows are not in order in its first dimension"
        if meetings.setdefault((name, rank, len(shape)), bool(moves)) != bool(moves):
            conflict = f"{name} of a parameter and a constant of {len(shape)} dimensions"
    reads = [read for read in two.reads if read.parameter]
    seen = {read.parameter for read in reads}
    unread = [name for name in trained if name not in seen]
    uses = Counter(read.parameter for read in reads)
    return Trace(
        reads, frozenset(), carriers, carries, meetings, unread, mapped, two.selects or three.selects, conflict, uses
    )


def _moves(a: tuple[int, ...], b: tuple[int, ...]) -> list[int]:
    return [i for i, (m, n) in enumerate(zip(a, b)) if m != n]


def _record(
    model: torch.nn.Module,
    forward: Callable[..., Any],
    call: tuple[Any, Any],
    carriers: frozenset[Path],
    rows: int,
    count: int,
    trained: dict[str, torch.nn.Parameter],
) -> _Recorder:
    call = take_rows(call, torch.arange(count) % rows, carriers)
    stack = [""]
    handles = []
    for name, module in model.named_modules():
        if module is model or isinstance(module, torch.jit.ScriptModule):
            continue

        def enter(_module: Any, _args: Any, name: str = name) -> None:
            stack.append(name)

        def leave(_module: Any, _args: Any, _output: Any) -> None:
            stack.pop()

        handles.append(module.register_forward_pre_hook(enter))
        handles.append(module.register_forward_hook(leave, always_call=True))
    recorder = _Recorder(trained, (t for path, t in leaves(call) if path in carriers), stack)
    try:
        with torch.random.fork_rng(devices=devices(model)), torch.no_grad(), recorder:
            forward(*call[0], **call[1])
    finally:
        for handle in handles:
            handle.remove()
    return recorder


def devices(model: torch.nn.Module) -> list[int]:
    """The GPUs that hold a model, whose random state belongs to its own."""
    # Each replay asks, and a walk over a large model takes as long as a small one's pass.
    on_gpus = model.parameters() if torch.cuda.is_initialized() else ()
    return sorted({p.device.index or 0 for p in on_gpus if p.device.type == "cuda"})
