"""What leaves with a model besides released parameters: buffers that a forward writes, parameters that something else moves.

Torch counts every write into a tensor, so that looking costs nothing but the counting. Writes through ``.data``, and by
other ways round torch, are not counted: for them a few numbers of every tensor, at places drawn anew for each release, are
compared as well, and from time to time all numbers that training leaves alone.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from fastdp.engine.batches import tensors as flat
from fastdp.engine.errors import SelfCheckError
from fastdp.engine.pieces import is_cut, piece, writes

#: A buffer's name, the tensor that holds it, and how often that was written.
_Buffers = dict[str, tuple[torch.Tensor, int]]
#: Columns of the table in which bits are added up.
_WIDE = 512
#: Numbers of a tensor that are looked at for each release, and the most tensors; of more than these, some are drawn.
_SPOT, _SPOTS = 16, 32
_DRAW = random.Random(random.SystemRandom().getrandbits(128))


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
        self._modules = list(model.named_modules())
        #: Every parameter by its module's place and its name there, and how often it was written.
        self._settled: list[tuple[str, torch.nn.Module, str, torch.nn.Parameter, int]] = []
        self._spots: _Spots | None = None
        #: All numbers of what no training changes, as of its latest change that torch counted; None before the first `settle`.
        self._still: dict[str, tuple[int, int, int]] | None = None
        self._releases, self._next = 0, 1

    def settle(self) -> None:
        """Take the parameters as they are now for released, or for not yet trained."""
        self._hold()
        self._settled = [
            (prefix, module, name, parameter, writes(parameter))
            for prefix, module in self._modules
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]
        buffers = [(name, buffer) for name, (buffer, _) in self._buffers().items() if name not in self.harmless]
        count, own = len(self._settled) + len(buffers), len(self._settled)
        here: list[tuple[str, torch.Tensor]] = []
        for at in _DRAW.sample(range(count), min(count, _SPOTS)):
            if at < own:
                prefix, _, name, parameter, _ = self._settled[at]
                here.append((_joined(prefix, name), piece(parameter) if is_cut(parameter) else parameter))
            else:
                here.append(buffers[at - own])
        self._spots = _Spots([(name, t) for name, t in here if _readable(t)])
        if self._still is None:
            self._still = self._untrained()

    def require_settled(self) -> None:
        """Raise RuntimeError, naming it, if a parameter was written or replaced since `settle`."""
        self._hold()
        for prefix, module, name, parameter, version in self._settled:
            held = module._parameters
            if writes(parameter) != version or (name in held and held[name] is not parameter):
                raise _moved(_joined(prefix, name))

    def require_untouched(self, *, last: bool) -> None:
        """Raise RuntimeError, naming it, if a parameter or a buffer was written in a way that torch does not count.

        Called before each release: some numbers of each tensor are compared with those at `settle`, and before the 1st, 4th,
        16th, 64th ... and the ``last`` release all numbers of frozen weights and of buffers with those before.
        """
        if self._spots is not None and (name := self._spots.moved()) is not None:
            raise _moved(name)
        self._releases += 1
        if not last and self._releases < self._next:
            return
        self._next = 4 * self._releases
        found, still = self._untrained(), self._still or {}
        for name, (identity, version, bits) in found.items():
            before = still.get(name, (0, 0, -1))
            if before[:2] == (identity, version) and before[2] != bits:
                raise _moved(name)
        self._still = found

    def require_frozen(self, trained: dict[str, torch.nn.Parameter]) -> None:
        """Raise RuntimeError, naming it, if a parameter that the engine does not know has come to be trained."""
        known = {id(p) for p in trained.values()}
        for module in _reached(self.model):
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.requires_grad and id(parameter) not in known:
                    prefix = next((prefix for prefix, own in self.model.named_modules() if own is module), "")
                    raise RuntimeError(
                        f"{_joined(prefix, name)} was unfrozen or added after make_private; call detach() and make "
                        "the run private anew"
                    )

    def _untrained(self) -> dict[str, tuple[int, int, int]]:
        frozen = ((name, p) for name, p in self.model.named_parameters() if not p.requires_grad)
        buffers = ((name, b) for name, (b, _) in self._buffers().items() if name not in self.harmless)
        return {**contents((name, t) for name, t in (*frozen, *buffers) if _readable(piece(t))), **self._extra()}

    def _extra(self) -> dict[str, tuple[int, int, int]]:
        """What hooks and modules put into the state dict beside parameters and buffers."""
        own = {_joined(prefix, name) for prefix, module in self._modules for name in module._parameters.keys()}  # noqa: SIM118
        own |= {name for name, _ in self.model.named_buffers()}
        found = {}
        for name, value in self.model.state_dict().items():
            if name not in own:
                tensors = [t.detach().cpu().numpy().tobytes() for t in flat(value) if _readable(t)]
                rest = repr(value) if not tensors else ""
                found[name] = (0, 0, zlib.crc32(b"".join(tensors) + rest.encode()))
        return found

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Raise `SelfCheckError`, naming it, if a buffer is written meanwhile, or replaced."""
        before = self._buffers()
        yield
        after = self._buffers()
        for name in after:
            if name not in self.harmless and (name not in before or _written(before[name], after[name])):
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

    def passed(self) -> Callable[[], tuple[dict[str, torch.Tensor], frozenset[str]]]:
        """A function that gives the buffers, copied, and the names of those that were written since this call."""
        before = self._buffers()

        def after() -> tuple[dict[str, torch.Tensor], frozenset[str]]:
            found = self._buffers()
            written = frozenset(n for n in found if n not in before or _written(before[n], found[n]))
            return {name: buffer.detach().clone() for name, (buffer, _) in found.items()}, written

        return after

    def _buffers(self) -> _Buffers:
        return {
            _joined(prefix, name): (buffer, buffer._version)
            for prefix, module in self._modules
            if module._buffers
            for name, buffer in module._buffers.items()
            if buffer is not None and name not in getattr(module, "_non_persistent_buffers_set", ())
        }


