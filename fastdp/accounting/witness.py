"""What this account remembers outside every output folder: where each ledger stood, and which data sets were released.

A ledger's own chain of digests shows that a line was altered. It does not show that its last lines are gone, nor that its
folder was copied and both copies go on. A second output folder knows nothing of the first. So each is also noted in a folder
of the account's own: ``$FASTDP_STATE``, or ``fastdp`` below ``$XDG_STATE_HOME`` or ``~/.local/state``. What happened under
another account, on another machine, or with another such folder is not known here: there, a checkpoint or a card that holds
the ledger's head tells whether the ledger was cut back.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from collections.abc import Collection, Iterable
from datetime import datetime, timezone
from pathlib import Path

import fastdp.files as files
from fastdp.accounting.journal import LedgerError
from fastdp.locks import Lock

#: Bytes of a text from which on it is hardly another person's as well; of its digest; and the name of a release's digests.
_LONG_TEXT, _MARK_BYTES, _PARTS_SUFFIX = 24, 16, ".parts"
#: Seconds to wait for another program that notes a release.
_LONGEST_WAIT = 60.0


def state_folder() -> Path:
    """The account's own folder; made, for its owner alone, if it is not there."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    folder = Path(os.environ.get("FASTDP_STATE") or Path(base) / "fastdp")
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise OSError(
            f"{folder} cannot be made ({error.strerror}), and what was released is remembered there: set FASTDP_STATE to a "
            "folder that can be written and lasts"
        ) from None
    return folder


def note_ledger(run_id: str, path: Path, head: str) -> None:
    """Remember the last record of a ledger and where it is."""
    files.write_json(_of_ledger(run_id), {"path": os.path.realpath(path), "head": head})


def forget_ledger(run_id: str) -> None:
    """A run that began nothing leaves no memory."""
    _of_ledger(run_id).unlink(missing_ok=True)


def knows_ledger_at(path: Path) -> bool:
    """Whether a ledger that was written to lay at this path."""
    place = os.path.realpath(path)
    notes = (state_folder() / "ledgers").glob("*.json")
    return any(json.loads(note.read_text())["path"] == place for note in notes)


def knows_ledger(run_id: str) -> bool:
    """Whether anything is known of a ledger: otherwise nothing here shows that its last records are there."""
    return _of_ledger(run_id).exists()


def check_ledger(run_id: str, path: Path, digests: Collection[str]) -> None:
    """Raise LedgerError for a ledger, of records ``digests``, that was cut back or replaced, or lies in another folder too."""
    note = _of_ledger(run_id)
    if not note.exists():
        return
    known = json.loads(note.read_text())
    first = Path(known["path"])
    if first.exists() and not first.samefile(path) and _run_id(first) == run_id:
        raise LedgerError(
            f"{path} is a copy of {first}: both would release under one card. Continue the first, or remove it to continue this."
        )
    if known["head"] not in digests:
        raise LedgerError(
            f"{path} was cut back or replaced by an older copy: it lacks the last record that was written to "
            "it. Put back the latest copy."
        )


def data_digest(parts: Iterable[str]) -> str:
    """A keyed digest of data, and a name of the key: another account's key cannot be compared, and shows nothing of the data."""
    key = _key()
    name = hashlib.sha256(b"name" + key).hexdigest()[:16]
    return f"{name}:{_keyed_digest(key, map(_encoded, parts))}"


def same_data(noted: str, digest: str) -> bool | None:
    """Whether two digests of `data_digest` are of the same data; None where their keys differ, so that nobody can tell."""
    known, own = noted.partition(":"), digest.partition(":")
    return None if known[0] != own[0] else known == own


