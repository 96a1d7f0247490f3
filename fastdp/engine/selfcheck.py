"""The check of a batch before anything of it is released: independence of its rows, and the engine against autograd.

Some rows of the real batch are run again (`fastdp.engine.replay`): no row's loss may notice its companions, and a backward
pass from one row's loss must find exact zeros at every other row. Then the engine's own captures are looked at in the same
way, and its norms and sums compared with autograd's in the same shapes, with the same dropout masks.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch

from fastdp.engine.accumulator import Accumulator
from fastdp.engine.batches import Call, leaves
from fastdp.engine.bits import contents
from fastdp.engine.boundary import differentiable, find_loss, plain_gradients, require_loss
from fastdp.engine.bounds import UpperNorms
from fastdp.engine.errors import SelfCheckError, UnsupportedUse
from fastdp.engine.factors import Factors
from fastdp.engine.guard import Guard
from fastdp.engine.layout import Layout, Ticket
from fastdp.engine.losses import LossTerms, intercepted
from fastdp.engine.passes import Passes, repeatable
from fastdp.engine.policy import Policy
from fastdp.engine.questions import asked, require_unasked, require_unasked_of_packed
from fastdp.engine.replay import (
    OVERFLOWS,
    Replay,
    coupled,
    require_contained,
    require_independence,
    require_same_loss,
    require_unmoved,
    require_unmoved_by_chance,
    rounding,
    seeds_for,
    stateful,
)
from fastdp.engine.shards import Measured, norm
from fastdp.engine.still import still, unchanged
from fastdp.engine.uses import uncast

_EXAMPLES = 3
_SECRET = random.SystemRandom()
#: Upstream gradients of rows that another's gradient must not notice; those of a lost loss are 1.
_LARGE = -(2.0**40)


@dataclass(frozen=True)
class _Probe(Policy):
    """The method's groups with known scales for some units, 0 for others, and a place to note the norms."""

    known: Mapping[int, float] = field(default_factory=dict)
    seen: list[torch.Tensor] = field(default_factory=list)

    def scales(self, upper: UpperNorms) -> torch.Tensor:
        squared = upper.measured
        self.seen.append(squared)
        known = torch.zeros(squared.shape[1], device=squared.device)
        for unit, weight in self.known.items():
            known[unit] = weight
        known = torch.where(torch.isfinite(squared).all(0), known, 0.0)
        return known.expand(squared.shape[0], -1).clone()


def chosen_rows(ticket: Ticket, start: int = 0) -> list[int]:
    """The rows of a micro-batch that are looked at: a few from ``start`` on, repeated if there are fewer than two."""
    count = min(_EXAMPLES, max(2, ticket.rows))
    return [(start + i) % ticket.rows for i in range(count)]


def independence(passes: Passes, call: Call, ticket: Ticket, rows: list[int]) -> list[int]:
    """Raise `SelfCheckError` if the plain model lets rows of this batch see each other; note what its loss divides by.

    Returns the rows that are worth looking at further. Raises `UnsupportedUse` if the losses cannot be told apart by row:
    each must then be run alone.
    """
    assert passes.trace is not None
    replay = passes.replay(call, ticket)
    if ticket.token_units is not None:
        _packed_independence(passes, replay, call, ticket)
    else:
        rows, passes.divided = require_independence(replay, rows, selects=passes.trace.selects)
        whole, half = passes.replay(call, ticket), _half(ticket)
        seen = require_unmoved(whole, half, selects=passes.trace.selects)
        require_unmoved_by_chance(replay, rows)
        require_unasked(replay, rows, selects=passes.trace.selects)
        passes.asked = asked(replay, rows)
        few = Ticket(torch.arange(len(rows)), torch.ones(len(rows)), is_last=True)
        _require_zero(passes, replay, replay.rows(rows), few, rows)
        require_contained(replay, rows, {rows[-1]}, replay(replay.rows(rows), len(rows)))
        require_contained(whole, range(ticket.rows), set(half), seen)
        return rows
    _require_zero(passes, replay, call, ticket)
    return rows


