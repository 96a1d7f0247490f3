"""What the tests of the noise ops share: the instruction sets of this machine, and halves that get noise under each of them."""

from __future__ import annotations

import functools
import io
import os
import subprocess
import sys

import numpy as np
import torch

from fastdp import _native
from fastdp.ops import NoiseStream
from fastdp.ops.grid import grid
from fastdp.ops.noise import standard_normals

ORDER = ("portable", "avx2", "avx512")
PATHS = ORDER[: ORDER.index(_native.isa()) + 1]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: The bound on a float32 normal's error, relative to the float64 definition: four roundings of its own and two of the
#: words, each at most 2^-24, with the polynomials' 2.8e-8 and 2.4e-8.
NORMAL_ERROR = 6 * 2.0**-24 + 5.2e-8
ODD_SHAPES = ((0,), (1,), (7,), (16,), (129,), (257, 123), (3, 0, 2), (2, 3, 5), ())

# Loads the extension alone, so that no time goes into importing torch once for each instruction set.
_PROGRAM = """
import importlib.util, io, sys
import numpy as np
spec = importlib.util.spec_from_file_location("_native", sys.argv[1])
native = importlib.util.module_from_spec(spec)
spec.loader.exec_module(native)
assert native.isa() == sys.argv[2]
position, out = np.frombuffer(sys.stdin.buffer.read(), np.int32), {}
for dtype in (1, 2):
    bits = np.arange(1 << 16).astype(np.uint16).view(np.int16)
    native.add_noise_group([(bits.ctypes.data, dtype, 0, bits.size, 1e-45)], position.ctypes.data, False, 1)
    out[f"bits-{dtype}"] = bits
for std in (30000.0, 1e-6):
    alone = np.zeros(1 << 16, np.int16)
    native.add_noise_group([(alone.ctypes.data, 2, 0, alone.size, std)], position.ctypes.data, False, 1)
    out[f"alone-{std:g}"] = alone
buffer = io.BytesIO()
np.savez(buffer, **out)
sys.stdout.buffer.write(buffer.getvalue())
"""


def open_sums(position: torch.Tensor, n: int, std: float) -> torch.Tensor:
    """Sums whose noised values lie as near to the middle between two numbers of the grid as float32 allows: [n]."""
    spacing, ratio = grid(std)
    y = ratio * standard_normals(position, n).numpy()
    away = np.floor(y) + 0.5 - y  # in [-1/2, 1/2]: the sum, in steps of the grid, that leads into the middle
    return torch.from_numpy((away * spacing).astype(np.float32))


def position() -> torch.Tensor:
    """Where all paths draw."""
    return NoiseStream.unsafe_reproducible(1).take()


@functools.cache
def run_path(isa: str) -> dict[str, np.ndarray]:
    """Halves with noise under one instruction set, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, _native.__file__, isa],
        input=position().numpy().tobytes(),
        env={**os.environ, "FASTDP_ISA": isa},
        capture_output=True,
        check=True,
    )
    return dict(np.load(io.BytesIO(done.stdout)))
