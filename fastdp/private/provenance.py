"""Where a model's weights come from: earlier private runs, the releases of this one, or something else.

A card covers what its own run released. Weights that an earlier run trained cost what that run spent as well. Of weights that
something else wrote, such as a plain optimizer on the same records, nobody counted the cost. A model is recognised by its
modules, which this process knows, and by checksums of its weights, which copies and files share.
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
_COLUMNS = 512
#: Under this name the ledger keeps which runs trained the model before.
_TRAINED_BEFORE = "trained before"
_EARLIER_RUNS = (
    "this model, or a part of it, was in private runs before ({}): unless other weights were loaded since, what those spent on "
    "the same data adds to this figure"
)
#: Under this name the ledger keeps that the weights were not what a release had left.
_CHANGED = "changed weights"
_CHANGED_WEIGHTS = (
    "the weights were changed after a release, and not by one: what changed them (a cast, a merge, other training, a checkpoint "
    "of another run) had no part of the records in it, for which this figure does not account"
)
#: The ids of the runs that trained a module, and of the run that released a tensor with this checksum.
_RUNS_OF_MODULE: weakref.WeakKeyDictionary[torch.nn.Module, tuple[str, ...]] = weakref.WeakKeyDictionary()
_RUN_OF_CHECKSUM: dict[int, str] = {}


def checksums(tensors: Iterable[torch.Tensor]) -> tuple[int, ...]:
    """A 64-bit checksum of each tensor's bits: rows and columns of a table are added up, each times an odd factor of its own."""
    devices: dict[torch.device, list[torch.Tensor]] = {}
    factors: dict[torch.device, torch.Tensor] = {}
    places = []
    for tensor in tensors:
        own = to_local(tensor) if is_dtensor(tensor) else tensor.detach()
        bits = (torch.view_as_real(own) if own.is_complex() else own).contiguous().reshape(-1).view(torch.uint8)
        head = bits.shape[0] // (8 * _COLUMNS) * 8 * _COLUMNS
        table = bits[:head].view(torch.int64).view(-1, _COLUMNS)
        parts = [bits[head:].long(), *((table.sum(0), table.sum(1)) if head else ())]
        most = max([part.shape[0] for part in parts])
        if own.device not in factors or factors[own.device].shape[0] < most:
            factors[own.device] = (2 * torch.arange(most, device=own.device) + 1) * 0x9E3779B97F4A7C1
        found = devices.setdefault(own.device, [])
        places.append((own.device, len(found)))
        found.append(sum([(part * factors[own.device][: part.shape[0]]).sum() for part in parts]))
    # One host synchronization per device.
    read = {device: torch.stack(found).tolist() for device, found in devices.items()}
    return tuple([read[device][at] for device, at in places])


class Provenance:
    """Which runs trained a run's weights before it, and whether they still are what its releases left.

    The ledger keeps what was found, so that the card of a resumed run says it too.

    Args:
        parameters: all that the run may train.
        state: gives the check of what changes between releases, which counts writes to the parameters.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        parameters: Mapping[str, torch.nn.Parameter],
        ledger: Ledger,
        state: Callable[[], StateCheck],
    ):
        self._model, self._parameters, self._ledger, self._state = model, parameters, ledger, state
        #: Checksums of the parameters as the run found them, and as releases left them wherever that was remembered.
        self._initial: tuple[int, ...] | None = None
        self._released: set[tuple[int, ...]] = set()
        #: Whether no further release comes: only checksums are compared from then on.
        self.ended = False
        #: Whether the ledger is closed.
        self._closed = False
        #: Whether the weights were changed by something else than a release.
        self._changed = False

    def note_earlier_runs(self) -> None:
        """Note which runs trained the model, a part of it, or a model that it is a copy of. Once this run begins, do nothing."""
        if self._initial is not None or self._closed:
            return
        by_module = (run for module in self._model.modules() for run in _RUNS_OF_MODULE.get(module, ()))
        by_checksum = (_RUN_OF_CHECKSUM[own] for own in self._checksums() if own in _RUN_OF_CHECKSUM)
        earlier = [run for run in dict.fromkeys((*by_module, *by_checksum)) if run != self._ledger.run_id]
        if earlier and self._ledger.noted(_TRAINED_BEFORE) is None:
            self._ledger.note(_TRAINED_BEFORE, ", ".join(earlier))

    def begin(self) -> None:
        """The run trains from here on."""
        self.note_earlier_runs()
        if self._initial is None:
            self._initial = self._checksums()
        for module in self._model.modules():
            _RUNS_OF_MODULE[module] = tuple(dict.fromkeys((*_RUNS_OF_MODULE.get(module, ()), self._ledger.run_id)))

    def end(self) -> None:
        """No further release comes: remember the weights as they are now."""
        self.ended = True
        self.remember()

    def remember(self) -> list[int]:
        """Remember the weights, which follow from releases now, and return their checksums."""
        now = self._checksums()
        self._released.add(now)
        # A tensor that no step moved, such as a bias of zeros, may belong to any model.
        moved = (own for own, before in zip(now, self._initial or now) if own != before)
        _RUN_OF_CHECKSUM.update(dict.fromkeys(moved, self._ledger.run_id))
        return list(now)

    def note_changes(self) -> None:
        """Note weights that are not what a release left, so that the card says it from here on."""
        if self._ledger.untouched:
            return
        if not self.ended:
            # Where writes were counted, checksums tell whether they put back what a release had left.
            with suppress(RuntimeError):
                self._state().require_parameters()
                return
        if self._checksums() not in self._released:
            self._note_changed()

    def resume(self, known: Sequence[int] | None) -> None:
        """Compare the weights with the checksums in a checkpoint that was loaded; None for one that holds none."""
        now, in_pieces = self._checksums(), any(map(is_dtensor, self._parameters.values()))
        # Of weights in pieces a checkpoint has one process's. Parameters that the earlier process unfrozen later come last.
        if known is None or in_pieces or tuple(known)[: len(now)] == now:
            self._released.add(now)
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
        """What the card says of all this."""
        before = self._ledger.noted(_TRAINED_BEFORE)
        found = [] if before is None else [_EARLIER_RUNS.format(before)]
        if self._changed or self._ledger.noted(_CHANGED) is not None:
            found.append(_CHANGED_WEIGHTS)
        return found

    def _checksums(self) -> tuple[int, ...]:
        return checksums(self._parameters.values())

    def _note_changed(self) -> None:
        if not self._closed and self._ledger.noted(_CHANGED) is None:
            self._ledger.note(_CHANGED, "not by a release")
        self._changed = True
