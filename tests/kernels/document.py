"""What docs/kernels.md says of the compiled kernels, read off their machine code: ``python -m tests.kernels.document`` writes it.

Shares of floors are estimates for an H100 by the rates below: nothing here has run on one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import triton
from fastdp.bench.record import insert, markdown
from fastdp.kernels import gram, weighted

from .resources import Resources
from .test_compiled import CASES, Case, built

PAGE = Path(__file__).parents[2] / "docs" / "kernels.md"
KERNELS = "compiled"
PROCESSORS = 132
#: Of one H100 processor, a clock: multiply-adds of 16-bit matrices and of float32, warps' instructions, operations of the pipe
#: for logic, bytes from the second-level cache (assumed, and by tensor descriptors) and from memory (2.95 TB/s of copying at
#: 1.755 GHz).
MATRIX, SINGLE, ISSUED, LOGIC, CACHE, DESCRIBED, MEMORY = 2048, 128, 4, 64, 28, 35, 12.7

#: Groups of matrices that read one input, (its width, widths of their outputs), tokens a unit and units.
_LLAMA = lambda hidden, keys, inner: [  # noqa: E731
    (hidden, [hidden, keys, keys]),
    (hidden, [hidden]),
    (hidden, [inner, inner]),
    (inner, [hidden]),
]
SHAPES = {
    "Llama 1B, T = 1,024, B = 4": (16, _LLAMA(2048, 512, 8192), 1024, 4),
    "Llama 8B, T = 2,048, B = 1": (32, _LLAMA(4096, 1024, 14336), 2048, 1),
    "GPT-2 124M, T = 1,024, B = 8": (12, [(768, [2304]), (768, [768]), (768, [3072]), (3072, [768])], 1024, 8),
    "BERT base, T = 128, B = 32": (12, [(768, [768] * 3), (768, [768]), (768, [3072]), (3072, [768])], 128, 32),
}


def gram_busy(groups: Sequence[tuple[int, Sequence[int]]], length: int, units: int) -> float:
    """The share of processors' time that one launch of Gram norms uses, jobs dealt round as `gram.gram_norms` does."""
    side = gram.tile_of(length * units, units, len(groups), 128, PROCESSORS)
    costs = sorted((width + sum(lefts) for width, lefts in groups), reverse=True)
    jobs = [cost for cost in costs for _ in range(gram.jobs_of(length, units, 1, side))]
    programs = PROCESSORS * gram.RESIDENT[side]
    loads = [sum(jobs[first::programs]) for first in range(min(programs, len(jobs)))]
    # Programs of one processor share it.
    shared = [sum(loads[first::PROCESSORS]) for first in range(PROCESSORS)]
    return sum(jobs) / (PROCESSORS * max(shared))


def sum_busy(m: int, n: int, tokens: int) -> float:
    """The same of one weighted sum, whose last tiles are cut along the tokens."""
    tiles = -(-m // 128) * -(-n // 128)
    whole, splits = weighted.deal(tiles, PROCESSORS, max(1, tokens // 512))
    rounds = -(-whole // PROCESSORS) + -(-(tiles - whole) * splits // PROCESSORS) / splits
    return tiles / (PROCESSORS * rounds)


def _clocks(case: Case, found: Resources) -> tuple[float, float] | None:
    """Clocks that a pass of the slowest loop needs at least (matrix units, multiply-adds), and those that it is held to."""
    loops = [loop for loop in found.loops if loop.multiplies]
    if not loops or case.narrow:  # tiles this narrow are read more slowly than they are multiplied
        return None
    loop, size = loops[0], case.constants
    sides = [size.get(name) or size["b_t"] for name in (("b_v", "b_x") if "b_v" in size else ("b_m", "b_n"))]
    deep = size["b_k"] if "b_k" in size else size["b_t"]
    width = 4 if "fp32" in str(case.types.values()) and not loop.matrix else 2
    rate = MATRIX if loop.matrix else SINGLE
    least = sides[0] * sides[1] * deep / rate
    issued = loop.instructions * case.num_warps / ISSUED
    read = sum(sides) * deep * width / (DESCRIBED if size.get("DESCRIBED") else CACHE)
    return least, max(least, issued, read)


def allowed_rate(name: str) -> float:
    """Operations a second that an H100 of 132 processors at 1.755 GHz would reach if nothing but the slowest loop counted."""
    share = _clocks(CASES[name], built(name, 90))
    assert share is not None
    return share[0] / share[1] * MATRIX * 2 * PROCESSORS * 1.755e9


def _row(name: str) -> list[Any] | None:
    """A kernel's line; None of one without a loop over products or rounds of noise."""
    case, found = CASES[name], built(name, 90)
    loops = [loop for loop in found.loops if loop.multiplies or loop.counts.get("SHF", 0) >= 32]
    if not loops:
        return None
    loop = loops[0]
    share = _clocks(case, found)
    if case.narrow:
        estimate = "bound by memory"
    elif share is not None:
        estimate = f"{share[0] / share[1]:.0%} of the products' rate"
    elif "b_blocks" not in case.constants:
        estimate = "of few numbers"
    else:
        everything = sum(
            len(re.findall(rf"\s{op}\b", found.sass)) for op in ("LOP3", "SHF", "IADD3", "PRMT", "LEA", "SGXT")
        )
        rounds = sum(each.logic for each in loops[:1])
        # The second such loop makes another block for the tails and runs in one tile of a million.
        logic = (everything - 2 * rounds + 10 * rounds) * 32 * case.num_warps / LOGIC
        elements = 16 * case.constants["b_blocks"]
        width = {"noise": 8, "noise-rounded": 8, "adamw": 16, "adamw-rounded": 16}.get(name, 4)
        memory = elements * width / MEMORY
        estimate = f"{min(1.0, memory / logic):.0%} of copying; bound by {'logic' if logic > memory else 'memory'}"
    return [f"`{name}`", found.registers, found.blocks, loop.instructions, estimate]


def kernels_table() -> str:
    """One line for each kernel of the default cases that has such a loop."""
    names = [name for name, case in CASES.items() if not case.slow]
    head = ["kernel", "registers", "blocks a processor", "instructions of its loop", "estimate"]
    return f"Triton {triton.__version__}, sm_90.\n\n" + "\n".join(markdown(head, filter(None, map(_row, names))))


if __name__ == "__main__":
    insert(PAGE, kernels_table(), KERNELS)
