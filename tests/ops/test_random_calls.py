"""Random calls of every op, its kernels and its definition, against float64 (`bench.fuzz_ops`)."""

from contextlib import nullcontext

import pytest
import torch
from fastdp.bench import fuzz_ops

from fastdp.ops.table import definitions
from tests.cases import cases, pairs

#: Of each entry of the families; one with several kinds of calls has several entries.
CALLS = 8


@pytest.fixture
def _threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("_threads")
@cases(*pairs(("entry", range(len(fuzz_ops.FAMILIES))), ("defined", [False, True])))
def test_random_calls_are_within_their_bounds(entry, defined):
    with definitions() if defined else nullcontext():
        found = [fuzz_ops.call(entry + len(fuzz_ops.FAMILIES) * number) for number in range(CALLS)]
    assert len({name for name, _ in found}) == 1
    assert max(share for _, share in found) <= 1, found
