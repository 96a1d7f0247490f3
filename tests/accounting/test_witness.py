"""What the account remembers: a ledger cut back, replaced or copied is found without a checkpoint, and so is a second draw."""

import os
import shutil
import stat
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings, strategies as st

import fastdp
from fastdp import accounting, files
from fastdp.accounting import BudgetExceeded, Ledger, LedgerError
from fastdp.accounting.witness import count_release, data_digest, same_data, state_folder
from tests.accounting.test_ledger import crash
from tests.tokenizers_for_tests import quickstart

STEP = accounting.dpsgd_model(0.5, 0.01)
SIDE = {"selection": (accounting.EventModel(accounting.gaussian(2.0)), 3)}


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch):
    """A memory of the test's own."""
    monkeypatch.setenv("FASTDP_STATE", str(tmp_path / "state"))
    monkeypatch.delenv("FASTDP_AGAIN")
    # Nothing here is about syncing, and a busy disk takes its time.
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    return tmp_path / "state"


def begin(folder, resume=False, header=None, **options):
    header = {"unit": "example"} if header is None else header
    arguments = {"event": STEP, "budget_steps": 100, "side": SIDE, "block": 5, **options}
    return Ledger.open_or_create(folder / "ledger.jsonl", header, resume=resume, **arguments)


def record(ledger, count):
    for _ in range(count):
        ledger.record()


def test_begun_and_continued(tmp_path, state):
    ledger = begin(tmp_path / "run")
    record(ledger, 7)
    ledger.record("selection")
    ledger.close()
    again = begin(tmp_path / "run", resume=True)
    assert (again.spent_steps, again.spent("selection"), again.run_id) == (7, 1, ledger.run_id)
    again.close()
    assert stat.S_IMODE((tmp_path / "run" / "ledger.jsonl").stat().st_mode) == 0o600
    assert stat.S_IMODE(state.stat().st_mode) == 0o700
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in state.rglob("*") if path.is_file())


def test_what_cannot_be_begun_or_continued(tmp_path):
    with pytest.raises(ValueError, match="there is no ledger to resume"):
        begin(tmp_path, resume=True)
    assert list(tmp_path.glob("*.jsonl")) == []
    with pytest.raises(ValueError, match="no ledger to resume without output_dir"):
        Ledger.open_or_create(None, {}, event=STEP, budget_steps=3, resume=True)
    ledger = begin(tmp_path)
    ledger.record()
    ledger.close()
    kept = (tmp_path / "ledger.jsonl").read_bytes()
    for refusal, options in (
        ("already holds a run's ledger", {}),
        ("another unit; resume with the same", {"resume": True, "header": {"unit": "user"}}),
        ("another noise or sampling", {"resume": True, "event": accounting.dpsgd_model(0.6, 0.01)}),
        ("with another event", {"resume": True, "side": {"selection": (STEP, 3)}}),
    ):
        with pytest.raises((ValueError, LedgerError), match=refusal):
            begin(tmp_path, **options)
        assert (tmp_path / "ledger.jsonl").read_bytes() == kept, "a refusal wrote to the ledger"
    begin(tmp_path, resume=True).close()


@pytest.mark.parametrize("left", [b"", b'{"body": {"rec'])
def test_an_emptied_ledger_is_not_called_one_that_released_nothing(tmp_path, monkeypatch, left):
    ledger = begin(tmp_path)
    record(ledger, 5)
    ledger.close()
    (tmp_path / "ledger.jsonl").write_bytes(left)
    with pytest.raises(LedgerError, match="was emptied, and releases were recorded in it: put back a copy"):
        begin(tmp_path, resume=True)
    (tmp_path / "ledger.jsonl").rename(tmp_path / "moved")
    with pytest.raises(ValueError, match="is gone, and releases were recorded in it: put back a copy"):
        begin(tmp_path, resume=True)
    (tmp_path / "moved").rename(tmp_path / "ledger.jsonl")
    monkeypatch.setenv("FASTDP_STATE", str(tmp_path / "another"))
    with pytest.raises(
        LedgerError, match="no complete record: put back a copy, or delete it if its run released nothing"
    ):
        begin(tmp_path, resume=True)
    with pytest.raises(LedgerError, match="it is no ledger, or its run released nothing"):
        Ledger.read(tmp_path / "ledger.jsonl")


def test_data_are_told_apart_by_a_digest_that_shows_nothing_elsewhere(monkeypatch, tmp_path):
    digest = data_digest(["a", "b"])
    assert same_data(digest, data_digest(["a", "b"])) is True
    assert same_data(digest, data_digest(["ab", ""])) is False
    monkeypatch.setenv("FASTDP_STATE", str(tmp_path / "another"))
    assert same_data(digest, data_digest(["a", "b"])) is None