@dataclass(frozen=True)
class Foreseen:
    """What the rows of some units must get from the pass that comes next, whatever the other rows hold.

    Args:
        rows: theirs.
        places: their places in what a backward pass starts from: units where losses are by unit, or rows.
        values: what they got beside other companions.
    """

    rows: list[int]
    places: torch.Tensor
    values: list[torch.Tensor]

    def holds(self, tops: Sequence[torch.Tensor]) -> bool:
        """Whether they did, to the last bit; NaN is no sign of anything."""
        return len(tops) == len(self.values) and all(
            top.shape[0] > int(self.places.max())
            and (found := top.detach().index_select(0, self.places)).shape == values.shape
            and torch.equal(found.nan_to_num(), values.nan_to_num())
            for top, values in zip(tops, self.values)
        )


def _half(ticket: Ticket) -> list[int]:
    """The rows of half of a micro-batch's units, drawn by chance, so that nothing can tell which are looked at."""
    units = ticket.row_units.unique().tolist()
    chosen = torch.tensor(_SECRET.sample(units, max(1, len(units) // 2)))
    return torch.isin(ticket.row_units, chosen).nonzero()[:, 0].tolist()


def briefly(passes: Passes, call: Call, ticket: Ticket, rows: Sequence[int]) -> Foreseen | None:
    """A look at a later batch: a pass beside other companions, and by chance two rows' gradients and questions.

    What the first gives must hold of the batch's own pass; it raises `SelfCheckError` and `UnsupportedUse` as
    `independence` does.
    """
    assert passes.trace is not None
    replay = passes.replay(call, ticket)
    if ticket.token_units is not None:
        _packed_independence(passes, replay, call, ticket)
        return None
    if passes.route != "uses":
        _require_repeated(passes, replay, rows)
        return None
    if ticket.rows < 2 or _SECRET.random() < 0.5:
        pair = Ticket(torch.arange(2), torch.ones(2), is_last=True)
        _require_zero(passes, replay, replay.rows(rows[:2]), pair, rows[:2])
        if not asked(replay, rows[:2]) <= passes.asked:
            require_unasked(replay, rows, selects=passes.trace.selects)
    if ticket.rows < 2:
        return None
    kept = _half(ticket)
    finite = replay.device.type != "cpu" or _SECRET.random() < 0.5
    try:
        with torch.enable_grad():
            tops = passes.tops(replay.beside(range(ticket.rows), set(kept), finite=finite), ticket)
    except Exception:
        if finite:
            raise
        # A record that is not finite would have stopped the run.
        return None
    places = (ticket.row_units[kept].unique() if passes.returns_loss else torch.tensor(kept)).to(replay.device)
    longest = int(places.max())
    values = [t.detach().index_select(0, places) for t in tops if t.shape[0] > longest]
    return Foreseen(kept, places, values)


def whole(passes: Passes, call: Call, ticket: Ticket, kept: Sequence[int]) -> None:
    """Raise `SelfCheckError` if rows of the whole call notice the others, all randomness taken out.

    Raises `UnsupportedUse` if they notice only what is not finite.
    """
    assert passes.trace is not None
    replay = passes.replay(call, ticket)
    seen = require_unmoved(replay, kept, selects=passes.trace.selects)
    require_contained(replay, range(ticket.rows), set(kept), seen)


def _require_repeated(passes: Passes, replay: Replay, rows: Sequence[int]) -> None:
    """Raise `SelfCheckError` if a row run alone has another loss after another row was."""
    if not passes.returns_loss:
        return
    losses = [_loss_of(passes, replay, [row]) for row in (rows[-1], rows[0], rows[-1])]
    if abs(losses[2] - losses[0]) > rounding(passes.model) * abs(losses[0]):
        raise stateful()
    _require_forgetful(passes, replay, rows)


def _loss_of(passes: Passes, replay: Replay, rows: Sequence[int]) -> float:
    """The model's own loss on some rows without randomness; NaN where that cannot be had."""
    args, kwargs = replay.rows(rows)
    with unchanged(passes.model, memory=False), still(passes.model) as restless, torch.enable_grad():
        loss = find_loss(passes.plain_forward(*args, **kwargs))
        return math.nan if loss is None or restless() else float(loss.detach())


def _packed_independence(passes: Passes, replay: Replay, call: Call, ticket: Ticket) -> None:
    layout, kind = ticket.layout(replay.device), replay.device.type
    assert layout.token_segments is not None
    shape = layout.token_segments.shape
    half = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) is torch.float16
    half |= any(parameter.dtype is torch.float16 for parameter in passes.model.parameters())
    if half or any(t.is_floating_point() and t.shape[:2] == shape for _, t in leaves(call)):
        raise SelfCheckError(
            "packed rows take token ids, and no float16: attention keeps the examples of a row apart by weights of zero, and "
            "where one is not finite 0 times NaN makes the others NaN too; use bfloat16 or float32, or leave packing out"
        )
    together = replay(call, ticket.rows, packed=True)
    for unit, single in replay.packed_alone():
        alone = replay(single, 1)
        if together.finite(unit) and not together.gap(unit, alone, 0) <= rounding(passes.model):
            raise coupled(replay, [0, 0], 0, "the others of its row")
    passes.asked |= require_unasked_of_packed(replay, call, together, passes.asked)


def _require_zero(
    passes: Passes, replay: Replay, call: Call, ticket: Ticket, rows: Sequence[int] | None = None
) -> None:
    """Raise `SelfCheckError` if one unit's gradient reaches another's rows of an embedding or an input at all.

    Raises `UnsupportedUse` if what flows back to a unit is another beside gradients of the others, however large, NaN included,
    or after these; or, of a call on these ``rows``, where the others are strange, as what is kept for a backward pass may be kept
    by the largest of all.
    """
    layout = ticket.layout(replay.device)
    own = layout.token_segments if layout.token_segments is not None else layout.lane_units
    unit = int(ticket.layout(torch.device("cpu")).weights.nonzero()[-1])
    packed = layout.token_segments is not None
    parameters = list(passes.read.values())

    def flowing(others: float, call: Call = call) -> list[torch.Tensor]:
        found = replay.gradients(
            call, ticket.rows, unit, parameters, lambda _index, _gradient: 0, packed=packed, others=others
        )
        return [gradient for gradient in found[1] if gradient.shape[: own.dim()] == own.shape]

    # First beside large ones: what a backward pass keeps of them shows in the next.
    large, plain = flowing(_LARGE), flowing(0.0)
    for gradient in plain:
        if bool(_reaches(gradient[own != unit])):
            raise coupled(replay, [0, 0], 0, "others: its gradient reaches them")
    for gradient, other in zip(plain, large):
        alone, beside = gradient[own == unit], other[own == unit]
        if _finite(alone) and _finite(beside) and not _alike(alone, beside, rounding(passes.model)):
            raise UnsupportedUse(
                "what flows back to a row is another where much flows back to others, or did in the pass before"
            )
    if packed:
        return
    strange = [] if rows is None else [replay.beside(rows, {rows[unit]}, finite=finite) for finite in (True, False)]
    for beside_others in strange:
        try:
            found = flowing(0.0, beside_others)
        except (SelfCheckError, UnsupportedUse, torch.OutOfMemoryError):
            raise
        except Exception:
            # Such a record would have stopped the run.
            continue
        for gradient, other in zip(plain, found):
            alone, beside = gradient[unit], other[unit]
            if _finite(alone) and _finite(beside) and not _alike(alone, beside, rounding(passes.model)):
                raise UnsupportedUse("what flows back to a row is another beside other companions")
    for gradient, other in zip(plain, flowing(math.nan)):
        if _finite(gradient[unit]) and not _finite(other[unit]):
            raise UnsupportedUse(OVERFLOWS)


def _alike(one: torch.Tensor, other: torch.Tensor, limit: float) -> bool:
    size = float(one.abs().max()) if one.numel() else 0.0
    return torch.equal(one, other) or float((one - other).abs().max()) <= limit * size


def _finite(gradient: torch.Tensor) -> bool:
    return bool(gradient.isfinite().all())


def _reaches(gradient: torch.Tensor) -> torch.Tensor:
    """Whether anything but exact zero arrived; NaN is what 0 times a companion's infinity gives, and no sign of it."""
    return (gradient.nan_to_num() != 0).any()


class _Attribution:
    """A sink that asks of every capture whether a backward pass from one unit's loss left the others' tokens at zero."""

    def __init__(self, names: Mapping[int, str], unit: int):
        self.names, self.unit = names, unit
        #: Whether something was computed in less than float32, as under an autocast of the model's own.
        self.rough = False

    def matrix(self, parameter: torch.nn.Parameter, factors: Factors, layout: Layout) -> None:
        """A use of a matrix: its backpropagated factor is looked at."""
        offsets = layout.offsets(factors.right.shape[0], laned=factors.laned)
        gradient = factors.arrived
        start, end = int(offsets[self.unit]), int(offsets[self.unit + 1])
        self._require(parameter, torch.cat([gradient[:start], gradient[end:]]))

    def vector(self, parameter: torch.nn.Parameter, lanes: torch.Tensor, layout: Layout) -> None:
        """An expanded parameter: other lanes are looked at."""
        self._require(parameter, lanes[layout.lane_units != self.unit])

    def tokens(self, parameter: torch.nn.Parameter, gradient: torch.Tensor, layout: Layout, laned: bool) -> None:
        """A bias."""
        own = torch.arange(layout.units, device=gradient.device) == self.unit
        per_token = layout.per_token(own, gradient.shape[0], laned=laned)
        self._require(parameter, gradient[~per_token])

    def instances(self, parameter: torch.nn.Parameter, gradients: torch.Tensor, layout: Layout) -> None:
        """Whole gradients: other units' are looked at."""
        self._require(parameter, torch.cat([gradients[: self.unit], gradients[self.unit + 1 :]]))

    def _require(self, parameter: torch.nn.Parameter, others: torch.Tensor) -> None:
        self.rough |= others.dtype.itemsize < 4
        if bool(_reaches(others)):
            raise UnsupportedUse(f"{self.names[id(parameter)]}: its tokens are not in the order of the batch's rows")


def compare(passes: Passes, call: Call, ticket: Ticket, rows: Sequence[int]) -> None:
    """Raise `UnsupportedUse` unless the engine's attribution, norms and sums are plain autograd's.

    All of it on these rows; then, on the whole micro-batch, the norm and the gradient of one unit drawn by chance, as a
    backward pass may do to many rows what it does not do to a few. Raises `SelfCheckError` if the backward pass draws random
    numbers of its own.
    """
    replay = passes.replay(call, ticket)
    packed = ticket.token_units is not None
    if packed:
        batch, small = call, ticket
    else:
        batch = replay.rows(rows)
        small = Ticket(torch.arange(len(rows)), torch.ones(len(rows)), is_last=True)
    layout = small.layout(replay.device)
    units = [unit for unit in range(layout.units) if float(layout.weights[unit]) > 0]
    sinks = [_Attribution(passes.accumulator.names, unit) for unit in dict.fromkeys((units[0], units[-1]))]
    with uncast(replay.device):
        for sink in sinks:
            with unchanged(passes.model, memory=False):
                passes.capture(batch, small, sink.unit, sink)
        kinds = {p.dtype for p in passes.model.parameters() if p.is_floating_point()}
        rough = any(sink.rough for sink in sinks) or not kinds <= {torch.float32, torch.float64}
        tolerance = 0.1 if rough else 1e-3
        _compare(passes, replay, batch, small, {unit: 1 / (1 + unit) for unit in units}, tolerance)
        plain = not packed and torch.equal(ticket.row_units, torch.arange(ticket.rows))
        if plain and ticket.rows > len(rows):
            drawn = _SECRET.choice(ticket.weights.nonzero()[:, 0].tolist())
            _compare(passes, replay, call, ticket, {drawn: 1.0}, tolerance)


def _compare(
    passes: Passes, replay: Replay, call: Call, ticket: Ticket, weights: Mapping[int, float], tolerance: float
) -> None:
    """Raise `UnsupportedUse` unless the engine finds autograd's norms of these units, and their sum by these weights."""
    kept, packed = passes.accumulator, ticket.token_units is not None
    policy, names = kept.policy, list(passes.read)
    probe = _Probe(policy.bounds, policy.stds, policy.group_of, policy.masks, known=weights)
    passes.accumulator = Accumulator(passes.read, probe, passes.weights)
    passes.accumulator.tables = kept.tables
    try:
        with unchanged(passes.model, memory=False):
            _by_engine(passes, call, ticket)
        squared, found = probe.seen[0], Comparison(passes.accumulator.sums)
        for unit, weight in weights.items():
            found.begin(float(squared[:, unit].double().sum()) ** 0.5, weight)
            replay.gradients(
                call, ticket.rows, unit, list(passes.read.values()),
                lambda i, g: found.take(names[i], passes.weights.measured(names[i], g)), packed=packed,
            )  # fmt: skip
            found.end()
    finally:
        passes.accumulator = kept
    found.judge(tolerance=tolerance)


def _by_engine(passes: Passes, call: Call, ticket: Ticket) -> None:
    output = passes.run_forward(call, ticket, verify=True)[0]
    if passes.returns_loss:
        tops = [require_loss(output)]
        seeds = [torch.ones_like(tops[0])]
    else:
        tops = differentiable(output)
        seeds = [s / passes.scale(ticket) for s in seeds_for(tops)]
    # The logits beside a loss are let go of before its backward pass, as they are in a step.
    del output
    with repeatable(passes.model):
        torch.autograd.backward(tops, seeds)


def alone(passes: Passes, call: Call, ticket: Ticket, rows: Sequence[int]) -> None:
    """Run the one-example route's forward and backward once, and see that a batch of copies has one copy's loss.

    Raises whatever the model raises on one row, and `SelfCheckError` if it scores examples against each other.
    """
    replay = passes.replay(call, ticket)
    if passes.returns_loss:
        losses = [_loss_of(passes, replay, chosen) for chosen in ([rows[-1]], [rows[-1]] * 2, [rows[0]], [rows[-1]])]
        one, two, _, again = losses
        if abs(again - one) > rounding(passes.model) * abs(one):
            raise stateful()
        if all(abs(two - n * one) > rounding(passes.model) * max(abs(one), abs(two)) for n in (1, 2)):
            raise coupled(replay, rows, rows[-1], "copies of itself")
    _require_forgetful(passes, replay, rows)


def _require_forgetful(passes: Passes, replay: Replay, rows: Sequence[int]) -> None:
    """Raise `SelfCheckError` if a row run alone has another gradient after a large one of another row, and after a small one."""

    def backward(row: int, size: float) -> tuple[torch.Tensor, ...] | None:
        single = replay.rows([row])
        with unchanged(passes.model, memory=False), still(passes.model) as restless, torch.enable_grad():
            with intercepted(LossTerms(replay.layout(1), alone=True)):
                output = passes.plain_forward(*single[0], **single[1])
            tops = [require_loss(output)] if passes.returns_loss else differentiable(output)
            seeds = [torch.full_like(t, size) for t in tops]
            found = plain_gradients(tops, seeds, list(passes.read.values()), keep=lambda _index, g: _sketch(g))
            return None if restless() else tuple(own for own in found if own is not None)

    backward(rows[0], 1 / _LARGE)
    first, _, again = backward(rows[-1], 1.0), backward(rows[0], _LARGE), backward(rows[-1], 1.0)
    if first is not None and again is not None:
        limit = 1e-3 if rounding(passes.model) < 1e-3 else 0.1
        if len(first) != len(again) or not all(_alike(a, b, limit) for a, b in zip(first, again) if _finite(a)):
            raise stateful()


def _sketch(gradient: torch.Tensor) -> torch.Tensor:
    """Its norm, and its sum over the root of how many numbers it has, which is no larger: float64 [2]."""
    wide = gradient.detach().double()
    return torch.stack([wide.norm(), wide.sum() / math.sqrt(max(wide.numel(), 1))])


def buffers(passes: Passes, guard: Guard, call: Call, ticket: Ticket) -> None:
    """Raise `SelfCheckError` if a training forward writes what depends on the data into a buffer, or any parameter."""
    replay = passes.replay(call, ticket)
    found, before = [], contents(passes.model.named_parameters())
    # Other rows, and one more of them: what counts rows or tokens tells how many a private batch has.
    for tried in (call, replay.beside(range(ticket.rows), ()), replay.rows([*range(ticket.rows), 0])):
        with unchanged(passes.model, memory=False), torch.no_grad():
            passed, into = guard.passed(), guard.following(t for path, t in leaves(tried) if path in replay.carriers)
            with into if tried is call else nullcontext():
                passes.plain_forward(*tried[0], **tried[1])
            found.append(passed())
            if tried is call:
                guard.require_unreached(into)
        after = contents(passes.model.named_parameters())
        written = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
        # PEFT's adapters of single parameters set them to themselves, in every forward.
        frozen = {name: p for name, p in passes.model.named_parameters() if not p.requires_grad}
        put_back = {name for name in written & frozen.keys() if before.get(name, ())[::2] == after[name][::2]}
        guard.let_back([frozen[name] for name in put_back])
        written -= put_back
        if written:
            raise SelfCheckError(
                f"{min(written)} is a parameter that a training forward writes or replaces, and would leave with the model "
                "without noise: keep what the data decide in a buffer with persistent=False; nothing was released"
            )
        if not found[0][0]:
            return
    for other in found[1:]:
        guard.learn([found[0], other])


def collation(passes: Passes, call: Call, ticket: Ticket, *, stretched: bool = False) -> None:
    """Raise `SelfCheckError` if the loader's collator lets an example's row, or its loss, depend on the others.

    Raises `UnsupportedUse` if it is padding at the end, which a mask tells of, that another loss follows from. Of a batch that
    is ``stretched``, longer or shorter than all before it, all examples are looked through for the longest and the shortest.
    """
    if ticket.source is None:
        return
    ticket.source.require_independence()
    if passes.returns_loss and ticket.token_units is None:
        items = ticket.source.items(len(ticket.source.indices)) if stretched else ticket.source.items()
        require_same_loss(ticket.source, items, passes.replay(call, ticket))


class Comparison:
    """The engine's sums less autograd's gradients, each taken as it arrives, so that one at a time is in memory.

    Args:
        sums: by parameter, float32; they are changed.
    """

    def __init__(self, sums: dict[str, torch.Tensor]):
        self.residual = sums
        self.scale = dict.fromkeys(sums, 0.0)
        self.norms: list[tuple[float, float]] = []

    def begin(self, measured: float, weight: float) -> None:
        """One example's gradients come next, whose norm is this by the passes, and this its weight in the sums."""
        self._measured, self._weight = measured, weight
        self._sizes: dict[str, float] = {}

    def take(self, name: str, gradient: Measured) -> None:
        """One parameter's gradient by autograd. Raises `UnsupportedUse` where one comes in parts, whose norms do not add up."""
        if name in self._sizes:
            raise UnsupportedUse("a gradient comes in several parts: checkpoint with use_reentrant=False")
        self._sizes[name] = gradient.norm
        # An example without a finite norm is in no sum.
        if not math.isfinite(self._measured):
            return
        self.scale[name] = self.scale.get(name, 0.0) + self._weight * gradient.norm
        if name in self.residual:
            self.residual[name].sub_(gradient.values, alpha=self._weight)
        else:
            self.residual[name] = gradient.values.float() * -self._weight

    def end(self) -> None:
        """All of the example's gradients came."""
        truth = math.sqrt(sum(size**2 for size in self._sizes.values()))
        # An example that both find not to be finite takes no part; it is not held against the others.
        if math.isfinite(self._measured) or math.isfinite(truth):
            self.norms.append((self._measured, truth))

    def judge(self, *, tolerance: float) -> None:
        """Raise `UnsupportedUse` if a norm or a sum is off by more than ``tolerance`` of its size."""
        worst, error = self._worst()
        for measured, truth in self.norms:
            if not (math.isfinite(measured) and abs(measured - truth) <= tolerance * truth + 1e-12):
                raise UnsupportedUse(
                    f"{worst} is read in a way that no rule knows: the gradient norm of an example is {measured:.6g} by the "
                    f"rules and {truth:.6g} by autograd"
                )
        if not error <= tolerance:
            raise UnsupportedUse(
                f"{worst} is read in a way that no rule knows: its summed gradient is off by {error:.2g}"
            )

    def _worst(self) -> tuple[str, float]:
        most = max(self.scale.values(), default=0.0)
        errors = {
            # A gradient that vanishes next to the others is rounding noise: it is judged on their scale.
            name: norm(gap) / max(self.scale.get(name, 0.0), 1e-4 * most, 1e-30)
            for name, gap in self.residual.items()
        }
        # A gap that is NaN is the worst of all.
        return max(errors.items(), key=lambda pair: (math.isnan(pair[1]), pair[1]), default=("nothing", 0.0))
