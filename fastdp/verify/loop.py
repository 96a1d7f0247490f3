"""Loop check: neither the inputs that a training loop makes of an example nor its gradient may depend on other examples.

If the loader's own tensors reach the model and it returns its loss, there is nothing to check. Otherwise the loop gets probe
batches of real examples that add to no sum: one alone, together with others, beside different ones, as first row and as last.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from fastdp.calls.batches import Call, map_tensors, row_of
from fastdp.calls.collation import Collation, ProbeBatch
from fastdp.calls.modes import rounding
from fastdp.calls.randomness import BufferSnapshot, DropoutDisabled, preserve_rng, rng_state, seed_everything, seeded
from fastdp.engine.errors import SelfCheckError
from fastdp.engine.loss.boundary import Junction, plain_gradients
from fastdp.engine.loss.losses import batch_divisors
from fastdp.engine.loss.one_example import backward_starts
from fastdp.engine.passes import JoinedPasses, Pass, Passes
from fastdp.engine.uses.layout import Ticket
from fastdp.engine.uses.use import CaptureContext
from fastdp.verify.probe import GRADIENT_TOLERANCE, same_shape_factor

#: Repeats of the batches of role "together" (role "still"), which show how far the loop moves an example by itself. A loop that
#: prefetches gets `_AHEAD` of the example alone. Other companions must move it `_EXCEEDS` times as far as the `_LAST` repeats.
_REPEATS, _AHEAD, _LAST, _EXCEEDS = 10, 3, 6, 3
#: Seeds of the model's random state and the criterion's.
_MODEL, _CRITERION = 1, 2
#: The loop's own terms are compared at no less than this share of the whole gradient: smaller ones are lost in its rounding.
_SHARE = 1e-3
_GRADIENT = "{why}. Mask padding, and give make_private criterion=, of one loss per row; this batch was not released."
_INPUTS = (
    "The loop gives the model something else for an example {how}. Make each row from its own example and pad on the right; "
    "this batch was not released."
)
_TERMS = "{why}. Average the loop's own terms over rows, or compute the whole loss in forward(); this batch was not released."
_REDUCTION = "The loop's loss is the {own} over rows. Pass loss_reduction='{own}'; this batch was not released."
_HOW = {"beside": "beside other examples", "alone": "alone than in its batch"}


class _Outcome(NamedTuple):
    """The example's inputs or gradient in one probe batch, the random state before it, and whether the loop drew more."""

    rows: int
    values: torch.Tensor
    start: tuple[bytes, ...]
    draws: bool


