"""Looking into a forward call's arguments: which of their tensors carry rows, and the same call on some of the rows."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch.distributions import Distribution

T = TypeVar("T")
#: Where a tensor stands in nested tuples, lists, mappings, dataclasses and distributions.
Path = tuple[Any, ...]
#: Positional and named arguments.
Call = tuple[Any, Any]


def everything(tree: Any) -> list[tuple[Path, Any]]:
    """What nested tuples, lists, mappings, dataclasses and distributions hold, tensors and anything else, and where it stands."""
    # A loop in the place of recursion: a traced pass looks into the arguments of each operation.
    found: list[tuple[Path, Any]] = []
    waiting: list[tuple[Path, Any]] = [((), tree)]
    while waiting:
        path, tree = waiting.pop()
        inside: list[tuple[Any, Any]]
        if isinstance(tree, torch.Tensor):
            found.append((path, tree))
            continue
        if isinstance(tree, (list, tuple)):
            inside = list(enumerate(tree))
        elif isinstance(tree, dict) or hasattr(tree, "items"):
            inside = list(tree.items())
        elif dataclasses.is_dataclass(type(tree)):
            inside = [(field.name, getattr(tree, field.name)) for field in dataclasses.fields(tree)]
        elif isinstance(tree, Distribution):
            inside = list(vars(tree).items())
        else:
            found.append((path, tree))
            continue
        for key, value in reversed(inside):
            waiting.append(((*path, key), value))
    return found


def leaves(tree: Any) -> list[tuple[Path, torch.Tensor]]:
    """Every tensor in nested tuples, lists, mappings, dataclasses and distributions, and where it stands."""
    return [pair for pair in everything(tree) if isinstance(pair[1], torch.Tensor)]


def tensors(tree: Any) -> list[torch.Tensor]:
    """Every tensor in nested tuples, lists, mappings, dataclasses and distributions."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    found = []
    for _, value in everything(tree):
        if isinstance(value, torch.Tensor):
            found.append(value)
    return found


def map_leaves(
    tree: Any,
    function: Callable[[Path, torch.Tensor], Any],
    path: Path = (),
    lists: Callable[[Path, Any], Any] = lambda path, tree: None,
) -> Any:
    """The same nesting with every tensor replaced by what ``function`` makes of its place and itself.

    So is a list or a tuple of which ``lists`` makes anything.
    """
    if isinstance(tree, torch.Tensor):
        return function(path, tree)
    if isinstance(tree, dict) or hasattr(tree, "items"):
        made = {key: map_leaves(value, function, (*path, key), lists) for key, value in tree.items()}
        return made if type(tree) is dict else type(tree)(made)
    if isinstance(tree, (list, tuple)):
        whole = None if hasattr(tree, "_fields") else lists(path, tree)
        if whole is not None:
            return whole
        parts = [map_leaves(value, function, (*path, position), lists) for position, value in enumerate(tree)]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    if dataclasses.is_dataclass(type(tree)):
        record = copy.copy(tree)
        for field in dataclasses.fields(tree):
            value = map_leaves(getattr(tree, field.name), function, (*path, field.name), lists)
            # A frozen one forbids plain assignment.
            object.__setattr__(record, field.name, value)
        return record
    if isinstance(tree, Distribution):
        law = copy.copy(tree)
        vars(law).update(map_leaves(vars(tree), function, path, lists))
        return law
    return tree


