"""Random calls of every op once more, in processes that are kept to a lower instruction set."""

import os
import subprocess
import sys

import pytest

from fastdp import _native


@pytest.mark.parametrize(("isa", "calls"), [("portable", 40), ("avx2", 80)])
def test_lower_instruction_sets(isa, calls):
    order = ("portable", "avx2", "avx512")
    if order.index(_native.isa()) <= order.index(isa):
        # A processor without the higher set runs this one, or less, in every other test.
        pytest.skip(f"this run uses {_native.isa()} already")
    command = [sys.executable, "-m", "fastdp.bench.fuzz_ops", str(calls)]
    done = subprocess.run(command, env={**os.environ, "FASTDP_ISA": isa}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