class _Spots:
    """A few neighbouring numbers of each of some tensors, at places that nobody knows beforehand, as they are now."""

    def __init__(self, named: Sequence[tuple[str, torch.Tensor]]):
        self._places: dict[tuple[torch.device, torch.dtype], list[tuple[str, torch.Tensor, int, int, int]]] = {}
        for name, tensor in named:
            size = min(_SPOT, tensor.numel())
            start = int(tensor.storage_offset()) + _DRAW.randrange(tensor.numel() - size + 1)
            kind = (tensor.device, tensor.dtype)
            self._places.setdefault(kind, []).append((name, tensor, tensor._version, size, start))
        self._values = [_read(places) for places in self._places.values()]

    def moved(self) -> str | None:
        """The name of a tensor whose numbers are others now though torch counted no write, if there is one."""
        for (kind, places), before in zip(self._places.items(), self._values):
            for name, tensor, _, size, start in places:
                if (tensor.device, tensor.dtype) != kind or start + size > tensor.storage_offset() + tensor.numel():
                    return name
            now = _read(places)
            if torch.equal(now, before):
                continue
            width = before.shape[0] // sum(size for *_, size, _ in places)
            widths = [size * width for *_, size, _ in places]
            for (name, tensor, version, *_), gap in zip(places, (now != before).split(widths)):
                # What torch counted a write into is for others to judge.
                if tensor._version == version and bool(gap.any()):
                    return name
        return None


def _reached(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Every module that the model holds now, each once; torch's own walk makes a generator and a name for each."""
    found, waiting = {id(model): model}, [model]
    while waiting:
        for module in waiting.pop()._modules.values():
            if module is not None and id(module) not in found:
                found[id(module)] = module
                waiting.append(module)
    return list(found.values())


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


@torch.no_grad()
def _read(places: Sequence[tuple[str, torch.Tensor, int, int, int]]) -> torch.Tensor:
    """The bytes that lie at these places, one behind the other."""
    return torch.cat([t.as_strided((size,), (1,), start) for _, t, _, size, start in places]).view(torch.uint8)


def _readable(tensor: torch.Tensor) -> bool:
    """Whether a tensor's numbers lie plainly in memory."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    return (
        plain
        and tensor.device.type != "meta"
        and not tensor.is_quantized
        and not tensor.is_complex()
        and tensor.numel() > 0
        and torch.ops.aten.is_non_overlapping_and_dense(tensor)
    )


def contents(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, tuple[int, int, int]]:
    """What tells whether tensors were written to or replaced, by name.

    Bits are added up, by place, so that writes through ``.data``, which torch does not count, are seen as well.
    """
    found = {}
    for name, tensor in named:
        plain = piece(tensor)
        flat = (torch.view_as_real(plain) if plain.is_complex() else plain).contiguous().reshape(-1)
        found[name] = (id(tensor), writes(tensor), _sum(flat))
    return found


def _sum(flat: torch.Tensor) -> int:
    """A sum of the bits of a flat tensor, modulo 2^64, in which no two places count alike."""
    bits = flat.view(torch.uint8)
    head = bits.shape[0] // (8 * _WIDE) * 8 * _WIDE
    whole = 0
    if head:
        table = bits[:head].view(torch.int64).view(-1, _WIDE)
        for sums in (table.sum(0), table.sum(1)):
            whole += int((sums * _odd(sums)).sum())
    rest = bits[head:].long()
    return (whole + int((rest * _odd(rest)).sum())) % 2**64


def _odd(like: torch.Tensor) -> torch.Tensor:
    """A different odd number for each place."""
    return (2 * torch.arange(like.shape[0], device=like.device) + 1) * 0x9E3779B97F4A7C1


def _moved(name: str) -> RuntimeError:
    return RuntimeError(
        f"{name} was changed outside of a release, so no noise covers it: let the private optimizer alone change the model; "
        "after loading released weights call private.load_state_dict, or detach() and make the run private anew"
    )


def _buffer_written(name: str) -> SelfCheckError:
    return SelfCheckError(
        f"{name} is a buffer that a training forward writes, and would leave with the model without noise: switch that off "
        "(track_running_stats=False, or eval mode for that module), or register it with persistent=False; nothing of this "
        "batch was released"
    )


def _written(before: tuple[torch.Tensor, int], after: tuple[torch.Tensor, int]) -> bool:
    return before[0] is not after[0] or before[1] != after[1]
