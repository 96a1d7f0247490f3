"""Public shapes: microbatches in which no record decides the shapes, or the place, of another one (docs/clipping.md)."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fastdp.calls.batches import Path, leaves, map_leaves
from fastdp.private.sampler import Sampler

#: The probability, for each logical batch, of more units than there are places.
TAIL = 2.0**-40
#: The entries of a batch that have a known pad value, beside the tokenizer's own.
_PADS = {"attention_mask": 0, "token_type_ids": 0, "position_ids": 0, "completion_mask": 0}

#: How far one record's length moved the sum of 64 equal ones, in units of the bound: `bench/results/cpu/shapes.json`.
_MOVED = {"float32": "3.7e-05", "bfloat16": "0.63"}


@dataclass(frozen=True)
class PublicShapes:
    """The sequence lengths of microbatches, and how to pad to them.

    Args:
        lengths: the lengths that sequences are padded to; () for the powers of two. Each row goes to the first length above
            its own: it ends in padding, since transformers leaves out an attention mask that covers everything.
        pad: the pad value of batch entries by name or position, beside those of a tokenizer's collator.
    """

    lengths: tuple[int, ...] = ()
    pad: Mapping[Any, float] = field(default_factory=dict)

    @classmethod
    def of(cls, shapes: Any) -> PublicShapes | None:
        """What `make_private` was given. Raises ValueError for anything else."""
        if shapes is None:
            return None
        given = {"lengths": shapes} if isinstance(shapes, (list, tuple)) else shapes
        given = {} if given == "public" else given
        if not isinstance(given, Mapping) or not {*given} <= {"lengths", "pad"}:
            raise ValueError(
                f"shapes is {shapes!r}: use 'public', a list of sequence lengths, or a mapping of 'lengths' and 'pad'"
            )
        lengths = tuple(sorted(given.get("lengths", ())))
        if not all(type(length) is int and length > 1 for length in lengths):
            raise ValueError(f"shapes has the lengths {lengths}: give whole numbers above 1")
        return cls(lengths, dict(given.get("pad", {})))

    def above(self, length: int) -> int:
        """The first public length above a row's own. Raises ValueError if there is none."""
        longer = (own for own in self.lengths or (2 ** length.bit_length(),) if own > length)
        if (found := next(longer, None)) is None:
            raise ValueError(
                f"A row has {length} tokens, and public lengths end at {self.lengths[-1]}. Truncate rows to "
                f"{self.lengths[-1] - 1}, or add a length to shapes."
            )
        return found


