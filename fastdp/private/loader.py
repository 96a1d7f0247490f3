"""The loader of a private run: cuts each logical batch that the sampler draws into microbatches, each with a `Ticket`."""

from __future__ import annotations

import itertools
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
)

from fastdp.accounting.ledger import STEP
from fastdp.calls.batches import map_tensors
from fastdp.calls.collation import Collation, ProbeBatch, example_length
from fastdp.calls.generators import HeldGenerators, callers_generators, callers_tensors
from fastdp.calls.marks import Marks
from fastdp.calls.randomness import forget_seeds, seed_from_os, seed_own_generators, seeded, version
from fastdp.distributed.ranks import ONE, Ranks
from fastdp.engine.uses.layout import Ticket
from fastdp.ops.stream import NoiseStream
from fastdp.private.observer import Observer
from fastdp.private.plan import Plan
from fastdp.private.sampler import Sampler, Units
from fastdp.private.shapes import LengthBuckets, PublicPlaces, PublicShapes, ShapedCollator, grid_size

_END = object()
#: Attributes that the plan and the first batch's checks rest on: they are set once.
_PLANNED = frozenset({"dataset", "collate_fn", "batch_size", "kind", "units", "unit_map", "reproducible", "_sampler"})


class LoaderOwner:
    """What a loader asks of the run that it feeds. These are the answers where no steps follow, as for a release besides them."""

    @property
    def evaluates(self) -> bool:
        """Whether the model is in evaluation mode."""
        return False

    @property
    def records_passes(self) -> bool:
        """Whether passes are recorded, so that microbatches are padded to few shapes."""
        return False

    @property
    def computes_loss(self) -> bool:
        """Whether the loop computes the loss of the model's outputs."""
        return False

    def steps_left(self, epoch: int) -> int:
        """How many of an epoch's logical batches the budget still holds. Raises BudgetExceeded at none."""
        return epoch

    def begin_iteration(self) -> None:
        """The loader is iterated anew."""

    def begin_microbatch(self) -> None:
        """A microbatch is about to be made. Raises RuntimeError if the one before was not followed by a step."""

    def plan_probes(self, source: Collation, rows: int) -> None:
        """Plan probe batches before iteration, for a loop that takes batches ahead."""

    def take_probes(self) -> Iterable[ProbeBatch]:
        """The probe batches that come next."""
        return ()


