"""A collator run again: what it gives an example must not depend on the example's companions, padding aside."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fastdp.engine.batches import Path, leaves
from fastdp.engine.chance import seeded
from fastdp.engine.errors import SelfCheckError

_OWN, _STRANGERS = 3, 5
_REFUSAL = (
    "; mixing, repeating, sorting and cutting by the batch let an example's contribution depend on others; "
    "nothing was released"
)


@dataclass(frozen=True)
class Collation:
    """How a micro-batch came about.

    Args:
        dataset, collate: the user's own.
        indices: the examples of the micro-batch, in order.
        batch: the tensors that were handed out, by their places: copies of them where a loop may write into them unseen.
        writes: how often each had been written to then.
        unit_map: of rows that several examples share, the entry that names the example of each token.
    """

    dataset: Any
    collate: Callable[[list[Any]], Any]
    indices: Sequence[int]
    batch: dict[Path, torch.Tensor]
    unit_map: str | None = None
    writes: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        dataset: Any,
        collate: Callable[[list[Any]], Any],
        indices: Sequence[int],
        batch: Any,
        unit_map: str | None = None,
        *,
        copied: bool = False,
    ) -> Collation:
        """Of a batch that is about to be handed out; ``copied`` keeps its tensors as they are now, whatever is done to them."""
        held = {path: t.clone() if copied else t for path, t in leaves(batch)}
        return cls(dataset, collate, indices, held, unit_map, tuple(map(_written, held.values())))

    def unwritten(self) -> list[torch.Tensor]:
        """The tensors of the batch that nothing has written to since it was handed out."""
        return [t for t, count in zip(self.batch.values(), self.writes) if _written(t) == count]

    def items(self, own: int = _OWN) -> list[Any]:
        """So many examples of the micro-batch, and a few spread over the data set, whose lengths differ more."""
        chosen = dict.fromkeys((*self.indices[:own], *spread(len(self.dataset), _STRANGERS)))
        return [self.dataset[index] for index in list(chosen)[: own + _STRANGERS]]

    def together(self, items: Sequence[Any], seed: int = 0) -> dict[Path, torch.Tensor]:
        """Their tensors, collated from copies (collators may take examples apart) under a random state of our own."""
        return dict(leaves(self.collated(items, seed)))

    def collated(self, items: Sequence[Any], seed: int = 0) -> Any:
        """What the user's collator makes of them, likewise."""
        with seeded(seed):
            return self.collate([copy.deepcopy(item) for item in items])

    def _values(self, items: Sequence[Any], seed: int = 0) -> dict[Path, torch.Tensor]:
        """Their tensors, and their numbers as tensors too."""
        return dict(values(self.collated(items, seed), single=len(items) == 1))

    def require_independence(self) -> None:
        """Raise `SelfCheckError` if an example's row depends on its companions, ValueError if one cannot stand alone."""
        self._require_repeatable()
        items = self.items()
        if self.unit_map is not None:
            self._require_packed_independence(items)
            return
        shorter = _halved(items[0])
        if shorter is not None and self._takes(shorter, items):
            items.append(shorter)
        try:
            alone = [self._values([item]) for item in items]
        except Exception as error:
            raise ValueError(
                f"the collator fails on a single example, and random sampling will draw one: {error}"
            ) from error
        if len(items) < 2:
            return
        if any(not same(self._values([i], 1), a) for i, a in zip(items, alone)):
            self._random(items, alone)
            return
        for order in (list(range(len(items))), list(reversed(range(len(items))))):
            batch = self._values([items[i] for i in order])
            for row, i in enumerate(order):
                self._require_same_row(alone[i], batch, row, len(items))
            # Of texts alone a loop has to make tensors, and what it makes is tried.
            if alone[0] and not any(_holds_rows(own, batch.get(path), len(items)) for path, own in alone[0].items()):
                raise SelfCheckError("the collator does not give each example one row of its own" + _REFUSAL)

    def require_own(self, rows: Sequence[int]) -> bool:
        """Whether these rows of the batch are what their examples get alone, or what says so can be told at all.

        Raises `SelfCheckError` if they are not, and all of the batch collated again shows it. False says that data set or
        collator draw by chance, or change by themselves, so that nothing follows.
        """
        known = {path: t for (path, t), count in zip(self.batch.items(), self.writes) if _written(t) == count}
        for row in rows:
            try:
                alone = self._values([self.dataset[self.indices[row]]])
            except Exception:
                # Of one example alone the first batch told what a collator makes.
                return False
            try:
                self._require_same_row(alone, known, row, len(self.indices))
            except SelfCheckError:
                self._require_repeatable()
                items = [self.dataset[index] for index in self.indices]
                one, two = self._values(items), self._values(items, 1)
                self._require_same_row(self._values([items[row]]), one if same(one, two) else {}, row, len(items))
                return False
        return True

    def _require_same_row(
        self, alone: dict[Path, torch.Tensor], batch: dict[Path, torch.Tensor], row: int, rows: int
    ) -> None:
        if self.unit_map is not None:
            if (self.unit_map,) in batch:
                self._require_same_tokens(self._tokens(alone, 0), self._tokens(batch, row))
            return
        for path, own in alone.items():
            if not _holds_rows(own, batch.get(path), rows):
                _require_constant(path, own, batch.get(path))
            elif not _padded(own[0], batch[path][row]):
                raise SelfCheckError(
                    f"the collator gives an example another row of {_named(path)} in company than alone" + _REFUSAL
                )

    @staticmethod
    def _require_same_tokens(alone: dict[Path, torch.Tensor], found: dict[Path, torch.Tensor]) -> None:
        for path, own in alone.items():
            if path not in found or not torch.equal(found[path].nan_to_num(), own.nan_to_num()):
                raise SelfCheckError(
                    f"the collator gives an example other tokens of {_named(path)} packed with others than alone"
                    + _REFUSAL
                )

    def _require_packed_independence(self, items: list[Any]) -> None:
        """Raise `SelfCheckError` if an example's tokens are others where it is packed beside others.

        Whole numbers of no token may say where examples begin and end; fractions of none are of all examples together.
        """
        alone = [self._tokens(self._values([item]), 0) for item in items]
        if any(not same(self._tokens(self._values([i], 1), 0), a) for i, a in zip(items, alone)):
            return
        for order in (list(range(len(items))), list(reversed(range(len(items))))):
            batch = self._values([items[i] for i in order])
            for number, i in enumerate(order):
                self._require_same_tokens(alone[i], self._tokens(batch, number))
            fractions = {path for path, t in batch.items() if t.is_floating_point() and path not in alone[0]}
            for path, own in self._values([items[0]]).items():
                if path in fractions:
                    _require_constant(path, own, batch[path])

    def _tokens(self, values: dict[Path, torch.Tensor], number: int) -> dict[Path, torch.Tensor]:
        """Of a packed batch everything that is by token, for one of its examples."""
        units = values[(self.unit_map,)]
        return {
            path: t[units == number]
            for path, t in values.items()
            if t.shape[: units.dim()] == units.shape and path != (self.unit_map,)
        }

    def _require_repeatable(self) -> None:
        """Raise `SelfCheckError` if an example reads otherwise after others were read; what it draws is drawn alike."""
        index = self.indices[0]
        others = [i for i in spread(len(self.dataset), _STRANGERS) if i != index]
        # What was read last may be one of the others: so that it is not, the example itself is.
        self.dataset[index]
        with seeded(0):
            first = copy.deepcopy(self.dataset[index])
        for other in others:
            self.dataset[other]
        with seeded(0):
            again = self.dataset[index]
        if not same(dict(leaves(first)), dict(leaves(again))):
            raise SelfCheckError(
                "the data set gives an example otherwise after others were read: let each depend on its own record alone; "
                "nothing was released"
            )

    def _takes(self, shorter: Any, items: list[Any]) -> bool:
        """Whether an example of half the length is one that this collator puts beside others."""
        try:
            self.together([shorter])
            self.together([*items, shorter])
        except Exception:
            return False
        return True

    def _random(self, items: list[Any], alone: list[dict[Path, torch.Tensor]]) -> None:
        """For a collator that draws at random: the same draws, in the same shapes, beside one companion and another."""
        sizes = [sum(t.numel() for t in tensors.values()) for tensors in alone]
        longest = max(range(len(items)), key=sizes.__getitem__)
        first, *rest = [item for i, item in enumerate(items) if i != longest]
        for other in rest[:2]:
            for at in (0, 1):
                pairs = [[items[longest], c] if at == 0 else [c, items[longest]] for c in (first, other)]
                one, two = (self._values(pair) for pair in pairs)
                for path, t in one.items():
                    if t.dim() == 0:
                        _require_constant(path, t, two.get(path))
                    alike = path in two and t.shape == two[path].shape and t.shape[:1] == (2,)
                    if alike and not torch.equal(t[at], two[path][at]):
                        raise SelfCheckError(
                            f"the collator gives an example another row of {_named(path)} beside another companion"
                            + _REFUSAL
                        )


