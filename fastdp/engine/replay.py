"""One forward pass run again with other companions, in another order or alone: an example must not notice.

Everything here leaves the model as it was (`fastdp.engine.still`): its buffers, its gradients, and every random state.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.nn.functional as F

from fastdp.engine.batches import Call, Path, leaves, map_leaves, take_rows, take_tokens, tensors, unpadded
from fastdp.engine.boundary import differentiable, plain_gradients, require_loss
from fastdp.engine.collation import Collation, same
from fastdp.engine.errors import SelfCheckError, UnsupportedUse
from fastdp.engine.follow import Follow
from fastdp.engine.layout import Layout, Ticket
from fastdp.engine.losses import LossTerms, combine, intercepted, shares
from fastdp.engine.rows import Fold, Places
from fastdp.engine.shards import Whole
from fastdp.engine.still import Chance, forgetting, still, unchanged

T = TypeVar("T")
#: How far a loss may move, relative to its size, when the shapes around an example change and nothing else does.
_ROUNDING = {torch.float64: 1e-9, torch.float32: 2e-4}
_LOW_PRECISION = 5e-2
#: Quantiles that stand for what seldom comes by chance.
_SELDOM = 0.001, 0.999
OVERFLOWS = (
    "a row that is not finite reaches the others, as where rows are multiplied by zeros (0 times NaN is NaN) or asked together "
    "whether they are finite"
)


@dataclass
class Witness:
    """What a forward pass gives each of its rows (or packed units), and how the model's loss is made of it.

    Args:
        values: for each loss function in the model its loss by row, ``[rows]``; without a loss, the outputs, rows first.
        shares: the coefficient of each loss function in the model's loss.
        rest: what the model's loss holds beyond them.
        laws: the probabilities, means and deviations of what the pass would have drawn by chance.
    """

    values: list[torch.Tensor]
    shares: list[float] = field(default_factory=list)
    rest: float = 0.0
    laws: list[torch.Tensor] = field(default_factory=list)

    def finite(self, row: int) -> bool:
        return all(bool(torch.isfinite(value[row]).all()) for value in self.values)

    def gap(self, row: int, other: Witness, at: int) -> float:
        """The largest difference of a row's values, relative to their size, from those of row ``at`` of another pass."""
        if len(self.values) != len(other.values):
            return float("inf")
        worst = 0.0
        for a, b in zip(self.values, other.values):
            if a[row].shape != b[at].shape:
                return float("inf")
            if not torch.equal(a[row], b[at]):
                size = max(float(a[row].abs().max()), float(a[torch.isfinite(a)].abs().mean()), 1e-30)
                gap = float((a[row].double() - b[at].double()).abs().max()) / size
                worst = max(worst, gap if gap == gap else float("inf"))
        return max(worst, self._law_gap(row, other, at))

    def _law_gap(self, row: int, other: Witness, at: int) -> float:
        """The largest difference of the laws that a row's draws have: a draw itself may hide by what it is distributed."""
        if len(self.laws) != len(other.laws):
            return float("inf")
        worst = 0.0
        for a, b in zip(self.laws, other.laws):
            if a.shape == b.shape and torch.equal(a, b):
                continue
            one, two = _own_law(a, row, len(self.values[0])), _own_law(b, at, len(other.values[0]))
            if one is None or two is None:
                raise UnsupportedUse("something is drawn by chance for all rows at once, by what the batch holds")
            if one.shape == two.shape:
                gap = float((one.double() - two.double()).abs().max()) / max(float(one.abs().max()), 1e-30)
                worst = max(worst, gap if gap == gap else float("inf"))
        return worst


def _own_law(law: torch.Tensor, row: int, rows: int) -> torch.Tensor | None:
    """Of a law the part of one row, or the number that it is all over; None where neither can be told."""
    if law.dim() and law.shape[0] == rows:
        return law[row]
    flat = law.reshape(-1)
    return flat[0] if flat.numel() and bool((flat == flat[0]).all()) else None


