"""How a microbatch was made of its examples, so that a check can make it again with other companions or alone."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Number
from typing import Any

import torch

from fastdp.calls.batches import Call, Path, cropped, everything, leaves, map_leaves
from fastdp.calls.errors import SelfCheckError
from fastdp.calls.generators import SEEDS, HeldGenerators
from fastdp.calls.marks import Marks
from fastdp.calls.randomness import rng_state, seeded, version

#: Examples that are read between two reads of one.
_READ_BETWEEN = 3
#: Examples of the data set from which a probe batch takes companions.
_SAMPLED = 8


@dataclass(frozen=True)
class Collation:
    """The examples of a microbatch, and the tensors that the loader handed out for them.

    Args:
        dataset, collate: the user's own.
        indices: the examples of the microbatch, in order.
        batch: the tensors that were handed out, by path.
        versions: how often each had been written to by then.
        unit_map: for packed rows, the entry that names the example of each token; it is handed to nobody.
    """

    dataset: Any
    collate: Callable[[list[Any]], Any]
    indices: Sequence[int]
    batch: dict[Path, torch.Tensor]
    versions: tuple[int, ...] = ()
    unit_map: str | None = None
    #: Tensors that a loop had before it was given this batch, and how often each had been written to.
    earlier: Marks[int] | None = None

    @classmethod
    def of(
        cls,
        dataset: Any,
        collate: Callable[[list[Any]], Any],
        indices: Sequence[int],
        batch: Any,
        unit_map: str | None = None,
    ) -> Collation:
        """The collation of a batch that is about to be handed out."""
        held = dict(leaves(batch))
        return cls(dataset, collate, indices, held, tuple(map(version, held.values())), unit_map)

    def sources(self, call: Call) -> dict[Path, Path] | None:
        """For each tensor of a call the path of the same tensor in the batch; None if the loop made one of them itself.

        A tensor that was moved to another device counts as the same if values agree, and one of that name before others.
        """
        unwritten = {path: t for (path, t), seen in zip(self.batch.items(), self.versions) if version(t) == seen}
        found: dict[Path, Path] = {}
        for path, t in leaves(call):
            same = [p for p, own in unwritten.items() if own is t]
            if not same:
                copies = [p for p, own in unwritten.items() if _is_copy(t, own)]
                same = [p for p in copies if p[-1:] == path[-1:] or self.batch[p].device != t.device]
                same.sort(key=lambda p: p[-1:] != path[-1:])
            if not same:
                return None
            found[path] = same[0]
        return found

    def makes(self, call: Call) -> bool:
        """Whether a call holds tensors or numbers that are not the loader's own."""
        given = dict(zip(map(id, self.batch.values()), self.versions))
        if all(
            given.get(id(v)) == version(v) if type(v) is torch.Tensor else type(v) in (type(None), bool, str)
            for v in (*call[0], *call[1].values())
        ):
            # What the loader handed out, and nobody wrote to; anything else is compared.
            return False
        values = (v for _, v in everything(call) if not isinstance(v, (torch.Tensor, bool)))
        return self.sources(call) is None or any(isinstance(v, Number) or hasattr(v, "dtype") for v in values)

    def predates(self, t: torch.Tensor) -> bool:
        """Whether a loop had a tensor, as it is, before it was given this batch, so that it holds none of its rows."""
        # A collator may hand out the data set's own tensors.
        handed_out = any(own is t for own in self.batch.values())
        return self.earlier is not None and self.earlier.get(t) == version(t) and not handed_out

    def row_axis(self, t: torch.Tensor) -> int | None:
        """The axis, 0 or 1, along which a tensor of equal first sizes has this batch's rows; None where nothing tells."""
        single = {path: own.shape for path, own in leaves(self.single(*self.items([0])))}
        found = [(0, 0)]
        for path, own in self.batch.items():
            shape = single.get(path, ())
            axis = int(len(shape) > 1 and shape[0] != 1 and shape[1] == 1)
            if own is t or (_is_copy(t, own) and not _is_copy(t.movedim(0, 1), own)):
                return axis
            if own.dim() == t.dim() and own.shape[axis] == t.shape[0]:
                first, second = (_evidence(t.movedim(n, 0), own.to(t.device).movedim(axis, 0)) for n in (0, 1))
                found.append((abs(first - second), int(second > first)))
        evidence, axis = max(found)
        if evidence:
            return axis
        # Recurrent layers begin with states of zeros, [layers, rows, width].
        return 1 if t.dim() > 2 and bool((t == t.flatten()[0]).all()) else None

    def lists_examples(self, t: torch.Tensor) -> bool:
        """Whether a tensor stands in a list of this batch that has one entry for each example.

        Such a list has one entry more where one example more is collated.
        """
        same = [path for path, own in self.batch.items() if own is t or _is_copy(t, own)]
        path, count = next(iter(same), ()), len(self.indices)
        more = dict(leaves(self.collated(self.items([0]) * (count + 1)))) if len(path) > 1 else {}
        return any((*path[:at], count, *path[at + 1 :]) in more for at, key in enumerate(path) if type(key) is int)

    def joins_examples(self, call: Call) -> bool:
        """Whether the collator joins what examples have several of, as the nodes of graphs, along one axis of a call's tensor.

        Rows cannot be cut from such a tensor. Where all of them have equally many in all tensors, they can.
        """
        sources = self.sources(call)
        if sources is None:
            return False
        item = max(self.items(range(len(self.indices))[:_SAMPLED]), key=example_length)
        one, two = (dict(leaves(made)) for made in (self.single(item), self.collated([item] * 2)))
        if {t.shape[0] for t in two.values() if t.dim() > 1} == {1}:
            # Packed rows want a unit map, which is faster.
            return False
        joined, uniform = False, True
        for path, own in ((path, self.batch[path]) for path in sources.values() if self.batch[path].dim()):
            pairs = list(zip(one[path].shape, two[path].shape)) if path in one and path in two else []
            joined |= any(a > 1 and b == 2 * a for a, b in pairs)
            uniform &= bool(pairs) and pairs[0][0] > 1 and own.shape[0] == pairs[0][0] * len(self.indices)
        return joined and not uniform

    def adjacent_rows(self, given: Sequence[torch.Tensor], count: int) -> tuple[bool, bool]:
        """Whether the ``count`` rows that a loop made of each example lie side by side, and whether this batch shows it exactly.

        Otherwise the first rows of all examples come first, as `torch.cat` leaves them.
        """
        nearest = [float("inf")] * 2
        for t, own in itertools.product(*([t.detach().cpu() for t in held] for held in (given, self.batch.values()))):
            rows = t.shape[0] // count
            orders = t.unflatten(0, (count, rows)).transpose(0, 1), t.unflatten(0, (rows, count))
            for order, made in enumerate(orders):
                # Either all rows of an example are one entry of the batch, or each is one.
                for view in (made, *made.unbind(1)):
                    if view.dim() != own.dim() or view.shape[0] != own.shape[0]:
                        continue
                    one, other = (x.double() for x in cropped(view, own))
                    # Ones of a mask are like any others.
                    if len(other.unique()) > 1:
                        nearest[order] = min(nearest[order], float((one - other).abs().mean()))
        return nearest[1] < nearest[0], min(nearest) == 0

    def items(self, rows: Sequence[int]) -> list[Any]:
        """The examples of these rows, read again."""
        return [self.dataset[self.indices[row]] for row in rows]

    def collated(self, items: Sequence[Any], seed: int = 0) -> Any:
        """What the user's collator makes of copies of some examples, under this seed."""
        with seeded(seed, self.collate):
            made = self.collate([copy.deepcopy(item) for item in items])
        if self.unit_map is not None and hasattr(made, "pop"):
            made.pop(self.unit_map, None)
        return made

    def copies(self, call: Call, row: int, count: int) -> Call | None:
        """The call on so many copies of a row, collated together; None if its tensors are not the collator's own."""
        sources = self.sources(call)
        return None if sources is None else self.call(call, sources, self.collated(self.items([row]) * count))

    def single(self, item: Any, seed: int = 0) -> Any:
        """What the user's collator makes of one example. Raises ValueError if it fails on one."""
        try:
            return self.collated([item], seed)
        except Exception as error:
            raise ValueError(f"the collator fails on a single example, and sampling will draw one: {error}") from error

    def call(self, like: Call, sources: Mapping[Path, Path], batch: Any) -> Call:
        """A call like this one, with tensors of another batch."""
        tensors = dict(leaves(batch))

        def other(path: Path, t: torch.Tensor) -> torch.Tensor:
            return tensors[sources[path]].to(t.device, t.dtype)

        made: Call = map_leaves(like, other)
        return made

    def alone(self, call: Call) -> Iterator[Call]:
        """The call on each example, collated by itself. Raises ValueError if the loop makes tensors of its own."""
        sources = self.sources(call)
        if sources is None:
            raise ValueError(
                "Padding changes this model's loss, and the loop makes tensors of the batch. Make them in the collator, or pass "
                "position_ids and an attention mask."
            )
        for row in range(len(self.indices)):
            yield self.call(call, sources, self.single(*self.items([row])))

    def probes(self, rows: int, *, stills: int = 0) -> list[ProbeBatch]:
        """Batches of at most ``rows`` examples: two copies of a short one, it with all others, beside different ones, and still.

        It stands first and then last, under another seed, with one batch between what is compared: a loop that mixes rows, or
        rows of its last two batches, may leave one place as it is. None if every batch holds one example, so that none can
        reach another.
        """
        spread = spread_indices(len(self.dataset), _SAMPLED)
        # Padding repeats examples, which would be taken for each other.
        own = list(dict.fromkeys([*self.indices, *spread]))[:rows]
        items = {index: self.dataset[index] for index in dict.fromkeys([*own, *spread])}
        if rows < 2 or len(items) < 2:
            return []
        # Not the one with the largest entry, which a division by the largest would leave as it is alone.
        first, *others = sorted(own, key=lambda index: (example_length(items[index]), largest_entry(items[index])))
        strangers = [index for index in items if index not in own] or [first]
        others = others or strangers[:1]
        # A longest one stays among them, so that shapes do, at another place: a loop that rolls rows then gives others.
        longer = example_length(items[others[-1]]) > example_length(items[first])
        kept = others[-1:] if len(others) > 1 and longer else []
        beside = [*itertools.islice(itertools.cycle(strangers), len(others) - len(kept)), *kept]
        small, large = SEEDS
        # Of one row, a loop's squeeze() would drop the axis. A loop that keeps some of the batch before gets the same twice.
        plan = [("alone", 0, small, [first, first])] * (1 if stills else 2)
        for role, companions in (("together", [*others[1:], others[0]]), ("beside", beside)):
            plan += [(role, 0, small, [first, *companions]), (role, len(others), large, [*companions, first])]
        # What a loop divides by the batch's labels changes for the others where one of them is left out.
        plan += [("fewer", 0, small, [first, *others[1:]])] if len(others) > 1 and not stills else []
        plan += stills * [("still", 0, small, [first, first])]
        return [
            ProbeBatch(
                replace(self, indices=rows, batch={}, versions=()), [items[index] for index in rows], role, at, seed
            )
            for role, at, seed, rows in plan
        ]

    def draws(self, row: int) -> tuple[bool, bool]:
        """Whether reading an example, and collating one, draw random numbers or give something else under another seed.

        Draws may happen to change nothing, as where few words are masked.

        Raises `SelfCheckError` if reading it gives something else under the same seed, after others were read.
        """
        index, held, reads, first = self.indices[row], HeldGenerators(self.dataset), False, []
        for seed in SEEDS:
            found = []
            for begin in (0, _READ_BETWEEN):
                for other in itertools.islice(itertools.cycle(self.indices), begin, begin + _READ_BETWEEN):
                    self.dataset[other]
                with held.at(seed):
                    item, drew = _watched(lambda: copy.deepcopy(self.dataset[index]), seed)
                found.append(item)
                reads |= drew
            if not _same(*found):
                raise SelfCheckError(
                    "The data set returns another value for an example after others were read. Compute each from its own "
                    "record; this batch was not released."
                )
            first.append(found[0])
        one, other = (self.single(first[0], seed) for seed in SEEDS)
        with (collator := HeldGenerators(self.collate)):
            collates = _watched(lambda: self.collate([copy.deepcopy(first[0])]), 0)[1]
        return reads or held.drawn or not _same(*first), collates or collator.drawn or not _same(one, other)

    def check_mixing(self, rows: Sequence[int]) -> None:
        """Raise `SelfCheckError` if, under one seed, a row that a collator makes follows from the other rows."""
        longest = max(rows, key=lambda row: example_length(self.items([row])[0]))
        others = [row for row in range(len(self.indices)) if row not in (rows[0], longest)]
        if not others:
            return
        first, kept, *changed = self.items([rows[0], longest, others[0], others[-1], rows[0]])
        for seed in SEEDS:
            one, *more = (dict(leaves(self.collated([first, kept, other], seed))) for other in changed)
            for path, t in one.items():
                found = [batch[path] for batch in more if path in batch and batch[path].shape == t.shape and t.dim()]
                if not all(_values_equal(t[0], other[0]) for other in found):
                    raise mixes(path[-1])

    def check_packed(self, row: int) -> None:
        """Raise `SelfCheckError` if an example's tokens in packed rows are others than where it is packed alone."""
        assert self.unit_map is not None
        with seeded(0):
            alone = dict(leaves(self.collate([copy.deepcopy(item) for item in self.items([row])])))
        path = (self.unit_map,)
        found = self.batch[path] == row
        for own, t in alone.items():
            if own == path or own not in self.batch or t.shape[:2] != alone[path].shape:
                continue
            if not _values_equal(t[alone[path] == 0], self.batch[own][found]):
                raise SelfCheckError(
                    f"The collator packs an example with other tokens in {own[-1]!r} beside others. Cut each example by itself; "
                    "this batch was not released."
                )


