"""Compile a kernel for a GPU that need not be there, and read what it takes off the machine code."""

from __future__ import annotations

import collections
import functools
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
SHARED_LIMIT = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
_LINE = re.compile(r"^[ \t]+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)(.*?);", re.MULTILINE)
#: Instructions of the pipe for logic, shifts and additions of integers, 64 a clock and processor.
_LOGIC = ("LOP3", "SHF", "IADD3", "PRMT", "LEA", "SGXT")


@dataclass(frozen=True)
class Loop:
    """An innermost loop of the machine code that multiplies matrices (or computes noise).

    ``loads`` and ``products`` are how many groups of copies into shared memory, and of products of Hopper's matrix units, may
    still be under way when the loop waits for some; None where it never waits.
    """

    instructions: int
    counts: dict[str, int]
    loads: int | None
    products: int | None

    @property
    def matrix(self) -> int:
        """Instructions of matrix units."""
        return sum(self.counts.get(name, 0) for name in ("HMMA", "HGMMA", "UTCHMMA", "UTCQMMA"))

    @property
    def multiplies(self) -> bool:
        """Whether this is a loop over products, by matrix units or, of float32 factors, by fused multiply-adds."""
        return self.matrix > 0 or self.counts.get("FFMA", 0) > 100

    @property
    def logic(self) -> int:
        """Instructions of the pipe for logic, shifts and integer additions."""
        return sum(self.counts.get(name, 0) for name in _LOGIC)


@dataclass(frozen=True)
class Resources:
    """What one thread and one block of a compiled kernel take."""

    registers: int
    stack: int
    shared: int
    sass: str
    ptx: str
    warps: int = 4

    @property
    def blocks(self) -> int:
        """Blocks of an H100 that one processor holds at a time: 65,536 registers, 227 KB, 64 warps."""
        registers = -(-self.registers // 8) * 8 * 32 * self.warps
        return min(65536 // registers, SHARED_LIMIT[90] // (self.shared + 1024), 64 // self.warps, 32)

    @functools.cached_property
    def loops(self) -> list[Loop]:
        """Innermost loops, from the shortest."""
        code = [(int(at, 16), name, rest) for at, name, rest in _LINE.findall(self.sass)]
        index = {at: i for i, (at, _, _) in enumerate(code)}
        spans = []
        for i, (at, name, rest) in enumerate(code):
            targets = re.findall(r"0x([0-9a-f]+)", rest) if name.startswith("BRA") else []
            if targets and int(targets[-1], 16) < at and int(targets[-1], 16) in index:
                spans.append((index[int(targets[-1], 16)], i))
        inner = [a for a in spans if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in spans)]
        loops = []
        for first, last in sorted(inner, key=lambda span: span[1] - span[0]):
            body = code[first : last + 1]
            waits = [re.search(r"0x([0-9a-f]+)", rest) for _, name, rest in body if name.startswith("DEPBAR")]
            products = [
                re.search(r"gsb0, 0x([0-9a-f]+)", rest) for _, name, rest in body if name == "WARPGROUP.DEPBAR.LE"
            ]
            loops.append(
                Loop(
                    len(body),
                    dict(collections.Counter(name.split(".")[0] for _, name, _ in body)),
                    max((int(found[1], 16) for found in waits if found), default=None),
                    max((int(found[1], 16) for found in products if found), default=None),
                )
            )
        return loops

    @property
    def spills(self) -> int:
        """Instructions that move registers to or from local memory."""
        return len(re.findall(r"\b(?:LDL|STL)\b", self.sass))

    def has(self, instruction: str) -> bool:
        """Whether the machine code holds an instruction of this name (HGMMA, HMMA, UTCHMMA, LDGSTS, ...)."""
        return re.search(rf"\b{instruction}\b", self.sass) is not None


def binary(
    kernel: Any, arguments: dict[str, Any], target: GPUTarget, *, aligned: tuple[str, ...] = (), **options: Any
) -> Any:
    """What Triton makes of a kernel for a target, with the types of arguments (``*bf16``, ``i64``, ...) and constexprs' values.

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
    return triton.compile(source, target=target, options={"enable_fp_fusion": True, **options})


def compiled(kernel: Any, arguments: dict[str, Any], capability: int, **options: Any) -> Resources:
    """`binary` for ``sm_<capability>``, and what its machine code takes."""
    made = binary(kernel, arguments, GPUTarget("cuda", capability, 32), **options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        usage = subprocess.run([_TOOL, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
        sass = subprocess.run([_TOOL, "-sass", file.name], capture_output=True, text=True, check=True).stdout
    numbers = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert numbers, usage
    return Resources(
        int(numbers[1]), int(numbers[2]), made.metadata.shared, sass, made.asm["ptx"], options["num_warps"]
    )