class PrivateLoader:
    """Iterates one epoch in microbatches; ``len`` counts logical steps, as learning-rate schedules do.

    Each microbatch's ticket goes to ``tickets`` in the order of delivery, and each backward pass consumes one.
    An empty logical batch is delivered as padding of weight 0, since stock models crash on no rows at all, and a single row with
    padding beside it where the loop computes the loss.

    A data set with an attribute ``lengths``, one number an example, has each logical batch cut into microbatches of like
    lengths, the longest first: less padding, and a shortage of memory shows at once. The sums are over the same units.

    Args:
        loader: the user's DataLoader: its data set, collator, workers and pinning are kept; its sampler is replaced.
        plan: says who draws for a release, and what its event is.
        units: the units of the data set, as many as the plan has.
        stream: the randomness of the draws.
        kind: the release that the loader draws for: training steps, or one release besides them.
        max_physical_batch_size: most examples in a microbatch.
        unit_map: name of the batch entry that holds the unit of every token, for collators that pack rows.
        observers: see each draw, and may leave units out of it.
        ranks: the processes that train together. Each draws the same logical batch and delivers its share of it, in as many
            microbatches as the others, padding rows for those it lacks.
        one_unit: one unit in each microbatch, as ``isolation="per_example"`` asks.
        shapes: public shapes of microbatches, or None.
    """

    def __init__(
        self,
        loader: DataLoader,
        plan: Plan,
        units: Units,
        stream: NoiseStream,
        max_physical_batch_size: int,
        *,
        kind: str = STEP,
        unit_map: str | None = None,
        observers: Sequence[Observer] = (),
        ranks: Ranks = ONE,
        one_unit: bool = False,
        shapes: PublicShapes | None = None,
    ):
        if len(units) != plan.units:
            raise ValueError(f"the data set has {len(units)} units, and the plan accounts for {plan.units}")
        #: The user's own, for another run after this one.
        self.given = loader
        self.dataset: Dataset = loader.dataset
        # Rows of one place under public shapes. A user's place holds the largest user's rows and one row of weight 0.
        self._place_rows = 1 if units.members is None else units.largest + 1
        shaped = shapes and ShapedCollator(loader.collate_fn, shapes, self._place_rows)
        self.collate_fn = shaped or loader.collate_fn
        self.batch_size = plan.batch_size
        self.kind = kind
        self._sampler = plan.sampler(stream, kind)
        most = max_physical_batch_size // self._place_rows
        self._places = None if shapes is None else PublicPlaces(self._sampler, most)
        #: Whether random draws of the data set and collator follow the user's seeds; such a run has no guarantee.
        self.reproducible = stream.reproducible or plan.sigma == 0
        self.units = units
        self.steps_per_epoch = plan.steps_per_epoch if kind == STEP else 1
        self.max_physical_batch_size = max_physical_batch_size
        #: Set by the run that it feeds.
        self.owner = LoaderOwner()
        self.num_workers, self.pin_memory, self.drop_last = loader.num_workers, loader.pin_memory, False
        self.observers = observers
        self.unit_map = unit_map
        #: How many tokens the model takes, where its configuration says so.
        self.most_tokens: int | None = None
        self.ranks = ranks
        self.one_unit = one_unit
        #: Where a loader that accelerate has prepared puts its batches; None leaves them where they are.
        self.device: torch.device | None = getattr(loader, "device", None)
        self.lengths = _lengths(self.dataset)
        self.tickets: deque[Ticket] = deque()
        #: Whether the latest iteration was complete; and whether the loop left it before its last logical batch.
        self._complete = self.cut_short = False
        #: Set by a caller that takes each batch before the backward pass of the one before: probe batches then come first.
        self.takes_ahead = False
        #: Set by a caller that checks itself that each microbatch has its backward pass: it may take several before.
        self.look_ahead = False
        names = ("num_workers", "pin_memory", "timeout", "prefetch_factor")
        begin = loader.worker_init_fn if self.reproducible else partial(_seed_worker, loader.worker_init_fn)
        self._options: dict[str, Any] = {name: getattr(loader, name) for name in names} | {
            "collate_fn": _MeasuringCollator(self.collate_fn),
            "worker_init_fn": begin,
        }

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _PLANNED and name in vars(self):
            raise AttributeError(
                f"{name} of a private loader is settled, as the accounting rests on it: call detach() and make the run private "
                "anew with another loader"
            )
        super().__setattr__(name, value)

    @property
    def sampler(self) -> Sampler:
        """What draws the units, as the plan's event says; no other can take its place."""
        return self._sampler

    @property
    def has_public_shapes(self) -> bool:
        """Whether no unit decides the shapes of another's arithmetic."""
        return self._places is not None or self.one_unit

    def __len__(self) -> int:
        return self.steps_per_epoch

    def __iter__(self) -> Iterator[Any]:
        if not torch.is_grad_enabled() and self.unit_map is None:
            # An evaluation on the training data: each example once, and nothing is drawn or released.
            options = {**self._options, "collate_fn": self.collate_fn, "worker_init_fn": self.given.worker_init_fn}
            yield from map(self._to_device, DataLoader(self.dataset, self.batch_size, **options))
            return
        complete, self._complete = self._complete, False
        if complete:
            # The last batch of the epoch before must have had its backward pass too.
            self.require_consumed()
        self.cut_short = False
        self.tickets.clear()
        self.owner.begin_iteration()
        if self.unit_map is None and self.takes_ahead:
            self.owner.plan_probes(Collation(self.dataset, self.collate_fn, (), {}), self.max_physical_batch_size)
            yield from self.probe_batches()
        steps = self.owner.steps_left(self.steps_per_epoch)
        waiting: deque[tuple[list[int], Ticket]] = deque()
        read: Any = _PerExampleDataset(self.dataset) if _reads_examples_together(self.dataset) else self.dataset
        if not self.reproducible:
            seed_own_generators(self.dataset, self.collate_fn)
        inner: DataLoader = DataLoader(read, batch_sampler=_TicketedBatches(self, steps, waiting), **self._options)
        try:
            handed = self._with_tickets(self._collate_batches(inner), waiting)
            for number, (indices, ticket, lengths, batch) in enumerate(handed):
                if not self.look_ahead:
                    self.require_consumed()
                    self.owner.begin_microbatch()
                if self._may_pad and self.owner.records_passes:
                    batch = self._buckets.pad(batch)
                source = Collation.of(self.dataset, self.collate_fn, indices, batch, self.unit_map)
                if number == 0:
                    # What is known of the first batch's tensors is known of all.
                    source = replace(source, earlier=Marks((t, version(t)) for t in callers_tensors()))
                own = ticket.row_units, ticket.weights, ticket.is_last
                ticket = Ticket(*own, source=source, lengths=tuple(lengths), in_eval=self.owner.evaluates)
                if self.unit_map is not None:
                    batch, ticket = self._take_unit_map(batch, ticket)
                self.tickets.append(ticket)
                steps -= ticket.is_last
                yield self._to_device(batch)
                yield from self.probe_batches()
        except GeneratorExit:
            # At the interpreter's end `__setattr__` has no globals left.
            vars(self)["cut_short"] = steps > 0
            raise
        self._complete = True

    def _with_tickets(self, inner: Iterator[Any], waiting: deque[tuple[list[int], Ticket]]) -> Iterator[Any]:
        """The example indices, ticket, lengths and batch of each forward pass: one for each public shape in a microbatch."""
        for parts in inner:
            indices, ticket = waiting.popleft()
            for number, (rows, lengths, batch) in enumerate(parts):
                if rows is None:
                    yield indices, ticket, lengths, batch
                    continue
                # A row of another shape repeats one of this shape, at weight 0.
                own = torch.tensor(rows) == torch.arange(len(rows))
                firsts = torch.searchsorted(ticket.row_units, torch.arange(len(ticket.weights)))
                last = ticket.is_last and number == len(parts) - 1
                shaped = replace(ticket, weights=ticket.weights * own[firsts], is_last=last)
                yield [indices[row] for row in rows], shaped, lengths, batch

    def _collate_batches(self, inner: Iterable[Any]) -> Iterator[Any]:
        """The collated batches. The operating system seeds draws of data set and collator, except in a reproducible run."""
        chance = nullcontext if self.reproducible else seed_from_os
        with chance():
            batches = iter(inner)
        while True:
            with chance():
                batch = next(batches, _END)
            if batch is _END:
                return
            yield batch

    def probe_batches(self) -> Iterator[Any]:
        """Batches of weight 0 that verify the training loop before anything is released, each under its seed."""
        for probe in self.owner.take_probes():
            batch, made = probe.source.collated(probe.items), probe.source
            source = Collation.of(made.dataset, made.collate, made.indices, batch)
            ticket = _padding_ticket([1] * len(source.indices), is_last=False)
            held = HeldGenerators(*callers_generators())
            probe = replace(probe, source=source, generators=held)
            self.tickets.append(replace(ticket, source=source, probe=probe, in_eval=self.owner.evaluates))
            batch = self._to_device(batch)
            with seeded(probe.seed), held.at(probe.seed):
                yield batch

    def _to_device(self, batch: Any) -> Any:
        if self.device is None:
            return batch
        # To a device it is queued; from one the host has to wait for it.
        return map_tensors(batch, lambda t: t.to(self.device, non_blocking=t.device.type == "cpu"))

    def require_consumed(self) -> None:
        """Raise RuntimeError if a batch was handed out and never differentiated: its ticket would go to another."""
        if self.tickets:
            raise RuntimeError(
                "A batch was skipped or taken ahead: train on each before the next, or iterate over "
                "fastdp.integrations.lightning.Batches(private), which allows one ahead."
            )

    def _take_unit_map(self, batch: Any, ticket: Ticket) -> tuple[Any, Ticket]:
        if not hasattr(batch, "pop") or self.unit_map not in batch:
            raise ValueError(f"unit_map is '{self.unit_map}', and the collator puts no such entry into the batch")
        token_units = batch.pop(self.unit_map)
        most = int(token_units.max()) if token_units.numel() else -1
        if most >= ticket.weights.shape[0]:
            raise ValueError(
                f"the unit map names unit {most} but the batch was packed from {ticket.weights.shape[0]} examples"
            )
        return batch, replace(ticket, token_units=token_units)

    def micro_batches(self, drawn: list[int]) -> Iterator[tuple[list[int], Ticket]]:
        """The example indices and ticket of each microbatch of one logical batch, whole units together."""
        microbatches, each = self._own_microbatches(drawn), 1 if self._places is None else self._place_rows
        for number, places in enumerate(microbatches):
            # Padding repeats rows, so that it has no shape of its own.
            filler = next((unit for unit in places if unit is not None), 0)
            weights, last = [float(unit is not None) for unit in places], number == len(microbatches) - 1
            if self.units.members is None:
                own = torch.tensor(weights) if None in places else torch.ones(len(places))
                ticket = Ticket(torch.arange(len(places)), own, last)
                yield [filler if unit is None else unit for unit in places], ticket
                continue
            owns = [self.units.members[filler][:each] if unit is None else self.units.members[unit] for unit in places]
            rest = [max(0, each - len(own)) for own in owns]
            groups = [
                group
                for weight, own, padding in zip(weights, owns, rest)
                for group in ((len(own), weight), (padding, 0.0))
                if group[0]
            ]
            sizes, weights = map(list, zip(*groups))  # type: ignore[arg-type]
            ticket = _padding_ticket(sizes, is_last=last)
            rows = [row for own, padding in zip(owns, rest) for row in own + own[:1] * padding]
            yield rows, replace(ticket, weights=torch.tensor(weights))

    def _own_microbatches(self, drawn: list[int]) -> list[list[int | None]]:
        """The units in each of this process's microbatches of a logical batch, None for a row of padding."""
        if self._places is not None:
            return self._places.of(drawn, self._sampler.stream.permutation)
        if (lengths := self.lengths) is not None:
            longest = {unit: max(lengths[index] for index in self.units.examples(unit)) for unit in drawn}
            drawn = sorted(drawn, key=longest.__getitem__, reverse=True)
        shares = [self._cut(share) for share in self.ranks.shares(drawn)]
        own = shares[self.ranks.rank]
        pieces = [piece or [None] for piece in own] + [[None]] * (max(map(len, shares)) - len(own))
        return [[*piece, *[None] * (self._padded_rows(len(piece)) - len(piece))] for piece in pieces]

    def _padded_rows(self, rows: int) -> int:
        """How many rows a microbatch is padded to: the last one of a draw may have any number, and few shapes should come."""
        most = self.max_physical_batch_size
        if not self._may_pad:
            return rows
        if not self.owner.records_passes:
            # A loop's squeeze() would drop the axis of a single row.
            alone = rows == 1 < min(most, self.batch_size) and not self.one_unit
            return 2 if alone and self.owner.computes_loss else rows
        return most if most <= self.batch_size / self.ranks.size else min(most, grid_size(rows))

    @cached_property
    def _buckets(self) -> LengthBuckets:
        # A model that does not say how many tokens it takes gets no longer batch than it was given.
        return LengthBuckets(self.collate_fn, self.most_tokens or 0)

    @property
    def _may_pad(self) -> bool:
        """Whether microbatches may be padded; those of public shapes, of packed rows, or of several a unit, may not."""
        return self._places is None and self.unit_map is None and self.units.members is None

    def _cut(self, drawn: list[int]) -> list[list[int | None]]:
        """Cut units into microbatches; the first is empty if there are none."""
        most = 1 if self.one_unit else self.max_physical_batch_size
        if self.units.members is None or self.one_unit:
            return [[*drawn[first : first + most]] for first in range(0, len(drawn), most)] or [[]]
        pieces: list[list[int | None]] = [[]]
        filled = 0
        for unit in drawn:
            size = len(self.units.members[unit])
            if pieces[-1] and filled + size > most:
                pieces.append([])
                filled = 0
            pieces[-1].append(unit)
            filled += size
        return pieces


