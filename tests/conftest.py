"""What every test runs under."""

import gc
import os
import tempfile

# Before torch is imported: threads that wait for busy cores take minutes over tests of milliseconds.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from hypothesis import HealthCheck, settings

import fastdp.private.registry as registry

# An example may take as long as it takes: a busy machine is no fault of the code under test.
settings.register_profile("search", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# A change is judged by the same examples everywhere; `make test-full` searches on, with new ones each time.
settings.register_profile("fastdp", settings.get_profile("search"), derandomize=True)
settings.load_profile("fastdp")

# What tests release is remembered apart from what the account does, also by the programs that tests start.
_STATE = tempfile.TemporaryDirectory(prefix="fastdp-state-")
os.environ["FASTDP_STATE"] = _STATE.name
# Many tests release the same few texts; those that are about it take this away.
os.environ["FASTDP_AGAIN"] = "1"


_CROSS_ENTROPY = torch._C._nn.cross_entropy_loss


def pytest_collection_finish():
    """What was imported stays: the garbage collector need not look through it again and again."""
    gc.collect()
    gc.freeze()


def pytest_runtest_teardown():
    """A run that outlives its test ends unheard: its warning would come up in the output of another test's program."""
    for reference in list(registry._DRIVEN.values()):
        driven = reference()
        if driven is not None:
            driven.ending.expect()
    if torch._C._nn.cross_entropy_loss is not _CROSS_ENTROPY:
        # A run that a test leaves amid a probe gives torch's functions back when it is detached or collected.
        gc.collect()


def pytest_runtest_setup(item):
    """Models start from the same weights in every run. Noise and samples have keys of their own, and stay random."""
    torch.manual_seed(0)
