"""The interpreter computes with numpy, which warns where a GPU is silent: NaN and infinities are given on purpose here."""

import functools

import numpy as np
import pytest
import torch
from triton.runtime import interpreter

from fastdp.ops.table import OPS

# The interpreter works out in int64 whether each sum and product of integers fits, and then, outside of its debug mode, looks at
# nothing of it; and it patches the language anew at each call of a device function, though its caller's patches, and those
# of an earlier call, still hold. Leaving out both changes no result and halves the time.
interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
_patched_for = functools.cache(interpreter._patch_lang)


def _call(function, *args, **options):
    _patched_for(function.fn)
    return function.rewrite()(*args, **options)


interpreter.InterpretedFunction.__call__ = _call


@pytest.fixture(autouse=True)
def _memory_starts_as_nan():
    """What a launcher allocates and a kernel forgets to write shows up as NaN."""
    # torch.use_deterministic_algorithms would import its compiler, for seconds.
    torch._C._set_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(3).isnan().all()
    with np.errstate(all="ignore"):
        yield
    torch._C._set_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def _same_draws():
    torch.manual_seed(0)


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Ops run what is registered for GPUs, and fall back to their definitions as there."""
    for op in OPS.values():
        monkeypatch.setattr(op, "implementations", {"cpu": op.implementations["cuda"]})