def _lengths(dataset: Any) -> Sequence[int] | None:
    lengths = getattr(dataset, "lengths", None)
    if lengths is not None and len(lengths) != len(dataset):
        raise ValueError(
            f"the data set's lengths has {len(lengths)} entries for {len(dataset)} examples; give one an example"
        )
    return lengths


def _padding_ticket(sizes: list[int], *, is_last: bool) -> Ticket:
    """The ticket of units of so many rows each, all of weight 0."""
    row_units = torch.tensor([unit for unit, size in enumerate(sizes) for _ in range(size)], dtype=torch.int64)
    return Ticket(row_units, torch.zeros(len(sizes)), is_last)


class _TicketedBatches:
    """The batch sampler of the inner DataLoader: runs in the main process, queues a ticket for every index list."""

    def __init__(self, loader: PrivateLoader, steps: int, waiting: deque[tuple[list[int], Ticket]]):
        self.loader, self.steps, self.waiting = loader, steps, waiting

    def __iter__(self) -> Iterator[list[int]]:
        for drawn in self.loader.sampler.epoch(self.steps):
            for observer in self.loader.observers:
                taken = observer.drawn(list(drawn), self.loader.kind)
                if len(set(taken)) < len(taken) or not set(taken) <= set(drawn):
                    raise ValueError(
                        f"{type(observer).__name__} puts units into a sample that were not drawn, or twice: an "
                        "observer may leave units out. This batch was not released."
                    )
                drawn = taken
            for indices, ticket in self.loader.micro_batches(drawn):
                self.waiting.append((indices, ticket))
                yield indices


