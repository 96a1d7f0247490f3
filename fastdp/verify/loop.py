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

from fastdp.calls.batches import Call, as_long_as, map_tensors, row_of, take_rows
from fastdp.calls.collation import Collation, ProbeBatch
from fastdp.calls.modes import LowPrecisionDetector, rounding
from fastdp.calls.randomness import BufferSnapshot, DropoutDisabled, preserve_rng, rng_state, seed_everything, seeded
from fastdp.engine.errors import SelfCheckError
from fastdp.engine.loss.boundary import Junction, plain_gradients
from fastdp.engine.loss.losses import batch_divisors
from fastdp.engine.loss.one_example import backward_starts
from fastdp.engine.passes import JoinedPasses, Pass, Passes
from fastdp.engine.uses.layout import Ticket
from fastdp.engine.uses.use import CaptureContext
from fastdp.verify.probe import GRADIENT_TOLERANCE, same_shape_factor

#: Where two batches differ, each is repeated (role "still") behind two copies of the one before, in the order of Thue and Morse,
#: which no drift, habit or single jump of a loop follows. A loop that prefetches gets `_AHEAD` of the example alone.
_ORDER, _AHEAD = (1, -1, -1, 1, -1, 1, 1, -1), 3
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


class _Outcome(NamedTuple):
    """The example's inputs or gradient in one probe batch, the random state before it, and whether the loop drew more."""

    rows: int
    values: torch.Tensor
    start: tuple[bytes, ...]
    draws: bool
    every: torch.Tensor  # what arrives at the outputs of each row, [rows, k]


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
        #: Of the batch at hand: its row, whether loop or model drew, the tolerance, dtypes, random states around its first pass.
        self._row, self._draws, self._rounding, self._dtypes = 0, False, 0.0, LowPrecisionDetector()
        self._open_contexts = ExitStack()
        self._state_before = self._state_after = rng_state()

    def begin(self, source: Collation, rows: int, *, ahead: bool = False) -> None:
        """Plan probe batches of at most ``rows`` examples; ``ahead`` is for loops that take them before they use earlier ones."""
        self.begun = True
        # The last one that is taken ahead finds another random state.
        self._due = source.probes(rows, stills=1 + _AHEAD if ahead else 0)
        #: The batches that may be handed out again; none for loops that take batches ahead.
        self._repeatable = [] if ahead else list(self._due)
        #: The role in which the example differed; and whether the loop makes inputs or loss terms.
        self._suspect, self._transforms = "", False
        self._seen: dict[tuple[str, int], _Outcome] = {}
        self._repeated: list[_Outcome] = []
        self.waiting, self._most = len(self._due), max((len(probe.items) for probe in self._due), default=0)
        # Row 0 of the third batch is the example, collated with others.
        self._collator_draws = len(self._due) > 2 and any(self._due[2].source.draws(0))

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
            self._rounding, self._dtypes = rounding(passes.model), LowPrecisionDetector()
            if probe.role == "alone":
                self._subject = map_tensors(call, lambda t: t[: len(t) // 2] if t.dim() else t)
            # Draws of other shapes may leave the same state, and what a loop draws for another example looks like this one's.
            self._row, self._draws = row_of(call, ticket.rows, self._subject, probe.row), probe.drew()
            self._state_before = *probe.rng_state(passes.model), repr(self._row * self._draws).encode()
        given, layout, own = call, ticket.layout(passes.device), ticket
        if probe.role == "alone" and not passes.returns_loss and passes.trace is not None and passes.trace.draws:
            # Among as many rows as together, the model draws the same for it.
            rows = torch.arange(self._most)
            given = take_rows(call, rows % ticket.rows, as_long_as(call, ticket.rows))
            own = replace(ticket, row_units=rows, weights=torch.ones(len(rows)))
        with passes.weights.apart(), DropoutDisabled(), seeded(_MODEL, passes.model), self._dtypes:
            before = rng_state(passes.model)
            weights = torch.ones(len(own.weights), device=passes.device)
            output, targets, loss, beside = passes.plain_rows(given, own, own.layout(passes.device), weights)
            self._draws |= rng_state(passes.model) != before
        snapshot.restore()
        if own is not ticket:
            output = map_tensors(output, lambda t: t[: ticket.rows] if t.dim() and t.shape[0] == own.rows else t)
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
        drew = self._draws or probe.rng_state(passes.model) != self._state_after
        self._open_contexts.close()
        self.mixes |= passes.returns_loss and parts[0][1] is not None
        outside = self.mixes or not passes.returns_loss
        low = rounding(passes.model, low=self._dtypes.found)
        self._rounding = GRADIENT_TOLERANCE * max(self._rounding, low) if outside else self._rounding
        rows = parts[0][0].ticket.rows if outside else 0
        starts = (self._starts(row, parts)[1] for row in range(rows))
        every = [torch.cat([*map(_sketch, own)] or [torch.zeros(2).double()]) for own in starts] or [torch.ones(2)]
        found = self._gradients(parts) if outside else torch.stack([p.targets[self._row][0].detach() for p, _ in parts])
        self._transforms |= outside or any(probe.source.makes(own.call) for own, _ in parts)
        if probe.role == "together" and probe.row and not self._transforms:
            # Nothing reaches the model but the loader's own tensors: the rest of a probe made ahead is not needed.
            self.waiting, self._due = self.waiting - len(self._due), []
        self.waiting -= 1
        self._compare(probe, _Outcome(parts[0][0].ticket.rows, found, self._state_before, drew, torch.stack(every)))

    def _starts(self, row: int, parts: JoinedPasses) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        return backward_starts([row], parts, self._passes.scale(parts[0][0].ticket), self._passes.returns_loss)

    def _gradients(self, parts: JoinedPasses) -> torch.Tensor:
        """The row's gradient as two numbers for each parameter (`_sketch`), float64 ``[k]``.

        Where the loop has terms of its own, theirs come first, then a share of the whole gradient's and the loss's weight.
        """
        passes = self._passes

        def sketched(parts: JoinedPasses, retain: bool) -> torch.Tensor:
            starts = self._starts(self._row, parts)
            found: list[torch.Tensor | None] = []
            if starts[0]:
                found = plain_gradients(*starts, passes.read.values(), keep=lambda _, g: _sketch(g), retain=retain)
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
            if self._suspect and len(self._repeated) == (3 * len(_ORDER) if self._repeatable else _AHEAD):
                self._decide()
            return
        self._seen[role, row] = outcome
        together, other = self._seen.get(("together", row)), "alone" if role == "together" else role
        found = self._seen.get((other, row))
        if found is None or together is None:
            return
        given = torch.cat([(own.every if other == "fewer" else own.values).flatten() for own in (found, together)])
        alike = found.start == together.start and bool(given.isfinite().all())
        differ = alike and self._differ(found, together, other)
        # With the other loss_reduction, gradients grow by the ratio of rows, whatever was drawn alike.
        growth = (together.rows / found.rows) ** (1 if self._passes.loss_reduction == "mean" else -1)
        grown = _Outcome(found.rows, found.values * growth, found.start, found.draws, found.every * growth)
        if differ and growth != 1 and not (self._passes.returns_loss or self._differ(grown, together, other)):
            self._refuse(_REDUCTION)
        if not alike or (other != "beside" and (self._collator_draws or found.draws or together.draws)):
            self.undecided = True
        elif differ:
            # A memory of rows lasts longer behind batches of two: companions of the same number tell more.
            first = not self._suspect or (other == "beside" != self._suspect)
            if first and self._repeatable:
                planned = [own for own in self._due if own.role != "still"]
                at = {(own.role, own.row): number for number, own in enumerate(self._repeatable)}
                order = [at["together" if sign > 0 else other, row] for sign in _ORDER]
                again = [self._repeatable[n] for last in order for n in (last - 1, last - 1, last)]
                planned += [replace(own, role="still") for own in again]
                self.waiting, self._due = self.waiting - len(self._due) + len(planned), planned
            self._suspect = other if first else self._suspect

    def _decide(self) -> None:
        """Annealing, other networks and random draws change an example too; a loop that mixes rows follows their companions."""
        measured = self._repeated[2::3] if self._repeatable else self._repeated
        same = len({own.start for own in measured}) == 1
        if self._repeatable:
            few = [self._compared(own, self._suspect).flatten().nan_to_num() for own in measured]
            values, signs = torch.stack([own.double() for own in few]), torch.tensor(_ORDER).unsqueeze(1)
            effect = (signs * values).mean(0)
            moves = (values - signs * effect).diff(dim=0).norm(dim=1).max()
            least = self._tolerance(self._suspect) * values.norm(dim=1).max()
            # What comes exactly again behind the same batches does not drift: these are the places of (+, -), and of (-, +).
            one, two = values[[1, 4, 7]], values[[3, 5]]
            spread = max(float((own - own[0]).norm(dim=1).max()) for own in (one, two))
            again = spread <= least < (one[0] - two[0]).norm()
            mixes = same and bool(2 * effect.norm() > torch.maximum(moves, least) or again)
        else:
            # The first is left out: a loop that keeps state of the batch before still has that of other examples in it.
            pairs = zip(self._repeated[1:], self._repeated[2:])
            mixes = same and not any(self._differ(*pair, self._suspect) for pair in pairs)
        if mixes:
            self._refuse()
        self.undecided = True

    def _refuse(self, form: str = "") -> None:
        self.begun = False  # A loop that goes on after this is verified again.
        how = "alone than in its batch" if self._suspect == "alone" else "beside other examples"
        own = "sum" if self._passes.loss_reduction == "mean" else "mean"
        why = next(iter(self._divisors), f"An example has another gradient {how}")
        form = form or (_TERMS if self.mixes else _INPUTS if self._passes.returns_loss else _GRADIENT)
        raise SelfCheckError(form.format(how=how, why=why, own=own))

    def _differ(self, one: _Outcome, two: _Outcome, role: str) -> bool:
        pairs = zip(*(self._compared(own, role) for own in (one, two)))
        return any(_distance(a, b) > self._tolerance(role) for a, b in pairs)

    def _compared(self, outcome: _Outcome, role: str) -> torch.Tensor:
        """What is compared in this role, ``[examples, k]``: of the example, or of all that both batches have."""
        if role != "fewer":
            return outcome.values.unsqueeze(0)
        # A collator may sort.
        return outcome.every[torch.cdist(self._seen[role, 0].every, outcome.every).argmin(1)]

    def _tolerance(self, role: str) -> float:
        return self._rounding * (same_shape_factor(self._passes) if role == "beside" else 1.0)


def _scale_entries(t: torch.Tensor) -> torch.Tensor:
    """Scale the entries of the last axis by factors between 0.75 and 1."""
    factors = torch.linspace(0.75, 1, t.shape[-1] if t.dim() > 1 else 1, device=t.device)
    return t * factors.to(t.dtype) if t.is_floating_point() and t.dim() else t


def _sketch(gradient: torch.Tensor, _index: int = 0) -> torch.Tensor:
    wide = gradient.detach().double()
    return torch.stack([wide.norm(), wide.sum() / max(wide.numel(), 1) ** 0.5]).cpu()


def _distance(one: torch.Tensor, two: torch.Tensor) -> float:
    """How far two vectors are apart, relative to the larger; infinite where only one is finite."""
    if one.shape != two.shape or not torch.equal(one.isfinite(), two.isfinite()):
        return float("inf")
    a, b = (t.double().nan_to_num(0.0, 0.0, 0.0) for t in (one, two))
    size = max(float(a.norm()), float(b.norm()))
    return float((a - b).norm()) / size if size > 1e-12 else 0.0
