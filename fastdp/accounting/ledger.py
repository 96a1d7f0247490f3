"""The ledger: what a run released, reserved on disk before it is released, so that no crash can forget it."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import fastdp.files as files
from fastdp.accounting import journal as journals
from fastdp.accounting.event_types import DpEvent
from fastdp.accounting.events import EventModel, as_count, compose
from fastdp.accounting.journal import EmptyLedgerError, Journal, LedgerError
from fastdp.accounting.serialisation import canonical, deserialise, serialise
from fastdp.accounting.witness import check_ledger, forget_ledger, knows_ledger_at, note_ledger, state_folder
from fastdp.validate import instance, integer

LEDGER_FORMAT = "fastdp.ledger"
#: The second knows kinds whose event changes with the number of the release.
VERSIONS = (1, 2)
STEP = "step"
_LOST = (
    "{}, and releases were recorded in it: put back a copy, or begin in another folder, whose cost adds to this run's."
)


class BudgetExceeded(LedgerError):
    """A release that the budget does not hold."""


@dataclass(frozen=True)
class _Account:
    """One kind of release: its event, and counts of releases. ``used <= reserved`` while a run is alive."""

    model: EventModel
    budget: int
    block: int
    used: int = 0
    reserved: int = 0

    def to_json(self) -> dict[str, Any]:
        return {
            "event": serialise(self.model.one),
            "releases_per_use": self.model.releases_per_use,
            **({"later": [[use, serialise(event)] for use, event in self.model.later]} if self.model.later else {}),
            "budget": self.budget,
            "block": self.block,
        }

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> _Account:
        later = tuple((as_count(use, "use"), deserialise(event)) for use, event in fields.get("later", ()))
        model = EventModel(deserialise(fields["event"]), fields["releases_per_use"], later)
        return cls(model, as_count(fields["budget"], "budget"), as_count(fields["block"], "block"))


def _account(event: EventModel, budget: int, block: int | None = None) -> _Account:
    instance(EventModel, "the EventModel of one release, such as dpsgd_model(...) returns", event=event)
    budget = as_count(budget, "budget")
    # A crash forfeits what is left of a block; a fiftieth of the budget is little to lose, and few writes.
    block = min(max(budget // 50, 1), 64) if block is None else block
    integer(1, block=block)
    return _Account(event, budget, block)


class Ledger:
    """Counts releases of each kind against a budget.

    With a path, releases are reserved in blocks on disk, in a chain of digests, before the first of a block is made.
    After a crash the whole block counts as spent: the count is never below the truth. `close` gives back what a block
    did not use. Without a path the same rules hold in memory.

    Runs make one with `open_or_create`; one process at a time holds the file.

    Attributes:
        header: what `create` was given, with ``run_id``.
        path: the file, or None.
    """

    def __init__(
        self, header: dict[str, Any], accounts: dict[str, _Account], journal: Journal | None, path: Path | None
    ):
        self.header = header
        self.path = path
        self._accounts = accounts
        self._journal = journal
        #: Digests of all records: the points in its history that a checkpoint or a card may name.
        self._heads: set[str] = set()
        self._notes: dict[str, str] = {}
        #: Whether its latest record counts what was made, and not what was reserved.
        self.closed_in_order = False
        self._closed = False
        #: Whether the account's own folder is told of each record (see `fastdp.accounting.witness`).
        self._witnessed = False
        #: Whether this object made the file.
        self._fresh = False

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str] | None,
        header: dict[str, Any],
        *,
        event: EventModel,
        budget_steps: int,
        block: int | None = None,
    ) -> Ledger:
        """A new ledger whose kind ``step`` has ``budget_steps`` releases of ``event``, reserved a ``block`` at a time.

        The file must not exist, and its folder must; without a path the ledger is in memory. The header holds JSON values, to
        which ``run_id`` is added.
        """
        header = {"run_id": uuid.uuid4().hex, **header}
        accounts = {STEP: _account(event, budget_steps, block)}
        body = {
            "record": "header",
            "format": LEDGER_FORMAT,
            "version": VERSIONS[bool(event.later)],
            "time": _now(),
            "header": header,
            "kinds": {kind: account.to_json() for kind, account in accounts.items()},
        }
        canonical(body)
        if path is None:
            return cls(header, accounts, None, None)
        ledger = cls(header, accounts, Journal.create(Path(path), body), Path(path))
        ledger._remember_head()
        return ledger

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Ledger:
        """Continue the ledger of an earlier process.

        What that process had reserved counts as spent unless it closed the ledger. A torn last line counts as one more
        block. Releases with shuffled batches restart at a new epoch, since the next one draws a new order.
        """
        path = Path(path)
        journal, history = Journal.open(path)
        try:
            header, accounts = _replay(history, path)
            ledger = cls(header, accounts, journal, path)
            ledger._remember(history)
            if history.torn:
                ledger._append("recover", {"total": {kind: account.used for kind, account in accounts.items()}})
            ledger.begin_pass()
        except BaseException:
            journal.close()
            raise
        return ledger

    @classmethod
    def open_or_create(
        cls,
        path: str | os.PathLike[str] | None,
        header: dict[str, Any],
        *,
        event: EventModel,
        budget_steps: int,
        side: Mapping[str, tuple[EventModel, int]] | None = None,
        resume: bool = False,
        block: int | None = None,
    ) -> Ledger:
        """The ledger of a run that begins or, with ``resume``, goes on: what every run of the package opens.

        A ledger is continued by the run that began it and by no other: with the same header, ``run_id`` aside, and events. It
        is noted outside its folder (see `fastdp.accounting.witness`). One that was cut back, replaced by an older copy, or
        copied to a second folder is refused.

        Args:
            path: the file; its folder is made if it is missing. None keeps the ledger in memory.
            header, event, budget_steps, block: as in `create`; a ledger that is continued keeps its own budget.
            side: event and budget of each further kind of release.
            resume: continue what ``path`` holds. Raises ValueError unless there is a ledger exactly if it is set.
        """
        path = None if path is None else Path(path)
        if path is not None:
            # For its refusal, before anything is made.
            state_folder()
        if path is not None and path.exists():
            if not resume:
                raise ValueError(
                    f"{path.parent} already holds a run's ledger: pass resume=True to continue it, or another output_dir"
                )
            ledger = cls._open_witnessed(path)
        else:
            if resume:
                if path is not None and knows_ledger_at(path):
                    raise ValueError(f"{path} {_LOST.format('is gone')}")
                place = "without output_dir" if path is None else f"in {path.parent}"
                raise ValueError(
                    f"there is no ledger to resume {place}: nothing shows what was spent; leave resume out to begin anew"
                )
            if path is not None:
                files.make_folder(path.parent)
            ledger = cls.create(path, header, event=event, budget_steps=budget_steps, block=block)
            ledger._fresh = True
        try:
            if path is not None and not ledger._fresh:
                _compare(ledger, header, event, path)
                check_ledger(ledger.run_id, path, ledger._heads)
            ledger._witnessed = path is not None
            ledger._remember_head()
            for kind, (model, budget) in (side or {}).items():
                ledger.declare(kind, model, budget)
        except BaseException:
            if ledger._fresh:
                ledger.abandon()
            else:
                ledger._close_file()
            raise
        return ledger

    @classmethod
    def _open_witnessed(cls, path: Path) -> Ledger:
        """`open`, where the account knows whether an empty file was ever written to."""
        try:
            return cls.open(path)
        except EmptyLedgerError as error:
            if not knows_ledger_at(path):
                raise
            raise EmptyLedgerError(f"{path} {_LOST.format('was emptied')}") from error

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Ledger:
        """The ledger as it stands, for looking at: takes no lock, writes nothing and refuses to record."""
        path = Path(path)
        history = journals.read(path)
        if not history.bodies:
            raise LedgerError(f"{path} holds no complete record: it is no ledger, or its run released nothing")
        ledger = cls(*_replay(history, path), None, path)
        ledger._remember(history)
        ledger._closed = True
        return ledger

    def mirrored(self) -> Ledger:
        """Its counts without its file, for a process that goes along with the one that writes it."""
        twin = Ledger(dict(self.header), dict(self._accounts), None, None)
        twin._heads, twin._notes = set(self._heads), dict(self._notes)
        return twin

    @property
    def run_id(self) -> str:
        """Identifies the run; the same after a resume."""
        return self.header["run_id"]

    @property
    def head(self) -> str | None:
        """Digest of the last record, for a checkpoint to keep (see `restore`); None without a file."""
        return None if self._journal is None else self._journal.head

    def holds(self, head: str) -> bool:
        """Whether a record with this digest is in its history."""
        return head in self._heads

    @property
    def kinds(self) -> dict[str, EventModel]:
        """The event of each kind of release, by name."""
        return {kind: account.model for kind, account in self._accounts.items()}

    @property
    def untouched(self) -> bool:
        """Whether nothing of any kind was spent."""
        return not any(account.used for account in self._accounts.values())

    @property
    def spent_steps(self) -> int:
        """Training steps spent, never below the truth."""
        return self._accounts[STEP].used

    @property
    def budget_steps(self) -> int:
        """Training steps the budget holds."""
        return self._accounts[STEP].budget

    def spent(self, kind: str) -> int:
        """Releases of a kind spent, never below the truth."""
        return self._find(kind).used

    def budget(self, kind: str) -> int:
        """Releases of a kind the budget holds."""
        return self._find(kind).budget

    def remaining(self, kind: str = STEP) -> int:
        """Releases of a kind that may still be made."""
        account = self._find(kind)
        return max(account.budget - account.used, 0)

    def event(self) -> DpEvent:
        """Event of all that was spent, of every kind."""
        return compose(*(account.model.event(account.used) for account in self._accounts.values()))

    def budget_event(self) -> DpEvent:
        """Event of the whole budget, or of what was spent where that is more."""
        return compose(*(a.model.event(max(a.budget, a.used)) for a in self._accounts.values()))

    def declare(self, kind: str, event: EventModel, budget: int) -> None:
        """Add a kind of release, such as ``selection``, with a budget of its own.

        Declaring it again with the same event is allowed, so that a resumed run may; the larger budget stands.
        Raises LedgerError if the kind exists with another event.
        """
        account = _account(event, budget, block=1)
        known = self._accounts.get(kind)
        if known is not None:
            if known.model != event:
                raise LedgerError(
                    f"the ledger already has releases of kind {kind!r} with another event; give the arguments it was begun with"
                )
            if budget > known.budget:
                self.extend(budget, kind)
            return
        self._append("declare", {"of": kind, "kind": account.to_json()})
        self._accounts[kind] = account

    def holds_next(self, kind: str = STEP) -> bool:
        """Whether the next release is reserved already, so that `record` writes nothing to disk."""
        account = self._find(kind)
        return account.used < account.reserved

    def reserve_next(self, kind: str = STEP) -> None:
        """Reserve a block on disk, unless the next release is reserved already or the budget holds no other."""
        account = self._find(kind)
        if account.used >= account.reserved:
            total = min(account.used + account.block, account.budget)
            if total > account.used:
                self._append("reserve", {"of": kind, "total": total})
                self._accounts[kind] = replace(account, reserved=total)

    def record(self, kind: str = STEP) -> None:
        """Note one release, before it is made. Writes to disk only where a new block begins.

        Raises BudgetExceeded if the budget does not hold it; the release must not be made then.
        """
        account = self._find(kind)
        self._require_open()
        if account.used >= account.budget:
            raise BudgetExceeded(
                f"all {account.budget} budgeted releases of kind {kind!r} are spent; extend the budget to go on"
            )
        self.reserve_next(kind)
        self._accounts[kind] = replace(self._accounts[kind], used=account.used + 1)

    def begin_pass(self) -> None:
        """Note that the sampler draws a new order: where batches are shuffled, an epoch begun before counts whole.

        Without this, two orders cut short and joined could use a unit twice in what would be counted as one epoch.
        Does nothing where each release is sampled afresh.
        """
        for kind, account in self._accounts.items():
            used = account.model.round_up(account.used)
            self._accounts[kind] = replace(account, used=used, reserved=max(account.reserved, used))

    def extend(self, new_budget: int, kind: str = STEP) -> None:
        """Raise the budget of a kind to ``new_budget`` releases in all. Raises ValueError if that is not more."""
        account = self._find(kind)
        if as_count(new_budget, "new budget") <= account.budget:
            raise ValueError(f"the budget is {account.budget} releases already: extend it to more, not to {new_budget}")
        self._append("extend", {"of": kind, "budget": int(new_budget)})
        self._accounts[kind] = replace(account, budget=int(new_budget))

    def restore(self, spent: int | Mapping[str, int], head: str | None = None) -> None:
        """Agree with a checkpoint: what is spent becomes the larger of the two counts, so neither is rolled back.

        The checkpoint has the releases of each kind, or of training steps alone, and `head` as they were when it was written.
        Raises LedgerError where the file's history does not hold that head.
        """
        if head is not None and self.path is not None and head not in self._heads:
            raise LedgerError(
                f"{self.path} does not hold the history this checkpoint was written with: it was cut back or replaced"
            )
        for kind, count in (spent if isinstance(spent, Mapping) else {STEP: spent}).items():
            account = self._find(kind)
            if as_count(count, "releases") <= account.used:
                continue
            total = account.model.round_up(count)
            self._append("reserve", {"of": kind, "total": total})
            self._accounts[kind] = replace(account, used=total, reserved=max(total, account.reserved))

    def note(self, name: str, digest: str) -> None:
        """Bind a file to the ledger: keep the digest of what was released under ``name``, such as a selection's outcome."""
        self._append("note", {"name": name, "digest": digest})
        self._notes[name] = digest

    def noted(self, name: str) -> str | None:
        """The digest that `note` kept last under a name; None if it kept none."""
        return self._notes.get(name)

    def close(self) -> None:
        """Give back what is reserved and unused, and release the file. May be called again."""
        if not self._closed:
            self._append("close", {"total": {kind: account.used for kind, account in self._accounts.items()}})
            self._close_file()

    def _close_file(self) -> None:
        self._closed = True
        if self._journal is not None:
            self._journal.close()

    def abandon(self) -> None:
        """Close it; one that `open_or_create` began, and that nothing was released under, leaves no file."""
        unused = self._fresh and self.untouched
        self.close()
        if unused and self.path is not None:
            self.path.unlink(missing_ok=True)
            forget_ledger(self.run_id)

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _find(self, kind: str) -> _Account:
        if kind not in self._accounts:
            raise LedgerError(f"the ledger knows no releases of kind {kind!r}; declare it first")
        return self._accounts[kind]

    def _append(self, record: str, fields: dict[str, Any]) -> None:
        self._require_open()
        if self._journal is not None:
            self._journal.append({"record": record, "time": _now(), **fields})
            self._remember_head()

    def _require_open(self) -> None:
        if self._closed or (self._journal is not None and not self._journal.writable):
            raise LedgerError("the ledger is closed, or another process's: nothing may be released under it here")

    def _remember(self, history: journals.History) -> None:
        self._heads = set(history.digests)
        self._notes = {body["name"]: body["digest"] for body in history.bodies if body["record"] == "note"}
        self.closed_in_order = history.bodies[-1]["record"] == "close" and not history.torn

    def _remember_head(self) -> None:
        if self._journal is not None and self.path is not None:
            self._heads.add(self._journal.head)
            if self._witnessed:
                note_ledger(self.run_id, self.path, self._journal.head)