def _seed_worker(own: Callable[[int], Any] | None, worker: int) -> None:
    """Run the user's ``worker_init_fn``, then seed the worker from the operating system: others may know the user's seeds."""
    if own is not None:
        own(worker)
    forget_seeds()


class _MeasuringCollator:
    """A collator that also returns lengths: (rows, lengths, batch) for each public shape, or once with rows None."""

    def __init__(self, collate: Callable[[list[Any]], Any]):
        self.collate = collate

    def __call__(self, items: list[Any]) -> list[tuple[list[int] | None, list[int], Any]]:
        lengths = [example_length(item) for item in items]
        if isinstance(self.collate, ShapedCollator):
            return [(rows, [lengths[row] for row in rows], batch) for rows, batch in self.collate.parts(items)]
        return [(None, lengths, self.collate(items))]


class _PerExampleDataset:
    """A data set whose examples are read one at a time, so that none depends on those read with it."""

    #: What torch would ask for all of a batch at once.
    __getitems__ = None

    def __init__(self, dataset: Any):
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def __getattr__(self, name: str) -> Any:
        # What workers' own functions ask of the data set; while this is unpickled there is none.
        if name == "dataset" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.dataset, name)


def _reads_examples_together(dataset: Any) -> bool:
    """Whether user code reads the examples of a batch together, such as a transform of `datasets`."""
    if isinstance(dataset, Subset) and type(dataset).__getitems__ is Subset.__getitems__:
        return _reads_examples_together(dataset.dataset)
    if type(dataset).__module__.partition(".")[0] == "datasets" and hasattr(dataset, "format"):
        return dataset.format["type"] == "custom"
    return callable(getattr(dataset, "__getitems__", None))