class Replay:
    """Runs one call of a model again on chosen rows.

    Args:
        model: left as it is; ``forward`` is its own forward, with nothing intercepted.
        call: the call's (args, kwargs); ``carriers`` are the places of the tensors that carry rows.
        ticket: the rows' or the packed tokens' units.
        returns_loss: whether the model returns its loss, or outputs for a criterion outside it.
        divided: the loss functions in the model whose coefficient it divides by the number of rows.
        mapped: whether the trace knows whose tokens those see.
        weights: the model's, for backward passes.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        forward: Callable[..., Any],
        call: Call,
        carriers: frozenset[Path],
        ticket: Ticket,
        *,
        returns_loss: bool,
        divided: frozenset[int] = frozenset(),
        mapped: bool = True,
        weights: Whole | None = None,
    ):
        self.model, self.forward = model, forward
        self.call, self.carriers, self.ticket = call, carriers, ticket
        self.returns_loss, self.divided, self.mapped = returns_loss, divided, mapped
        self.weights = weights or Whole()
        #: Whether a pass would have drawn something by chance, units dropped at a fixed rate aside.
        self.draws = False
        self.device = next(model.parameters()).device

    def rows(self, rows: Sequence[int]) -> Call:
        """The call on these rows, in this order; a row may come several times."""
        call: Call = take_rows(self.call, torch.tensor(rows), self.carriers)
        return call

    def beside(self, rows: Sequence[int], kept: Collection[int], *, finite: bool = True) -> Call:
        """The call on these rows where all but those ``kept`` have become one row, and its numbers are huge.

        Masks (zeros and ones alone) stay, since attention may take another kernel where they change. Unless they shall be
        ``finite`` all fractions are NaN and infinite in turn.
        """
        last = next((r for r in reversed(rows) if r not in kept), rows[-1])
        mixed = [r if r in kept else last for r in rows]
        others = torch.tensor([r not in kept for r in rows])

        def change(path: Path, t: torch.Tensor) -> torch.Tensor:
            if path in self.carriers and t.is_floating_point() and not finite:
                t = t.index_select(0, torch.tensor(rows, device=t.device))
                return _overwritten(t, 0, _overflows(rows, kept))
            if path not in self.carriers or bool(((t == 0) | (t == 1)).all()):
                return t.index_select(0, torch.tensor(rows, device=t.device)) if path in self.carriers else t
            t = t.index_select(0, torch.tensor(mixed, device=t.device))
            if t.is_floating_point():
                t[others.to(t.device)] *= -1000
            return t

        call: Call = map_leaves(self.call, change)
        return call

    def overflown(self, rows: Sequence[int], kept: Collection[int]) -> Witness:
        """A pass on these rows where all but those ``kept`` hold NaN and infinities, also in what is looked up for their ids."""
        call = self.beside(rows, kept, finite=False)
        inputs = [t for path, t in leaves(call) if path in self.carriers]
        return self(call, len(rows), mode=_Overflow(inputs, _overflows(rows, kept)))

    def packed_alone(self) -> Iterator[tuple[int, Call]]:
        """Each unit of packed rows by itself, with its number among the layout's segments."""
        assert self.ticket.token_units is not None
        shape = (self.ticket.token_units.shape[0], self.ticket.token_units.shape[1])
        layout = self.ticket.layout(torch.device("cpu"))
        assert layout.token_segments is not None
        for segment in range(layout.units):
            if float(layout.weights[segment]) == 0:
                continue
            where = (layout.token_segments == segment).nonzero()
            row, start, end = int(where[0, 0]), int(where[0, 1]), int(where[-1, 1]) + 1
            if int(where[-1, 0]) != row:
                raise ValueError("a packed unit runs over the end of its row; keep each in one row")
            args, kwargs = self.call
            yield segment, (take_tokens(args, row, start, end, shape), take_tokens(kwargs, row, start, end, shape))

    def layout(self, rows: int, *, packed: bool = False) -> Layout:
        """Each row a unit of its own, or the call's packed units."""
        if packed:
            return self.ticket.layout(self.device)
        return Ticket(torch.arange(rows), torch.ones(rows), is_last=True).layout(self.device)

    def __call__(
        self,
        call: Call,
        rows: int,
        *,
        packed: bool = False,
        mode: AbstractContextManager[Any] | None = None,
        at: float = 0.5,
    ) -> Witness:
        """What each row gets from one pass on ``call``; ``mode`` is open while the model runs.

        Without randomness: in the place of what would be drawn stands the quantile ``at`` of its distribution.

        Raises `UnsupportedUse` if the losses cannot be told apart by row, or randomness cannot be taken out.
        """
        layout = self.layout(rows, packed=packed)
        chance = Chance(at)
        with unchanged(self.model, memory=False), still(self.model, chance) as restless, torch.enable_grad():
            witness = self._witness(call, layout, mode)[0]
            witness.laws = chance.laws
            if restless():
                raise UnsupportedUse("the forward pass draws random numbers that cannot be taken out of a comparison")
        self.draws |= chance.drawn
        return witness

    def _witness(
        self, call: Call, layout: Layout, mode: AbstractContextManager[Any] | None = None
    ) -> tuple[Witness, LossTerms, Any]:
        terms = LossTerms(layout)
        with intercepted(terms), mode or nullcontext():
            output = self.forward(*call[0], **call[1])
        if not self.returns_loss:
            rows = layout.rows
            values = [t.detach() for t in tensors(output) if t.is_floating_point() and t.dim() and t.shape[0] == rows]
            return Witness(values), terms, output
        total = require_loss(output)
        if not (self.mapped and terms.terms):
            raise UnsupportedUse(terms.unmapped or "the model computes its loss without torch's loss functions")
        own = [0.0 if share is None else float(share) for share in shares(total, terms.terms)]
        parts = [share * float(term.value) for share, term in zip(own, terms.terms)]
        rest = float(total.detach()) - sum(parts)
        if not abs(rest) > 1e-4 * max(map(abs, (float(total.detach()), *parts))):
            rest = 0.0
        return Witness([t.per_unit.detach() for t in terms.terms], own, rest), terms, output

    def gradients(
        self,
        call: Call,
        rows: int,
        unit: int,
        parameters: Sequence[torch.nn.Parameter],
        keep: Callable[[int, torch.Tensor], T],
        *,
        packed: bool = False,
        others: float = 0.0,
    ) -> tuple[list[T | None], list[torch.Tensor], list[torch.Tensor]]:
        """Plain autograd of one unit's loss within a pass on the whole call, with its randomness; of the ``others``' this much.

        Returns what ``keep`` makes of the parameters' gradients (see `plain_gradients`), the gradients of every embedding and
        floating-point input (rows first), and the random upstream gradients of the outputs where the model returns no loss.
        Other rows must find exact zeros in the second.
        """
        layout = self.layout(rows, packed=packed)
        flowing: list[tuple[torch.Tensor, Fold]] = []

        def begin(path: Path, t: torch.Tensor) -> torch.Tensor:
            if path not in self.carriers or not t.is_floating_point():
                return t
            flowing.append((t.detach().clone().requires_grad_(), Fold()))
            return flowing[-1][0].clone()

        with unchanged(self.model, memory=False), torch.enable_grad():
            call = map_leaves(call, begin)
            inputs = [t for path, t in leaves(call) if path in self.carriers]
            with _Beginnings(inputs, flowing, rows):
                _, terms, output = self._witness(call, layout)
            seeds: list[torch.Tensor] = []
            if self.returns_loss:
                losses = combine(require_loss(output), terms, self.divided, verify=False)
                own = torch.tensor(unit, device=losses.device)
                tops, upstream = [losses], [torch.full_like(losses, others).index_fill_(0, own, 1)]
            else:
                tops = differentiable(output)
                seeds = seeds_for(tops)
                places = [torch.tensor([unit], device=seed.device) for seed in seeds]
                upstream = [torch.full_like(s, others).index_copy_(0, i, s[i]) for s, i in zip(seeds, places)]
            # The logits beside a loss are let go of before its backward pass, as they are in a step.
            del output
            with self.weights.gathered():
                found = plain_gradients(tops, upstream, parameters, keep=keep)
        return found, [fold.front(t.grad, rows) for t, fold in flowing if t.grad is not None], seeds


