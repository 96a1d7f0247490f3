"""Steady steps of two checkouts in turns: here of this one and itself."""

from pathlib import Path

import pytest
from fastdp.bench import steady

ROOT = Path(steady.__file__).resolve().parents[1]


@pytest.mark.slow
def test_two_processes_take_steps_in_turns():
    found = steady.compare((ROOT, ROOT), "bert", threads=1, starts=1, turns=2, steps=1)
    assert found["pairs"] == 2
    assert 0.2 < found["ratio"] < 5


def test_a_checkout_without_fastdp_is_named(tmp_path):
    with pytest.raises(RuntimeError, match="build the extension"):
        steady.Worker(tmp_path, "bert", 1)