def check_loader(loader: Any) -> int:
    """The batch size of a loader whose batches can be drawn as the accountant assumes.

    Its order and ``drop_last`` have no effect, and a warning says so.

    Raises ValueError or TypeError for a loader that cannot be sampled, or whose sampler does more than put rows in order.
    """
    if not isinstance(loader, DataLoader):
        raise TypeError(f"data_loader is a {type(loader).__name__}: give a torch.utils.data.DataLoader")
    if isinstance(loader.dataset, IterableDataset) or not hasattr(loader.dataset, "__len__"):
        raise ValueError("an iterable data set cannot be sampled at random; give one with __len__ and __getitem__")
    size = len(loader.dataset)  # type: ignore[arg-type]
    if size == 0:
        raise ValueError("the data set is empty; there is nothing to train on")
    batches: Any = loader.batch_sampler
    if type(batches).__name__ == "BatchSamplerShard":
        # accelerate's, around the loader's own: it hands each process other batches, which private sampling does itself.
        batches = batches.batch_sampler
    if batches is None:
        raise ValueError("the loader has no batch size, which is the logical batch: give it batch_size")
    sampler = batches.sampler if type(batches) is BatchSampler else batches
    if isinstance(sampler, RandomSampler) and sampler.replacement:
        raise ValueError("sampling with replacement is not what the accountant assumes; drop replacement=True")
    if isinstance(sampler, (RandomSampler, SequentialSampler)):
        batch_size = int(batches.batch_size)
        given = {"drop_last=True": batches.drop_last, "num_samples": len(sampler) != size}
        for name in itertools.compress(given, given.values()):
            warnings.warn(f"{name} has no effect: private sampling draws every row at the same rate", stacklevel=3)
    else:
        batch_size = _batch_size_of(batches, sampler, size)
        warnings.warn(
            f"the loader's {type(sampler).__name__} has no effect: private sampling draws batches of about {batch_size} rows "
            "at random",
            stacklevel=3,
        )
    if batch_size > size:
        raise ValueError(f"batch_size {batch_size} exceeds the {size} examples: the sample rate would pass 1")
    return batch_size