def grid_size(size: int) -> int:
    """The first size at or above this one of a public grid, which has four to an octave."""
    step = 1 << max(0, size.bit_length() - 3)
    return -(-size // step) * step


class ShapedCollator:
    """A collator that pads sequences to public lengths; ``rows`` is the number of rows in a place, the slot of one unit."""

    def __init__(self, collate: Callable[[list[Any]], Any], shapes: PublicShapes, rows: int = 1):
        self.collate, self.shapes, self.rows = collate, shapes, rows
        # transformers' Trainer has one that leaves out columns around it.
        collate = getattr(collate, "data_collator", collate)
        tokenizer = getattr(collate, "tokenizer", None) or getattr(collate, "processing_class", None)
        self.left = getattr(tokenizer, "padding_side", "right") == "left"
        named = [getattr(own, name, None) for own in (tokenizer, collate) for name in ("pad_token_id", "pad_token")]
        token = next((value for value in named if isinstance(value, int)), None)
        self.pads = dict(shapes.pad)
        if token is not None:
            labels = getattr(collate, "label_pad_token_id", -100)
            self.pads = _PADS | {"labels": labels, "input_ids": token, "decoder_input_ids": token} | self.pads

    def __call__(self, items: Sequence[Any]) -> Any:
        """The batch of some examples, each sequence padded to the first public length above the longest."""
        return map_leaves(self.collate([*items]), lambda path, t: self._padded(path, t, self.shapes.above))

    def parts(self, items: Sequence[Any]) -> Iterator[tuple[list[int], Any]]:
        """A batch for each public shape among the places: the index of the example in each row, and the batch.

        Every place keeps its rows. Where its own shape is another, it repeats the first place of this shape.
        """
        self._require_padding([dict(leaves(self([copy.deepcopy(item)]))) for item in items])
        places = [range(start, start + self.rows) for start in range(0, len(items), self.rows)]
        batches = [self([copy.deepcopy(items[row]) for row in place]) for place in places]
        shapes = [tuple((path, t.shape) for path, t in leaves(batch)) for batch in batches]
        for shape in sorted({*shapes}, key=str):
            first = places[shapes.index(shape)]
            rows = [row for place, own in zip(places, shapes) for row in (place if own == shape else first)]
            yield rows, self([copy.deepcopy(items[row]) for row in rows])

    def _require_padding(self, singles: Sequence[Mapping[Path, torch.Tensor]]) -> None:
        """Raise ValueError if rows differ in size where they are not padded, or a mask might cover everything."""
        first = singles[0]
        masked = {t.shape for path, t in first.items() if path[-1] == "attention_mask"}
        uneven = {
            path for single in singles for path, t in single.items() if path in first and t.shape != first[path].shape
        }
        unknown = [
            path[-1]
            for path, t in first.items()
            if (path in uneven or t.shape in masked) and (t.dim() < 2 or self._pad(path[-1], t) is None)
        ]
        if unknown:
            raise ValueError(
                f"The batch's {unknown} may need padding, whose values are not known. Use a tokenizer's collator, or give "
                f"shapes={{'pad': {{{unknown[0]!r}: value}}}}."
            )

    def _padded(self, path: Path, t: torch.Tensor, longer: Callable[[int], int]) -> torch.Tensor:
        name = path[-1] if path else None
        if t.dim() < 2 or (value := self._pad(name, t)) is None:
            return t
        rest = longer(t.shape[1]) - t.shape[1]
        sides = (rest, 0) if self.left else (0, rest)
        return torch.nn.functional.pad(t, (*[0] * (2 * t.dim() - 4), *sides), value=value)

    def _pad(self, name: Any, t: torch.Tensor) -> float | None:
        # Labels of several classes are no sequence, and are floating-point numbers.
        sequence = name in self.shapes.pad or (t.dim() == 2 and not t.is_floating_point())
        return self.pads.get(name) if sequence else None


class LengthBuckets(ShapedCollator):
    """Pads batches to lengths of a public grid, so that their shapes come again; no batch knows the lengths of another.

    Batches without a mask, or with sequences whose padding is not known, stay as they are. The model takes ``most`` tokens.
    """

    def __init__(self, collate: Callable[[list[Any]], Any], most: int):
        super().__init__(collate, PublicShapes())
        self.most = most

    def pad(self, batch: Any) -> Any:
        """The batch, its sequences padded."""
        found = dict(leaves(batch))
        mask = found.get(("attention_mask",))
        if mask is None or mask.dim() != 2:
            return batch
        length = mask.shape[1]
        bucket = min(grid_size(length), max(length, self.most))
        along = [(path, t) for path, t in found.items() if length in t.shape[1:]]
        known = all(t.shape[1] == length and self._pad(path[-1], t) is not None for path, t in along)
        if bucket == length or not known:
            return batch
        return map_leaves(batch, lambda path, t: self._padded(path, t, lambda size: bucket if size == length else size))


class PublicPlaces:
    """Places for the units of a logical batch, in microbatches of one size, at most ``most``; those left over are padding.

    The number of places is fixed, and units take them at random. So the places of the others have one distribution, with a
    unit and without it.
    """

    def __init__(self, sampler: Sampler, most: int):
        units = sampler.most(TAIL)
        self.microbatches = math.ceil(units / most)
        self.rows = math.ceil(units / self.microbatches)

    def of(self, units: Sequence[int], permutation: Callable[[int], torch.Tensor]) -> list[list[int | None]]:
        """The unit in each place of each microbatch, None in places without."""
        count = max(self.microbatches, math.ceil(len(units) / self.rows))
        placed: list[int | None] = [None] * (count * self.rows)
        for unit, place in zip(units, permutation(len(placed)).tolist()):
            placed[place] = unit
        return [placed[start : start + self.rows] for start in range(0, len(placed), self.rows)]


def shape_statement(public: bool, *, on_gpu: bool = False) -> str:
    """The card's sentence on how one unit's shape changes the rounding of the others' gradients (docs/clipping.md)."""
    if public:
        return (
            "one unit changes no bit of another's gradient: the shapes of microbatches and each unit's place in them are "
            f"public, except in a share of {TAIL:.0e} of the logical batches"
        )
    further = "; on a GPU the route to norms follows it too, which may move the sum further" if on_gpu else ""
    return (
        "products round by the shape of their microbatch, which one unit may change: that moved the sum of 64 equal records by "
        f"{_MOVED['float32']} of the bound in float32 and by {_MOVED['bfloat16']} in bfloat16, at 12 layers, and more for "
        f"models that are sharp by construction{further}; shapes='public' rules it out"
    )
