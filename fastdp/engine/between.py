"""What a user's loop makes of a batch between loader and model: a row must be there what it is in any other company.

A loop may standardise a batch by its own mean, mix its rows, or hand the model a number that it made of all of them. No look
into the model finds that. So where a model is called with what its batch does not hold, the loop is given a few small batches
more, of which nothing is summed: the same examples in one company, again, in another, alone, and beside companions of NaN.
"""

from __future__ import annotations

import math
import operator
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

import torch

from fastdp.engine.batches import Call, Path, as_long_as, everything, map_leaves, map_tensors
from fastdp.engine.boundary import replace_loss, require_loss
from fastdp.engine.chance import seeded
from fastdp.engine.collation import Collation, spread, values
from fastdp.engine.errors import SelfCheckError, UnsupportedUse
from fastdp.engine.layout import Ticket
from fastdp.engine.passes import Pass, Passes
from fastdp.engine.replay import Replay, rounding
from fastdp.engine.still import randomness, still, unchanged
from fastdp.engine.uses import Tap

#: The examples that are looked at, and as many companions.
_EXAMPLES = 3
_LOW_PRECISION = 2e-2
#: Of an attribute that is not there.
_NOTHING = object()


@dataclass(frozen=True)
class Company:
    """One small batch that only tries the loop.

    Args:
        source: the data set, the collator, and the examples of this batch.
        kept: how many of the first ones are looked at.
        role: which of the batches it is: "first", "again", "other", "alone" or "poisoned".
        seed: of the random state in which the loop gets it.
    """

    source: Collation
    kept: int
    role: str
    seed: int = 0

    def batch(self) -> Any:
        """As the user's collator makes it; a poisoned one's companions hold NaN wherever they hold fractions."""
        source, size = self.source, len(self.source.indices)
        made = source.collate([source.dataset[index] for index in source.indices])

        def poison(_: Path, t: torch.Tensor) -> torch.Tensor:
            if not t.is_floating_point() or t.dim() == 0 or t.shape[0] != size:
                return t
            t = t.clone()
            t[self.kept :] = torch.nan
            return t

        return map_leaves(made, poison) if self.role == "poisoned" else made


#: The place of what a criterion sends back, among what a loop makes.
CRITERION = "criterion"
#: The place of what a loop sets in a module.
_ATTRIBUTE = "attribute"
#: The place of the rows' losses, of what a loop makes for a model that returns its loss.
LOSS = "loss"
COUPLES = (
    "the criterion couples examples: one's gradient in company is not what it is alone, as with a mean over all tokens of a "
    "batch, class weights, or scores against each other. Give make_private a criterion=, a function of (output, batch) that "
    "returns one loss a row; nothing of this batch was released"
)
_RESTLESS = (
    "the loop draws at random, or changes from batch to batch, what it calls the model with, so that its criterion cannot be "
    "told from one that couples examples: do that in the data set or the collator, or let the model return its loss; nothing of "
    "this batch was released"
)
_TOGETHER = (
    "the loop calls the model with something ({}) that is another for an example beside other companions: what is made of a "
    "whole batch, like its mean or a mixture of its rows, lets one example reach the others; make it of each row alone; nothing "
    "of this batch was released"
)
_PADDED = (
    "an example has another loss where the loop calls the model with it beside others: what the loop pads or cuts by the batch "
    "changes it. On the left that shifts positions unless position_ids are given: pad on the right, or give them; nothing of "
    "this batch was released"
)


