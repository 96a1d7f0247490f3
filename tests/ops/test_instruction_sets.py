"""Tests of norms and of instantiated gradients once more, in processes that are kept to a lower instruction set."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fastdp import _native

FILES = ("test_norms.py", "test_instances.py")
CHOSEN = "layout or repeated_ids or ragged_units or cross_inner or nan_in_one or every_shape or keeps"


@pytest.mark.parametrize("isa", [pytest.param("portable", marks=pytest.mark.slow), "avx2"])
def test_lower_instruction_sets(isa):
    order = ("portable", "avx2", "avx512")
    if order.index(_native.isa()) <= order.index(isa):
        # A processor without the higher set runs this one, or less, in every other test.
        pytest.skip(f"this run uses {_native.isa()} already")
    files = [Path(__file__).with_name(name) for name in FILES]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files, "-k", CHOSEN]
    done = subprocess.run(command, env={**os.environ, "FASTDP_ISA": isa}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout, "none was chosen"