def _compare(ledger: Ledger, header: Mapping[str, Any], event: EventModel, path: Path) -> None:
    """Raise ValueError where a run that is continued differs from the one that began: one card speaks for both."""
    # As the file holds them: tuples are lists there.
    given = json.loads(canonical(dict(header)))
    # Ledgers that say nothing of it were begun when there was no choice; of the others, when a ledger did not say.
    later = ("shapes", "sampling", "noise_multiplier", "sequence_length", "reuse")
    begun = {"noise_rounds": 20, **{key: given.get(key) for key in later}, **ledger.header}
    changed = [key for key in header if key != "run_id" and begun.get(key) != given[key]]
    if not changed and ledger.kinds[STEP] != event:
        changed = ["noise or sampling"]
    if changed:
        raise ValueError(
            f"the ledger in {path.parent} was written with another {changed[0]}; resume with the same arguments, or begin anew "
            "in another output_dir"
        )


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _replay(history: journals.History, path: Path) -> tuple[dict[str, Any], dict[str, _Account]]:
    """Header and accounts after every record; ``used`` is what must be counted as spent."""
    first, *rest = history.bodies
    if first.get("record") != "header" or first.get("format") != LEDGER_FORMAT:
        raise LedgerError(f"{path} is not a ledger of this package")
    if first.get("version") not in VERSIONS:
        raise LedgerError(
            f"{path} has ledger version {first.get('version')!r}; this package reads {' and '.join(map(str, VERSIONS))}"
        )
    try:
        accounts = {kind: _Account.from_json(fields) for kind, fields in first["kinds"].items()}
        for body in rest:
            _apply(accounts, body)
        header = dict(first["header"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise LedgerError(f"{path} holds a record this package cannot read: {error!r}") from None
    for kind, account in accounts.items():
        spent = account.used
        if history.torn:
            # Whatever was being written, no release had been made under it; one block is more than the truth.
            spent = max(spent, min(spent + account.block, account.budget))
        accounts[kind] = replace(account, used=spent, reserved=spent)
    return header, accounts


def _apply(accounts: dict[str, _Account], body: dict[str, Any]) -> None:
    record = body["record"]
    if record == "declare":
        accounts[body["of"]] = _Account.from_json(body["kind"])
    elif record == "extend":
        accounts[body["of"]] = replace(accounts[body["of"]], budget=as_count(body["budget"], "budget"))
    elif record == "reserve":
        total = as_count(body["total"], "total")
        accounts[body["of"]] = replace(accounts[body["of"]], used=total, reserved=total)
    elif record in ("recover", "close"):
        for kind, total in body["total"].items():
            accounts[kind] = replace(accounts[kind], used=as_count(total, "total"), reserved=total)
    elif record == "note":
        if not (isinstance(body["name"], str) and isinstance(body["digest"], str)):
            raise ValueError("a note is no text")
    else:
        raise ValueError(f"unknown record {record!r}")