def map_tensors(tree: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same nesting with every tensor replaced."""
    return map_leaves(tree, lambda _, tensor: function(tensor))


def accepted(module: torch.nn.Module, batch: Any) -> Call:
    """What of a batch a module's forward takes: entries by name, or the first ones by position."""
    shown = inspect.signature(module.forward).parameters.values()
    kinds, named = {p.kind for p in shown}, {p.name for p in shown}
    if hasattr(batch, "items"):
        every = inspect.Parameter.VAR_KEYWORD in kinds
        return (), {name: value for name, value in batch.items() if every or name in named}
    entries = tuple(batch) if isinstance(batch, (list, tuple)) else (batch,)
    return entries if inspect.Parameter.VAR_POSITIONAL in kinds else entries[: len(shown)], {}


#: The tensors of a call, each with its place.
Inputs = list[tuple[Path, torch.Tensor]]


class RowNumbers(torch.Tensor):
    """Stands in a call for a list of one entry a row, such as texts, so that its rows can be taken."""


#: Arguments in which no list can be.
_FLAT = frozenset((torch.Tensor, type(None), bool, int, float, str))


class RowLists:
    """Inputs whose rows are no first axis: lists of one entry a row (texts, images), tensors with rows second, and several rows
    an example, as where a loop concatenates pairs.

    In a call that was encoded a tensor of numbers stands in the place of such lists, and tensors have rows first (texts may come
    with time first, and hidden states with layers first). Decoding gives the entries of those numbers, and axes as they were.
    Rows of one example are decoded side by side, and outputs are put into the loop's order.
    """

    def __init__(self) -> None:
        self._entries: dict[int, Any] = {}
        self._kinds: dict[Path, type] = {}
        #: Whether the list at each place has one entry a row.
        self._listed: dict[Path, bool] = {}
        #: The axis of rows at each place where it was seen, and the places of the latest call where rows came second.
        self._axes: dict[Path, int] = {}
        self._second: set[Path] = set()
        #: The places of the latest call whose tensors hold no rows although a size says so, and have an axis of size 1 in front.
        self._whole: set[Path] = set()
        #: How many rows an example had when a call first had several, how many it has now, and whether they lie side by side.
        self._several, self._count, self._adjacent = 0, 1, None

    def __bool__(self) -> bool:
        """Whether the latest call had lists, or several rows an example."""
        return bool(self._kinds) or self._count > 1

    def encode(self, call: Call, rows: int, source: Any = None, held: Inputs | None = None) -> Call:
        """The call of so many rows, rows first and without such lists.

        ``source`` is the collation of its batch, ``held`` what is known to be its `leaves`.
        """
        held = leaves(call) if held is None else held
        nested = [path for path, _ in held if len(path) > 2]
        # Tensors of a list may be one each row.
        listed = bool(nested) and any(isinstance(path[-1], int) for path in nested)
        self._count = 1 if listed else self._rows_an_example([t for _, t in held if t.dim()], rows, source)
        if self._count > 1:
            self._second, self._whole, self._kinds = set(), set(), {}
            return map_leaves(call, lambda _, t: self._examples_first(t, rows) if t.dim() else t)
        # A size may be the number of rows by chance: a tensor that the loop had before this batch holds none of its rows.
        possible = [(path, t) for path, t in held if rows > 1 and rows in t.shape[:2] and source is not None]
        self._whole = {path for path, t in possible if source.predates(t)}
        # Neither is asked where its rows lie: a tensor without rows, and an entry of a list that has one for each row.
        skipped = self._whole | _entries_of_rows(held, rows) if nested and rows > 2 else self._whole
        is_second = {p: self._is_second(p, t, rows, source) for p, t in held if t.dim() > 1 and p not in skipped}
        # What could be either, such as a mask without padding, lies as the others do.
        others_second = True in is_second.values()
        self._second = {path for path, second in is_second.items() if second or (second is None and others_second)}
        if self._second or self._whole:
            call = map_leaves(call, self._rows_first)
        self._entries, self._kinds = {}, {}
        args, kwargs = call
        if _FLAT.issuperset(map(type, (*args, *kwargs.values()))):
            return call

        def numbers(path: Path, tree: Any) -> torch.Tensor | None:
            if len(path) < 2 or len(tree) != rows:
                return None
            held = list(tensors(tree))
            # A list of as many channels as images, say, may be of either.
            stacked = bool(held) and all(t.shape[:1] == (rows,) for t in held)
            if stacked and path not in self._listed and source is not None:
                self._listed[path] = source.lists_examples(held[0])
            if stacked and not self._listed.get(path):
                return None
            self._kinds[path], self._listed[path] = type(tree), True
            return torch.tensor([self._number(entry) for entry in tree]).as_subclass(RowNumbers)

        made: Call = map_leaves(call, lambda _, t: t, lists=numbers)
        return made if self else call

    def _rows_an_example(self, held: Sequence[torch.Tensor], rows: int, source: Any) -> int:
        """How many rows a call has for each of ``rows`` examples, where all of its tensors have several; else 1."""
        sizes = {t.shape[0] for t in held}
        count, rest = divmod(max(sizes, default=0), max(rows, 1))
        if source is None or len(sizes) != 1 or rest or count < 2 or self._several not in (0, count):
            return 1
        if self._adjacent is None:
            adjacent, exact = source.adjacent_rows(held, count)
            # What may as well be steps of time, of as many features as rows, is told by its values.
            if not (self._several or (exact and rows > 1)) and any(rows in t.shape[1:2] for t in held):
                return 1
            self._adjacent = adjacent if rows > 1 else None
        self._several = count
        return count

    def _examples_first(self, t: torch.Tensor, rows: int) -> torch.Tensor:
        """Rows ``[rows k, ...]`` of a loop as ``[rows, k, ...]``."""
        return t.unflatten(0, (rows, -1)) if self._adjacent else t.unflatten(0, (-1, rows)).transpose(0, 1)

    def as_given(self, output: Any) -> Any:
        """What a model returned, its rows in the order of the latest call."""
        count = self._count
        if count == 1 or self._adjacent:
            return output

        def back(t: torch.Tensor) -> torch.Tensor:
            several = t.dim() and t.shape[0] and not t.shape[0] % count
            return t.unflatten(0, (-1, count)).transpose(0, 1).flatten(0, 1) if several else t

        return map_tensors(output, back)

    def _rows_first(self, path: Path, t: torch.Tensor) -> torch.Tensor:
        return t.movedim(1, 0) if path in self._second else t[None] if path in self._whole else t

    def _is_second(self, path: Path, t: torch.Tensor, rows: int, source: Any) -> bool | None:
        """Whether rows come second; None where nothing tells."""
        # One row of ids is the same for every example: positions, or a prompt.
        first, second = t.shape[0] == rows, t.shape[1] == rows and (t.dim() > 2 or t.shape[0] > 1)
        found = int(second) if first != second else None
        if first and second and path not in self._axes and source is not None and rows > 1:
            # As many tokens, or layers, as rows.
            found = source.row_axis(t)
            if found is None:
                return None
        if found is not None:
            self._axes.setdefault(path, found)
        return second and self._axes.get(path) == 1

    def _number(self, entry: Any) -> int:
        # Equal texts begin at one number in every call, by which a row is found again.
        number = zlib.crc32(repr(entry).encode("utf-8", "backslashreplace"))
        while self._entries.setdefault(number, entry) is not entry:
            number += 1
        return number

    def decode(self, call: Call) -> Call:
        """A call, or some rows of it, with its lists."""

        def listed(path: Path, t: torch.Tensor) -> Any:
            if self._count > 1:
                return t.flatten(0, 1) if t.dim() > 1 and t.shape[1] == self._count else t
            if path in self._second:
                return t.movedim(0, 1).contiguous()
            if not isinstance(t, RowNumbers):
                return t[0] if path in self._whole else t
            with torch._C.DisableTorchFunction():
                return self._kinds[path](self._entries[number] for number in t.tolist())

        made: Call = map_leaves(call, listed) if self or self._second or self._whole else call
        return made


def _entries_of_rows(held: Inputs, rows: int) -> set[Path]:
    """The places of tensors in lists of one entry a row; two may be a state with rows second."""
    keys: dict[Path, set[Any]] = {}
    parents = {path: [path[:at] for at in range(2, len(path)) if isinstance(path[at], int)] for path, _ in held}
    for path, own in parents.items():
        for parent in own:
            keys.setdefault(parent, set()).add(path[len(parent)])
    return {path for path, own in parents.items() if any(len(keys[parent]) == rows for parent in own)}


def as_long_as(tree: Any, rows: int) -> frozenset[Path]:
    """The places of the tensors whose first size is ``rows``: those that may carry rows, and others by chance."""
    return frozenset(path for path, t in leaves(tree) if t.dim() > 0 and t.shape[0] == rows)


def take_rows(tree: T, index: torch.Tensor, carriers: Collection[Path]) -> T:
    """The call on the rows ``index`` alone: tensors at the places ``carriers`` are cut, all others left as they are."""

    def take(path: Path, t: torch.Tensor) -> torch.Tensor:
        return t.index_select(0, index.to(t.device)) if path in carriers else t

    made: T = map_leaves(tree, take)
    return made


def slice_rows(tree: Any, rows: slice, carriers: Collection[Path]) -> Any:
    """As `take_rows`, for rows that follow each other: views, for which no index is copied to a device."""
    return map_leaves(tree, lambda path, t: t[rows] if path in carriers else t)


def unpadded(tree: T, carriers: Collection[Path]) -> T:
    """The call on one row without the padding that its attention mask tells of, at either end.

    Left as it is without such a mask, and where what would go is not the same in each place: then it is no padding of this
    mask (the labels of a decoder may be as long as the text of its encoder).
    """
    mask = next((t for p, t in leaves(tree) if p in carriers and p[-1] == "attention_mask" and t.dim() == 2), None)
    if mask is None or not bool((mask != 0).any()) or bool((mask != 0).all()):
        return tree
    kept, width = (mask[0] != 0).nonzero()[:, 0], mask.shape[1]
    start, end = int(kept[0]), int(kept[-1]) + 1

    def holds(path: Path, t: torch.Tensor) -> bool:
        return path in carriers and t.dim() > 1 and t.shape[1] == width

    for path, t in leaves(tree):
        for outside in (t[:, :start], t[:, end:]) if holds(path, t) else ():
            if outside.shape[1] and not bool((outside == outside[:, :1]).all()):
                return tree
    made: T = map_leaves(tree, lambda path, t: t[:, start:end] if holds(path, t) else t)
    return made


def take_tokens(tree: Any, row: int, start: int, end: int, shape: tuple[int, int]) -> Any:
    """The call on one packed unit: tokens [start, end) of a row, as a batch of one."""

    def take(t: torch.Tensor) -> torch.Tensor:
        return t[row : row + 1, start:end] if tuple(t.shape[:2]) == shape else t

    return map_tensors(tree, take)


def cropped(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both cut to the sizes that they share: at the end, or at the start where they agree better."""
    sizes = [min(n, m) for n, m in zip(a.shape, b.shape)]
    starts = [t[tuple(slice(0, n) for n in sizes)] for t in (a, b)]
    if a.shape == b.shape:
        return starts[0], starts[1]
    ends = [t[tuple(slice(m - n, m) for n, m in zip(sizes, t.shape))] for t in (a, b)]
    one, two = min(starts, ends, key=lambda pair: float((pair[0].double() - pair[1].double()).nan_to_num().abs().sum()))
    return one, two


def row_of(call: Call, rows: int, single: Call | None, otherwise: int = 0) -> int:
    """The row of a call that holds what another call holds alone, padding aside; ``otherwise`` if there is none.

    Flat tokens, and rows on another axis, do not tell their row.
    """
    if single is None or rows == 1 or any(t.shape[0] != 1 for t in tensors(single) if t.dim()):
        return otherwise
    pairs = [(t, own) for (_, t), (_, own) in zip(leaves(call), leaves(single)) if t.dim() and t.shape[0] == rows]
    # Of rows with equal inputs, whose labels may differ, it is the expected one.
    for row in (otherwise, *range(rows)):
        if all(t.dim() == own.dim() and torch.equal(*cropped(t[row], own[0])) for t, own in pairs if own.dim()):
            return row
    return otherwise


def options(call: Call, free: Collection[Path] = ()) -> frozenset[Any]:
    """What a call holds beside tensors, by its place: choices by their value, ``free`` texts and the rest by their type."""
    values = [(path, value) for path, value in everything(call) if not isinstance(value, torch.Tensor)]
    return frozenset([(path, v if isinstance(v, (bool, str)) and path not in free else type(v)) for path, v in values])


def wrong_rows(call: Call, rows: int) -> str:
    """The refusal of a call that is not what the loader handed out."""
    found = {path: t.shape for path, t in leaves(call) if t.dim() > 1}
    if rows > 1 and found and all(shape[0] == 1 for shape in found.values()):
        lacking = any(path[-1] == "seq_idx" for path in found)
        return "This collator packs examples into one row. Pass unit_map='seq_idx' and set use_cache=False." + (
            "" if lacking else " Make the collator with return_seq_idx=True."
        )
    sizes = sorted({t.shape[0] for t in tensors(call) if t.dim()})
    way = "pass each batch once, and concatenate inside a wrapper module's forward()"
    if sizes and sizes[-1] < rows:
        way = "pass each batch whole, and max_physical_batch_size to split it"
    return (
        f"the loader handed out {rows} rows but the model was called with {', '.join(map(str, sizes)) or 'none'}: {way}"
    )


def single_rows(call: Call, carriers: frozenset[Path], rows: int, trim: bool) -> Iterator[Call]:
    """The call on each of its rows; ``trim`` removes the padding that an attention mask shows."""
    for row in range(rows):
        single = take_rows(call, torch.tensor([row]), carriers)
        yield unpadded(single, carriers) if trim else single