@dataclass(frozen=True)
class ProbeBatch:
    """One small batch that verifies the loop.

    Args:
        source: the data set, the collator, and the examples of this batch.
        items: the examples as they were read.
        role: "together", "beside", "alone" for two copies, or "still" for the same again.
        row: that of the example which is compared.
        seed: of the random states that the loop finds.
        generators: the loop's own.
    """

    source: Collation
    items: Sequence[Any]
    role: str
    row: int
    seed: int
    generators: HeldGenerators = field(default_factory=HeldGenerators)

    def rng_state(self, model: torch.nn.Module) -> tuple[bytes, ...]:
        """Fingerprint of every generator that the model, a criterion or the loop may draw from."""
        return *rng_state(model), *self.generators.states()

    def drew(self) -> bool:
        """Whether the loop drew random numbers since it was given this batch."""
        now = rng_state()
        with seeded(self.seed):
            return rng_state() != now or self.generators.moved()


def spread_indices(size: int, count: int) -> list[int]:
    """At most ``count`` indices from all over a data set, by multiples of the golden ratio: more of them begin with fewer."""
    return list(dict.fromkeys(int(size * (0.6180339887498949 * k % 1)) for k in range(count)))


def _watched(make: Callable[[], Any], seed: int) -> tuple[Any, bool]:
    """What a function returns under this seed, and whether it drew from a random state of the host."""
    with seeded(seed):
        before = rng_state()
        return make(), rng_state() != before


