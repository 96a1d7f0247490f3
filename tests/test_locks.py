"""One holder among all processes, until it ends however it ends."""

import os
import signal
import subprocess
import sys
import time

import pytest

from fastdp.locks import Lock

HOLDER = """
import os, sys, time
from fastdp.locks import Lock
lock = Lock.of_folder(__import__("pathlib").Path(sys.argv[1]))
if os.fork() == 0:
    time.sleep(600)
print("held", flush=True)
time.sleep(600)
"""


def test_one_holder(tmp_path):
    with Lock.of_folder(tmp_path) as first:
        with pytest.raises(ValueError, match="is in use by another program: wait"):
            Lock.of_folder(tmp_path)
        begin = time.monotonic()
        with pytest.raises(ValueError, match="in use"):
            Lock(tmp_path / ".lock", "it", seconds=0.2)
        assert time.monotonic() - begin >= 0.2
    first.close()
    Lock.of_folder(tmp_path).close()
    assert (tmp_path / ".lock").stat().st_mode & 0o077 == 0


def test_a_killed_holder_leaves_it_although_a_child_lives(tmp_path):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, start_new_session=True
    )
    with holder:
        try:
            assert holder.stdout.readline() == b"held\n"
            with pytest.raises(ValueError, match="in use"):
                Lock.of_folder(tmp_path)
            holder.kill()
            holder.wait()
            Lock(tmp_path / ".lock", "it", seconds=60.0).close()
        finally:
            os.killpg(holder.pid, signal.SIGKILL)