class LoopCheck:
    """Compares an example's inputs or gradient between the probe batches that a loop was given.

    Attributes:
        waiting: probe batches that have not gone through the loop yet.
        begun: whether the loop was ever verified.
        undecided: whether something could not be compared.
        twice: whether the loop was seen to call the model more than once for a batch.
        mixes: whether its loss was seen to have terms beside the model's own.
    """

    def __init__(self, passes: Passes) -> None:
        self._passes = passes
        self.waiting, self.begun, self.undecided, self.twice, self.mixes = 0, False, False, False, False
        self._due: list[ProbeBatch] = []
        #: What the model was called with for the example that is compared, alone.
        self._subject: Call | None = None
        self._divisors: list[str] = []
        #: Of the batch at hand: the row that is compared, whether the model drew, the tolerance, and the random states around
        #: its first pass.
        self._row, self._forward_draws, self._rounding = 0, False, 0.0
        self._state_before = self._state_after = rng_state()
        self._open_contexts = ExitStack()

    def begin(self, source: Collation, rows: int, *, ahead: bool = False) -> None:
        """Plan probe batches of at most ``rows`` examples; ``ahead`` is for loops that take them before they use earlier ones."""
        self.begun = True
        # The last one that is taken ahead finds another random state.
        self._due = source.probes(rows, stills=1 + _AHEAD if ahead else 0)
        #: The batches that may be handed out again; none for loops that take batches ahead.
        self._repeatable = [] if ahead else list(self._due)
        #: The role in which the example differed; whether the loop makes inputs or loss terms; whether a second difference
        #: refuses; and how far the loop moves an example by itself.
        self._suspect, self._transforms, self._confirming, self._drift = "", False, False, 0.0
        self._seen: dict[tuple[str, int], _Outcome] = {}
        self._repeated: list[_Outcome] = []
        self.waiting = len(self._due)
        # Row 0 of the second batch is the example, collated with others.
        self._collator_draws = len(self._due) > 1 and any(self._due[1].source.draws(0))

    def take(self) -> Iterator[ProbeBatch]:
        """The probe batches that the loop is to be given next."""
        while self._due:
            yield self._due.pop(0)

    def forget(self) -> None:
        """Drop the probe batches of a logical batch that was discarded."""
        self.begun = self.begun and not self.waiting
        self.waiting, self._due = 0, []
        self._open_contexts.close()

    def run_forward(self, call: Call, ticket: Ticket, junction: Junction) -> Any:
        """A probe batch's forward pass, without dropout and under one seed; nothing is summed."""
        passes, probe, again = self._passes, ticket.probe, self._passes.twice()
        self.twice |= again
        snapshot = BufferSnapshot(passes.model)
        if not again:
            self._rounding = rounding(passes.model)
            if probe.role == "alone":
                self._subject = map_tensors(call, lambda t: t[: len(t) // 2] if t.dim() else t)
            self._row, self._forward_draws = row_of(call, ticket.rows, self._subject, probe.row), False
            # What a loop draws for another example may make it look like this one.
            self._state_before = *probe.rng_state(passes.model), repr(self._row * probe.drew()).encode()
        layout = ticket.layout(passes.device)
        with passes.weights.apart(), DropoutDisabled(), seeded(_MODEL, passes.model):
            before = rng_state(passes.model)
            output, targets, loss, beside = passes.plain_rows(call, ticket, layout, torch.ones_like(layout.weights))
            self._forward_draws |= rng_state(passes.model) != before
        snapshot.restore()
        if again:
            # Without dropout both passes may give the same, which would hide a term of their difference.
            targets, loss, beside = map_tensors((targets, loss, beside), _scale_entries)
            output = map_tensors(output, _scale_entries) if loss is None else output
        else:
            self._open_contexts.close()  # of a batch whose loss the loop left alone
            self._open_contexts.enter_context(preserve_rng(passes.model))
            divisors = self._open_contexts.enter_context(batch_divisors())
            self._divisors = divisors if probe.role == "together" else self._divisors
            seed_everything(_CRITERION)
            self._state_after = probe.rng_state(passes.model)
        waiting = Pass(call, ticket, layout, CaptureContext(layout), True, junction, [], self._finish, targets)
        return waiting.replace_outputs(output) if loss is None else waiting.replace_loss(output, loss, beside)

    def _finish(self, parts: JoinedPasses, _retain: bool) -> None:
        """Compare the inputs, or the gradients, that the loop gave the passes of a probe batch."""
        passes, probe = self._passes, parts[0][0].ticket.probe
        drew = self._forward_draws or probe.rng_state(passes.model) != self._state_after
        self._open_contexts.close()
        self.mixes |= passes.returns_loss and parts[0][1] is not None
        outside = self.mixes or not passes.returns_loss
        self._rounding *= GRADIENT_TOLERANCE if outside else 1.0
        found = self._gradients(parts) if outside else torch.stack([p.targets[self._row][0].detach() for p, _ in parts])
        self._transforms |= outside or any(probe.source.makes(own.call) for own, _ in parts)
        if probe.role == "together" and probe.row and not self._transforms:
            # Nothing reaches the model but the loader's own tensors: the rest of a probe made ahead is not needed.
            self.waiting, self._due = self.waiting - len(self._due), []
        self.waiting -= 1
        self._compare(probe, _Outcome(parts[0][0].ticket.rows, found, self._state_before, drew))

    def _gradients(self, parts: JoinedPasses) -> torch.Tensor:
        """The row's gradient as two numbers for each parameter (`_sketch`), float64 ``[k]``.

        Where the loop has terms of its own, theirs come first, then a share of the whole gradient's and the loss's weight.
        """
        passes = self._passes

        def sketched(parts: JoinedPasses, retain: bool) -> torch.Tensor:
            starts = backward_starts([self._row], parts, passes.scale(parts[0][0].ticket), passes.returns_loss)
            found = plain_gradients(*starts, passes.read.values(), keep=_sketch, retain=retain) if starts[0] else []
            return torch.cat([torch.zeros(2, dtype=torch.float64) if g is None else g for g in found or [None]])

        with DropoutDisabled():
            if not self.mixes:
                return sketched(parts, False)
            terms = sketched([(own, (None, *upstream[1:])) for own, upstream in parts], True)
            both = torch.cat([terms, _SHARE * sketched(parts, False)])
        weights = torch.tensor([float(upstream[0] or 0.0) for _, upstream in parts], dtype=torch.float64)
        return torch.cat([both, weights * both.norm()])

    def _compare(self, probe: ProbeBatch, outcome: _Outcome) -> None:
        """Raise `SelfCheckError` if the example got something else than together with the others, whose NaN would hide it."""
        role, row = probe.role, probe.row
        if role == "still":
            self._repeated.append(outcome)
            if self._suspect and len(self._repeated) == (_REPEATS if self._repeatable else _AHEAD):
                self._decide()
            return
        self._seen[role, row] = outcome
        together, other = self._seen.get(("together", row)), "alone" if role == "together" else role
        found = self._seen.get((other, row))
        if found is None or together is None:
            return
        unlike = found.start != together.start or not torch.cat([found.values, together.values]).isfinite().all()
        if unlike or (other == "alone" and (self._collator_draws or found.draws or together.draws)):
            self.undecided = True
        elif self._differ(found, together, other):
            # With the other loss_reduction, gradients grow by the ratio of rows.
            growth = (together.rows / found.rows) ** (1 if self._passes.loss_reduction == "mean" else -1)
            grown = _Outcome(found.rows, found.values * growth, found.start, found.draws)
            if growth != 1 and not (self._passes.returns_loss or self._differ(grown, together, other)):
                self._refuse(_REDUCTION)
            if self._confirming:
                self._refuse()
            if not self._suspect:
                # Both batches of role "together".
                self._due += [replace(probe, role="still") for probe in self._repeatable[1:3] * (_REPEATS // 2)]
                self.waiting += _REPEATS * bool(self._repeatable)
            self._suspect = self._suspect or other

    def _decide(self) -> None:
        """Annealing and random draws change an example alone too; a loop that changes it only beside others mixes them."""
        # The first is left out: a loop that keeps state of the batch before still has that of other examples in it.
        pairs = list(zip(self._repeated[1:], self._repeated[3 if self._repeatable else 2 :]))
        moved = not self._repeatable and any(self._differ(*pair, self._suspect) for pair in pairs)
        if moved or any(one.start != two.start for one, two in pairs):
            self.undecided = True
        elif self._repeatable:
            # A schedule may have ended and a carried state fades, so a difference beyond the drift must occur twice.
            self._drift = _EXCEEDS * max(_distance(one.values, two.values) for one, two in pairs[-_LAST:])
            self.undecided = self._confirming = True
            self._seen.clear()
            self._due += self._repeatable
            self.waiting += len(self._repeatable)
        else:
            self._refuse()

    def _refuse(self, form: str = "") -> None:
        self.begun = False  # A loop that goes on after this is verified again.
        how, own = _HOW.get(self._suspect, ""), self._passes.loss_reduction
        why = next(iter(self._divisors), f"An example has another gradient {how}")
        form = form or (_TERMS if self.mixes else _INPUTS if self._passes.returns_loss else _GRADIENT)
        raise SelfCheckError(form.format(how=how, why=why, own="sum" if own == "mean" else "mean"))

    def _differ(self, one: _Outcome, two: _Outcome, role: str) -> bool:
        tolerance = self._rounding * (same_shape_factor(self._passes) if role == "beside" else 1.0)
        return _distance(one.values, two.values) > max(tolerance, self._drift)


def _scale_entries(t: torch.Tensor) -> torch.Tensor:
    """Scale the entries of the last axis by factors between 0.75 and 1."""
    factors = torch.linspace(0.75, 1, t.shape[-1] if t.dim() > 1 else 1, device=t.device)
    return t * factors.to(t.dtype) if t.is_floating_point() and t.dim() else t


def _sketch(_index: int, gradient: torch.Tensor) -> torch.Tensor:
    wide = gradient.detach().double()
    return torch.stack([wide.norm(), wide.sum() / max(wide.numel(), 1) ** 0.5]).cpu()


def _distance(one: torch.Tensor, two: torch.Tensor) -> float:
    """How far two vectors are apart, relative to the larger; infinite where only one is finite."""
    if one.shape != two.shape or not torch.equal(one.isfinite(), two.isfinite()):
        return float("inf")
    a, b = (t.double().nan_to_num(0.0, 0.0, 0.0) for t in (one, two))
    size = max(float(a.norm()), float(b.norm()))
    return float((a - b).norm()) / size if size > 1e-12 else 0.0