def test_a_run_that_began_nothing_leaves_nothing(tmp_path, state):
    begin(tmp_path / "run").abandon()
    assert list((tmp_path / "run").iterdir()) == []
    assert list((state / "ledgers").iterdir()) == []
    ledger = begin(tmp_path / "run")
    ledger.record()
    ledger.abandon()
    again = begin(tmp_path / "run", resume=True)
    assert again.spent_steps == 1
    again.abandon()
    assert begin(tmp_path / "run", resume=True).spent_steps == 1


@given(st.lists(st.sampled_from(["record", "selection", "close", "extend"]), min_size=1, max_size=12), st.data())
@settings(max_examples=40)
def test_a_ledger_cut_at_any_line_is_refused(tmp_path_factory, actions, data):
    """However a run went, a file that lost lines at its end is refused, and the whole one goes on."""
    folder = tmp_path_factory.mktemp("run")
    os.environ["FASTDP_STATE"] = str(folder / "state")
    ledger = begin(folder)
    for action in actions:
        if action == "close":
            ledger.close()
            ledger = begin(folder, resume=True)
        elif action == "extend":
            ledger.extend(ledger.budget_steps + 1)
        else:
            try:
                ledger.record("step" if action == "record" else action)
            except BudgetExceeded:
                continue
    ledger.close()
    path = folder / "ledger.jsonl"
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    path.write_bytes(b"".join(lines[: data.draw(st.integers(1, len(lines) - 1))]))
    with pytest.raises(LedgerError, match="cut back or replaced"):
        begin(folder, resume=True)
    path.write_bytes(whole)
    begin(folder, resume=True).close()


