"""One traced forward: which operations read which trained parameters, in which modules, and whether with rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from fastdp.engine.batches import take_rows
from fastdp.engine.intercept import OPERATIONS
from fastdp.engine.uses import is_detach, is_metadata


@dataclass(frozen=True)
class Read:
    """One operation of the forward pass that reads a trained parameter."""

    parameter: str
    operation: str
    module: str
    input_shape: tuple[int, ...]


@dataclass
class Trace:
    """What a model's forward pass does with its trained parameters.

    ``carries_rows`` says for each (operation, parameter, dimensions of the input) whether the input's first size
    follows the number of rows (DoRA calls one layer on activations and on an identity matrix).
    ``unread`` lists trained parameters that the forward pass never reads: no gradient reaches them in ordinary
    training either.
    """

    reads: list[Read]
    carries_rows: dict[tuple[str, str, int], bool]
    unread: list[str]
    conflict: str | None = None
    uses: Counter[str] = field(default_factory=Counter)

    @property
    def tables(self) -> frozenset[str]:
        """Parameters whose rows are looked up, whatever else reads them (a tied head does)."""
        return frozenset(read.parameter for read in self.reads if read.operation == OPERATIONS[F.embedding])

    @property
    def modules(self) -> list[str]:
        return list(dict.fromkeys(read.module for read in self.reads))


class _Recorder(TorchFunctionMode):
    def __init__(self, names: dict[int, str], stack: list[str]):
        super().__init__()
        self.names, self.stack = names, stack
        self.reads: list[Read] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not (is_metadata(func) or is_detach(func)):
            self._note(func, args, kwargs)
        return func(*args, **kwargs)

    def _note(self, func: Any, args: Any, kwargs: Any) -> None:
        flat: list[Any] = []
        for value in (*args, *kwargs.values()):
            flat.extend(value if isinstance(value, (list, tuple)) else [value])
        found = [self.names[id(v)] for v in flat if id(v) in self.names]
        if not found:
            return
        operation = OPERATIONS.get(func, getattr(func, "__name__", str(func)))
        inputs = [v for v in flat if isinstance(v, torch.Tensor) and id(v) not in self.names]
        shape = tuple(inputs[0].shape) if inputs else ()
        for name in found:
            self.reads.append(Read(name, operation, self.stack[-1], shape))


def trace(
    model: torch.nn.Module,
    forward: Callable[..., Any],
    args: Any,
    kwargs: Any,
    rows: int,
    trained: dict[str, torch.nn.Parameter],
) -> Trace:
    """Run ``forward`` on 2 and on 3 rows of the given call, without gradients, and compare what each read saw.

    Args:
        model: owner of ``trained``; its hooks, buffers and random state are left as they were.
        rows: number of rows of the call; rows are repeated if there are fewer than three.
    """
    runs = []
    for count in (2, 3):
        index = torch.arange(count) % rows
        sub_args, sub_kwargs = take_rows(args, index, rows), take_rows(kwargs, index, rows)
        runs.append(_record(model, forward, sub_args, sub_kwargs, trained))
    two, three = runs
    carries: dict[tuple[str, str, int], bool] = {}
    conflict = None
    if [(r.parameter, r.operation) for r in two] != [(r.parameter, r.operation) for r in three]:
        conflict = "the model's reads of its parameters depend on the number of rows"
    for a, b in zip(two, three):
        moves = [i for i, (m, n) in enumerate(zip(a.input_shape, b.input_shape)) if m != n]
        if a.operation in OPERATIONS.values() and moves and moves[0] != 0:
            conflict = f"{a.parameter}: the input of {a.operation} has its rows in dimension {moves[0]}, not first"
        key = (a.operation, a.parameter, len(a.input_shape))
        carried = bool(moves)
        if carries.setdefault(key, carried) != carried:
            conflict = f"{a.parameter}: {a.operation} reads it sometimes with rows and sometimes without"
    seen = {read.parameter for read in two}
    unread = [name for name in trained if name not in seen]
    return Trace(two, carries, unread, conflict, Counter(read.parameter for read in two))


def _record(
    model: torch.nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any, trained: dict[str, torch.nn.Parameter]
) -> list[Read]:
    stack = [""]
    handles = []
    for name, module in model.named_modules():
        if module is model:
            continue

        def enter(_module: Any, _args: Any, name: str = name) -> None:
            stack.append(name)

        def leave(_module: Any, _args: Any, _output: Any) -> None:
            stack.pop()

        handles.append(module.register_forward_pre_hook(enter))
        handles.append(module.register_forward_hook(leave, always_call=True))
    recorder = _Recorder({id(p): name for name, p in trained.items()}, stack)
    try:
        with torch.random.fork_rng(devices=_devices(model)), torch.no_grad(), recorder:
            forward(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return recorder.reads


def _devices(model: torch.nn.Module) -> list[int]:
    return sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
