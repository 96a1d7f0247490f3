"""Loop check: what a training loop makes of an example, or sends back for it, must not depend on other examples.

If the tensors that reach the model are the loader's own and the model returns its loss, there is nothing to check. Otherwise
the loop is given three small batches of real examples that add to no sum: some examples together, one of them beside other
companions, and that one alone. All three pass through the loop, the model and the criterion like any other batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from fastdp.engine.batches import Call, leaves, row_of
from fastdp.engine.boundary import differentiable, plain_gradients, replace_loss
from fastdp.engine.collation import Collation, example_length, largest_entry
from fastdp.engine.errors import SelfCheckError
from fastdp.engine.layout import Ticket
from fastdp.engine.losses import batch_divisors, intercepted
from fastdp.engine.one_example import merged
from fastdp.engine.passes import ONE_EXAMPLE, Pass, Passes
from fastdp.engine.randomness import BufferSnapshot, DropoutDisabled, preserve_rng, rng_state, seed_everything, seeded
from fastdp.engine.uses import Tap
from fastdp.verify.probe import rounding

#: Examples among which a short and a long one are chosen, of this batch and of the data set.
_SAMPLED = 8
#: How often an example is given alone to tell that a loop does not change it by itself or by chance.
_REPEATS = 10
_GOLDEN = 0.6180339887498949
#: Seeds of the loop's random state, the model's and the criterion's.
_LOOP, _MODEL, _CRITERION = 0, 1, 2
#: How far gradients may move where losses may move by 1.
_GRADIENTS = 10.0
UNDECIDED = (
    "the training loop, the model or the criterion draws random numbers that depend on the batch's shape, so rows were compared "
    "beside other companions and not alone"
)
_COUPLES = "{why}. Mask padding, and give make_private criterion=, of one loss per row; this batch was not released."
_MAKES = (
    "The loop gives the model something else for an example {how}. Make each row from its own example and pad on the right; "
    "this batch was not released."
)
_HOW = {"beside": "beside other examples", "alone": "alone than in its batch"}


@dataclass(frozen=True)
class ProbeBatch:
    """One small batch that verifies the loop.

    Args:
        source: the data set, the collator, and the examples of this batch; the first of them is compared.
        items: the examples as they were read.
        role: "together", "beside", "alone", or "again" for the same as together.
    """

    source: Collation
    items: Sequence[Any]
    role: str

    def batch(self) -> Any:
        """What the user's collator makes of the examples."""
        return self.source.collated(self.items, _LOOP)


class _Outcome(NamedTuple):
    """What a probe batch gave its first row, the random state in which the model found it, and whether more was drawn."""

    values: torch.Tensor
    start: tuple[bytes, ...]
    draws: bool


