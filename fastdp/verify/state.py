"""State check: parameters, buffers and modules that change outside of releases, by torch's own version counters."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

import fastdp._native as _native
from fastdp.calls.errors import pass_writes, unreleased_change
from fastdp.calls.flow import DataFlow
from fastdp.calls.randomness import BufferSnapshot, version, was_written
from fastdp.distributed.pieces import is_dtensor, writes

_TRAINED, _VERSION = map(operator.attrgetter, ("requires_grad", "_version"))
#: What a module holds: parameters, buffers, and what counts as structure.
_KINDS = "_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks"
#: Buffers by name, and how often each was written.
_Buffers = dict[str, tuple[torch.Tensor, int]]
#: Parameters, in order, how often each was written, and whether it is trained.
_Parameters = tuple[list[Any], list[int], list[bool]]
UNDECLARED = "{} is none of what this batch trains. Freeze it or, with DP-SGD, unfreeze it earlier, in the optimizer."
MOVED = "{} is moved along a direction, without a gradient of its own: freeze it again."


class StateCheck:
    """Detect model state that changes between releases.

    Trained parameters may change only where `settle` is called afterwards; frozen ones only between passes, as averages of
    released weights do, or be replaced. Buffers that a state dict saves must not change in training passes, unless they
    follow from parameters alone, as those of spectral normalization do.

    Args:
        model: whose state is checked.
        restore_parameters: puts a model's own parameters back into its modules.
    """

    def __init__(self, model: torch.nn.Module, restore_parameters: Callable[[], None] = lambda: None):
        self.model, self._restore_parameters = model, restore_parameters
        self._in_pieces = any(map(is_dtensor, model.parameters()))
        #: Buffers that training forwards write from parameters alone.
        self.harmless: frozenset[str] = frozenset()
        #: Frozen parameters that every forward sets to their own values, by identity.
        self.rewritten: frozenset[int] = frozenset()
        #: Frozen parameters that releases move, and nothing else may, by identity.
        self.moved: frozenset[int] = frozenset()
        #: Modes of modules and whether parameters are trained, and what else modules held, when this was looked at last.
        self._structure: tuple[list[bool], list[Any]] | None = None
        #: What modules held as parameters, with None and without, and as buffers; and parameters that were frozen when settled.
        self._values, self._held_list, self._held_buffers, self._frozen = (list[Any]() for _ in range(4))
        self._list_modules()
        self._settled: _Parameters = [], [], []
        self._alike = False  # whether modules held the settled parameters when they were looked at last
        self.frozen_written = False  #: Whether a frozen parameter was written between passes.
        self._buffers: _Buffers = {}

    def settle(self, *, written: bool = False) -> None:
        """Take parameters and buffers for released, or not yet trained; ``written``: only values changed since the check."""
        self._restore_parameters()
        known = self._settled[::2] if written and self._alike else ()
        self._settled = self._parameters(*known)
        if not known:
            self.accept_buffers()
        self._frozen = self._frozen if known else [p for p, t in zip(*self._settled[::2]) if not t]
        self._alike = bool(known)

    def require_settled(self, trained: Mapping[str, torch.nn.Parameter] | None = None) -> None:
        """Raise RuntimeError for a trained parameter or buffer that was written since `settle`, or one not of ``trained``."""
        self.require_parameters(None if trained is None else trained.values())
        self._require_buffers(unreleased_change)

    def require_parameters(self, declared: Collection[Any] | None = None) -> None:
        """The same of parameters alone. The first time they are settled."""
        self._restore_parameters()
        if not self._settled[0]:
            self.settle()
        before = self._settled
        # Before a release modules were looked at already, if they ever are.
        looked = declared is not None and self._structure is not None and self._alike
        if looked and before[1] == self._parameters(*before[::2])[1]:
            return
        now, declared = self._parameters(), before[0] if declared is None else declared
        self._alike = before[1:] == now[1:] and (before[0] is now[0] or all(map(operator.is_, before[0], now[0])))
        # A module may hold a parameter that another one has too.
        if self._alike and {*map(id, declared)}.issuperset(map(id, itertools.compress(now[0], now[2]))):
            return
        known, own = {id(p): (c, t) for p, c, t in zip(*before)}, set(map(id, declared))
        replaced = not {n for n, (_, t) in known.items() if t or n in self.moved} <= set(map(id, now[0]))
        for name, p in self.model.named_parameters():
            if p.requires_grad and id(p) not in own and not replaced:
                raise RuntimeError((MOVED if id(p) in self.moved else UNDECLARED).format(name))
            # One that takes the place of a trained parameter is judged as that.
            count, was_trained = known.get(id(p), (-1, replaced))
            if count != self._count(p):
                if was_trained or p.requires_grad or id(p) in self.moved:
                    raise unreleased_change(name)
                self.frozen_written = True

    def _require_buffers(self, error: Callable[[str], Exception]) -> None:
        written = self._buffers and any(version(buffer) != count for buffer, count in self._buffers.values())
        if not written and _native.same_values(self._tables, self._held_buffers):
            return
        for name, seen in self._saved_buffers().items():
            if name not in self.harmless and was_written(self._buffers.get(name), seen):
                raise error(name)
        self.accept_buffers()

    def accept_buffers(self) -> None:
        """Take buffers as they are, after a check has written and restored them."""
        self._buffers, self._held_buffers = self._saved_buffers(), [b for own in self._tables for b in own.values()]

    def structure_changed(self) -> bool:
        """Whether hooks, modules or their modes changed since this was last asked; False the first time."""
        held, before = self._held(), self._structure
        trained, parts = list(map(_TRAINED, held)), before[1] if before else []
        if not _native.same_values(self._inside, parts):
            parts = [part for own in self._inside for part in own.values()]
        self._structure = [own["training"] for own in self._attributes] + trained, parts
        if changed := before not in (None, self._structure):
            self._list_modules()
        known, _, were_trained = self._settled
        self._alike &= not changed and were_trained == trained and all(map(operator.is_, known, held))
        return changed

    def _list_modules(self) -> None:
        prefixes, modules = zip(*self.model.named_modules())
        self._owned, self._tables, *inside = zip(*map(operator.attrgetter(*_KINDS), modules))
        self._inside = tuple(itertools.chain(*inside))
        self._buffered = list(zip(prefixes, self._tables, modules))
        self._attributes = [own for own in map(vars, modules) if "training" in own]

    @contextmanager
    def forward(self, *, frozen: bool = False) -> Iterator[None]:
        """Raise `SelfCheckError`, naming it, if a saved buffer or a parameter is written or replaced meanwhile.

        ``frozen`` looks at frozen parameters alone, in place: trained ones are compared before each release as well.
        """
        self._require_buffers(unreleased_change)
        held, counts, _ = self._parameters(self._frozen if frozen else None, [])
        yield
        self._require_buffers(pass_writes)
        # Torch swaps the parameters of weights in pieces meanwhile.
        now, seen, _ = self._parameters(held if frozen or self._in_pieces else None, [])
        alike = counts == seen and (held is now or all(map(operator.is_, held, now)))
        before = {} if alike else dict(zip(map(id, held), counts))
        for name, p in () if alike else self.model.named_parameters():
            if before.get(id(p), self._count(p) if frozen else -1) != self._count(p):
                raise pass_writes(name)

    @contextmanager
    def tracing(self, again: Callable[[int], DataFlow]) -> Iterator[None]:
        """Learn from a trace which buffers, and frozen parameters, forwards write whatever the data are.

        Args:
            again: runs some data, or others, and returns what follows from them; called only if the trace wrote something.

        Raises `SelfCheckError`, naming it, for another buffer that a forward writes, or a parameter that it changes.
        """
        snapshot = BufferSnapshot(self.model)
        buffers, counts = self._saved_buffers(), {n: writes(p) for n, p in self.model.named_parameters()}
        yield
        written = {n for n, seen in self._saved_buffers().items() if was_written(buffers.get(n), seen)}
        parameters = {n: p for n, p in self.model.named_parameters() if counts.get(n) != writes(p)}
        if not written and not parameters:
            return
        states = []
        for data in (0, 1):
            snapshot.restore()
            followed = again(data)
            every = itertools.chain(self.model.named_parameters(), self.model.named_buffers())
            state = {n: t for n, t in every if n in written or n in parameters}
            # A buffer that is made of data will hold some, though its weight may still be zero.
            for name in (n for n, t in state.items() if n in written and t in followed.data):
                raise pass_writes(name)
            states.append({n: t.detach().clone() for n, t in state.items()})
        for name, tensor in states[1].items():
            same = torch.allclose(states[0][name].double(), tensor.double(), rtol=1e-4, atol=1e-6)
            if not (same or name in self.harmless) or (name in parameters and parameters[name].requires_grad):
                raise pass_writes(name)
        self.harmless |= written
        self.rewritten |= {id(p) for p in parameters.values()}

    def _held(self) -> list[Any]:
        """The parameters that modules hold; the same list as before for the same ones."""
        if not _native.same_values(self._owned, self._values):
            self._values = [p for own in self._owned for p in own.values()]
            self._held_list = [p for p in self._values if p is not None]
        return self._held_list

    def _parameters(self, held: list[Any] | None = None, trained: list[bool] | None = None) -> _Parameters:
        held = self._held() if held is None else held
        count = self._count if self.rewritten or self._in_pieces else _VERSION
        return held, list(map(count, held)), list(map(_TRAINED, held)) if trained is None else trained

    def _count(self, parameter: torch.Tensor) -> int:
        return 0 if id(parameter) in self.rewritten else writes(parameter)

    def _saved_buffers(self) -> _Buffers:
        """The buffers that a state dict saves, and how often each was written."""
        return {
            f"{prefix}.{name}" if prefix else name: (buffer, version(buffer))
            for prefix, own, module in itertools.compress(self._buffered, self._tables)
            for name, buffer in own.items()
            if buffer is not None and name not in getattr(module, "_non_persistent_buffers_set", ())
        }
