"""What leaves with a model besides released parameters: buffers that a forward writes, parameters that something else moves.

Torch counts every write into a tensor (but through ``.data``), so that looking costs nothing but the counting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

from fastdp.engine.errors import SelfCheckError

#: A buffer's name, the tensor that holds it, and how often that was written.
_Buffers = dict[str, tuple[torch.Tensor, int]]
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Guard:
    """Watches the state of a model that a release does not cover.

    Buffers that leave with a state dict must not change in training forwards, unless they follow from the parameters
    alone (spectral normalisation's vectors do). Parameters may change only where `settle` is called afterwards.
    """

    def __init__(self, model: torch.nn.Module):
        self.model = model
        self.harmless: frozenset[str] = frozenset()
        self._modules = list(model.named_modules())
        self._versions: dict[str, tuple[torch.Tensor, int]] | None = None

    def settle(self) -> None:
        """Take the parameters as they are now for released, or for not yet trained."""
        self._versions = {name: (p, p._version) for name, p in self.model.named_parameters()}

    def require_settled(self) -> None:
        """Raise RuntimeError, naming it, if a parameter was written or replaced since `settle`."""
        now = dict(self.model.named_parameters())
        for name, (parameter, version) in (self._versions or {}).items():
            if parameter._version != version or now.get(name, parameter) is not parameter:
                raise RuntimeError(
                    f"{name} was changed outside of a release, so no noise covers it: let the private optimizer alone change "
                    "the model; after loading released weights call private.load_state_dict, or detach() and make the run "
                    "private anew"
                )

    def require_frozen(self, trained: dict[str, torch.nn.Parameter]) -> None:
        """Raise RuntimeError, naming it, if a parameter that the engine does not know has come to be trained."""
        known = {id(p) for p in trained.values()}
        for prefix, module in self.model.named_modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.requires_grad and id(parameter) not in known:
                    raise RuntimeError(
                        f"{prefix}{'.' * bool(prefix)}{name} was unfrozen or added after make_private; call detach() and make "
                        "the run private anew"
                    )

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
            f"{prefix}.{name}" if prefix else name: (buffer, buffer._version)
            for prefix, module in self._modules
            for name, buffer in module._buffers.items()
            if buffer is not None and name not in getattr(module, "_non_persistent_buffers_set", ())
        }


def contents(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, tuple[int, ...]]:
    """What tells whether tensors were written to or replaced, by name.

    Bits are added up, so that writes through ``.data``, which torch does not count, are seen as well.
    """
    found: dict[str, tuple[int, ...]] = {}
    for name, tensor in named:
        plain = tensor.detach()
        bits = (torch.view_as_real(plain) if plain.is_complex() else plain).contiguous().reshape(-1)
        whole = bits.view(_BITS[bits.element_size()]).sum(dtype=torch.int64)
        found[name] = (id(tensor), tensor._version, int(whole))
    return found


def _buffer_written(name: str) -> SelfCheckError:
    return SelfCheckError(
        f"{name} is a buffer that a training forward writes, and would leave with the model without noise: switch that off "
        "(track_running_stats=False, or eval mode for that module), or register it with persistent=False; nothing of this "
        "batch was released"
    )


def _written(before: tuple[torch.Tensor, int], after: tuple[torch.Tensor, int]) -> bool:
    return before[0] is not after[0] or before[1] != after[1]