def mixes(entry: object) -> SelfCheckError:
    """The refusal of a collator that makes an example's row from other examples too."""
    return SelfCheckError(
        f"The collator makes an example's {entry!r} from other examples too. Make each row from its own example; this batch "
        "was not released."
    )


def _same(one: Any, other: Any) -> bool:
    """Whether two nestings hold the same tensors and plain values."""
    pairs = list(zip(everything(one), everything(other), strict=False))
    return all(_equal(a, b) for (_, a), (_, b) in pairs)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return isinstance(a, type(b)) and _values_equal(a, b)
    if hasattr(a, "tobytes") and hasattr(b, "tobytes"):
        return bool(a.tobytes() == b.tobytes())
    return not isinstance(a, (bool, int, float, str)) or a == b or a != a


def _values_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num())


def _evidence(t: torch.Tensor, own: torch.Tensor) -> int:
    """By how many entries one tensor follows from another, as a mask does from ids: those that equal others; 0 if it does not.

    Both are cut to the sizes that they share, at the end or at the start: a loop may leave the last token out.
    """
    if _values_equal(*cropped(t, own)):
        return 2 * own.numel()
    found, sizes = 0, [min(n, m) for n, m in zip(t.shape, own.shape)]
    for ends in (False, True):
        made, given = (
            x[tuple(slice((m - n) * ends, m if ends else n) for n, m in zip(sizes, x.shape))].nan_to_num()
            for x in (t, own)
        )
        distinct, places = torch.unique(given, return_inverse=True)
        values = torch.zeros(len(distinct), dtype=t.dtype, device=t.device)
        values[places] = made
        found = max(found, (given.numel() - len(distinct)) * torch.equal(values[places], made))
    return found


