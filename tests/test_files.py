"""Files are left whole, durable and private; nothing in the package leaves one in another way."""

import ast
import contextlib
import os
import resource
import stat
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors.torch import load_file

import fastdp.files as files

ROOT = Path(__file__).parents[1] / "fastdp"


@contextlib.contextmanager
def small_files(size):
    """Files cannot grow beyond a size, for the whole process."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@given(st.text(), st.booleans(), st.booleans())
@settings(max_examples=25, deadline=None)
def test_what_is_written_is_there_with_its_permissions(tmp_path_factory, text, public, earlier):
    path = tmp_path_factory.mktemp("written") / "folder" / "file"
    if earlier:
        path.parent.mkdir()
        path.write_text("earlier")
    files.write(path, text, public=public)
    assert path.read_bytes() == text.encode()
    assert mode(path) == (0o644 if public else 0o600)
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("public", [False, True])
def test_a_folder_that_is_made_is_private_unless_it_is_public(tmp_path, public):
    """One that was there keeps its mode: it is its owner's choice."""
    path = tmp_path / "runs" / "first"
    files.make_folder(path, public=public)
    assert mode(path) == (0o755 if public else 0o700)
    assert mode(path.parent) == mode(path)
    files.write(tmp_path / "other" / "file", "text", public=public)
    assert mode(tmp_path / "other") == (0o755 if public else 0o700)
    path.chmod(0o750)
    files.make_folder(path)
    assert mode(path) == 0o750


def test_a_failure_leaves_what_was_there_and_nothing_else(tmp_path):
    path = tmp_path / "file"
    path.write_text("earlier")

    def fail():
        with files.atomic_path(path) as aside:
            aside.write_text("half")
            assert mode(aside) == 0o600
            raise InterruptedError

    with pytest.raises(InterruptedError):
        fail()
    assert path.read_text() == "earlier"
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_no_file_is_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", ""):
        with pytest.raises(FileExistsError, match="not a regular file"):
            files.write(tmp_path / name, "text")
    assert os.listdir(tmp_path) == ["pipe"]


def test_the_content_is_on_the_disk_before_the_name_and_the_name_before_the_return(tmp_path, monkeypatch):
    seen = []
    sync, replace = os.fsync, os.replace

    def fsync(descriptor):
        found = os.fstat(descriptor)
        seen.append("folder" if stat.S_ISDIR(found.st_mode) else f"file of {found.st_size}")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", lambda a, b: (seen.append("rename"), replace(a, b)))
    files.write(tmp_path / "file", b"12345")
    assert seen == ["file of 5", "rename", "folder"]


def test_tensors_of_any_layout_come_back(tmp_path):
    tensors = {"a": torch.arange(6.0).reshape(2, 3).t(), "b": torch.ones(2, requires_grad=True)}
    files.save_tensors(tmp_path / "t.safetensors", tensors, {"key": "value"})
    found = load_file(tmp_path / "t.safetensors")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    assert mode(tmp_path / "t.safetensors") == 0o600


def test_appending_closes_an_open_file_to_others(tmp_path):
    path = tmp_path / "log"
    path.write_text("one\n")
    path.chmod(0o644)
    with files.appending(path) as log:
        log.write("two\n")
    assert path.read_text() == "one\ntwo\n"
    assert mode(path) == 0o600


#: What writes a file, and the few places that do so for another reason than to leave one.
WRITERS = set("write_text write_bytes mkstemp NamedTemporaryFile replace rename save_file mkdir savefig".split())
ELSEWHERE = {
    # A folder, renamed so that nobody finds it while it is removed.
    ("split/vendor.py", "replace"),
    # A model's folder, made by transformers or peft, renamed once it is whole.
    ("finetune/models.py", "rename"),
    # The account's own folder, of mode 0700.
    ("accounting/witness.py", "mkdir"),
    # The kernel's switch that resets the peak of resident memory.
    ("finetune/memory.py", "write_text"),
}


def writes(path):
    """Calls in a source file that leave a file: by name, and ``open`` for writing."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        called = node.func
        name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", None)
        owner = called.value.id if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name) else None
        if name in WRITERS - {"replace", "rename"} or (name in ("replace", "rename") and owner in ("os", "aside")):
            yield name, node.lineno


def test_nothing_else_writes_files():
    found = {
        (str(path.relative_to(ROOT)), name): line
        for path in ROOT.rglob("*.py")
        for name, line in writes(path)
        if path != ROOT / "files.py"
    }
    found = {where: line for where, line in found.items() if where not in ELSEWHERE}
    assert not found, "use fastdp.files, which is durable and keeps private what is private"
