"""The gate for public text: copies of the private data do not pass, however they are dressed, and other text does."""

import json
import random

import pytest
from hypothesis import given, settings, strategies as st

from fastdp.public import WINDOW, PublicGate, content_digest
from fastdp.tables import DataError

words = st.text(st.characters(categories=("L", "N")), min_size=1, max_size=8)
records = st.lists(st.lists(words, min_size=1, max_size=40).map(" ".join), min_size=1, max_size=12)


def shared(private, public, folder, confirmed=0):
    path = folder / "public.txt"
    path.write_text("\n".join(public))
    return PublicGate(private, [folder / "private.txt"], confirmed).admit(path, public).shared


DRESSED = {
    "shuffled": lambda rows: random.Random(0).sample(rows, len(rows)),
    "in capitals": lambda rows: [row.swapcase().swapcase().upper() for row in rows],
    "spaced": lambda rows: [f"  {row.replace(' ', '   ')}. " for row in rows],
    "punctuated": lambda rows: [row.replace(" ", ", ") + "!" for row in rows],
    "twice": lambda rows: rows + rows,
    "a few": lambda rows: rows[: max(1, len(rows) // 4)],
}


@pytest.mark.parametrize("dress", DRESSED)
@given(rows=records)
@settings(max_examples=30, deadline=None)
def test_a_copy_is_refused(tmp_path_factory, dress, rows):
    rows = [row for row in rows if row.upper().casefold() == row.casefold()] or ["one record"]
    folder = tmp_path_factory.mktemp("gate")
    copy = DRESSED[dress](rows)
    with pytest.raises(DataError, match=f"{len(copy)} of {len(copy)} records are private ones"):
        shared(rows, copy, folder)
    assert shared(rows, copy, folder, len(copy)) == len(copy)


def sentence(seed, length):
    return " ".join(f"w{random.Random(f'{seed} {i}').randrange(500)}" for i in range(length))


def test_long_records_that_were_cut_or_joined_are_refused(tmp_path):
    private = [sentence(i, 40) for i in range(8)]
    joined = [" ".join(private[i : i + 2]) for i in range(0, 8, 2)]
    cut = [" ".join(row.split()[5:30]) for row in private]
    for copy in (joined, cut):
        with pytest.raises(DataError, match="are private ones"):
            shared(private, copy, tmp_path)


def test_text_of_its_own_passes_and_common_phrases_do_not_count(tmp_path):
    private = [sentence(i, 40) for i in range(50)]
    phrase = " ".join(private[0].split()[: WINDOW - 1])
    public = [f"{phrase} {sentence(1000 + i, 20)}" for i in range(50)]
    assert shared(private, public, tmp_path) == 0


def test_no_more_than_was_confirmed(tmp_path):
    private = [sentence(i, 20) for i in range(10)]
    public = private[:3] + [sentence(100 + i, 20) for i in range(7)]
    assert shared(private, public, tmp_path, 3) == 3
    with pytest.raises(DataError, match=r"3 of 10 records .* public_overlap 3"):
        shared(private, public, tmp_path, 2)


def test_the_private_file_itself_is_refused_whatever_is_confirmed(tmp_path):
    private = tmp_path / "private.txt"
    private.write_text("one\ntwo\n")
    (tmp_path / "link.txt").symlink_to(private)
    (tmp_path / "copy.txt").write_text("one\ntwo\n")
    gate = PublicGate(["one", "two"], [private], 99)
    for name in ("private.txt", "link.txt", "copy.txt"):
        with pytest.raises(DataError, match="the private data itself"):
            gate.admit(tmp_path / name, ["one", "two"])


def test_the_card_says_what_it_was(tmp_path):
    path = tmp_path / "public.txt"
    path.write_text("three\n")
    found = PublicGate(["one"], [], 0).admit(path, ["three"])
    assert found.describe() == {"name": "public.txt", "sha256": content_digest(path), "records": 1, "shared": 0}
    assert json.dumps(found.describe())


def test_a_folder_is_known_by_its_files(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rows.arrow").write_bytes(b"rows")
    assert content_digest(tmp_path / "a") == content_digest(tmp_path / "b")
    (tmp_path / "b" / "rows.arrow").write_bytes(b"other")
    assert content_digest(tmp_path / "a") != content_digest(tmp_path / "b")