def count_release(
    parts: Iterable[str], mechanism: str, place: str | os.PathLike[str], again: bool = False, run: str = ""
) -> list[str]:
    """Count a release of a data set by a perturbation at its source, before it leaves. Returns the earlier ones, in words.

    Data are known by keyed digests, of all parts together and of each that is long enough to be nobody else's: the folder of the
    account shows nobody what was in them. A data set half of whose parts were released before counts as released; of one
    that shares fewer with an earlier one, that is returned.

    Args:
        parts: the texts.
        mechanism, place: how and to where, for whoever meets the refusal, and for the card.
        again: release it once more all the same; so does ``FASTDP_AGAIN=1`` in the environment, which is its owner's.
        run: names one release that a stopped program repeats in the same place: it counts once.

    Raises ValueError, naming the last release, if there was one and nobody asked for another.
    """
    path, marks, count = _release_note(parts)
    said = f"by {mechanism} to {os.path.realpath(place)}" + (f" in run {run}" if run else "")
    # Of two programs that release the same data at once, the later one finds the note of the earlier.
    with _lock():
        notes = _notes(path)
        own = [note for note in notes if not (run and note.startswith(f"{said} on "))]
        counted = own != notes
        partly = _partly_released(path, marks, count, own, again or counted)
        if not counted:
            now = datetime.now(timezone.utc).isoformat(timespec="seconds")
            files.write_json(path, [*own, f"{said} on {now}"])
        files.write(path.with_suffix(_PARTS_SUFFIX), b"".join(sorted(marks)))
    return own + partly


def check_release(parts: Iterable[str], again: bool = False) -> None:
    """Raise ValueError where `count_release` would, before work that ends in a release is begun."""
    path, marks, count = _release_note(parts)
    _partly_released(path, marks, count, _notes(path), again)


def _release_note(parts: Iterable[str]) -> tuple[Path, set[bytes], int]:
    """The note of a data set, the marks of its longer parts, and the number of its parts."""
    key, encoded = _key(), [_encoded(part) for part in parts]
    marks = {hmac.digest(key, part, "sha256")[:_MARK_BYTES] for part in encoded if len(part) >= _LONG_TEXT}
    return state_folder() / "releases" / f"{_keyed_digest(key, encoded)}.json", marks, len(encoded)


def _notes(path: Path) -> list[str]:
    """The releases of one data set, in words."""
    return json.loads(path.read_text()) if path.exists() else []


def _partly_released(path: Path, marks: set[bytes], count: int, own: list[str], again: bool) -> list[str]:
    """Earlier releases of other data that share parts with these. Raises ValueError as `count_release`."""
    shared = _sharing(marks, path)
    before = own + [said for said, known in shared if 2 * known >= count]
    if before and not again and os.environ.get("FASTDP_AGAIN") != "1":
        raise ValueError(
            f"these data were released before, {before[-1]}. Use what was drawn then, or pay for a second release: again=True, "
            "--again or FASTDP_AGAIN=1."
        )
    return [f"in part, {said}" for said, _ in shared]


def _sharing(marks: set[bytes], own: Path) -> list[tuple[str, int]]:
    """The latest of each earlier release of other data that hold some of these parts, and how many of them."""
    found = []
    for path in sorted(own.parent.glob(f"*{_PARTS_SUFFIX}")):
        if path.stem != own.stem:
            held = path.read_bytes()
            shared = sum(held[at : at + _MARK_BYTES] in marks for at in range(0, len(held), _MARK_BYTES))
            if shared:
                found.append((json.loads(path.with_suffix(".json").read_text())[-1], shared))
    return found


def _of_ledger(run_id: str) -> Path:
    # A file may hold any text as its run's name; as a digest it names no other place.
    return state_folder() / "ledgers" / f"{hashlib.sha256(run_id.encode()).hexdigest()}.json"


def _run_id(path: Path) -> str | None:
    try:
        with open(path, "rb") as file:
            return json.loads(file.readline())["body"]["header"]["run_id"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _key() -> bytes:
    path = state_folder() / "key"
    if not path.exists():
        with _lock():
            if not path.exists():
                files.write(path, os.urandom(32))
    return path.read_bytes()


def _lock() -> Lock:
    """The account's memory of releases, for one program at a time."""
    return Lock(state_folder() / "releases.lock", "what this account remembers of releases", seconds=_LONGEST_WAIT)


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _keyed_digest(key: bytes, parts: Iterable[bytes]) -> str:
    digest = hmac.new(key, digestmod=hashlib.sha256)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()