def _is_copy(t: torch.Tensor, own: torch.Tensor) -> bool:
    """Whether a tensor is another device's, or another type's, copy of the loader's own."""
    moved = t.device != own.device or t.dtype != own.dtype or own.data_ptr() == t.data_ptr()
    return moved and t.shape == own.shape and _values_equal(own.to(t), t)


def example_length(item: Any) -> int:
    """Elements of an example's longest sequence, text or tensor; 0 if it has none."""
    if isinstance(item, torch.Tensor):
        return item.numel()
    if isinstance(item, (dict, Mapping)):
        longest = 0
        for field in item.values():
            # A step asks this of each of its examples, most of whose fields are tensors.
            length = field.numel() if type(field) is torch.Tensor else example_length(field)
            longest = length if length > longest else longest
        return longest
    if isinstance(item, (tuple, list)):
        plain = not item or isinstance(item[0], (int, float))
        return len(item) if plain else max(map(example_length, item))
    if isinstance(item, str):
        return len(item)
    size = getattr(item, "size", 0)  # numpy's arrays
    return size if isinstance(size, int) else 0


def largest_entry(item: Any) -> float:
    """The largest absolute entry of an example's floating-point tensors, 0 without any."""
    entries = [t for _, t in leaves(item) if t.is_floating_point() and t.numel()]
    return max((float(t.detach().abs().max()) for t in entries), default=0.0)
