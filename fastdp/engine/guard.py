"""What leaves with a model besides released parameters: buffers that a forward writes, parameters that something else moves.

Torch counts every write into a tensor, so that looking costs nothing but the counting. Writes through ``.data``, and by
other ways round torch, are not counted: for them a few numbers of every tensor, at places drawn anew for each release, are
compared as well, and from time to time all numbers that training leaves alone. A GPU compares by itself and sends what it
found, which is read one release later, or where the run's results leave: no release waits for the device.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from fastdp.engine.batches import tensors as flat
from fastdp.engine.bits import DRAW, Spots, moved, readable, total
from fastdp.engine.errors import SelfCheckError
from fastdp.engine.follow import FollowInto
from fastdp.engine.pieces import is_cut, piece, writes
from fastdp.engine.sent import Sent

#: A buffer's name, the tensor that holds it, and how often that was written.
_Buffers = dict[str, tuple[torch.Tensor, int]]
#: The most tensors that are looked at for each release; of more than these, some are drawn.
_SPOTS = 32
#: Where a module holds what is in its state.
_STATE = frozenset({"_parameters", "_buffers", "_modules"})
#: What a module says that it holds.
_PARAMETERS_AND_MODULES, _BUFFERS = operator.attrgetter("_parameters", "_modules"), operator.attrgetter("_buffers")


class _Held(NamedTuple):
    """What all modules hold: the names of parameters, these themselves, and modules."""

    names: list[str]
    parameters: list[Any]
    modules: list[Any]

    def holds_as(self, before: _Held | None) -> bool:
        """Whether the same parameters stand under the same names."""
        return before is not None and self.names == before.names and _same(self.parameters, before.parameters)


class _Question(NamedTuple):
    """What was compared: for each tensor its name, None if others judge it, how many flags it has, and the flags."""

    names: list[str | None]
    widths: list[int]
    differ: Sent

    def answer(self) -> str | None:
        """The name of a tensor that is another than it was, if there is one."""
        flags = self.differ.read()
        if not bool(flags.any()):
            return None
        found = zip(self.names, flags.split(self.widths))
        return next((name for name, own in found if name is not None and bool(own.any())), None)


class _Kept(NamedTuple):
    """A tensor, or something else of a state dict, as it was.

    Args:
        known: what the host knows of it.
        bits: the sum of its bits, on its device; None for what is no tensor.
        counted: whether ``known`` is others' to judge.
    """

    known: tuple[Any, ...]
    bits: torch.Tensor | None
    counted: bool = True


class Guard:
    """Watches the state of a model that a release does not cover.

    Buffers that leave with a state dict must not change in training forwards, unless they follow from the parameters
    alone (spectral normalisation's vectors do). Parameters may change only where `settle` is called afterwards.

    Args:
        model: what is watched.
        hold: has its modules hold their own parameters, where passes put others in their places.
    """

    def __init__(self, model: torch.nn.Module, hold: Callable[[], None] = lambda: None):
        self.model, self._hold = model, hold
        self.harmless: frozenset[str] = frozenset()
        #: Frozen parameters that forwards write to as they are, so that torch's counts say nothing of them: their bits do.
        self.put_back: frozenset[int] = frozenset()
        self._modules = list(model.named_modules())
        self._own = [module for _, module in self._modules]
        #: Places of modules that have, or had, buffers.
        self._holding: dict[int, None] = {}
        self._children = self._identities().modules
        #: Every parameter by its module's place and its name there, what all modules held then, and how often each was written.
        self._settled: list[tuple[str, torch.nn.Module, str]] = []
        self._parameters: list[torch.nn.Parameter] = []
        self._held: _Held | None = None
        self._writes: list[int] = []
        #: Whether some are in pieces, whose writes are counted apart.
        self._cut = False
        #: What was seen when each module was last looked at for parameters that have come to be trained.
        self._trained: tuple[list[bool], list[int]] | None = None
        self._spots: Spots | None = None
        #: All numbers of what no training changes, as of its latest change that torch counted; None before the first `settle`.
        self._still: dict[tuple[str, int], _Kept] | None = None
        self._releases, self._next = 0, 1
        #: What devices were asked and have not said; and a tensor that was moved, once that is known.
        self._asked: list[_Question] = []
        self._moved: str | None = None
        #: What a whole model has beside its state, as it was at the start.
        self._aside = self._beside()
        leaving = _Leaving(self.require_told, self._require_whole)
        # A scripted module takes no hooks; what it is part of does.
        hooked = [module for module in self._own if not isinstance(module, torch.jit.ScriptModule)]
        self._hooks = [module.register_state_dict_pre_hook(leaving) for module in hooked]

    def close(self) -> None:
        """Let states of the model be taken as of any other."""
        for hook in self._hooks:
            hook.remove()

    def settle(self) -> None:
        """Take the parameters as they are now for released, or for not yet trained."""
        self._hold()
        held = self._identities()
        if not held.holds_as(self._held):
            self._held, self._trained = held, None
            found = [
                (prefix, module, name, parameter)
                for prefix, module in self._modules
                for name, parameter in module._parameters.items()
                if parameter is not None
            ]
            self._settled = [(prefix, module, name) for prefix, module, name, _ in found]
            self._parameters = [parameter for *_, parameter in found]
            self._cut = any(map(is_cut, self._parameters))
        if self._still is None:
            self._still = self._untrained()
        self.advance()

    def begin(self) -> None:
        """Before the first pass of an engine: as `settle`, unless what an earlier one left was settled already."""
        if self._still is None:
            self.settle()
        self.require_settled()
        self._ask_spots()
        self._answered(wait=True)

    def advance(self) -> None:
        """As `settle`, of the same parameters as before: one that was replaced is found by `require_settled`."""
        if self._still is None:
            self.settle()
            return
        self._writes = self._count()
        known = self._buffers(everywhere=False)
        buffers = [(name, buffer) for name, (buffer, _) in known.items() if name not in self.harmless]
        count, own = len(self._settled) + len(buffers), len(self._settled)
        here: list[tuple[str, torch.Tensor]] = []
        for at in DRAW.sample(range(count), min(count, _SPOTS)):
            if at < own:
                (prefix, _, name), parameter = self._settled[at], self._parameters[at]
                here.append((_joined(prefix, name), piece(parameter) if is_cut(parameter) else parameter))
            else:
                here.append(buffers[at - own])
        self._spots = Spots([(name, t) for name, t in here if readable(t)])

    def holds(self) -> bool:
        """Whether parameters are those of the latest `settle`, as far as counts of writes, and a few numbers, can tell."""
        if self._still is None:
            return True
        self._hold()
        if not self._identities().holds_as(self._held) or self._count() != self._writes:
            return False
        try:
            found = [*self._spots.compare()] if self._spots is not None else []
        except RuntimeError:
            # On another device, or in another type, they are not compared.
            return True
        return not any(bool(differ.any()) for *_, differ in found)

    def require_settled(self, trained: Mapping[str, torch.nn.Parameter] | None = None) -> None:
        """Raise RuntimeError, naming it, if a parameter was written or replaced since `settle`.

        With ``trained``, what the engine knows, also if any other has come to be trained, or to be there at all.
        """
        self._hold()
        held = self._identities()
        as_settled = held.holds_as(self._held)
        if not as_settled or self._count() != self._writes:
            for (prefix, module, name), parameter, version in zip(self._settled, self._parameters, self._writes):
                own = module._parameters
                if self._writes_to(parameter) != version or (name in own and own[name] is not parameter):
                    raise moved(_joined(prefix, name))
        if trained is not None:
            self._require_frozen(trained, as_settled, held.modules)

    def _identities(self) -> _Held:
        """What all modules hold now, in order."""
        # One walk over a thousand modules, which lie far apart, takes longer than all that is made of them.
        parameters, modules = (filter(None, tables) for tables in zip(*map(_PARAMETERS_AND_MODULES, self._own)))
        own, chained = [*parameters], itertools.chain.from_iterable
        return _Held(
            # `keys`, as a scripted module's table is walked by nothing else.
            [*chained([table.keys() for table in own])],
            [*chained([table.values() for table in own])],
            [*chained([table.values() for table in modules])],
        )

    def _count(self) -> list[int]:
        if self._cut or self.put_back:
            return list(map(self._writes_to, self._parameters))
        return [p._version for p in self._parameters]

    def _writes_to(self, tensor: torch.Tensor) -> int:
        return 0 if id(tensor) in self.put_back else writes(tensor)

    def require_untouched(self, *, last: bool) -> None:
        """Raise RuntimeError, naming it, if a parameter or a buffer was written in a way that torch does not count.

        Called before each release: some numbers of each tensor are compared with those at `settle`, and before the 1st, 4th,
        16th, 64th ... and the ``last`` release all numbers of frozen weights and of buffers with those before, and so before any
        other release if torch has counted a write into a buffer, as a loop may beside all forwards. Of a write before a release
        a GPU says at the next one, or at `require_told`; before the ``last`` release it is waited for.
        """
        self.require_told()
        if self._releases + 1 >= self._next or last or self._rewritten():
            self._compare(self._untrained())
            self._next = 4 * (self._releases + 1)
        elif self.put_back:
            self._compare((self._still or {}) | self._put_back())
        self._releases += 1
        self._ask_spots()
        self._answered(wait=last)

    def _ask_spots(self) -> None:
        if self._spots is not None:
            for names, widths, differ in self._spots.compare():
                self._asked.append(_Question(names, widths, Sent(differ)))

    def require_told(self) -> None:
        """Raise RuntimeError, naming it, if a tensor was moved before an earlier release; waits for what devices were asked.

        What was found once is said at each call, and at each release, until `conclude`.
        """
        self._answered(wait=True)

    def _require_whole(self) -> None:
        """As `require_told`, of a model that is copied or saved as a whole, with all that a forward may have left in it."""
        self.require_told()
        for name, found in self._beside().items():
            before = self._aside.get(name, [])
            if len(found) != len(before) or not all(map(_as_it_was, before, found)):
                raise RuntimeError(
                    f"{name} has come to the model, or was written, since it was made private, and would leave with a model that "
                    "is copied or saved whole: set it to None first, or take state_dict()"
                )

    def _beside(self) -> dict[str, list[tuple[torch.Tensor, int]]]:
        """Tensors that modules hold beside their state, by name: attributes, nested ones too, and buffers that no state has."""
        found = {}
        for prefix, module in self.model.named_modules():
            aside = {name: module._buffers[name] for name in getattr(module, "_non_persistent_buffers_set", ())}
            for name, value in {**vars(module), **aside}.items():
                if name not in _STATE and (tensors := _tensors_of(value)):
                    found[_joined(prefix, name)] = tensors
        return found

    def conclude(self) -> None:
        """Raise as `require_told` what was not yet raised, and forget it: whoever calls says what the weights are, or ends.

        Buffers that were loaded with them, as torch counts it, are then as they are to be.
        """
        try:
            if self._moved is None:
                self.require_told()
        finally:
            self._asked, self._moved = [], None
            if self._still is not None:
                still = self._still
                loaded = (item for item in self._untrained().items() if item[0] in still and item[1].counted)
                still.update(
                    {key: now for key, now in loaded if now.known != still[key].known or now.known[0] in self.put_back}
                )

    def _answered(self, *, wait: bool) -> None:
        late = []
        for question in self._asked:
            if self._moved is None and (wait or question.differ.there):
                self._moved = question.answer()
            elif self._moved is None:
                late.append(question)
        self._asked = late
        if self._moved is not None:
            raise moved(self._moved)

    def _rewritten(self) -> bool:
        """Whether a buffer is another tensor, or was written to, since all numbers were compared."""
        still = self._still or {}
        known = (
            (still.get((name, 0)), buffer)
            for name, (buffer, _) in self._buffers(everywhere=False).items()
            if name not in self.harmless
        )
        return any(before is not None and before.known != (id(now), writes(now)) for before, now in known)

    def _compare(self, found: dict[tuple[str, int], _Kept]) -> None:
        """Ask whether what no training changes is what it was, but for parameters that torch counted a write into."""
        still, parameters = self._still or {}, {name for name, _ in self.model.named_parameters()}
        pairs: dict[torch.device, list[tuple[str, torch.Tensor, torch.Tensor]]] = {}
        for (name, place), now in found.items():
            before = still.get((name, place))
            # Of parameters the host knows as well when they come, are written to, and go.
            if name in parameters and (before is None or before.known != now.known):
                continue
            if before is None or (before.known != now.known and not now.counted):
                self._moved = self._moved or name
            elif before.bits is not None and now.bits is not None:
                pairs.setdefault(now.bits.device, []).append((name, before.bits, now.bits))
        for device, alike in pairs.items():
            differ = torch.stack([bits.to(device) for _, bits, _ in alike]) != torch.stack([bits for *_, bits in alike])
            self._asked.append(_Question([name for name, *_ in alike], [1] * len(alike), Sent(differ)))
        self._still = found

    def _require_frozen(self, trained: Mapping[str, torch.nn.Parameter], as_settled: bool, children: list[Any]) -> None:
        seen = [parameter.requires_grad for parameter in self._parameters], [*map(id, trained.values())]
        # Where the same modules hold the same parameters as when all was looked at, nothing can have come.
        if as_settled and seen == self._trained and _same(children, self._children):
            return
        known, settled = set(seen[1]), set(map(id, self._parameters))
        for module in _reached(self.model):
            for name, parameter in module._parameters.items():
                # Where no pass is looked at before it is made, nothing is settled until the first release.
                if parameter is None or not (parameter.requires_grad or settled):
                    continue
                if id(parameter) not in (known if parameter.requires_grad else settled):
                    prefix = next((prefix for prefix, own in self.model.named_modules() if own is module), "")
                    raise RuntimeError(
                        f"{_joined(prefix, name)} was unfrozen or added after make_private; call detach() and make "
                        "the run private anew"
                    )
        self._trained = seen if as_settled else None

    def _put_back(self) -> dict[tuple[str, int], _Kept]:
        """Of what `put_back` names alone."""
        every = self.model.named_parameters()
        return {(name, 0): _Kept((id(p), 0), total(piece(p))) for name, p in every if id(p) in self.put_back}

    def _untrained(self) -> dict[tuple[str, int], _Kept]:
        frozen = ((name, p) for name, p in self.model.named_parameters() if not p.requires_grad)
        buffers = ((name, b) for name, (b, _) in self._buffers().items() if name not in self.harmless)
        found = {
            (name, 0): _Kept((id(t), self._writes_to(t)), total(piece(t)))
            for name, t in (*frozen, *buffers)
            if readable(piece(t))
        }
        return found | self._extra()

    def _extra(self) -> dict[tuple[str, int], _Kept]:
        """What is in the state dict beside parameters and buffers: hooks put it there, or modules that have come since."""
        known, found = set(map(id, self._own)), {}
        # A module may stand in several places, and its state then has a name for each.
        own = {
            _joined(prefix, name)
            for prefix, module in self.model.named_modules(remove_duplicate=False)
            if id(module) in known
            for name in (*module._parameters.keys(), *module._buffers.keys())
        }
        for name, value in self.model.state_dict().items():
            if name in own:
                continue
            tensors = [t.detach() for t in flat(value) if readable(t)]
            for place, t in enumerate(tensors):
                found[name, place] = _Kept((t.dtype, t.shape), total(t), counted=False)
            if not tensors:
                found[name, 0] = _Kept((repr(value),), None, counted=False)
        return found

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Raise `SelfCheckError`, naming it, if a buffer is written meanwhile, or replaced."""
        before = self._buffers(everywhere=self._still is None)
        yield
        after = self._buffers()
        for name in after:
            if name not in self.harmless and (name not in before or _written(before[name], after[name])):
                raise _buffer_written(name)

    def following(self, data: Iterable[torch.Tensor]) -> FollowInto:
        """What sees, over one pass, into which buffers something of these tensors is written."""
        return FollowInto(data, {name: buffer for name, (buffer, _) in self._buffers().items()})

    def require_unreached(self, into: FollowInto) -> None:
        """Raise `SelfCheckError` for a buffer that was: what has no weight yet, as in a warm-up, may have some later."""
        for name in into.reached({name: buffer for name, (buffer, _) in self._buffers().items()}):
            raise _buffer_written(name)

    def learn(self, passes: list[tuple[dict[str, torch.Tensor], frozenset[str]]]) -> None:
        """Take buffers that were written alike whatever the data were for harmless, and refuse others by name.

        Args:
            passes: what `passed` gave of two passes on different data, from the same beginning.
        """
        (one, written), (other, too) = passes
        for name in {**one, **other}:
            if name in one and name in other and torch.allclose(one[name], other[name], rtol=1e-4, atol=1e-6):
                continue
            raise _buffer_written(name)
        self.harmless = written | too

    def let_back(self, parameters: Iterable[torch.Tensor]) -> None:
        """Know frozen parameters that a forward sets to what they are by their bits, whatever torch counts of them."""
        own = set(map(id, parameters))
        self.put_back |= own
        self._writes = [0 if id(p) in own else count for p, count in zip(self._parameters, self._writes)]
        for key, kept in (self._still or {}).items():
            if kept.counted and kept.known[0] in own:
                self._still[key] = _Kept((kept.known[0], 0), kept.bits)  # type: ignore[index]

    def passed(self) -> Callable[[], tuple[dict[str, torch.Tensor], frozenset[str]]]:
        """A function that gives the buffers, copied, and the names of those that were written since this call."""
        before = self._buffers()

        def after() -> tuple[dict[str, torch.Tensor], frozenset[str]]:
            found = self._buffers()
            written = frozenset(n for n in found if n not in before or _written(before[n], found[n]))
            return {name: buffer.detach().clone() for name, (buffer, _) in found.items()}, written

        return after

    def _buffers(self, *, everywhere: bool = True) -> _Buffers:
        """Those with a place in a state dict; unless ``everywhere``, of modules alone that had some when all were looked at."""
        if everywhere:
            self._holding |= dict.fromkeys(itertools.compress(range(len(self._own)), map(_BUFFERS, self._own)))
        return {
            _joined(prefix, name): (buffer, buffer._version)
            for prefix, module in map(self._modules.__getitem__, self._holding)
            for name, buffer in module._buffers.items()
            if buffer is not None and name not in getattr(module, "_non_persistent_buffers_set", ())
        }


class _Leaving:
    """A hook of modules whose state is about to be taken, or which are copied or saved whole: what leaves is looked at first."""

    def __init__(self, require: Callable[[], None], require_whole: Callable[[], None]):
        self._require, self._require_whole = require, require_whole

    def __call__(self, module: torch.nn.Module, prefix: str, keep_vars: bool) -> None:
        self._require()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        function, arguments = self.__reduce__()
        return function(*arguments)

    def __reduce__(self) -> Any:
        self._require_whole()
        # A copy is a plain model, and a file of it is read without this package: of three arguments a slice does nothing.
        return functools.partial, (slice,)


def _reached(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Every module that the model holds now, each once; torch's own walk makes a generator and a name for each."""
    found, waiting = {id(model): model}, [model]
    while waiting:
        for module in waiting.pop()._modules.values():
            if module is not None and id(module) not in found:
                found[id(module)] = module
                waiting.append(module)
    return list(found.values())


def _same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(map(operator.is_, one, other))


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _buffer_written(name: str) -> SelfCheckError:
    return SelfCheckError(
        f"{name} is a buffer that a training forward writes, and would leave with the model without noise: switch that off "
        "(track_running_stats=False, or eval mode for that module), or register it with persistent=False; nothing of this "
        "batch was released"
    )


def _written(before: tuple[torch.Tensor, int], after: tuple[torch.Tensor, int]) -> bool:
    return before[0] is not after[0] or before[1] != after[1]


def _as_it_was(before: tuple[torch.Tensor, int], after: tuple[torch.Tensor, int]) -> bool:
    """Whether a tensor is the one that it was, or has its numbers, as buffers have on the device that a model is moved to."""
    (kept, version), (now, _) = before, after
    if kept._version != version or kept.is_meta:
        return now is kept and kept._version == version
    alike = now.shape == kept.shape and now.dtype == kept.dtype
    return now is kept or (alike and torch.equal(now.to(kept.device), kept))


def _tensors_of(value: Any) -> list[tuple[torch.Tensor, int]]:
    """Tensors in nested containers, which may hold themselves, and how often each was written."""
    found, seen, waiting = [], set(), [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, torch.Tensor):
            found.append((item, item._version))
        elif isinstance(item, (dict, list, tuple, set, frozenset)) and id(item) not in seen:
            seen.add(id(item))
            waiting.extend(item.values() if isinstance(item, dict) else item)
    return found
