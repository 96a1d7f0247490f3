"""State check: parameters, buffers and modules that change outside of releases, by torch's own version counters."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from fastdp.calls.randomness import BufferSnapshot, version
from fastdp.distributed.pieces import is_cut, writes
from fastdp.engine.errors import SelfCheckError
from fastdp.engine.follow import DataFlow

_TRAINED = operator.attrgetter("requires_grad")
#: Buffers by name, and how often each was written.
_Buffers = dict[str, tuple[torch.Tensor, int]]
_VERSION = operator.attrgetter("_version")


class StateCheck:
    """Detect model state that changes between releases.

    Parameters may change only where `settle` is called afterwards. Buffers that a state dict saves must not change in
    training forward passes, unless they follow from parameters alone, as those of spectral normalization do.

    Args:
        model: whose state is checked.
        hold: puts a model's own parameters back into its modules, where passes replaced them.
    """

    def __init__(self, model: torch.nn.Module, hold: Callable[[], None] = lambda: None):
        self.model, self._hold = model, hold
        #: Buffers that training forwards write from parameters alone.
        self.harmless: frozenset[str] = frozenset()
        #: Frozen parameters that every forward sets to their own values, by identity.
        self.rewritten: frozenset[int] = frozenset()
        self._modules = list(model.named_modules())
        self._structure: list[Any] | None = None
        self._settled: tuple[list[Any], list[int]] | None = None
        self._buffers: _Buffers = {}

    def settle(self) -> None:
        """Take parameters and buffers as they are now for released, or for not yet trained."""
        self._hold()
        self._settled, self._buffers = self._parameters(), self._saved_buffers()

    def begin(self) -> None:
        """Settle before a first batch. Raises RuntimeError if parameters were settled before and changed since."""
        if not self.holds():
            self.require_settled()
        self.settle()

    def holds(self) -> bool:
        """Whether parameters are those of the latest `settle`."""
        self._hold()
        return self._settled is None or _same(self._settled, self._parameters())

    def require_settled(self, trained: Mapping[str, torch.nn.Parameter] | None = None) -> None:
        """Raise RuntimeError, naming it, if a parameter or saved buffer was written or replaced since `settle`.

        Args:
            trained: what is trained; another parameter that has come to be trained raises as well.
        """
        if self._settled is None:
            self.settle()
        assert self._settled is not None
        self._hold()
        now = self._parameters()
        more = trained is not None and sum(map(_TRAINED, now[0])) != len(trained)
        if more or not _same(self._settled, now):
            known = {id(p): count for p, count in zip(*self._settled)}
            own = None if trained is None else set(map(id, trained.values()))
            for name, p in self.model.named_parameters():
                if p.requires_grad and (id(p) not in known or (own is not None and id(p) not in own)):
                    raise RuntimeError(
                        f"{name} was unfrozen, added or replaced after make_private; call detach() and make the run private anew"
                    )
                if known.get(id(p), -1) != self._count(p):
                    raise _changed(name, trained=p.requires_grad)
        self._require_buffers(self._buffers, self._saved_buffers(), _changed)

    def _require_buffers(self, before: _Buffers, now: _Buffers, error: Callable[[str], Exception]) -> None:
        for name, seen in now.items():
            if name not in self.harmless and _written(before.get(name), seen):
                raise error(name)

    def accept_buffers(self) -> None:
        """Take buffers as they are, after a check has written and restored them."""
        self._buffers = self._saved_buffers()

    def structure_changed(self) -> bool:
        """Whether hooks, modules or their modes changed since this was last asked; False the first time."""
        now: list[Any] = []
        for _, module in self._modules:
            now += (module.training, *module._forward_hooks, *module._forward_pre_hooks, *module._backward_hooks)
            now += map(id, module._modules.values())
        before, self._structure = self._structure, now
        if before is None or before == now:
            return False
        self._modules = list(self.model.named_modules())
        return True

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Raise `SelfCheckError`, naming it, if a saved buffer is written or replaced meanwhile."""
        before = self._saved_buffers()
        self._require_buffers(self._buffers, before, _changed)
        yield
        after = self._saved_buffers()
        self._require_buffers(before, after, _buffer_written)
        self._buffers = after

    @contextmanager
    def tracing(self, again: Callable[[int], DataFlow]) -> Iterator[None]:
        """Learn from a trace which buffers, and frozen parameters, forwards write whatever the data are.

        Args:
            again: runs some data through the model, or others, and returns what follows from them; called only if the
                trace wrote something.

        Raises `SelfCheckError`, naming it, for another buffer that a forward writes, or a parameter that it changes.
        """
        snapshot = BufferSnapshot(self.model)
        buffers, counts = self._saved_buffers(), {n: writes(p) for n, p in self.model.named_parameters()}
        yield
        written = {n for n, seen in self._saved_buffers().items() if _written(buffers.get(n), seen)}
        parameters = {n: p for n, p in self.model.named_parameters() if counts.get(n) != writes(p)}
        if not written and not parameters:
            return
        states = []
        for data in (0, 1):
            snapshot.restore()
            followed = again(data)
            # A buffer that is made of data will hold some, though its weight may still be zero.
            for name in (n for n, t in self._state(written).items() if t in followed.data):
                raise _buffer_written(name)
            states.append({n: t.detach().clone() for n, t in self._state(written | parameters.keys()).items()})
        held, now = states
        for name, tensor in now.items():
            same = torch.allclose(held[name].double(), tensor.double(), rtol=1e-4, atol=1e-6)
            if name in parameters and (not same or parameters[name].requires_grad):
                raise SelfCheckError(
                    f"{name} is a parameter that a training forward writes, and no noise covers it. Keep such values in a buffer "
                    "with persistent=False; this batch was not released."
                )
            if not (same or name in self.harmless):
                raise _buffer_written(name)
        self.harmless |= written
        self.rewritten |= {id(p) for p in parameters.values()}

    def _state(self, names: set[str]) -> dict[str, torch.Tensor]:
        every = itertools.chain(self.model.named_parameters(), self.model.named_buffers())
        return {name: tensor for name, tensor in every if name in names}

    def _parameters(self) -> tuple[list[Any], list[int]]:
        """Every parameter, in order, and how often each was written."""
        held = [p for _, module in self._modules for p in module._parameters.values() if p is not None]
        # One of each type: pieces are of a type of their own, and a step should not ask every parameter.
        if self.rewritten or any(map(is_cut, {type(p): p for p in held}.values())):
            return held, list(map(self._count, held))
        return held, list(map(_VERSION, held))

    def _count(self, parameter: torch.Tensor) -> int:
        return 0 if id(parameter) in self.rewritten else writes(parameter)

    def _saved_buffers(self) -> _Buffers:
        """The buffers that a state dict saves, and how often each was written."""
        return {
            f"{prefix}.{name}" if prefix else name: (buffer, version(buffer))
            for prefix, module in self._modules
            if module._buffers
            for name, buffer in module._buffers.items()
            if buffer is not None and name not in getattr(module, "_non_persistent_buffers_set", ())
        }


def _same(one: tuple[list[Any], list[int]], other: tuple[list[Any], list[int]]) -> bool:
    return one[1] == other[1] and len(one[0]) == len(other[0]) and all(map(operator.is_, one[0], other[0]))


def _written(before: tuple[torch.Tensor, int] | None, after: tuple[torch.Tensor, int]) -> bool:
    """Whether a buffer was written, or replaced by one of other values: a model may be moved to another device."""
    if before is None or before[0] is after[0]:
        return before is None or before[1] != after[1]
    old, new = before[0], after[0]
    same = version(old) == before[1] and old.shape == new.shape and old.dtype == new.dtype
    return not (same and torch.equal(old.to(new.device), new))


def _buffer_written(name: str) -> SelfCheckError:
    return SelfCheckError(
        f"{name} is a buffer that training forwards write, and no noise covers it. Set track_running_stats=False, or register "
        "it with persistent=False; this batch was not released."
    )


def _changed(name: str, *, trained: bool = True) -> RuntimeError:
    way = "After loading released weights call private.load_state_dict, or detach() and make_private again."
    return RuntimeError(
        f"{name} was changed outside of a release, so no noise covers it. "
        + (way if trained else "Keep a teacher or averaged weights outside the model.")
    )