class LoopCheck:
    """Decides when the loop is verified, and compares what it did with the probe batches.

    Args:
        passes: of the model.

    Attributes:
        waiting: probe batches that have not gone through the loop yet.
        begun: whether the loop was ever verified.
        undecided: whether something could not be compared.
    """

    def __init__(self, passes: Passes) -> None:
        self._passes = passes
        self.waiting = 0
        self.begun = self.undecided = False
        self._due: list[ProbeBatch] = []
        #: What is handed out again where rows differ (all examples, then one alone), and the role of the one that differed.
        self._repeats: list[ProbeBatch] = []
        self._alone: list[_Outcome] = []
        self._doubted = ""
        self._seen: dict[str, _Outcome] = {}
        self._collator_draws = False
        #: What the model was called with for the example that is compared, alone.
        self._subject: Call | None = None
        #: The most elements a row of a call so far.
        self._longest = 0
        self._divisors: list[str] = []

    def makes(self, call: Call, source: Collation, *, grew: bool) -> bool:
        """Whether the loop made tensors or numbers of a call itself, and was not verified with ones like these.

        Args:
            call: of the model.
            source: of the loader's batch.
            grew: whether that batch is longer or larger than those before.
        """
        if not source.makes(call):
            return False
        longest = max((t.numel() // max(t.shape[0], 1) for _, t in leaves(call) if t.dim()), default=0)
        longer, self._longest = longest > self._longest, max(longest, self._longest)
        return longer or grew or not self.begun

    def begin(self, source: Collation, rows: int, *, ahead: bool = False) -> None:
        """Plan probe batches of at most ``rows`` examples: a short one with all others, beside other ones, and alone.

        ``ahead`` is for loops that take a batch before they are done with the one before.
        """
        self.begun = True
        size = len(source.dataset)
        spread = list(dict.fromkeys(int(size * (_GOLDEN * k % 1)) for k in range(_SAMPLED)))
        own = list(source.indices)[:rows] or spread[:rows]
        items = {index: source.dataset[index] for index in dict.fromkeys([*own, *spread])}
        if rows < 2 or len(items) < 2:
            # Every batch holds one example, so none can reach another.
            return
        # Not the one with the largest entry, which a division by the largest would leave as it is alone.
        first, *others = sorted(own, key=lambda index: (example_length(items[index]), largest_entry(items[index])))
        strangers = [index for index in items if index not in own] or [first]
        if not others:
            others = [strangers[0]]
        # A longest one stays among them, so that shapes do, at another place: a loop that rolls rows then gives others.
        longer = others and example_length(items[others[-1]]) > example_length(items[first])
        kept = others[-1:] if len(others) > 1 and longer else []
        beside = [*kept, *itertools.islice(itertools.cycle(strangers), len(others) - len(kept))]
        plan = [("alone", [first]), ("together", [first, *others]), ("beside", [first, *beside])]
        if ahead:
            # The last one finds another random state.
            plan += 2 * [("again", plan[1][1])]
        for role, chosen in plan:
            made = Collation(source.dataset, source.collate, chosen, {})
            self._due.append(ProbeBatch(made, [items[index] for index in chosen], role))
        self._repeats = (
            [] if ahead else [replace(self._due[1], role="again"), *_REPEATS * [replace(self._due[0], role="still")]]
        )
        self._doubted, self._alone = "", []
        self.waiting, self._seen = len(self._due), {}
        self._collator_draws = any(replace(source, indices=own).draws(0))

    def take(self) -> Iterator[ProbeBatch]:
        """The probe batches that the loop is to be given next."""
        while self._due:
            yield self._due.pop(0)

    def forget(self) -> None:
        """Drop the probe batches of a logical batch that was discarded."""
        self.begun = self.begun and not self.waiting
        self.waiting, self._due = 0, []

    def run_forward(self, call: Call, ticket: Ticket, enter: Callable[[Pass, Any], None]) -> Any:
        """A probe batch's forward pass, without dropout and under one seed; nothing is summed."""
        passes, probe = self._passes, ticket.probe
        start, snapshot = rng_state(passes.model), BufferSnapshot(passes.model)
        if probe.role == "alone":
            self._subject = call
        row = row_of(call, ticket.rows, self._subject)
        layout = ticket.layout(passes.device)
        terms = passes.terms(layout)
        with passes.weights.apart(), DropoutDisabled(), seeded(_MODEL):
            before = rng_state(passes.model)
            if passes.route == ONE_EXAMPLE:
                outputs, targets = passes.run_rows(call, ticket)
                output, tops = merged(outputs), targets[row]
            else:
                with intercepted(terms):
                    output = passes.plain_forward(*call[0], **call[1])
                tops = [] if passes.returns_loss else [t[row : row + 1] for t in differentiable(output)]
                if passes.returns_loss and (terms.unmapped or not terms.terms):
                    tops = passes.run_rows(call, ticket)[1][row]
            draws = rng_state(passes.model) != before
        snapshot.restore()
        if passes.returns_loss:
            own = [term.per_unit[row] for term in terms.terms] if not tops else [top.reshape(()) for top in tops]
            values = torch.stack([value.detach() for value in own])
            if probe.role == "together" and not probe.source.makes(call):
                # Nothing reaches the model but the loader's own tensors: the rest of a probe made ahead is not needed.
                self.waiting -= len(self._due)
                self._due = []
        state = ExitStack()
        state.enter_context(preserve_rng(passes.model))
        self._divisors = state.enter_context(batch_divisors())
        seed_everything(_CRITERION)
        left = rng_state(passes.model)

        def backward(upstream: Any, _retain: bool) -> None:
            drew = draws or rng_state(passes.model) != left
            state.close()
            found = values if passes.returns_loss else self._gradients(tops, upstream, row, passes.scale(ticket))
            self.waiting -= 1
            self._compare(probe.role, _Outcome(found, start, drew))

        waiting = Pass(call, ticket, layout, Tap(layout), True, enter, [], backward)
        if passes.returns_loss:
            return replace_loss(output, waiting.loss(values.float().mean()))
        return waiting.replace_outputs(output)

    def _gradients(self, tops: Sequence[torch.Tensor], upstream: Sequence[Any], row: int, scale: float) -> torch.Tensor:
        """Two numbers of each parameter's gradient that a row's outputs send back ``[k]``, float64."""
        pairs = [(top, g[row : row + 1] * scale) for top, g in zip(tops, upstream) if g is not None]
        parameters = self._passes.read.values()
        found = plain_gradients([t for t, _ in pairs], [g for _, g in pairs], parameters, keep=_sketch)
        return torch.cat([own if own is not None else torch.zeros(2, dtype=torch.float64) for own in found])

    def _compare(self, role: str, outcome: _Outcome) -> None:
        """Raise `SelfCheckError` if the first row got something else than together with the others."""
        if role == "still":
            self._alone.append(outcome)
            if len(self._alone) == _REPEATS:
                self._decide()
            return
        self._seen[role] = outcome
        together = self._seen.get("together")
        for other in ("alone",) if role == "together" else (role,):
            found = self._seen.get(other)
            if found is None or together is None or found is together:
                continue
            draws = self._collator_draws or found.draws or together.draws
            if found.start != together.start or (other == "alone" and draws):
                self.undecided = True
            elif _distance(found.values, together.values) > self._tolerance():
                self._doubt(other)
            elif other == "again" and self._doubted:
                self._refuse()

    def _doubt(self, role: str) -> None:
        """Plan the batch of all examples once more and, if that one changes too, the example alone several times."""
        if role == "again":
            self.waiting, self._due = self.waiting - len(self._due), self._repeats[1:]
            self.waiting += len(self._due)
            self.undecided = self.undecided or not self._due
        elif not self._doubted:
            self._doubted, self._due = role, self._due + self._repeats[:1]
            self.waiting += len(self._repeats[:1])

    def _decide(self) -> None:
        """Annealing and random draws change an example alone too; a loop that changes it only beside others mixes them."""
        # What a loop keeps of the batch before, the first one still has of other examples.
        _, one, *others = self._alone
        still = not self._collator_draws and not any(outcome.draws or outcome.start != one.start for outcome in others)
        if still and all(_distance(outcome.values, one.values) <= self._tolerance() for outcome in others):
            self._refuse()
        self.undecided = True

    def _refuse(self) -> None:
        # A loop that goes on after this is verified again.
        self.begun = False
        why = next(iter(self._divisors), f"An example has another gradient {_HOW[self._doubted]}")
        made = _MAKES if self._passes.returns_loss else _COUPLES
        raise SelfCheckError(made.format(how=_HOW[self._doubted], why=why))

    def _tolerance(self) -> float:
        return rounding(self._passes.model) * (1.0 if self._passes.returns_loss else _GRADIENTS)


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
