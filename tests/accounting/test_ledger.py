"""The ledger: budgets, crashes at any point, tampering, one writer, and shuffled epochs that are cut short."""

import json
import os
import re
import signal
import time

import pytest
from dp_accounting import dp_event
from hypothesis import example, given, settings, strategies as st

from fastdp import accounting
from fastdp.accounting import BudgetExceeded, Ledger, LedgerError
from fastdp.accounting.events import flatten
from fastdp.accounting.journal import Journal
from tests.cases import cases

STEP = accounting.dpsgd_model(0.5, 0.01)


def crash(ledger):
    """What SIGKILL leaves behind: the file as it is, the lock gone."""
    journal = ledger._journal
    if journal is not None:
        journal.close()


def _record(ledger, count, kind="step"):
    for _ in range(count):
        ledger.record(kind)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger.jsonl"


@pytest.fixture
def quick_disk(monkeypatch):
    """Tests that open thousands of files say nothing about syncing."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.mark.parametrize("on_disk", [True, False])
def test_budget_is_held(path, on_disk):
    ledger = Ledger.create(path if on_disk else None, {}, event=STEP, budget_steps=25, block=10)
    _record(ledger, 25)
    with pytest.raises(BudgetExceeded, match="all 25 budgeted"):
        ledger.record()
    assert (ledger.spent_steps, ledger.remaining()) == (25, 0)
    ledger.extend(26)
    ledger.record()
    with pytest.raises(BudgetExceeded):
        ledger.record()
    with pytest.raises(ValueError, match="to more"):
        ledger.extend(26)


def test_a_block_is_reserved_ahead_once_and_within_the_budget(path):
    ledger = Ledger.create(path, {}, event=STEP, budget_steps=25, block=10)
    for made, reserved in ((0, 10), (3, 10), (10, 20), (20, 25), (25, 25)):
        _record(ledger, made - ledger.spent_steps)
        ledger.reserve_next()
        ledger.reserve_next()
        assert Ledger.read(path).spent_steps == reserved


def test_event_is_what_was_spent(path):
    ledger = Ledger.create(path, {}, event=STEP, budget_steps=100)
    assert ledger.event() == dp_event.NoOpDpEvent()
    _record(ledger, 7)
    assert ledger.event() == accounting.dpsgd(0.5, 0.01, 7)
    assert ledger.budget_event() == accounting.dpsgd(0.5, 0.01, 100)


def test_kinds_have_their_own_events_and_budgets(path):
    ledger = Ledger.create(path, {}, event=STEP, budget_steps=10, block=5)
    selection = accounting.EventModel(accounting.poisson_gaussian(2.0, 0.02))
    ledger.declare("selection", selection, 2)
    _record(ledger, 2, "selection")
    _record(ledger, 3)
    with pytest.raises(BudgetExceeded, match="'selection'"):
        ledger.record("selection")
    with pytest.raises(LedgerError, match="declare"):
        ledger.record("map")
    assert flatten(ledger.event()).sampled == ((0.01, 0.5, 3), (0.02, 2.0, 2))
    crash(ledger)
    ledger = Ledger.open(path)
    ledger.declare("selection", selection, 3)
    assert (ledger.spent("selection"), ledger.budget("selection"), ledger.spent_steps) == (2, 3, 5)
    with pytest.raises(LedgerError, match="another event"):
        ledger.declare("selection", STEP, 3)


def test_a_crash_forfeits_the_block_and_a_close_gives_it_back(path):
    ledger = Ledger.create(path, {"dataset_size": 3}, event=STEP, budget_steps=100, block=10)
    run_id = ledger.run_id
    _record(ledger, 13)
    crash(ledger)
    ledger = Ledger.open(path)
    assert (ledger.spent_steps, ledger.run_id, ledger.header["dataset_size"]) == (20, run_id, 3)
    _record(ledger, 3)
    ledger.close()
    ledger = Ledger.open(path)
    assert ledger.spent_steps == 23
    crash(ledger)
    assert Ledger.read(path).spent_steps == 23
    with Ledger.open(path) as ledger:
        _record(ledger, 1)
    assert Ledger.read(path).spent_steps == 24


def test_a_closed_ledger_records_nothing(path):
    for ledger in (
        Ledger.create(path, {}, event=STEP, budget_steps=9),
        Ledger.create(None, {}, event=STEP, budget_steps=9),
    ):
        ledger.record()
        ledger.close()
        ledger.close()
        with pytest.raises(LedgerError, match="closed"):
            ledger.record()
        assert ledger.spent_steps == 1
    with pytest.raises(LedgerError, match="closed"):
        Ledger.read(path).record()


def test_nothing_is_written_within_a_block(path):
    ledger = Ledger.create(path, {}, event=STEP, budget_steps=1000, block=10)
    ledger.record()
    size = path.stat().st_size
    _record(ledger, 9)
    assert path.stat().st_size == size
    ledger.record()
    assert path.stat().st_size > size


def test_a_disk_that_refuses_stops_the_release(path, monkeypatch):
    ledger = Ledger.create(path, {}, event=STEP, budget_steps=10, block=2)
    _record(ledger, 2)

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        ledger.record()
    assert ledger.spent_steps == 2
    monkeypatch.undo()
    with pytest.raises(LedgerError):
        ledger.record()


def _history(path):
    """A run of every kind of record, twice resumed; returns (file size, true number of releases) along the way."""
    log = []

    def note(true):
        log.append((path.stat().st_size, dict(true)))

    true = {"step": 0, "selection": 0}
    ledger = Ledger.create(path, {"unit": "example"}, event=STEP, budget_steps=60, block=7)
    note(true)
    ledger.declare("selection", accounting.EventModel(accounting.gaussian(2.0)), 3)
    note(true)

    def make(count, kind="step"):
        for _ in range(count):
            ledger.record(kind)
            true[kind] += 1
            note(true)

    make(2, "selection")
    make(16)
    crash(ledger)
    ledger = Ledger.open(path)
    make(5)
    ledger.close()
    note(true)
    with path.open("ab") as file:
        file.write(b'{"body":{"of":"st')
    ledger = Ledger.open(path)
    note(true)
    ledger.extend(90)
    note(true)
    make(9)
    ledger.restore(64)
    note(true)
    make(3)
    ledger.close()
    note(true)
    return log


def test_no_truncation_ever_undercounts(path, tmp_path, quick_disk):
    """Killed at any byte: reading and reopening count no less than was released when the file was that long.

    Tried are the bytes about each line's end, where what is left may pass for a line, and every eleventh.
    """
    log = _history(path)
    data = path.read_bytes()
    header = data.index(b"\n") + 1
    copy = tmp_path / "copy.jsonl"
    ends = [place for place, byte in enumerate(data) if byte == ord("\n")]
    for length in sorted({*range(0, len(data), 11), *(end + near for end in ends for near in (-1, 0, 1))}):
        copy.write_bytes(data[:length])
        if length < header - 1:
            with pytest.raises(LedgerError, match="no complete record"):
                Ledger.read(copy)
            continue
        made = [true for size, true in log if size <= length]
        true = made[-1] if made else {"step": 0, "selection": 0}
        found = Ledger.read(copy)
        for kind in found.kinds:
            assert found.spent(kind) >= true[kind], (length, kind)
        if length % 2:
            ledger = Ledger.open(copy)
            counted = {kind: ledger.spent(kind) for kind in ledger.kinds}
            assert all(counted[kind] >= true[kind] for kind in counted)
            crash(ledger)
            again = Ledger.open(copy)
            assert all(again.spent(kind) >= counted[kind] for kind in counted)
            again.close()


def test_a_kill_during_recovery_is_recovered_from(path, tmp_path, quick_disk):
    """The record that vouches for a torn line may itself be torn, at any byte."""
    ledger = Ledger.create(path, {}, event=STEP, budget_steps=60, block=7)
    _record(ledger, 8)
    crash(ledger)
    torn = path.read_bytes()[:-9]
    path.write_bytes(torn)
    crash(Ledger.open(path))
    data = path.read_bytes()
    copy = tmp_path / "copy.jsonl"
    for length in sorted({*range(len(torn), len(data), 7), len(data) - 1, len(data)}):
        copy.write_bytes(data[:length])
        first = Ledger.open(copy)
        assert first.spent_steps >= 8
        first.record()
        crash(first)
        assert Ledger.read(copy).spent_steps >= 9


@given(
    st.integers(1, 6),
    st.integers(1, 9),
    st.lists(st.tuples(st.sampled_from(["record", "pass", "crash", "close"]), st.integers(1, 9)), max_size=25),
)
@example(4, 3, [("record", 2), ("close", 1), ("record", 6)])
@example(4, 3, [("record", 2), ("crash", 1), ("record", 6)])
@example(4, 3, [("record", 2), ("pass", 1), ("record", 6)])
@settings(max_examples=30)
def test_shuffled_epochs_cut_short_are_not_joined(tmp_path_factory, steps_per_epoch, block, actions):
    """The event holds at least one use for every order drawn, however often passes are cut short or runs killed."""
    path = tmp_path_factory.mktemp("ledger") / "ledger.jsonl"
    model = accounting.dpsgd_model(2.0, 0.1, "shuffled", steps_per_epoch)
    ledger = Ledger.create(path, {}, event=model, budget_steps=40, block=block)
    orders, place = 0, 0
    for action, count in actions:
        if action == "record":
            for _ in range(count):
                if ledger.remaining() == 0:
                    break
                if place == 0:
                    orders += 1
                ledger.record()
                place = (place + 1) % steps_per_epoch
        else:
            place = 0
            if action == "pass":
                ledger.begin_pass()
            else:
                ledger.close() if action == "close" else crash(ledger)
                ledger = Ledger.open(path)
        assert flatten(ledger.event()).mu_squared >= orders / 2.0**2 - 1e-12
    ledger.close()


def test_altered_lines_are_refused(path):
    ledger = Ledger.create(path, {"dataset_size": 1000}, event=STEP, budget_steps=100, block=10)
    _record(ledger, 35)
    ledger.close()
    lines = path.read_bytes().splitlines(keepends=True)
    for number, line in enumerate(lines):
        changed = re.sub(rb'"(total|budget|step)":(?=\d)', rb'"\1":1', line)
        assert changed != line
        path.write_bytes(b"".join([*lines[:number], changed, *lines[number + 1 :]]))
        with pytest.raises(LedgerError, match=f"line {number + 1} does not continue"):
            Ledger.open(path)
    for number in range(len(lines) - 1):
        path.write_bytes(b"".join([*lines[:number], *lines[number + 1 :]]))
        with pytest.raises(LedgerError, match="does not continue"):
            Ledger.open(path)
    path.write_bytes(b"".join([lines[0], b"garbage\n", *lines[1:]]))
    with pytest.raises(LedgerError, match="does not continue"):
        Ledger.open(path)


def test_other_files_and_versions_are_refused(path):
    path.write_bytes(b"")
    with pytest.raises(LedgerError, match="no complete record"):
        Ledger.open(path)
    path.unlink()
    Journal.create(path, {"record": "header", "format": "other"}).close()
    with pytest.raises(LedgerError, match="not a ledger"):
        Ledger.open(path)
    path.unlink()
    Journal.create(path, {"record": "header", "format": "fastdp.ledger", "version": 9}).close()
    with pytest.raises(LedgerError, match="version 9"):
        Ledger.open(path)
    path.unlink()
    Journal.create(path, {"record": "header", "format": "fastdp.ledger", "version": 1}).close()
    with pytest.raises(LedgerError, match="cannot read"):
        Ledger.open(path)
    with pytest.raises(FileNotFoundError):
        Ledger.open(path.with_name("absent"))


def test_an_older_checkpoint_rolls_nothing_back(path):
    ledger = Ledger.create(path, {}, event=STEP, budget_steps=100, block=10)
    _record(ledger, 5)
    steps, head = ledger.spent_steps, ledger.head
    _record(ledger, 25)
    ledger.close()
    ledger = Ledger.open(path)
    ledger.restore(steps, head)
    assert ledger.spent_steps == 30


def test_a_ledger_cut_back_behind_a_checkpoint_is_refused(path):
    ledger = Ledger.create(path, {}, event=STEP, budget_steps=100, block=10)
    _record(ledger, 5)
    old = path.read_bytes()
    _record(ledger, 25)
    steps, head = ledger.spent_steps, ledger.head
    ledger.close()
    path.write_bytes(old)
    ledger = Ledger.open(path)
    with pytest.raises(LedgerError, match="cut back or replaced"):
        ledger.restore(steps, head)
    ledger.restore(steps)
    assert ledger.spent_steps == 30
    crash(ledger)
    assert Ledger.read(path).spent_steps == 30


def test_in_memory_a_checkpoint_restores_the_count():
    ledger = Ledger.create(None, {}, event=accounting.dpsgd_model(1.0, 0.1, "shuffled", 10), budget_steps=40)
    ledger.restore(13)
    assert ledger.spent_steps == 20
    assert ledger.head is None


def test_a_second_opener_is_refused(path):
    ledger = Ledger.create(path, {}, event=STEP, budget_steps=10)
    with pytest.raises(LedgerError, match="in use by another run"):
        Ledger.open(path)
    Ledger.read(path)
    ledger.close()
    Ledger.open(path).close()
    with pytest.raises(FileExistsError):
        Ledger.create(path, {}, event=STEP, budget_steps=10)


def _fork(work):
    """Run ``work`` in a child and leave it there, whatever happens."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(1)
    return child


