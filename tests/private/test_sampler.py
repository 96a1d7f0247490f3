"""Who takes part in a logical batch, and how it reaches the engine."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from scipy import stats

import fastdp
from fastdp.engine.uses.layout import Ticket
from fastdp.private.loader import PrivateLoader
from fastdp.private.plan import Plan
from fastdp.private.sampler import PoissonSampler, ShuffledSampler, Units, steps_per_epoch
from tests.cases import cases
from tests.engine.runs import PRIVATE, loader, logical_step, start
from tests.loops import trained

#: How often a statistical test of this file may fail with nothing wrong; each draws fresh randomness.
FALSE_ALARM = 1e-9


def test_poisson_sampling_includes_every_unit_with_the_stated_probability_and_independently() -> None:
    units, rate, steps = 60, 0.3, 4000
    drawn = torch.zeros(steps, units)
    for step, taken in enumerate(PoissonSampler(units, rate, fastdp.NoiseStream()).epoch(steps)):
        drawn[step, taken] = 1
    scores = (drawn.sum(0) - steps * rate) / (steps * rate * (1 - rate)) ** 0.5
    assert stats.chi2.sf(float(scores.square().sum()), units) > FALSE_ALARM
    batch_sizes = drawn.sum(1)
    spread = float((batch_sizes - units * rate).square().sum()) / (units * rate * (1 - rate))
    # The sum of `steps` squared standardised binomials; its variance is 2 + (1 - 6 pq) / (n pq) a step.
    excess = (1 - 6 * rate * (1 - rate)) / (units * rate * (1 - rate))
    assert 2 * stats.norm.sf(abs(spread - steps) / (steps * (2 + excess)) ** 0.5) > FALSE_ALARM
    centred = drawn - drawn.mean(0)
    pairs = torch.corrcoef(centred.T)[tuple(torch.triu_indices(units, units, 1))]
    assert 2 * stats.norm.sf(float(pairs.abs().max()) * steps**0.5) * pairs.numel() > FALSE_ALARM
    following = (centred[1:] * centred[:-1]).sum() / centred.square().sum()
    assert 2 * stats.norm.sf(abs(float(following)) * (steps * units) ** 0.5) > FALSE_ALARM


@given(units=st.integers(1, 40), batch_size=st.integers(1, 40))
@settings(max_examples=40)
def test_shuffled_batches_cover_every_unit_once_an_epoch(units: int, batch_size: int) -> None:
    batch_size = min(batch_size, units)
    sampler = ShuffledSampler(units, batch_size, fastdp.NoiseStream())
    batches = list(sampler.epoch(steps_per_epoch(units, batch_size)))
    assert sorted(unit for batch in batches for unit in batch) == list(range(units))
    assert all(len(batch) <= batch_size for batch in batches)


@given(units=st.integers(2, 70), batch_size=st.integers(1, 40), seed=st.integers(0, 2**32), left_out=st.integers(0, 69))
@example(units=32, batch_size=30, seed=0, left_out=0)
@settings(max_examples=60)
def test_leaving_a_unit_out_changes_one_shuffled_batch_by_that_unit_alone(
    units: int, batch_size: int, seed: int, left_out: int
) -> None:
    """N = 32 against 31 with B = 30 used to move another unit into its place, and to empty the last batch."""
    batch_size, left_out = min(batch_size, units - 1), left_out % units
    steps = steps_per_epoch(units, batch_size)
    if steps_per_epoch(units - 1, batch_size) != steps:
        return  # The number of places, which is public, would differ.

    def epoch(count: int) -> list[set[int]]:
        sampler = ShuffledSampler(count, batch_size, fastdp.NoiseStream.unsafe_reproducible(seed))
        return [set(batch) for batch in sampler.epoch(steps)]

    # The data set without the unit: the last one takes its index, so that its place is the one that stays empty.
    renamed = {units - 1: left_out, left_out: units - 1}
    every = [{renamed.get(unit, unit) for unit in batch} for batch in epoch(units)]
    without = [{renamed.get(unit, unit) for unit in batch} for batch in epoch(units - 1)]
    changed = [a ^ b for a, b in zip(every, without, strict=True) if a != b]
    assert changed == [{left_out}]


def _loader(
    data: Any, sampler: Any, steps: int, physical: int, units: Units | None = None, **options: Any
) -> PrivateLoader:
    units = Units(len(data)) if units is None else units
    inner = torch.utils.data.DataLoader(data, batch_size=4, collate_fn=torch.tensor, **options)
    plan = Told(len(units), 1, steps, steps, "poisson", "add_remove", None, None, 1.0, told=sampler)
    return PrivateLoader(inner, plan, units, fastdp.NoiseStream(), physical)


@dataclass(frozen=True)
class Told(Plan):
    """A plan whose sampler is handed in."""

    told: Any = None

    def sampler(self, stream: fastdp.NoiseStream, kind: str = "step") -> Any:
        return self.told


class Script:
    """A sampler that hands out what it was told to."""

    def __init__(self, batches: list[list[int]]):
        self.batches = batches

    def epoch(self, steps: int) -> Any:
        return iter(self.batches[:steps])


logical_batches = st.lists(st.lists(st.integers(0, 19), unique=True, max_size=12), min_size=1, max_size=6)


@given(batches=logical_batches, physical=st.integers(1, 13))
@settings(max_examples=60)
def test_micro_batches_hold_each_logical_batch_whole_and_in_order(batches: list[list[int]], physical: int) -> None:
    private = _loader(list(range(20)), Script(batches), len(batches), physical)
    pieces = list(zip(private, _following(private.tickets)))
    read: list[list[int]] = [[]]
    for rows, ticket in pieces:
        assert len(rows) == ticket.rows <= physical
        read[-1] += [int(r) for r, w in zip(rows, ticket.weights[ticket.row_units]) if w > 0]
        if ticket.is_last:
            read.append([])
    assert read == [*batches, []]
    assert sum(ticket.is_last for _, ticket in pieces) == len(batches)


class Lengthy(list):
    """Examples that are their own index, with a length each."""

    lengths: list[int]


@given(
    lengths=st.lists(st.integers(1, 9), min_size=6, max_size=30),
    owners=st.integers(1, 6),
    physical=st.integers(5, 9),
    data=st.data(),
)
@settings(max_examples=60)
def test_examples_of_like_lengths_share_micro_batches(
    lengths: list[int], owners: int, physical: int, data: st.DataObject
) -> None:
    rows = Lengthy(range(len(lengths)))
    rows.lengths = lengths
    units = Units(len(rows), [i % owners for i in rows], 5)
    drawn = data.draw(st.lists(st.integers(0, len(units) - 1), unique=True, min_size=1))
    private = _loader(rows, Script([drawn]), 1, physical, units)
    longest = []
    seen = []
    for batch, ticket in zip(private, _following(private.tickets)):
        of_unit: dict[int, int] = {}
        for row, unit in zip(batch.tolist(), ticket.row_units.tolist()):
            of_unit[unit] = max(of_unit.get(unit, 0), lengths[row])
            seen.append(row)
        longest += of_unit.values()
    assert longest == sorted(longest, reverse=True), "units come by their longest example, longest first"
    assert sorted(seen) == sorted(i for unit in drawn for i in units.examples(unit)), "and none is lost"


def _following(tickets: deque[Ticket]) -> Any:
    while True:
        yield tickets.popleft()


@given(owners=st.lists(st.integers(0, 5), min_size=1, max_size=25), most=st.integers(1, 4), extra=st.integers(0, 5))
@settings(max_examples=60)
def test_a_user_s_examples_stay_together_and_are_bounded(owners: list[int], most: int, extra: int) -> None:
    units = Units(len(owners), owners, most)
    counts = Counter(owners)
    assert len(units) == len(counts)
    assert units.largest == min(most, max(counts.values()))
    private = _loader(list(range(len(owners))), Script([list(range(len(units)))]), 1, units.largest + extra, units)
    seen: Counter[int] = Counter()
    for rows, ticket in zip(private, _following(private.tickets)):
        assert len(rows) <= units.largest + extra
        of_unit = [
            {owners[int(r)] for r, u in zip(rows, ticket.row_units) if u == unit} for unit in range(len(ticket.weights))
        ]
        assert all(len(users) == 1 for users in of_unit), "a unit is one user"
        assert len(set().union(*of_unit)) == len(of_unit), "and a user one unit"
        seen.update(owners[int(r)] for r in rows)
    assert seen == {user: min(count, most) for user, count in counts.items()}


def test_an_empty_batch_is_one_padding_row() -> None:
    private = _loader(list(range(20)), Script([[], [3]]), 2, 4)
    (empty, first), (_, second) = zip(private, _following(private.tickets))
    assert len(empty) == 1
    assert first.is_last
    assert second.is_last
    assert first.weights.tolist() == [0.0]
    assert second.weights.tolist() == [1.0]


def test_a_skipped_batch_is_refused_before_its_ticket_can_go_to_another() -> None:
    private = start(max_physical_batch_size=2)
    iterator = iter(private.data_loader)
    next(iterator)
    with pytest.raises(RuntimeError, match="was skipped"):
        next(iterator)
    logical_step(private)
    assert private.steps_done == 1


def test_the_last_batch_of_an_epoch_is_not_skipped_either() -> None:
    private = start(data_loader=loader(batch_size=24), max_physical_batch_size=24)
    (batch,) = private.data_loader
    with pytest.raises(RuntimeError, match="was skipped"):
        next(iter(private.data_loader))
    # Whoever begins anew all the same has discarded it.
    logical_step(private)
    (batch,) = private.data_loader
    private.model(**batch)["loss"].backward()
    private.optimizer.step()
    assert private.steps_done == 2


@cases("how", ["released", "broken off", "no step", "no step at the end"])
def test_a_card_says_that_a_logical_batch_was_discarded(how: str) -> None:
    private = start(unsafe_seed=None, epochs=4, **PRIVATE)
    logical_step(private)
    for batch in private.data_loader:
        loss = private.model(**batch)["loss"]
        if how == "broken off":
            break
        loss.backward()
        if how != "released":
            break
        private.optimizer.step()
        private.optimizer.zero_grad()
    if not how.endswith("end"):
        logical_step(private)
    private.detach()
    assert any("were discarded" in said for said in private.card()["assumptions"]) == (how != "released")


@cases("user", [(1, float("nan")), (object(),), frozenset({float("nan")})])
def test_an_id_that_holds_what_equals_nothing_is_none(user: Any) -> None:
    with pytest.raises(ValueError, match="equals no other"):
        start(user_ids=[user] * 24, max_examples_per_user=24)


@cases("user", ["ann", 3, b"x", 2.5, ("ann", 3), None, torch.tensor(4)])
def test_an_id_that_equals_another_is_one(user: Any) -> None:
    others = range(100, 112)
    ids = [user] * 12 + (list(map(str, others)) if isinstance(user, str) else list(others))
    private = start(data_loader=loader(batch_size=4), user_ids=ids, max_examples_per_user=12)
    assert len(private.data_loader.units) == 13


@cases("sampling", ["poisson", "shuffled"])
def test_len_counts_logical_steps(sampling: str) -> None:
    private = start(data_loader=loader(batch_size=7), sampling=sampling, max_physical_batch_size=2, epochs=3)
    assert len(private.data_loader) == 4
    assert private.total_steps == 12
    for epoch in range(3):
        assert sum(private.last_step_done for _ in trained(private)) == 4, f"epoch {epoch}"


def test_len_counts_users_where_users_are_the_units() -> None:
    private = start(
        data_loader=loader(batch_size=3), user_ids=[i % 7 for i in range(24)], max_examples_per_user=2, epochs=1.5
    )
    assert len(private.data_loader) == 3
    assert private.total_steps == 5
    assert private.sample_rate == 3 / 7


def test_a_restart_in_mid_epoch_wastes_no_poisson_step_and_a_whole_shuffled_epoch() -> None:
    options: dict[str, Any] = {"noise_multiplier": 1.0, "target_delta": 1e-4, "epochs": 2}
    private = start(**options)
    logical_step(private)
    logical_step(private)
    assert private.steps_done == 2
    private = start(sampling="shuffled", **options)
    logical_step(private)
    logical_step(private)
    # Two orders cut short and joined could use a unit twice in what would be counted as one epoch.
    assert private.steps_done == 4


def test_the_last_epoch_ends_with_the_budget() -> None:
    private = start(epochs=4 / 3)
    taken = []
    for _ in range(2):
        iterator = iter(private.data_loader)
        before = private.steps_done
        while private.steps_done < private.total_steps and private.steps_done - before < 3:
            logical_step(private, iterator)
        assert next(iterator, None) is None
        taken.append(private.steps_done - before)
    assert taken == [3, 1]


@cases("make", [lambda: {"num_workers": 2}, lambda: {"shuffle": True}])
def test_workers_and_shuffling_loaders_hand_out_matching_tickets(make: Callable[[], dict[str, Any]]) -> None:
    data = list(range(20))
    private = _loader(data, PoissonSampler(20, 0.4, fastdp.NoiseStream()), 6, 3, **make())
    logical = 0
    for rows, ticket in zip(private, _following(private.tickets)):
        assert len(rows) == ticket.rows
        logical += ticket.is_last
    assert logical == 6


def test_two_runs_draw_differently_unless_seeded() -> None:
    def drawn(seed: int | None) -> list[list[int]]:
        private = start(unsafe_seed=seed, epochs=20)
        return list(private.data_loader.sampler.epoch(20))

    assert drawn(None) != drawn(None)
    assert drawn(1) == drawn(1) != drawn(2)
    torch.manual_seed(0)
    first = drawn(None)
    torch.manual_seed(0)
    assert drawn(None) != first, "torch's seed is for weights only"


def test_text_beside_numbers_among_user_ids_is_refused() -> None:
    for ids in ([7, "7", 8], ["a", 7.5, None], ["a", torch.tensor(7), "b"]):
        with pytest.raises(ValueError, match="user_ids has text beside numbers"):
            Units(3, ids, max_examples_per_user=2)
    for ids in ([7, 7.0, True], ["7", None, "8"]):
        assert len(Units(3, ids, max_examples_per_user=2)) <= 3
