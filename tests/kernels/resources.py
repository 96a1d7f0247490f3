"""Compile a kernel for a GPU that need not be there, and read what it takes off the machine code."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

_TOOL = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"

#: Shared memory that one block can have, in bytes.
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}


@dataclass(frozen=True)
class Resources:
    """What one thread and one block of a compiled kernel take."""

    registers: int
    stack: int
    shared: int
    sass: str
    ptx: str

    @property
    def spills(self) -> int:
        """Instructions that move registers to or from local memory."""
        return len(re.findall(r"\b(?:LDL|STL)\b", self.sass))

    def has(self, instruction: str) -> bool:
        """Whether the machine code holds an instruction of this name (HGMMA, HMMA, UTCHMMA, LDGSTS, ...)."""
        return re.search(rf"\b{instruction}\b", self.sass) is not None


def compiled(
    kernel: Any,
    arguments: dict[str, Any],
    capability: int,
    *,
    aligned: tuple[str, ...] = (),
    num_warps: int = 4,
    num_stages: int = 3,
) -> Resources:
    """Compile for ``sm_<capability>``, with the types of arguments (``*bf16``, ``i64``, ...) and the values of constexprs.

    ``aligned`` names pointers on 16 bytes and numbers that are multiples of 16, as the launcher would find them.
    """
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}

    def typed(value: Any, path: tuple[int, ...], divisible: bool, constexpr: bool) -> Any:
        if isinstance(value, tuple):
            return tuple(typed(v, (*path, i), divisible, constexpr) for i, v in enumerate(value))
        if constexpr or not isinstance(value, str):
            constants[path] = value
            return "constexpr"
        if divisible:
            attributes[path] = [["tt.divisibility", 16]]
        return value

    signature = {
        parameter.name: typed(arguments[parameter.name], (at,), parameter.name in aligned, parameter.is_constexpr)
        for at, parameter in enumerate(kernel.params)
    }
    source = ASTSource(kernel, signature, constants, attributes)
    binary = triton.compile(
        source,
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True},
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        usage = subprocess.run([_TOOL, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
        sass = subprocess.run([_TOOL, "-sass", file.name], capture_output=True, text=True, check=True).stdout
    numbers = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert numbers, usage
    return Resources(int(numbers[1]), int(numbers[2]), binary.metadata.shared, sass, binary.asm["ptx"])
