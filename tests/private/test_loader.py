"""How a private loader reads its data set, and what it makes of the order of the loader that it takes the place of."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, SequentialSampler, SubsetRandomSampler

from tests.cases import cases
from tests.engine.runs import PRIVATE, collate, examples, loader, logical_step, start


class Augmented(list[Any]):
    """Draws from every generator that a worker may have seeded."""

    def __getitem__(self, index: Any) -> Any:
        drawn = [torch.rand(()).item(), random.random(), numpy.random.rand()]  # noqa: NPY002
        return {**super().__getitem__(index), "drawn": torch.tensor(drawn)}


def _seeded(worker: int) -> None:
    torch.manual_seed(worker)
    random.seed(worker)
    numpy.random.seed(worker)  # noqa: NPY002


@cases("known", [True, False])
def test_seeds_that_workers_are_begun_with_tell_nothing_of_a_private_run(known: bool) -> None:
    def collate(items: Any) -> Any:
        return {**loader().collate_fn(items), "drawn": torch.stack([item["drawn"] for item in items])}

    drawn = []
    for _ in range(2):
        options = {"noise_multiplier": 1.0, "target_delta": 1e-3, "unsafe_seed": 3 if known else None}
        data = loader(Augmented(examples(8)), collate_fn=collate, num_workers=1, worker_init_fn=_seeded)
        iterator = iter(start(data_loader=data, **options).data_loader)
        drawn.append(next(iterator)["drawn"])
        iterator.close()
    assert torch.equal(*drawn) if known else not bool((drawn[0][:1] == drawn[1][:1]).any())


@cases("name", ["dataset", "collate_fn", "batch_size", "units"])
def test_what_the_plan_goes_by_is_settled(name: str) -> None:
    data = start(**PRIVATE).data_loader
    with pytest.raises(AttributeError, match=f"{name} of a private loader is settled"):
        setattr(data, name, getattr(data, name))


class Buckets(BatchSampler):
    """Batches of neighbours, in random order."""

    def __init__(self, size: int, batch_size: int, drop_last: bool = False, first: int = 0):
        super().__init__(SequentialSampler(range(size)), batch_size, drop_last)
        self.first = first

    def __iter__(self) -> Iterator[list[int]]:
        batches = [batch for batch in super().__iter__() if batch[0] >= self.first]
        return iter(random.sample(batches, len(batches)))


class Own(Sampler[int]):
    """Any rows, in an order of its own."""

    def __init__(self, rows: Sequence[int]):
        self.rows = rows

    def __iter__(self) -> Iterator[int]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)


def of_own(batches: Any) -> DataLoader:
    return DataLoader(examples(), batch_sampler=batches, collate_fn=collate)  # type: ignore[arg-type]


@cases(
    "make, batch_size, said",
    [
        (lambda: loader(drop_last=True, shuffle=True), 8, "drop_last=True has no effect"),
        (lambda: loader(sampler=RandomSampler(examples(), num_samples=9)), 8, "num_samples has no effect"),
        (lambda: of_own(Buckets(24, 6)), 6, "the loader's Buckets has no effect.* about 6 rows"),
        (lambda: of_own(Buckets(24, 10)), 10, "Buckets"),
        (lambda: of_own(Buckets(24, 10, drop_last=True)), 10, "Buckets"),
        (lambda: loader(sampler=Own([*range(23, -1, -1)])), 8, "the loader's Own has no effect"),
        (lambda: loader(sampler=SubsetRandomSampler(range(24))), 8, "SubsetRandomSampler"),
    ],
)
def test_an_order_of_ones_own_is_replaced_and_said_once(make: Any, batch_size: int, said: str) -> None:
    with pytest.warns(UserWarning, match=said) as caught:
        private = start(data_loader=make(), epochs=1, **PRIVATE)
    assert sum("has no effect" in str(entry.message) for entry in caught) == 1
    for _ in private.data_loader.steps_per_epoch * [0]:
        logical_step(private)
    assert private.sample_rate == batch_size / 24
    assert private.steps_done == -(-24 // batch_size)


@cases(
    "make, words",
    [
        (
            lambda: loader(sampler=SubsetRandomSampler(range(20))),
            "leaves out 4 of 24 rows.*Use torch.utils.data.Subset",
        ),
        (lambda: loader(sampler=Own([3, 1, 2]), drop_last=True), "leaves out 21 of 24 rows.*Subset"),
        (lambda: of_own(Buckets(24, 6, first=6)), "leaves out 6 of 24 rows.*Subset"),
        (lambda: of_own(Buckets(22, 6, drop_last=True)), "leaves out 6 of 24 rows.*Subset"),
        (lambda: loader(sampler=Own([0, 0, *range(22)])), "draws each row at one rate"),
        (lambda: of_own(itertools.repeat([1, 2, 3])), "draws each row at one rate"),
        # Batches of about as many tokens: how many there are follows from the lengths of private rows.
        (
            lambda: of_own(Own([[*range(12)], [*range(12, 18)], [18, 19], [20, 21, 22, 23]])),  # type: ignore[list-item]
            "different sizes, which private rows may decide. Give the DataLoader a batch_size",
        ),
    ],
)
def test_a_sampler_that_chooses_rows_is_refused(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        start(data_loader=make(), **PRIVATE)
