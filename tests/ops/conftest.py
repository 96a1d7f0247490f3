"""What an implementation allocates and forgets to write shows up as NaN; and every test draws the same numbers."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _memory_starts_as_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def _same_draws() -> None:
    torch.manual_seed(0)