def _written(t: torch.Tensor) -> int:
    return 0 if t.is_inference() else t._version


def _halved(item: Any) -> Any:
    """The example with every sequence in it cut to half its length; None where there is none to cut."""

    def cut(value: Any) -> Any:
        whole = isinstance(value, (list, tuple)) or (isinstance(value, torch.Tensor) and value.dim() > 0)
        return value[: len(value) // 2] if whole and len(value) > 1 else value

    if isinstance(item, Mapping):
        half = {key: cut(value) for key, value in item.items()}
        return half if any(half[key] is not item[key] for key in half) else None
    return cut(item) if isinstance(item, list) and len(item) > 1 else None


def spread(size: int, count: int) -> list[int]:
    """Up to ``count`` different numbers below ``size``, from all over and at no period that data may have."""
    golden = 0.6180339887498949
    return list(dict.fromkeys(int(size * (golden * k % 1)) for k in range(count)))


def _holds_rows(own: torch.Tensor, batch: torch.Tensor | None, rows: int) -> bool:
    return own.dim() > 0 and own.shape[0] == 1 and batch is not None and batch.dim() > 0 and batch.shape[0] == rows


def values(tree: Any, path: Path = (), *, single: bool) -> Iterator[tuple[Path, torch.Tensor]]:
    """Every tensor and number of a batch, a list of numbers as one tensor; of a ``single`` example's none in its lists of one."""
    if isinstance(tree, torch.Tensor):
        yield path, tree
    elif isinstance(tree, bool):
        yield path, torch.tensor(tree)
    elif isinstance(tree, (int, float)):
        yield path, torch.tensor(tree, dtype=torch.float64)
    elif (array := _of_numpy(tree)) is not None:
        yield path, array
    elif isinstance(tree, Mapping) or hasattr(tree, "items"):
        for key, value in tree.items():
            yield from values(value, (*path, key), single=single)
    elif isinstance(tree, (list, tuple)):
        if tree and all(isinstance(value, (bool, int, float)) for value in tree):
            yield path, torch.tensor(tree, dtype=torch.float64)
        elif single and len(tree) == 1 and path:
            # What such a list holds is its example's own, and stands elsewhere in company.
            yield from leaves(tree, path)
        else:
            for position, value in enumerate(tree):
                yield from values(value, (*path, position), single=single)


def _of_numpy(value: Any) -> torch.Tensor | None:
    """An array, or a number of numpy's, as a tensor; None for anything else, and for what holds no numbers."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, (numpy.ndarray, numpy.generic)) or value.dtype.kind not in "biuf":
        return None
    return torch.from_numpy(numpy.array(value))


def _require_constant(path: Path, own: torch.Tensor, batch: torch.Tensor | None) -> None:
    """Raise `SelfCheckError` for what is no row and is another with other records, lengths aside."""
    if batch is None or own.dim() != batch.dim() or own.dtype != batch.dtype:
        return
    fits = all(n <= m for n, m in zip(own.shape, batch.shape))
    if not (_padded(own, batch) if fits else _padded(batch, own)):
        raise SelfCheckError(
            f"the collator makes {_named(path)} of all examples together, so that each would reach the others by it: give "
            "every example a row of its own; nothing was released"
        )


def same(a: dict[Path, torch.Tensor], b: dict[Path, torch.Tensor]) -> bool:
    """Whether two batches hold the same tensors."""
    return a.keys() == b.keys() and all(
        a[p].shape == b[p].shape and torch.equal(a[p].nan_to_num(), b[p].nan_to_num()) for p in a
    )


def _padded(own: torch.Tensor, row: torch.Tensor) -> bool:
    """Whether a row in company is the row alone, with something before or behind it."""
    if own.dim() != row.dim() or any(n > m for n, m in zip(own.shape, row.shape)):
        return False
    starts = row[tuple(slice(0, n) for n in own.shape)]
    ends = row[tuple(slice(m - n, m) for n, m in zip(own.shape, row.shape))]
    own = own.nan_to_num()
    return torch.equal(starts.nan_to_num(), own) or torch.equal(ends.nan_to_num(), own)


def _named(path: Path) -> str:
    return repr(path[-1]) if path else "the batch"