class Between:
    """Tries a loop, and compares what it calls the model with.

    Args:
        passes: of the model.
        enabled: whether it is tried at all; where not, it counts as settled.

    Attributes:
        settled: whether the loop was tried, or calls the model with nothing but what its batches hold.
        made: whether it was tried because it makes something itself, or because nobody looks at what it makes.
        waits: how many batches of a trial have not gone through the loop yet; nothing may be released before.
        first: whether the loop is tried before its first batch alone, as one that takes batches ahead cannot be later.
    """

    def __init__(self, passes: Passes, *, enabled: bool = True) -> None:
        self._passes, self._enabled = passes, enabled
        self.made = self.first = False
        self.settled = not enabled
        self.waits = 0
        self._due: list[Company] = []
        #: By role and place what the loop made, and of which examples.
        self._seen: dict[str, dict[Path, tuple[torch.Tensor, Sequence[int]]]] = {}
        self._fresh: tuple[Any, ...] = ()
        #: By place how long, and how large, what was tried is at most.
        self._reach: dict[Path, list[float]] = {}
        #: Switches, texts among them, of the first call.
        self._switches: dict[Path, Any] | None = None
        #: What modules, and the model's configuration, held when the latest pass was over; and what the loop has set in them.
        self._left: list[dict[str, Any]] = []
        self._set: dict[Path, tuple[dict[str, Any], str]] = {}
        self._before: dict[Path, Any] = {}
        self._fresh_set = False
        owners = (*passes.model.modules(), getattr(passes.model, "config", None))
        self._held: list[dict[str, Any]] = [vars(owner) for owner in owners if hasattr(owner, "__dict__")]
        self.leave()

    def forget(self) -> None:
        """Of a trial that was begun the rest will not come."""
        self.settled = self.settled and not self.waits
        self.waits, self._due = 0, []

    def arrive(self) -> None:
        """A pass begins: whatever modules hold now and did not after the latest pass, the loop has set."""
        self._fresh_set = False
        self._before = self._before if self.waits else {}
        for place, (held, before) in enumerate(zip(self._held, self._left)):
            if len(held) == len(before) and all(map(operator.is_, held.values(), before.values())):
                continue
            for name, value in held.items():
                # Before the first pass switches are set for all batches, and nothing is made of any.
                if before.get(name, before) is value or (self._switches is None and isinstance(value, (bool, str))):
                    continue
                if isinstance(value, (bool, str)) or next(values(value, single=False), None) is not None:
                    path = _ATTRIBUTE, place, name
                    self._set[path], self._fresh_set = (held, name), True
                    self._before.setdefault(path, before.get(name, _NOTHING))
        self._left = []

    def leave(self) -> None:
        """A pass is over: what modules hold beside parameters is the model's own doing."""
        if self.settled and not (self._enabled and self._passes.device.type == "cpu"):
            return
        self._left = list(map(dict, self._held))

    def _given(self, call: Call) -> dict[Path, torch.Tensor]:
        """What the model gets from the loop: a call's tensors, numbers and switches, and what was set in its modules."""
        found = dict(values(call, single=False))
        for path, (held, name) in self._set.items():
            found |= values(held.get(name), path, single=False)
            found |= _switches(held.get(name), path)
        return found | _switches(call, depth=2)

    def makes(self, call: Call, source: Collation) -> bool:
        """Whether a call has tensors, numbers or switches that neither its batch nor the first call had, or modules do."""
        held, switches = source.unwritten(), _switches(call, depth=2)
        own = set(map(id, held))
        known, self._switches = self._switches, switches if self._switches is None else self._switches
        return (
            self._fresh_set
            or (known is not None and switches != known)
            or any(
                not any(h.shape == t.shape and torch.equal(h.to(t).nan_to_num(), t.nan_to_num()) for h in held)
                for _, t in values(call, single=False)
                if id(t) not in own and (t.dim() or t.dtype is not torch.bool)
            )
        )

    def passes_reach(self, source: Collation) -> bool:
        """Whether something in a batch is a tenth longer, or twice as large, as all that was tried; it then counts as tried."""
        before = {path: list(reach) for path, reach in self._reach.items()}
        self._extend_reach(source)
        return any(
            now > factor * then
            for path, reach in before.items()
            for now, then, factor in zip(self._reach[path], reach, [2.0] + [1.1] * (len(reach) - 1))
        )

    def _extend_reach(self, source: Collation) -> None:
        for path, t in source.batch.items():
            large = float(t.nan_to_num(0.0, 0.0, 0.0).abs().max()) if t.is_floating_point() and t.numel() else 0.0
            known = self._reach.get(path, [0.0] * max(1, t.dim()))
            self._reach[path] = list(map(max, known, (large, *t.shape[1:])))

    def begin(self, source: Collation, most: int, *, whole: bool = False) -> None:
        """Ask for a trial of the loop with examples of this batch, in batches of at most ``most`` examples.

        With ``whole`` all of them stand together first, and then each half beside strangers: what a loop makes of this batch
        and made of none before may be for one example's sake.
        """
        self.settled = self.made = True
        if whole:
            self._plan(self._halves(source), source)
            return
        kept = list(dict.fromkeys(source.indices))[: min(_EXAMPLES, most // 2)]
        if not kept:
            return
        others = [i for i in spread(len(source.dataset), 3 * _EXAMPLES) if i not in kept] or kept
        size = min(_EXAMPLES, most - len(kept))
        one, *more = (list(islice(cycle(others), size * k, size * k + size)) for k in range(3))
        # Loops that take a batch while the one before is under way find the next one's random state: those before the
        # poisoned ones need one.
        plan = [("first", [*kept, *one], 0), ("again", [*kept, *one], 0)]
        plan += [("other", [*kept, *beside], 0) for beside in more] + [
            ("alone", [index], 0) for index in islice(cycle(kept), _EXAMPLES)
        ]
        if not source.batch or any(t.is_floating_point() for t in source.batch.values()):
            # Whoever mixes rows by chance may leave one of them alone, but hardly each time.
            plan += [("poisoned", [*kept, *(more[0] if seed % 2 else one)], seed) for seed in range(1, 5)]
        self._plan([(role, 1 if role == "alone" else len(kept), indices, seed) for role, indices, seed in plan], source)

    def _halves(self, source: Collation) -> list[tuple[str, int, list[int], int]]:
        every = list(dict.fromkeys(source.indices))
        strangers = [i for i in spread(len(source.dataset), len(every) + _EXAMPLES) if i not in every]
        halves = [every[: len(every) // 2], every[len(every) // 2 :]]
        # Where all stand in the batch, more of the same half do: what is in the other one alone is then missing.
        beside = [list(islice(cycle(strangers or half), len(every) - len(half))) for half in halves]
        others = [("other", len(half), [*half, *more], 0) for half, more in zip(halves, beside)]
        return [("first", len(every), every, 0), ("again", len(every), every, 0), *others]

    def _plan(self, plan: Sequence[tuple[str, int, list[int], int]], source: Collation) -> None:
        for role, kept, indices, seed in plan:
            there = Collation(source.dataset, source.collate, indices, {})
            self._due.append(Company(there, kept, role, seed))
        self.waits, self._seen = len(self._due), {}
        with seeded(0):
            self._fresh = randomness(self._passes.model)

    def take(self) -> Iterator[Company]:
        """The batches that the loop is to be given next; each finds in modules what was there before the loop set it."""
        if not self._due:
            return
        now = {path: held.get(name, _NOTHING) for path, (held, name) in self._set.items()}
        while self._due:
            self._put(self._before)
            yield self._due.pop(0)
        self._put(now)
        self.leave()

    def _put(self, values: Mapping[Path, Any]) -> None:
        for path, value in values.items():
            held, name = self._set[path]
            held.pop(name, None) if value is _NOTHING else held.update({name: value})

    def run_forward(self, call: Call, ticket: Ticket, enter: Callable[[Pass, Any], None]) -> Any:
        """A pass without randomness of which only the call is looked at, and what a criterion sends back; nothing is summed."""
        passes, company = self._passes, ticket.company
        self._extend_reach(company.source)
        made = self._given(call)
        if company.role == "other":
            self._require_same_arguments(made)
        self._note(made, company)
        if self.first and passes.returns_loss and not self.makes(call, company.source):
            # The rest of the trial is left out: the loop calls the model with what its batches hold.
            self.waits -= len(self._due)
            self._due = []
        with passes.weights.apart(), unchanged(passes.model), still(passes.model) as restless:
            output = passes.forwards.root.plain(*call[0], **call[1])
            if passes.returns_loss and company.role != "poisoned" and not restless():
                self._note({(LOSS,): self._losses(call, ticket.rows)}, company)

        def backward(upstream: Any, _retain: bool) -> None:
            if not passes.returns_loss:
                sent = {(CRITERION, i): g * passes.scale(ticket) for i, g in enumerate(upstream) if g is not None}
                self._note(sent, company)
            self.waits -= 1
            self._seen = self._seen if self.waits else {}

        layout = ticket.layout(passes.device)
        waiting = Pass(call, ticket, layout, Tap(layout), True, enter, [], backward)
        if passes.returns_loss:
            return replace_loss(output, waiting.loss(require_loss(output).detach().nan_to_num()))
        return waiting.replace_outputs(
            map_tensors(output, lambda t: t.nan_to_num() if t.requires_grad and t.is_floating_point() else t)
        )

    def _losses(self, call: Call, rows: int) -> torch.Tensor:
        """The rows' losses ``[rows, ...]`` as the loop has put them together; a row at a time where they are not told apart."""
        passes = self._passes
        ticket = Ticket(torch.arange(rows), torch.ones(rows), is_last=False)
        carriers = as_long_as(call, rows) if passes.trace is None else passes.trace.carriers
        replay = Replay(passes.model, passes.plain_forward, call, carriers, ticket, returns_loss=True)
        try:
            return torch.stack(replay(call, rows).values, 1)
        except UnsupportedUse:
            alone = (passes.plain_forward(*one, **named) for one, named in (replay.rows([row]) for row in range(rows)))
            return torch.stack([require_loss(output).detach().reshape(1) for output in alone])

    def _note(self, found: Mapping[Path, torch.Tensor], company: Company) -> None:
        """What the loop made of a company's batch. Raises `SelfCheckError` if a row is another than before."""
        noted = self._seen.setdefault(company.role, {})
        for path, t in found.items():
            noted[path] = t.detach().clone(), company.source.indices
        if company.role not in ("first", "again"):
            drew = company.seed == 0 and randomness(self._passes.model) != self._fresh
            for path in found.keys() & self._seen["first"].keys() & self._seen["again"].keys():
                self._require_same(path, company, drew=drew)

    def _require_same_arguments(self, made: Mapping[Path, torch.Tensor]) -> None:
        """Raise `SelfCheckError` for an argument that is there in one company, and not in another of as many examples."""
        every = self._seen["first"], self._seen["again"], made
        first, again, other = ({path[:2] for path in seen if path[0] not in (CRITERION, LOSS)} for seen in every)
        odd = ((first & again) - other) | (other - (first | again))
        if odd:
            raise SelfCheckError(_TOGETHER.format(_named(min(odd, key=repr))))

    def _require_same(self, path: Path, company: Company, *, drew: bool) -> None:
        (one, two, again), companies = zip(*(self._seen[role][path] for role in ("first", company.role, "again")))
        if len({(t.dim(), t.dtype) for t in (one, two, again)}) > 1:
            return
        rows = one.dim() > 0 and all(t.shape[0] == len(i) for t, i in zip((one, two, again), companies))
        if not rows and company.role == "alone":
            return
        if path[0] == LOSS:
            if not drew:
                self._require_same_losses(company)
            return
        alike, sent = one.shape == two.shape, path[0] == CRITERION
        itself = _gap(one, again) if one.shape == again.shape else math.inf
        if company.role == "poisoned":
            if sent:
                return
        elif itself > _rounding(one) or (drew and not alike):
            # What changes by itself, like a schedule, or draws from a generator of the loop's own, tells by NaN alone.
            if sent:
                raise SelfCheckError(_RESTLESS)
            return
        for number in range(company.kept) if rows else (None,):
            a, b = (one, two) if number is None else (one[companies[0].index(companies[1][number])], two[number])
            if company.role == "poisoned":
                apart = bool(b.isnan().any()) and not bool(a.isnan().any())
            elif alike:
                apart = _gap(a, b) > (max(_rounding(a), 4 * itself) if sent else 4 * itself)
            else:
                apart = _gap(*_cropped(a, b)) > _rounding(a)
            if apart:
                raise SelfCheckError(COUPLES if sent else _TOGETHER.format(_named(path)))

    def _require_same_losses(self, company: Company) -> None:
        (one, first), (two, here), (again, _) = (self._seen[role][LOSS,] for role in ("first", company.role, "again"))
        limit = rounding(self._passes.model)
        kept = [(one[first.index(index)], two[here.index(index)]) for index in here[: company.kept]]
        size = float(one.nan_to_num().abs().mean())
        # What a loop changes by itself has other losses too.
        if _gap(one, again) <= limit and any(_gap(a, b, size) > limit for a, b in kept):
            raise SelfCheckError(_PADDED)


def _gap(a: torch.Tensor, b: torch.Tensor, least: float = 0.0) -> float:
    """How far two tensors of one shape are apart, relative to their largest entry, or to ``least`` where that is more."""
    if a.numel() == 0:
        return 0.0
    a, b = (t.nan_to_num().double() for t in (a, b))
    size = max(float(torch.maximum(a.abs().max(), b.abs().max())), least)
    return float((a - b).abs().max()) / size if size else 0.0


def _cropped(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both cut to what both have: at the end, as padding comes there, or at the start where that fits better."""
    sizes = [min(n, m) for n, m in zip(a.shape, b.shape)]
    starts = [t[tuple(slice(0, n) for n in sizes)] for t in (a, b)]
    ends = [t[tuple(slice(m - n, m) for n, m in zip(sizes, t.shape))] for t in (a, b)]
    one, two = starts if _gap(starts[0], starts[1]) <= _gap(ends[0], ends[1]) else ends
    return one, two


def _rounding(t: torch.Tensor) -> float:
    return 1e-5 if t.dtype in (torch.float32, torch.float64) else _LOW_PRECISION if t.is_floating_point() else 0.0


def _switches(tree: Any, path: Path = (), depth: int = 0) -> dict[Path, torch.Tensor]:
    """Truth values and texts that stand so deep, as numbers by which they can be told apart; deeper ones may be rows' own."""
    return {
        place: torch.tensor(zlib.crc32(repr(value).encode()), dtype=torch.float64)
        for place, value in everything(tree, path)
        if isinstance(value, (bool, str)) and len(place) == len(path) + depth
    }


def _named(path: Path) -> str:
    return repr(path[-1]) if isinstance(path[-1], str) else f"argument {path[-1]}"