def seeds_for(tops: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Upstream gradients that are the same whenever the outputs have these shapes."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(t.shape, generator=generator).to(t.device, t.dtype) for t in tops]


class _Beginnings(Follow):
    """Keeps the gradient of everything that an embedding looks up for the rows of a batch, and where those lie in it."""

    def __init__(self, inputs: Sequence[torch.Tensor], flowing: list[tuple[torch.Tensor, Fold]], rows: int):
        super().__init__(inputs)
        self.flowing, self.rows, self.places = flowing, rows, Places(inputs, rows)

    def follow(self, func: Any, args: Any, kwargs: Any, given: list[torch.Tensor], out: Any) -> None:
        """Follow one operation, and what it makes of the rows' numbers if it is one on ids."""
        super().follow(func, args, kwargs, given, out)
        if not isinstance(out, torch.Tensor) or out not in self.data:
            return
        ids = kwargs.get("input", args[0] if args else None)
        if func in (F.embedding, F.embedding_bag) and torch.is_grad_enabled():
            place = self.places.of(ids)
            fold = Fold() if place is None else place.fold(self.rows)
            if fold is None or not fold.fits(tuple(out.shape), self.rows):
                return
            if out.requires_grad:
                out.retain_grad()
            else:
                out.requires_grad_()
            self.flowing.append((out, fold))
        elif not out.is_floating_point():
            self.places.follow(func, args, kwargs, given, [out])


class _Overflow(Follow):
    """Writes NaN and infinities into what is looked up for rows of ids.

    Args:
        inputs: the tensors that carry rows.
        values: for each row what is written, 0 where nothing is.
    """

    def __init__(self, inputs: Sequence[torch.Tensor], values: torch.Tensor):
        super().__init__(inputs)
        self.values, self.places = values, Places(inputs, len(values))

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run one operation; of one that reads a table by ids, rows are overwritten."""
        out = super().run(func, args, kwargs)
        data: list[torch.Tensor] = []
        other: list[torch.Tensor] = []
        for t in tensors((args, kwargs)):
            (data if t in self.data else other).append(t)
        reads = isinstance(out, torch.Tensor) and out.is_floating_point() and len(data) == 1
        if not reads or data[0].dtype not in _IDS or not any(t.is_floating_point() for t in other):
            return out
        place = self.places.of(data[0])
        if place is None or out.shape[: data[0].dim()] != data[0].shape:
            return out
        here = torch.where(place.rows < 0, 0.0, self.values[place.rows.long().clamp(min=0)])
        return _overwritten(out, place.axis, here)

    def follow(self, func: Any, args: Any, kwargs: Any, given: list[torch.Tensor], out: Any) -> None:
        """Follow one operation, and what it makes of the rows' numbers if it is one on ids."""
        super().follow(func, args, kwargs, given, out)
        if isinstance(out, torch.Tensor) and out in self.data and not out.is_floating_point():
            self.places.follow(func, args, kwargs, given, [out])


_IDS = frozenset({torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8})


def _overflows(rows: Sequence[int], kept: Collection[int]) -> torch.Tensor:
    """For each row NaN and infinity in turn, 0 for those ``kept``."""
    return torch.tensor([0.0 if row in kept else (torch.nan, torch.inf)[i % 2] for i, row in enumerate(rows)])


def _overwritten(t: torch.Tensor, axis: int, values: torch.Tensor) -> torch.Tensor:
    """The tensor with these values along an axis, where they are not 0."""
    sizes = [1] * t.dim()
    sizes[axis] = -1
    values = values.to(t).view(sizes)
    return torch.where(values == 0, t, values)


def rounding(model: torch.nn.Module) -> float:
    """The relative change of a loss that counts as rounding."""
    kinds = {p.dtype for p in model.parameters() if p.is_floating_point()}
    if torch.is_autocast_enabled(next(model.parameters()).device.type):
        return _LOW_PRECISION
    return max((_ROUNDING.get(kind, _LOW_PRECISION) for kind in kinds), default=_LOW_PRECISION)


def require_independence(replay: Replay, rows: Sequence[int], *, selects: bool) -> tuple[list[int], frozenset[int]]:
    """Raise `SelfCheckError` if the loss of one of these rows depends on the others, or on earlier passes.

    A unit's values must be the same to the last bit beside other companions in the same shapes, and within rounding
    alone, in another order, and among as many copies of itself as the batch has rows. With ``selects``, shapes inside the
    model follow the data, and rounding is allowed throughout.

    Returns the rows whose loss is finite (0 times a companion's infinity is NaN, so others would say nothing), and the
    loss functions whose coefficient the model divides by the number of rows. Raises `UnsupportedUse` where the losses
    cannot be told apart by row, and where a coefficient depends on the batch in another way.
    """
    base = replay(replay.rows(rows), len(rows))
    finite = [row for i, row in enumerate(rows) if base.finite(i)]
    if not finite:
        raise SelfCheckError(
            "no example of the first batch that was looked at has a finite loss, so the engine cannot be checked; nothing "
            "was released"
        )
    if len(finite) < len(rows):
        rows = finite if len(finite) > 1 else finite * 2
        base = replay(replay.rows(rows), len(rows))
    count, loose = len(rows), rounding(replay.model)
    # Sums on a GPU come in no fixed order, and vectorised ones may follow a tensor's place in memory: as far as a pass does
    # not repeat itself to the last bit, nothing else can be asked to.
    repeated = replay(replay.rows(rows), count)
    apart = max(base.gap(i, repeated, i) for i in (0, count - 1))
    same = loose if selects else min(4 * apart, loose if replay.device.type != "cpu" else 1e-2 * loose)
    divided: frozenset[int] | None = None
    for i in (count - 1, 0):
        unit, many = rows[i], max(count, replay.ticket.rows)
        tried = [("nobody", replay.rows([unit]), 1, 0, loose)]
        if rows.count(unit) == 1:
            tried.append(("other companions", replay.beside(rows, {unit}), count, i, same))
        if i:
            tried.append(("copies of itself", replay.rows([unit] * many), many, many - 1, loose))
        else:
            tried.append(("the others in another order", replay.rows(rows[::-1]), count, count - 1, loose))
        for how, call, n, at, bound in tried:
            other = replay(call, n)
            if not base.gap(i, other, at) <= bound:
                raise coupled(replay, rows, unit, how)
            size = max(abs(base.rest), abs(other.rest), *(float(v[i].abs().max()) for v in base.values))
            if abs(base.rest - other.rest) > 1e-3 * size:
                raise SelfCheckError(
                    "the model adds something to its per-example loss (a balancing or contrastive term?) that depends on "
                    "the whole batch; switch that term off in the model's configuration; nothing was released"
                )
            kind = _coefficient(base.shares, other.shares, count / n)
            if kind is None or kind != (frozenset() if n == count else divided if divided is not None else kind):
                raise UnsupportedUse("the coefficients of the model's loss depend on the batch")
            divided = kind if n != count else divided
    if not all(base.gap(i, replay(replay.rows(rows), count), i) <= same for i in (0, count - 1)):
        raise stateful()
    if base.rest:
        raise UnsupportedUse("the model adds to its loss what depends on its parameters alone")
    return list(rows), divided or frozenset()


def require_unmoved_by_chance(replay: Replay, rows: Sequence[int]) -> None:
    """Raise `UnsupportedUse` if a row notices its companions where what is drawn by chance comes out as it seldom does.

    A model that mixes rows in one of ten passes is one that others do not show.
    """
    unit, count = rows[-1], len(rows)
    for at in _SELDOM if replay.draws else ():
        base, alone = replay(replay.rows(rows), count, at=at), replay(replay.rows([unit]), 1, at=at)
        gaps = [base.gap(count - 1, alone, 0)]
        if rows.count(unit) == 1:
            gaps.append(base.gap(count - 1, replay(replay.beside(rows, {unit}), count, at=at), count - 1))
        if base.finite(count - 1) and not max(gaps) <= rounding(replay.model):
            raise UnsupportedUse("rows meet in some passes, by chance")


def require_unmoved(replay: Replay, kept: Sequence[int], *, selects: bool) -> Witness:
    """Raise `SelfCheckError` if one of the rows ``kept`` has another loss when all other rows of the whole call change.

    Some couplings and some memories begin at a size that a few rows do not have. Returns what the rows got; raises
    `UnsupportedUse` where losses cannot be told apart by row.
    """
    rows = range(replay.ticket.rows)
    changed = replay(replay.beside(rows, set(kept)), len(rows))
    one, two = (replay(replay.rows(rows), len(rows)) for _ in range(2))
    loose = rounding(replay.model)
    apart = max((one.gap(row, two, row) for row in kept if one.finite(row)), default=0.0)
    limit = loose if selects or replay.device.type != "cpu" else 1e-2 * loose
    if not apart <= limit:
        raise stateful()
    for row in kept:
        if one.finite(row) and not one.gap(row, changed, row) <= (limit if selects else min(4 * apart, limit)):
            raise coupled(replay, rows, row, "other companions")
    return one


def require_contained(replay: Replay, rows: Sequence[int], kept: Collection[int], base: Witness) -> None:
    """Raise `UnsupportedUse` if one of the rows ``kept`` notices that the others are not finite.

    0 times NaN is NaN, and a record that brings one would be dropped together with all that it reaches. On processors alone:
    a kernel of a GPU may end the process where it meets a NaN.

    Args:
        replay: of a call.
        rows: of it, in this order.
        kept: those that stay as they are.
        base: what each got beside the others as they are.
    """
    if replay.device.type != "cpu":
        return
    try:
        other = replay.overflown(rows, kept)
    except Exception:
        # A pass that raises would have stopped the run.
        return
    places = [i for i, row in enumerate(rows) if row in kept and base.finite(i)]
    same = all(base.gap(i, other, i) <= rounding(replay.model) for i in places)
    if not same or _coefficient(base.shares, other.shares, 1.0) != frozenset():
        raise UnsupportedUse(OVERFLOWS)


def require_same_loss(source: Collation, items: Sequence[Any], replay: Replay) -> None:
    """Raise `SelfCheckError` if the shortest of some examples has another loss when it is collated beside the longest.

    Raises `UnsupportedUse` if it has its own again without the padding, as each row has that is run alone: a branch on the
    length of a batch, like position embeddings that stretch. Looks only at calls all of whose rows come from the batch as the
    collator made it.
    """
    places: dict[Path, Path] = {}
    for path, t in leaves(replay.call):
        if path in replay.carriers:
            equal = [p for p, b in source.batch.items() if b.shape == t.shape and torch.equal(b.to(t), t)]
            if not equal:
                return
            # Where no row is padded, labels may equal ids.
            places[path] = next((p for p in equal if p[-1:] == path[-1:]), equal[0])
    alone = [source.together([item]) for item in items]
    if len(items) < 2 or any(not same(source.together([i], 1), a) for i, a in zip(items, alone)):
        return
    sizes = [sum(t.numel() for t in tensors.values()) for tensors in alone]
    longest, shortest = (pick(range(len(items)), key=sizes.__getitem__) for pick in (max, min))
    if longest == shortest:
        return

    def call(batch: dict[Path, torch.Tensor]) -> Call:
        def place(path: Path, t: torch.Tensor) -> torch.Tensor:
            return batch[places[path]].to(t) if path in places else t

        made: Call = map_leaves(replay.call, place)
        return made

    def fresh(made: Call, count: int) -> Witness:
        # A batch's length may stay with the model, and is not what is asked here.
        with forgetting(replay.model):
            return replay(made, count)

    single = fresh(call(alone[shortest]), 1)
    pair = call(source.together([items[shortest], items[longest]]))
    beside = fresh(pair, 2)
    if not beside.finite(0) or beside.gap(0, single, 0) <= rounding(replay.model):
        return
    row = unpadded(take_rows(pair, torch.tensor([0]), replay.carriers), replay.carriers)
    first = next((t[0, 0] for p, t in leaves(pair) if p[-1] == "attention_mask" and t.dim() == 2), None)
    if first is not None and bool(first) and fresh(row, 1).gap(0, single, 0) <= rounding(replay.model):
        raise UnsupportedUse("an example's loss changes with the length of the longest one in its batch")
    raise SelfCheckError(
        "an example has another loss when it is collated beside a longer one: padding changes it. Padding on the left "
        "shifts positions unless position_ids are given, and lets padding predict an example's first token; pad on the "
        "right, or pass position_ids and an attention mask and label no first token; nothing was released"
    )


def stateful() -> SelfCheckError:
    """The refusal of a model that remembers its batches."""
    return SelfCheckError(
        "the model keeps something from one pass to the next (a queue, a running statistic, a hidden state): an "
        "example would reach every later one; nothing was released"
    )


def _coefficient(base: Sequence[float], other: Sequence[float], ratio: float) -> frozenset[int] | None:
    """Which coefficients are ``ratio`` times as large in the other pass, the rest being equal; None if one is neither."""
    divided = set()
    for index, (a, b) in enumerate(zip(base, other)):
        if not abs(a - b) <= 1e-5 * abs(a):
            if not abs(a * ratio - b) <= 1e-5 * abs(b):
                return None
            divided.add(index)
    return frozenset(divided)


def coupled(replay: Replay, rows: Sequence[int], unit: int, how: str) -> SelfCheckError:
    """The refusal of a model in which a unit's loss depends on its companions, with the module where that begins."""
    where = ""
    if rows.count(unit) == 1:
        seen = [_outputs(replay, call, rows.index(unit)) for call in (replay.rows(rows), replay.beside(rows, {unit}))]
        first = next((n for n, t in seen[0].items() if n in seen[1] and not torch.equal(t, seen[1][n])), None)
        where = f" (first seen in what {first} returns)" if first else ""
    return SelfCheckError(
        f"the model couples examples: one's loss changes beside {how}{where}; losses, statistics and capacities that run "
        "over the batch cannot be made private; nothing was released"
    )


def _outputs(replay: Replay, call: Call, row: int) -> dict[str, torch.Tensor]:
    seen: dict[str, torch.Tensor] = {}
    handles = []
    for name, module in replay.model.named_modules():
        if not name:
            continue

        def note(_module: Any, _args: Any, output: Any, name: str = name) -> None:
            first = next(tensors(output), None)
            if first is not None and first.dim() > 0 and first.shape[0] > row:
                seen.setdefault(name, first.detach()[row].clone())

        handles.append(module.register_forward_hook(note))
    try:
        with unchanged(replay.model, memory=False), still(replay.model), torch.no_grad():
            replay.forward(*call[0], **call[1])
    finally:
        for handle in handles:
            handle.remove()
    return seen