def _batch_size_of(batches: Any, sampler: Any, size: int) -> int:
    """The usual size of the batches of somebody's own sampler; ValueError unless these hold each of the rows once."""
    name = type(sampler).__name__
    if hasattr(sampler, "num_replicas"):
        raise ValueError(
            f"the loader's {name} would be replaced: private sampling shares out each batch among the processes. Remove it."
        )
    sizes: list[int] = []
    rows: list[int] = []
    own = sampler is batches
    for batch in batches if own else [list(itertools.islice(sampler, size + 1))]:
        sizes.append(len(batch))
        rows += map(int, batch)
        if len(rows) > size:
            break
    if len(set(rows)) < len(rows):
        raise ValueError(
            f"the loader's {name} would be replaced by private sampling, which draws each row at one rate. "
            "Remove it, and weigh rows in the loss."
        )
    largest = max(sizes, default=0)
    left_out = size - len(rows)
    if left_out and getattr(batches, "drop_last", False) and left_out < largest:
        # What the last batch lacks is not left out by whoever chooses the rows.
        inner = getattr(batches, "sampler", ())
        left_out = size - len(set(itertools.islice(inner, size)))
    if left_out:
        raise ValueError(
            f"the loader's {name} leaves out {left_out} of {size} rows, which private sampling would draw. Use "
            "torch.utils.data.Subset(dataset, indices) instead of a sampler."
        )
    stated = getattr(batches, "batch_size", None)
    if isinstance(stated, int) and stated > 0:
        return stated
    if sum(count < largest for count in sizes) <= 1:
        return largest
    # The expected batch size is public, and lengths of private rows are not.
    raise ValueError(
        f"the loader's {name} makes batches of different sizes, which private rows may decide. Give the DataLoader a batch_size "
        "instead."
    )
