"""What every test runs under."""

import pytest
import torch
from hypothesis import HealthCheck, settings

# An example may take as long as it takes: a busy machine is no fault of the code under test.
settings.register_profile("fastdp", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("fastdp")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Models start from the same weights in every run. Noise and samples have keys of their own, and stay random."""
    torch.manual_seed(0)
