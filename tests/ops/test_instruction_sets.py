"""Tests of norms and of instantiated gradients once more, in processes that are kept to a lower instruction set."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fastdp import _native

DRAWS = """
import torch
from fastdp import NoiseStream, ops
torch.manual_seed(0)
table, ids = torch.randn(3000, 33), torch.randint(3000, (300_000,))
drawn = ops.exponential_choice(ids, table, 1.5, NoiseStream.unsafe_reproducible(1))
snapped = ops.private_snap(ids[:2000], table, 20.0, NoiseStream.unsafe_reproducible(2))
print(hash(tuple(drawn.tolist())), hash(tuple(snapped.tolist())), int(torch.cat([drawn, snapped]).sum()))
"""
FILES = ("test_norms.py", "test_instances.py")
CHOSEN = "layout or repeated_ids or ragged_units or cross_inner or nan_in_one or every_shape or keeps"


@pytest.mark.parametrize("isa", ["portable", "avx2"])
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


def test_draws_are_the_same_for_every_instruction_set():
    order = ("portable", "avx2", "avx512")
    found = []
    for isa in order[: order.index(_native.isa()) + 1]:
        command = [sys.executable, "-c", DRAWS]
        done = subprocess.run(command, env={**os.environ, "FASTDP_ISA": isa}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        found.append(done.stdout)
    assert len(set(found)) == 1