def _open_soon(path):
    end = time.monotonic() + 60
    while True:
        try:
            return Ledger.open(path)
        except LedgerError:
            if time.monotonic() > end:
                raise
            time.sleep(0.01)


def test_a_worker_that_outlives_its_parent_holds_no_lock(path):
    """Data-loading workers are forked with the ledger open; a killed run must resume while they linger."""
    reader, writer = os.pipe()

    def parent():
        ledger = Ledger.create(path, {}, event=STEP, budget_steps=10)
        ledger.record()
        worker = _fork(lambda: time.sleep(300))
        os.write(writer, json.dumps(worker).encode() + b"\n")
        time.sleep(300)

    child = _fork(parent)
    worker = int(os.read(reader, 100))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    try:
        os.kill(worker, 0)
        ledger = _open_soon(path)  # the worker lets go of the descriptor as it starts
        assert ledger.spent_steps == 1
        ledger.close()
    finally:
        os.kill(worker, signal.SIGKILL)
        os.close(reader)
        os.close(writer)


def test_a_forked_process_may_not_record(path):
    ledger = Ledger.create(path, {}, event=STEP, budget_steps=10, block=5)
    ledger.record()

    def work():
        try:
            ledger.record()
        except LedgerError:
            os._exit(42)

    child = _fork(work)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42
    ledger.record()
    assert ledger.spent_steps == 2


@cases(
    ("arguments", "error"),
    [
        ({"budget_steps": -1}, ValueError),
        ({"budget_steps": 1.5}, ValueError),
        ({"block": 0}, ValueError),
        ({"event": accounting.dpsgd(0.5, 0.01, 5)}, TypeError),
        ({"header": {"model": object()}}, TypeError),
        ({"header": {"target": float("nan")}}, ValueError),
    ],
)
def test_bad_arguments_leave_no_file(path, arguments, error):
    settings = {"header": {}, "event": STEP, "budget_steps": 10, **arguments}
    with pytest.raises(error):
        Ledger.create(path, settings.pop("header"), **settings)
    assert not path.exists()
