"""What the tests of the noise ops share: the instruction sets of this machine, and ops run under each of them."""

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
given = dict(np.load(io.BytesIO(sys.stdin.buffer.read())))
position = given.pop("position")
threads = int(given.pop("threads"))
out = {}
for dtype in range(3):
    for rounded in (False, True):
        x, rows = given[f"x{dtype}"].copy(), 7
        y, norm, back = np.empty_like(x), np.empty(rows), np.empty_like(x)
        length = x.size // rows
        native.clip_noise(x.ctypes.data, y.ctypes.data, norm.ctypes.data, dtype, rows, length, 2.5, 0.7,
                          position.ctypes.data, rounded, threads)
        native.clip_backward(given[f"g{dtype}"].ctypes.data, x.ctypes.data, norm.ctypes.data, back.ctypes.data, dtype,
                             rows, length, 2.5, threads)
        p, m, v = x.copy(), given["m"].copy(), given["v"].copy()
        native.adamw_noise_step(p.ctypes.data, dtype, given["sum"].ctypes.data, m.ctypes.data, v.ctypes.data, p.size, 0,
                                position.ctypes.data, rounded, 0.7, 32.0, 1e-2, 0.9, 0.999, 1e-8, 0.1, 3,
                                given["a"].ctypes.data, given["b"].ctypes.data, given["b"].size, threads)
        native.add_noise(x.ctypes.data, dtype, 0, x.size, 0.7, position.ctypes.data, rounded, threads)
        out.update({f"{name}-{dtype}-{rounded}": value for name, value in
                    dict(add=x, clip=y, norm=norm, back=back, param=p, mean=m, square=v).items()})
for dtype in (1, 2):
    bits = np.arange(1 << 16).astype(np.uint16).view(np.int16)
    native.add_noise(bits.ctypes.data, dtype, 0, bits.size, 1e-45, position.ctypes.data, False, threads)
    out[f"bits-{dtype}"] = bits
for std in (30000.0, 1e-6):
    alone = np.zeros(1 << 16, np.int16)
    native.add_noise(alone.ctypes.data, 2, 0, alone.size, std, position.ctypes.data, False, threads)
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


def inputs(n: int = 7 * 3001) -> dict[str, np.ndarray]:
    """Inputs of every kernel of the family, in each dtype (as raw bits)."""
    generator = torch.Generator().manual_seed(0)
    given: dict[str, np.ndarray] = {}
    for i, dtype in enumerate(DTYPES):
        for name in ("x", "g"):
            value = torch.randn(n, generator=generator).to(dtype)
            given[f"{name}{i}"] = value.numpy() if i == 0 else value.view(torch.int16).numpy()
    given["sum"] = torch.randn(n, generator=generator).numpy()
    given["m"] = torch.randn(n, generator=generator).numpy()
    given["v"] = torch.rand(n, generator=generator).numpy()
    given["a"], given["b"] = (torch.rand(k, generator=generator).numpy() for k in (7, n // 7))
    given["position"] = NoiseStream.unsafe_reproducible(1).take().numpy()
    return given


@functools.cache
def run_path(isa: str, threads: int) -> dict[str, np.ndarray]:
    """Outputs of every kernel of the family under one instruction set, in a process of its own."""
    buffer = io.BytesIO()
    np.savez(buffer, threads=np.array(threads), **inputs())
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, _native.__file__, isa],
        input=buffer.getvalue(),
        env={**os.environ, "FASTDP_ISA": isa},
        capture_output=True,
        check=True,
    )
    return dict(np.load(io.BytesIO(done.stdout)))
