"""The interpreter computes with numpy, which warns where a GPU is silent: NaN and infinities are given on purpose here."""

import numpy as np
import pytest
import torch

from fastdp.ops.table import OPS


@pytest.fixture(autouse=True)
def _memory_starts_as_nan():
    """What a launcher allocates and a kernel forgets to write shows up as NaN."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(3).isnan().all()
    with np.errstate(all="ignore"):
        yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def _same_draws():
    torch.manual_seed(0)


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Ops run what is registered for GPUs, and fall back to their definitions as there."""
    for op in OPS.values():
        monkeypatch.setattr(op, "implementations", {"cpu": op.implementations["cuda"]})
