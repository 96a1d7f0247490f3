"""Whose the weights are: the runs that left theirs in a model before, and what changed them after this run's releases.

A card speaks of what its run released. Weights that another run trained cost what that one spent as well; weights that
something else wrote since, a plain optimizer on the same records say, cost what nobody counted. Both are told by the modules,
which this process knows, and by sums of all bits of the weights, which copies and files share.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence

import torch

from fastdp.accounting.ledger import Ledger
from fastdp.engine.bits import contents
from fastdp.engine.guard import Guard
from fastdp.engine.pieces import is_cut

#: Under this name the ledger keeps which runs trained the model before.
_BEFORE = "trained before"
_TRAINED_BEFORE = (
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


class Provenance:
    """Of the weights of one run.

    Args:
        model: the user's own.
        parameters: all that the run may train, by name.
        ledger: keeps what was found, so that the card says so of a run that is resumed as well.
        guard: the present one of the model.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        parameters: Mapping[str, torch.nn.Parameter],
        ledger: Ledger,
        guard: Callable[[], Guard],
    ):
        self._model, self._parameters, self._ledger, self._guard = model, parameters, ledger, guard
        #: What tells each parameter as the run found it; and the states that follow from its releases, as far as they were kept.
        self._found: tuple[int, ...] | None = None
        self._known: set[tuple[int, ...]] = set()
        #: Whether no release comes any more, so that states are known by all their bits; and whether the ledger is closed.
        self._ended = self._closed = False
        self._changed = False

    def look_back(self) -> None:
        """Note which runs trained the model, a part of it or what it is a copy of, until this one begins."""
        if self._found is not None or self._closed:
            return
        modules = (run for module in self._model.modules() for run in _TRAINED.get(module, ()))
        copies = (_RELEASED[bits] for bits in self._bits() if bits in _RELEASED)
        earlier = [run for run in dict.fromkeys((*modules, *copies)) if run != self._ledger.run_id]
        if earlier and self._ledger.noted(_BEFORE) is None:
            self._ledger.note(_BEFORE, ", ".join(earlier))

    def begin(self) -> None:
        """The run trains from here on."""
        self.look_back()
        if self._found is None:
            self._found = self._bits()
        for module in self._model.modules():
            _TRAINED[module] = tuple(dict.fromkeys((*_TRAINED.get(module, ()), self._ledger.run_id)))

    def released(self, *, last: bool) -> None:
        """A release changed the weights."""
        self._ended = last
        if last:
            self.keep()

    def keep(self) -> list[int]:
        """Know the weights as they are, which follow from releases, from here on; returns what they are known by."""
        bits = self._bits()
        self._known.add(bits)
        # Those that no step moved, like a bias of zeros, may be any model's.
        found = bits if self._found is None else self._found
        _RELEASED.update({own: self._ledger.run_id for own, before in zip(bits, found) if own != before})
        return list(bits)

    def require(self) -> None:
        """See whether the weights are what releases left: where they are not, the card says so from here on."""
        if self._ledger.untouched or (not self._ended and self._guard().holds()) or self._bits() in self._known:
            return
        self._note_changed()

    def resume(self, bits: Sequence[int] | None) -> None:
        """A checkpoint was loaded, of weights that were known by this; None of a checkpoint that does not say."""
        # Of pieces each process has its own, and a checkpoint one's.
        if bits is None or tuple(bits) == self._bits() or any(map(is_cut, self._parameters.values())):
            self._known.add(self._bits())
        else:
            self._note_changed()

    def close(self) -> None:
        """The run gives the model back."""
        self.require()
        if not self._ledger.untouched:
            self.begin()
            self.released(last=True)
        self._closed = True

    def sentences(self) -> list[str]:
        """For the card."""
        before = self._ledger.noted(_BEFORE)
        changed = self._changed or self._ledger.noted(_CHANGED) is not None
        return [
            *([] if before is None else [_TRAINED_BEFORE.format(before)]),
            *([_CHANGED_WEIGHTS] if changed else []),
        ]

    def _bits(self) -> tuple[int, ...]:
        return tuple(bits for *_, bits in contents(self._parameters.items()).values())

    def _note_changed(self) -> None:
        if not self._closed and self._ledger.noted(_CHANGED) is None:
            self._ledger.note(_CHANGED, "not by a release")
        self._changed = True
