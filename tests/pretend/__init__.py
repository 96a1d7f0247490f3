"""A device beside the processor for machines that have none: its memory is the host's, and mixes with none of it.

An operation on tensors of both raises as on a GPU, but for copies, indices and numbers. Its random state is its own, and autograd
has a thread for it: load it in a process of its own, before the first backward pass.
"""

import contextlib
import functools
import hashlib
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import torch

SOURCE = Path(__file__).with_name("device.cpp")
OPTIONS = "-O0 -std=c++20 -shared -fPIC -w -lc10 -ltorch_cpu".split()


@functools.cache
def pretend_device() -> torch.device:
    """The device, compiled once for each version of torch into ``build``."""
    version = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    library = SOURCE.parents[2] / "build" / f"pretend-{version}.so"
    if not library.exists():
        library.parent.mkdir(exist_ok=True)
        made = library.with_suffix(f".{os.getpid()}")
        torchs = Path(torch.__file__).parent
        options = [f"-I{torchs / 'include'}", f"-L{torchs / 'lib'}", *OPTIONS]
        subprocess.run([os.environ.get("CXX", "c++"), SOURCE, "-o", made, *options], check=True)
        made.rename(library)
    torch.ops.load_library(library)
    generator = torch.ops.pretend.generator()
    module = SimpleNamespace(
        _initialized=True,
        _is_in_bad_fork=lambda: False,
        current_device=lambda: 0,
        default_generators=(generator,),
        device=lambda device: contextlib.nullcontext(),
        device_count=lambda: 1,
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
        get_rng_state=lambda device=0: generator.get_state(),
        is_available=lambda: True,
        is_initialized=lambda: True,
        manual_seed_all=generator.manual_seed,
        set_rng_state=lambda state, device=0: generator.set_state(state),
    )
    torch.utils.rename_privateuse1_backend("pretend")
    torch._register_device_module("pretend", module)
    torch.utils.generate_methods_for_privateuse1_backend()
    return torch.device("pretend", 0)
