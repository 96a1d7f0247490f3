"""Whose the weights are: the runs that left theirs in a model before, and what changed them after this run's releases.

A card speaks of what its run released. Weights that another run trained cost what that one spent as well; weights that
something else wrote since, a plain optimizer on the same records say, cost what nobody counted. Both are told by the modules,
which this process knows, and by sums of all bits of the weights, which copies and files share.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress

import torch

from fastdp.accounting.ledger import Ledger
from fastdp.distributed.pieces import is_dtensor, to_local
from fastdp.verify.state import StateCheck

#: Columns of the table in which bits are added up.
_WIDE = 512
#: Under this name the ledger keeps which runs trained the model before.
_TRAINED_BEFORE = "trained before"
_EARLIER_RUNS = (
    "this model, or a part of it, was in private runs before ({}): unless other weights were loaded since, what those spent on "
    "the same data adds to this figure"
)
#: Under this name the ledger keeps that other weights stood in the place of those that it released.
_CHANGED = "changed weights"
_CHANGED_WEIGHTS = (
    "the weights were changed after a release, and not by one: what changed them (a cast, a merge, other training, a checkpoint "
    "of another run) had no part of the records in it, for which this figure does not account"
)
#: The runs that a module was in, and the run that released a tensor with these bits.
_TRAINED: weakref.WeakKeyDictionary[torch.nn.Module, tuple[str, ...]] = weakref.WeakKeyDictionary()
_RELEASED: dict[int, str] = {}


def checksums(tensors: Iterable[torch.Tensor]) -> tuple[int, ...]:
    """A 64-bit checksum of each tensor's bits, in which no two positions count alike."""
    devices: dict[torch.device, list[torch.Tensor]] = {}
    # A different odd number for each position, by device.
    odd: dict[torch.device, torch.Tensor] = {}
    places = []
    for tensor in tensors:
        own = to_local(tensor) if is_dtensor(tensor) else tensor.detach()
        bits = (torch.view_as_real(own) if own.is_complex() else own).contiguous().reshape(-1).view(torch.uint8)
        head = bits.shape[0] // (8 * _WIDE) * 8 * _WIDE
        table = bits[:head].view(torch.int64).view(-1, _WIDE)
        parts = [bits[head:].long(), *((table.sum(0), table.sum(1)) if head else ())]
        most = max([part.shape[0] for part in parts])
        if own.device not in odd or odd[own.device].shape[0] < most:
            odd[own.device] = (2 * torch.arange(most, device=own.device) + 1) * 0x9E3779B97F4A7C1
        found = devices.setdefault(own.device, [])
        places.append((own.device, len(found)))
        found.append(sum([(part * odd[own.device][: part.shape[0]]).sum() for part in parts]))
    # One host synchronization per device.
    read = {device: torch.stack(found).tolist() for device, found in devices.items()}
    return tuple([read[device][at] for device, at in places])


class Provenance:
    """Of the weights of one run: which runs trained them before, and whether they are what its releases left.

    The ledger keeps what was found, so that the card says so of a run that is resumed as well. ``parameters`` are all that the
    run may train.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        parameters: Mapping[str, torch.nn.Parameter],
        ledger: Ledger,
        state: Callable[[], StateCheck],
    ):
        self._model, self._parameters, self._ledger, self._state = model, parameters, ledger, state
        #: Checksums of the parameters as the run found them; and of the states that its releases left, as far as they were kept.
        self._initial_bits: tuple[int, ...] | None = None
        self._released_bits: set[tuple[int, ...]] = set()
        #: Whether no release comes any more, so that states are known by all their bits; and whether the ledger is closed.
        self.ended = self._closed = False
        self._changed = False

    def note_earlier_runs(self) -> None:
        """Note which runs trained the model, a part of it or what it is a copy of, until this one begins."""
        if self._initial_bits is not None or self._closed:
            return
        modules = (run for module in self._model.modules() for run in _TRAINED.get(module, ()))
        copies = (_RELEASED[bits] for bits in self._bits() if bits in _RELEASED)
        earlier = [run for run in dict.fromkeys((*modules, *copies)) if run != self._ledger.run_id]
        if earlier and self._ledger.noted(_TRAINED_BEFORE) is None:
            self._ledger.note(_TRAINED_BEFORE, ", ".join(earlier))

    def begin(self) -> None:
        """The run trains from here on."""
        self.note_earlier_runs()
        if self._initial_bits is None:
            self._initial_bits = self._bits()
        for module in self._model.modules():
            _TRAINED[module] = tuple(dict.fromkeys((*_TRAINED.get(module, ()), self._ledger.run_id)))

    def end(self) -> None:
        """Know the weights as they are from here on: no release comes any more."""
        self.ended = True
        self.remember()

    def remember(self) -> list[int]:
        """Know the weights as they are, which follow from releases, from here on; returns what they are known by."""
        bits = self._bits()
        self._released_bits.add(bits)
        # Those that no step moved, like a bias of zeros, may be any model's.
        found = bits if self._initial_bits is None else self._initial_bits
        run_id = self._ledger.run_id
        _RELEASED.update({own: run_id for own, before in zip(bits, found) if own != before})
        return list(bits)

    def note_changes(self) -> None:
        """See whether the weights are what releases left: where they are not, the card says so from here on."""
        if self._ledger.untouched:
            return
        if not self.ended:
            with suppress(RuntimeError):
                self._state().require_parameters()
                return
        if self._bits() not in self._released_bits:
            self._note_changed()

    def resume(self, bits: Sequence[int] | None) -> None:
        """A checkpoint was loaded, of weights that were known by this; None of a checkpoint that does not say."""
        # Of pieces each process has its own, and a checkpoint one's. What was unfrozen later may come to be trained again.
        known, in_pieces = len(self._parameters), any(map(is_dtensor, self._parameters.values()))
        if bits is None or in_pieces or tuple(bits)[:known] == self._bits():
            self._released_bits.add(self._bits())
        else:
            self._note_changed()

    def close(self) -> None:
        """The run gives the model back."""
        self.note_changes()
        if not self._ledger.untouched:
            self.begin()
            self.end()
        self._closed = True

    def sentences(self) -> list[str]:
        """For the card."""
        before = self._ledger.noted(_TRAINED_BEFORE)
        changed = self._changed or self._ledger.noted(_CHANGED) is not None
        return [*([] if before is None else [_EARLIER_RUNS.format(before)]), *([_CHANGED_WEIGHTS] if changed else [])]

    def _bits(self) -> tuple[int, ...]:
        return checksums(self._parameters.values())

    def _note_changed(self) -> None:
        if not self._closed and self._ledger.noted(_CHANGED) is None:
            self._ledger.note(_CHANGED, "not by a release")
        self._changed = True
