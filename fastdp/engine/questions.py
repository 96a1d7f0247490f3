"""What a forward pass asks the host about data, and whether another answer would matter.

``if (ids == 49).any():`` decides for a whole batch, and a check whose rows answer no never sees what follows a yes. So the
question itself is looked for: a truth value is turned round and the rows must not notice; whoever reads numbers of the data
(``item()``, ``tolist()``, ``int()``) is run one example at a time, where a question is about one example alone. What is made of
all rows at once and stays a tensor is a question too, and its answer is made another.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Sequence
from types import FrameType
from typing import Any

import torch

from fastdp.engine.batches import Call, Path, leaves, map_leaves
from fastdp.engine.errors import SelfCheckError, UnsupportedUse
from fastdp.engine.follow import Follow
from fastdp.engine.marks import Marks
from fastdp.engine.named import functions
from fastdp.engine.replay import Replay, Witness, rounding
from fastdp.engine.rows import reduced

_TRUTHS = functions("__bool__ is_nonzero equal allclose __contains__")
#: Of all rows at once.
_OF_ALL = functions(
    "any all sum mean prod max min amax amin count_nonzero nansum nanmean median norm logsumexp var std bincount"
)
_COUNTS = functions("bincount")
_NUMBERS = functions("item __int__ __float__ __index__ __complex__ tolist numpy __array__")


class Asking(Follow):
    """Notes where the host is told something of the data, or one thing is made of all rows.

    Args:
        inputs: the data; what was chosen by them (the experts that got tokens) is followed elsewhere.
        turned: the place whose answers are made others.

    Attributes:
        truths, numbers: places (file and line) where truth values or something of all rows, or numbers, were asked for.
    """

    def __init__(self, inputs: Iterable[torch.Tensor], turned: str | None = None):
        inputs = list(inputs)
        super().__init__(inputs)
        self.turned = turned
        self._rows = inputs[0].shape[0] if inputs else 0
        self.truths: dict[str, None] = {}
        self.numbers: dict[str, None] = {}
        self._turned: Marks[None] = Marks()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_function__(func, types, args, kwargs)
        of_all = (
            func in _OF_ALL
            and isinstance(out, torch.Tensor)
            and self._gone(func, args, kwargs or {}, out)
            and not _ours()
        )
        if not of_all and func not in _TRUTHS and func not in _NUMBERS:
            return out
        given = [t for _, t in leaves((args, kwargs or {}))]
        if not any(t in self.data and t not in self.chosen for t in given):
            return out
        place = _place()
        if func in _NUMBERS:
            self.numbers[place] = None
            return out
        self.truths[place] = None
        # An answer that was turned round as a tensor is not turned back where the same line tells the host.
        if place != self.turned or any(t in self._turned for t in given):
            return out
        if not of_all:
            return not out
        # An index beyond its table ends a GPU's process.
        if out.is_floating_point() or out.dtype is torch.bool or out.device.type == "cpu":
            out = ~out if out.dtype is torch.bool else out + 1
        self.data[out] = self._turned[out] = None
        return out

    def _gone(self, func: Any, args: Any, kwargs: Any, out: torch.Tensor) -> bool:
        """Whether an operation has put rows together: of nothing as many as rows is left, and the first dimension held them."""
        first = args[0] if args and isinstance(args[0], torch.Tensor) else out
        if out.dim() == 0 or first.dim() == 0:
            return out.dim() == 0
        held = self._rows > 0 and first.shape[0] % self._rows == 0 and self._rows not in out.shape
        return held and (func in _COUNTS or 0 in [d % first.dim() for d in reduced(args, kwargs)])


def asked(replay: Replay, rows: Sequence[int]) -> frozenset[str]:
    """Every place where a pass on these rows asks the host about data."""
    noted = _noted(replay, replay.rows(rows), replay.carriers)
    return frozenset((*noted.truths, *noted.numbers))


def require_unasked(replay: Replay, rows: Sequence[int], *, selects: bool) -> None:
    """Raise `UnsupportedUse` if rows could notice what the model asks the host about other rows.

    Tensors of zeros and ones (masks) are tried as they may be, full and all but empty, in the rows' companions. Of
    everything else truth values are turned round: a pass that then raises would have stopped the run.
    """
    call = replay.rows(rows)
    if not asked(replay, rows):
        return
    whole = [(path, t) for path, t in leaves(call) if path in replay.carriers and not t.is_floating_point()]
    binary = frozenset(path for path, t in whole if bool(((t == 0) | (t == 1)).all()))
    noted = _noted(replay, call, replay.carriers - binary)
    if noted.numbers:
        raise UnsupportedUse(f"the model reads numbers of the data ({next(iter(noted.numbers))})")
    base, again, unit = replay(call, len(rows)), replay(call, len(rows)), rows[0]
    loose = rounding(replay.model)
    limit = loose if selects or replay.device.type != "cpu" else 1e-2 * loose
    # As far as a pass does not repeat itself to the last bit, nothing else can be asked to.
    exact = limit if selects else min(4 * max(base.gap(i, again, i) for i in range(len(rows))), limit)

    def require(one: Witness, two: Witness, places: Iterable[int], asked_at: str) -> None:
        apart = max(base.gap(i, one, i) for i in places)
        if not (apart <= loose and one.gap(0, two, 0) <= exact):
            raise UnsupportedUse(f"the model asks the whole batch a question ({asked_at}), and goes on as it answers")

    if binary and rows.count(unit) == 1:
        for full in (True, False):
            calls = [_filled(c, binary, rows, unit, full=full) for c in (call, replay.beside(rows, {unit}))]
            one, two = (replay(c, len(rows)) for c in calls)
            require(one, two, [0], "of masks")
    for place in noted.truths:
        try:
            one, two = (_turned(replay, c, place) for c in (call, replay.beside(rows, {unit})))
        except Exception:
            continue
        require(one, two, range(len(rows)), place)


def require_unasked_of_packed(replay: Replay, call: Call, together: Witness, known: frozenset[str]) -> frozenset[str]:
    """Raise `SelfCheckError` if packed units could notice what the model asks the host about the whole batch.

    Where units begin and end is no question of what they hold, so positions that count from each unit's first token are let
    be. What was ``known`` is not tried again; returns every place where a pass asks.
    """
    segments = replay.ticket.layout(replay.device).token_segments
    assert segments is not None
    positions = _positions(segments)
    real = replay.ticket.token_units.to(replay.device) >= 0  # type: ignore[union-attr]

    def counts(t: torch.Tensor) -> bool:
        return (
            t.shape == positions.shape
            and not t.is_floating_point()
            and torch.equal(t[real], positions[real].to(t.dtype))
        )

    followed = frozenset(path for path, t in leaves(call) if path in replay.carriers and not counts(t))
    noted = _noted(replay, call, followed, packed=True)
    places = frozenset((*noted.truths, *noted.numbers))
    for place in places - known:
        try:
            other = together if place in noted.numbers else _turned(replay, call, place, followed, packed=True)
        except Exception:
            continue
        units = [unit for unit in range(len(together.values[0])) if together.finite(unit)]
        if place in noted.numbers or not all(together.gap(u, other, u) <= rounding(replay.model) for u in units):
            raise SelfCheckError(
                f"the model asks the host about all packed examples at once ({place}), and goes on as they answer, so that one "
                "would reach the others: leave that out, or pack no rows; nothing of this batch was released"
            )
    return places


def _positions(segments: torch.Tensor) -> torch.Tensor:
    """Of each token ``[rows, tokens]`` its place in its segment, which are numbered in the order of the flattened rows."""
    flat = segments.reshape(-1)
    first = torch.zeros(int(flat.max()) + 1, dtype=torch.int64, device=flat.device)
    entries = torch.arange(flat.numel(), device=flat.device)
    first.scatter_reduce_(0, flat, entries, "amin", include_self=False)
    return (entries - first[flat]).view(segments.shape)


def _noted(replay: Replay, call: Call, followed: Collection[Path], *, packed: bool = False) -> Asking:
    mode = Asking(t for path, t in leaves(call) if path in followed)
    replay(call, _rows(call, replay), packed=packed, mode=mode)
    return mode


def _turned(
    replay: Replay, call: Call, place: str, followed: Collection[Path] | None = None, *, packed: bool = False
) -> Witness:
    followed = replay.carriers if followed is None else followed
    mode = Asking((t for path, t in leaves(call) if path in followed), turned=place)
    return replay(call, _rows(call, replay), packed=packed, mode=mode)


def _rows(call: Call, replay: Replay) -> int:
    return next(t.shape[0] for path, t in leaves(call) if path in replay.carriers)


def _filled(call: Call, binary: Collection[Path], rows: Sequence[int], unit: int, *, full: bool) -> Call:
    others = torch.tensor([row != unit for row in rows])

    def fill(path: Path, t: torch.Tensor) -> torch.Tensor:
        if path not in binary:
            return t
        t = t.clone()
        part = t[others.to(t.device)]
        part.fill_(1 if full else 0)
        if not full and t.dim() > 1:
            part[:, 0] = 1
        t[others.to(t.device)] = part
        return t

    made: Call = map_leaves(call, fill)
    return made


def _place() -> str:
    """File and line of the code that asked, beyond torch and the engine."""
    frame = _caller("fastdp.engine.")
    return f"{frame.f_globals.get('__name__', '?')}, line {frame.f_lineno}"


def _ours() -> bool:
    """Whether the engine itself asked, as for the units' losses, and no model."""
    modes = _caller("fastdp.engine.questions", "fastdp.engine.follow", "fastdp.engine.still")
    return str(modes.f_globals.get("__name__", "")).startswith("fastdp.engine.")


def _caller(*beyond: str) -> FrameType:
    """The innermost frame beyond torch and the modules of these names."""
    frame = inspect.currentframe()
    assert frame is not None
    while frame.f_back is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name.partition(".")[0] != "torch" and not name.startswith(beyond):
            break
        frame = frame.f_back
    return frame