def test_of_two_copies_of_a_run_one_goes_on(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    ledger = begin(first)
    record(ledger, 12)
    ledger.close()
    shutil.copytree(first, second)
    with pytest.raises(LedgerError, match=r"second/ledger.jsonl is a copy of .*first/ledger.jsonl"):
        begin(second, resume=True)
    begin(first, resume=True).close()
    # The first went on: the second lacks what it released since, whether or not the first is still there.
    shutil.rmtree(first)
    with pytest.raises(LedgerError, match="cut back or replaced"):
        begin(second, resume=True)


def test_a_run_may_move(tmp_path):
    ledger = begin(tmp_path / "first")
    record(ledger, 12)
    ledger.close()
    (tmp_path / "first").rename(tmp_path / "second")
    begin(tmp_path / "second", resume=True).close()
    (tmp_path / "link").symlink_to(tmp_path / "second")
    begin(tmp_path / "link", resume=True).close()
    # A new run where the old one was is another run.
    begin(tmp_path / "first").close()
    begin(tmp_path / "second", resume=True).close()


def test_killed_between_the_record_and_its_memory(tmp_path, monkeypatch):
    """The ledger is written first: what the account remembers may be older, never newer."""
    ledger = begin(tmp_path)
    monkeypatch.setattr(accounting.ledger, "note_ledger", lambda *given: (_ for _ in ()).throw(InterruptedError))
    with pytest.raises(InterruptedError):
        ledger.record()
    monkeypatch.undo()
    monkeypatch.setenv("FASTDP_STATE", str(tmp_path / "state"))
    crash(ledger)
    assert begin(tmp_path, resume=True).spent_steps == 5


def test_a_note_binds_a_file_to_the_ledger(tmp_path):
    ledger = begin(tmp_path)
    ledger.note("preparation-0", "aa")
    ledger.note("preparation-0", "bb")
    ledger.close()
    again = begin(tmp_path, resume=True)
    assert (again.noted("preparation-0"), again.noted("other")) == ("bb", None)
    again.close()


def test_data_are_released_once_unless_it_is_asked_for_again(tmp_path, state, monkeypatch):
    texts = ["a", "b c"]
    assert count_release(texts, "laplace", tmp_path / "out.jsonl") == []
    with pytest.raises(ValueError, match=r"released before, by laplace to .*out\.jsonl"):
        count_release(iter(texts), "exponential", tmp_path / "other.jsonl")
    assert len(count_release(texts, "exponential", tmp_path / "other.jsonl", again=True)) == 1
    monkeypatch.setenv("FASTDP_AGAIN", "1")
    first, second = count_release(texts, "exponential", tmp_path / "third.jsonl")
    assert first.startswith("by laplace to ")
    assert second.startswith("by exponential to ")
    monkeypatch.delenv("FASTDP_AGAIN")
    for other in (["a", "b", "c"], ["a b c"], ["b c", "a"], ["a", "b c", ""]):
        assert count_release(other, "laplace", tmp_path) == []
    kept = b"".join(path.read_bytes() for path in state.rglob("*") if path.is_file())
    assert b"b c" not in kept


def test_of_two_programs_that_release_at_once_one_is_refused(tmp_path, monkeypatch):
    """The second waits until the first has noted its release, however long that takes."""
    write = files.write_json

    def slowly(*arguments, **options):
        time.sleep(0.3)
        write(*arguments, **options)

    monkeypatch.setattr(files, "write_json", slowly)
    with ThreadPoolExecutor(2) as pool:
        begun = [pool.submit(count_release, ["a", "b"], "laplace", tmp_path / str(k)) for k in range(2)]
    assert [type(each.exception()) for each in begun].count(ValueError) == 1
    with pytest.raises(ValueError, match="released before"):
        count_release(["a", "b"], "laplace", tmp_path / "third")


def test_texts_that_were_released_in_other_company_are_refused_or_said(tmp_path, state):
    texts = [f"what the {place}th of these people wrote" for place in range(8)]
    assert count_release(texts, "laplace", tmp_path / "out.jsonl") == []
    for known in (texts[::-1], texts[:3], [*texts, "and one who came later than all"], texts[:4] + ["short"] * 4):
        with pytest.raises(ValueError, match=r"released before, by laplace to .*out\.jsonl"):
            count_release(known, "laplace", tmp_path / "other.jsonl")
    (said,) = count_release(texts[::-1], "laplace", tmp_path / "other.jsonl", again=True)
    assert said.startswith("in part, by laplace to ")
    grown = [*texts[:2], *(f"and what {name} wrote about it later" for name in ("Ann", "Ben", "Cem"))]
    first, second = count_release(grown, "laplace", tmp_path / "third.jsonl")
    assert first.startswith("in part, by laplace to ")
    assert "third" not in first + second
    assert count_release(["a", "b", "nobody wrote any of these lines before"], "laplace", tmp_path / "fourth") == []
    kept = b"".join(path.read_bytes() for path in state.rglob("*") if path.is_file())
    assert b"people" not in kept


def test_a_stop_while_a_release_is_counted_is_nobody_else_s_fault(tmp_path, monkeypatch):
    texts = [f"what the {place}th of these people wrote" for place in range(8)]
    write = files.write

    def stopped(path, *args, **options):
        write(path, *args, **options)
        if path.parent.name == "releases":
            raise KeyboardInterrupt

    monkeypatch.setattr(files, "write", stopped)
    with pytest.raises(KeyboardInterrupt):
        count_release(texts, "split", tmp_path, run="one")
    monkeypatch.setattr(files, "write", write)
    count_release(texts[:1] + ["what somebody else wrote, who is alone"] * 3, "laplace", tmp_path / "other.jsonl")
    with pytest.raises(ValueError, match="released before, by split to .* in run one"):
        count_release(texts, "split", tmp_path, run="another")
    for _ in range(2):
        assert not [said for said in count_release(texts, "split", tmp_path, run="one") if "split" in said]
    with pytest.raises(ValueError, match="released before, by split to .* in run one"):
        count_release(texts[::-1], "laplace", tmp_path / "third.jsonl")


def test_a_second_draw_into_another_place_is_refused_or_said(tmp_path):
    tokenizer, table = quickstart()
    perturb = fastdp.SelectivePerturbation(2.0)
    texts = ["Alice Smith lives in Paris, at alice@example.org"]
    first = perturb(texts, tokenizer, table, cache=tmp_path / "one" / "drawn")
    with pytest.raises(ValueError, match="by selective perturbation .*one/drawn"):
        perturb(texts, tokenizer, table, cache=tmp_path / "two" / "drawn")
    assert not (tmp_path / "two" / "drawn").exists()
    again = perturb(texts, tokenizer, table, cache=tmp_path / "two" / "drawn", again=True)
    kept = perturb(texts, tokenizer, table, cache=tmp_path / "two" / "drawn")
    assert kept.from_cache
    assert kept.earlier == again.earlier
    assert first.earlier == ()
    for card in (again.card(), kept.card()):
        assert len(card["earlier_releases"]) == 1
        result = accounting.verify(card)
        assert result.holds
        assert any("1 earlier releases" in entry for entry in result.unchecked)
    assert "earlier_releases" not in first.card()


def test_a_folder_that_cannot_be_made_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FASTDP_STATE", str(tmp_path / "file" / "state"))
    with pytest.raises(OSError, match="set FASTDP_STATE to a folder"):
        begin(tmp_path)
    assert not (tmp_path / "ledger.jsonl").exists()
    monkeypatch.delenv("FASTDP_STATE")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))
    assert state_folder() == tmp_path / "xdg" / "fastdp"
