"""Every kernel compiled for GPUs that need not be there: it fits, spills nothing and uses the matrix units it should.

Arguments are typed as the launchers pass them: pointers on 16 bytes, widths and row strides multiples of 16, inner strides 1.
"""

import functools
import importlib
import pkgutil
import re
from dataclasses import dataclass, replace
from typing import Any

import pytest

pytest.importorskip("triton")

import fastdp.kernels
import torch
import triton
import triton.language as tl
from fastdp.bench import meter
from fastdp.kernels import (
    adamw,
    affine,
    blocks,
    bounds,
    chacha,
    choice,
    clip,
    cross,
    dchi,
    direct,
    gram,
    grouped,
    groups,
    heads,
    launch,
    noise,
    onehot,
    reduce,
    settle,
    snap,
    weighted,
)
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from tests.cases import cases, pairs

from .resources import SHARED_LIMIT, binary, compiled

#: Instructions of the matrix units; tiles at least 64 wide must not fall back to those of the generation before.
MATRIX = {90: ("HGMMA",), 100: ("UTCHMMA", "UTCQMMA"), **dict.fromkeys((80, 86, 89, 120), ("HMMA",))}
#: Numbers that differ from batch to batch: a kernel compiled for some of their values would be compiled again and again.
VARYING = {
    *("units", "tokens", "most", "problems", "slots", "splits", "whole", "rows", "size"),
    *("groups", "tiles_x", "chunks", "lines", "capacity", "words", "ignored"),
}


#: Types by the names of arguments; other pointers are to float32, other strides by "k", "m" or "n" 1, and other numbers i32.
POINTERS = {
    **dict.fromkeys("p_offsets p_offsets1 p_offsets2 p_lefts p_rights p_lines p_table p_keys p_order".split(), "*i64"),
    **dict.fromkeys("p_list p_ids p_index p_bad p_target".split(), "*i64"),
    **dict.fromkeys("p_blocks p_position p_positions".split(), "*i32"),
    **dict.fromkeys("p_mask p_chosen".split(), "*u8"),
    **dict.fromkeys("p_norm p_partial p_counts p_eta p_sizes".split(), "*fp64"),
}
FLOATS = {
    *"std spacing inverse max_norm product_error norm_error".split(),
    *"inverse_divisor keep step_size lerp1 beta2 rest2 inverse_correction2 eps".split(),
}


def type_of(name):
    if name.startswith("p_"):
        return POINTERS.get(name, "*fp32")
    if name.startswith("stride_") and name.rstrip("12")[-1] in "kmn":
        return 1
    return "fp32" if name in FLOATS else "i32"


@dataclass(frozen=True)
class Case:
    """A kernel with the types (where they are not `type_of` a name) and constants that its launcher gives it.

    And what its machine code must hold.
    """

    kernel: Any
    own: dict[str, Any]
    constants: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    matrix: bool = False
    asynchronous: bool = False
    stack: int = 0
    maxnreg: int | None = None
    slow: bool = False
    narrow: bool = False
    #: Launched on Hopper and Blackwell's large chips alone.
    wide: bool = False
    #: The most instructions of a loop over products, branches within it included.
    loop: int = 180
    #: The fewest blocks that one processor holds at a time.
    blocks: int = 1

    @functools.cached_property
    def types(self):
        """Of every argument that is no constant."""
        names = [parameter.name for parameter in self.kernel.params if not parameter.is_constexpr]
        return {name: self.own[name] if name in self.own else type_of(name) for name in names}


def gram_case(dtype, b_t, b_k, warps, described=False, slow=False):
    constants = {"RIGHT": dtype, "LEFT": dtype, "CONTIGUOUS": True, "ALIGNED": True, "DESCRIBED": described}
    constants |= {"b_t": b_t, "b_k": b_k}
    stages, matrix = 3 if described and b_t == 128 else 4, dtype != tl.float32
    case = Case(
        gram._gram_kernel, {"p_table": "*i32"}, constants, warps, stages, matrix, True, slow=slow, wide=described
    )
    return replace(case, loop=310)  # every other round the accumulator is added up and emptied


def direct_case(dtype, kind, b_m, b_n, b_t, warps, slow=False):
    own = {"p_left": f"*{dtype}", "p_right": f"*{dtype}"}
    constants = {"b_m": b_m, "b_n": b_n, "b_t": b_t, "KIND": kind.value}
    return Case(direct._direct_kernel, own, constants, warps, 3, dtype != "fp32", True, slow=slow)


def weighted_case(dtype, b_m, b_n, b_t, warps, described=False, slow=False):
    constants = {"LEFT": dtype, "RIGHT": dtype, "CONTIGUOUS": True, "ALIGNED": True, "DESCRIBED": described}
    constants |= {"b_m": b_m, "b_n": b_n, "b_t": b_t}
    stages, matrix = 7 if b_n == 256 else 5, dtype != tl.float32
    return Case(weighted._weighted_kernel, {}, constants, warps, stages, matrix, True, slow=slow, wide=described)


def cross_case(dtype, kind, b_t, b_k, warps, slow=False):
    own = {
        "p_left1": f"*{dtype}" if kind is cross.DENSE else "*i64",
        "p_left2": "*i64" if kind is cross.IDS else f"*{dtype}",
        **{"p_right1": f"*{dtype}", "p_right2": f"*{dtype}"},
    }
    constants = {"KIND": kind.value, "b_t": b_t, "b_k": b_k}
    return Case(cross.cross_kernel, own, constants, warps, 3, dtype != "fp32", True, slow=slow, loop=310)


def grouped_case(dtype, b_m, b_t, warps, slow=False):
    constants = {"NARROW": dtype, "WIDE": dtype, "CONTIGUOUS": True, "NARROW_ALIGNED": True, "WIDE_ALIGNED": True}
    constants |= {"b_m": b_m, "b_n": 128, "b_t": b_t}
    return Case(grouped._grouped_kernel, {}, constants, warps, 3, dtype != tl.float32, True, slow=slow)


def snap_case(dtype, b_x, warps, slow=False):
    own = {"p_x": "*bf16", "p_table": f"*{dtype}"}
    constants = {"b_v": 128, "b_x": b_x, "b_k": 64, "b_group": 32}
    return Case(snap.nearest_group_kernel, own, constants, warps, 3, True, True, slow=slow)


def onehot_norm_case(kind, slow=False):
    constants = {"b_t": 4, "b_n": onehot.COLUMNS, "KIND": kind.value}
    return Case(onehot._norm_kernel, {"p_right": "*bf16"}, constants, slow=slow)


def onehot_scatter_case(masked, slow=False):
    constants = {"b_t": 4, "b_n": onehot.COLUMNS, "MASKED": masked}
    return Case(onehot.scatter_kernel, {"p_right": "*bf16"}, constants, slow=slow)


UNLISTED = {"p_list": None, "p_sums": None}


def noise_case(dtype, rounded, slow=False):
    own = {"p_x": f"*{dtype}", "n": "i64", **({} if rounded else UNLISTED)}
    return Case(noise.add_noise_kernel, own, {"b_blocks": chacha.BLOCKS, "ROUNDED": rounded}, slow=slow)


def adamw_case(rounded, parameter, moments, slow=False, **constants):
    """``rounded`` None: the launch that settles what is open."""
    constants = {"MASTER": False, "AXES": False} | constants
    constants |= {"PARAMETER": parameter, "MOMENTS": moments}
    if rounded is None:
        return Case(adamw.settle_adamw_kernel, {}, constants | {"b": settle.SETTLE_BLOCK}, 1, slow=slow, stack=40)
    own = {} if rounded else {"p_list": None}
    constants |= {"b_blocks": chacha.BLOCKS, "ROUNDED": rounded, "ALIGNED": True}
    return Case(adamw.adamw_kernel, own, constants, slow=slow, maxnreg=adamw.REGISTERS, blocks=3)


#: Arguments of 16 bits.
HALF = {"p_x": "*bf16", "p_y": "*bf16", "p_out": "*bf16", "p_grad": "*bf16", "p_left": "*bf16", "p_right": "*bf16"}


CASES = {
    "noise": noise_case("fp32", False),
    "noise-rounded": noise_case("fp32", True),
    "noise-rounded-bf16": noise_case("bf16", True, slow=True),
    # The float64 cosine keeps a path for huge angles, whose table is the stack; angles here are below 2 pi.
    "noise-settle": Case(settle.settle_kernel, {}, {"b": settle.SETTLE_BLOCK}, 1, stack=40),
    "adamw": adamw_case(False, tl.bfloat16, tl.bfloat16),
    "adamw-masters": adamw_case(False, tl.bfloat16, tl.float32, MASTER=True, slow=True),
    "adamw-rounded": adamw_case(True, tl.bfloat16, tl.bfloat16),
    "adamw-rounded-masters": adamw_case(True, tl.bfloat16, tl.float32, MASTER=True, slow=True),
    "adamw-rounded-axes": adamw_case(True, tl.float32, tl.float32, AXES=True, slow=True),
    "adamw-settle": adamw_case(None, tl.bfloat16, tl.bfloat16, slow=True),
    "adamw-settle-axes": adamw_case(None, tl.float32, tl.float32, AXES=True, slow=True),
    "instance-norms-many": Case(groups.norms_kernel, {}, {"b": groups.COLUMNS}),
    "instance-norms-parts": Case(groups.norm_parts_kernel, {}, {"b": 128}, 1, slow=True),
    "instance-sums-many": Case(groups.sums_kernel, {}, {"b": groups.COLUMNS}),
    "clip-norms": Case(
        clip.row_dots_kernel, HALF, {"b_step": clip.CLIP_STEP, "b_chunk": clip.CLIP_CHUNK, "ALIGNED": True}
    ),
    "clip-factors": Case(clip.forward_factor_kernel, {}, {"b_chunks": 128}, 1),
    "clip-factors-backward": Case(clip.backward_factor_kernel, {}, {"b_chunks": 128}, 1, slow=True),
    "clip-apply": Case(
        clip.apply_kernel,
        {**HALF, **UNLISTED, "n": "i64", "width": "i64"},
        {"b_blocks": chacha.BLOCKS, "NOISY": True, "ROUNDED": False},
    ),
    "clip-backward": Case(
        clip.pull_back_kernel, {**HALF, "n": "i64", "width": "i64"}, {"b_tile": clip.CLIP_STEP, "ALIGNED": True}
    ),
    "gram-bf16": gram_case(tl.bfloat16, 128, 64, 8),
    "gram-bf16-described": gram_case(tl.bfloat16, 128, 128, 8, described=True),
    "gram-bf16-described-short": gram_case(tl.bfloat16, 64, 64, 4, described=True, slow=True),
    "gram-bf16-short": replace(gram_case(tl.bfloat16, 32, 64, 4, slow=True), narrow=True, blocks=4),
    "gram-fp32": replace(gram_case(tl.float32, 64, 32, 8), loop=700, blocks=2),
    "gram-pairs": Case(gram.pairs_kernel, {"p_table": "*i32"}, {}, slow=True),
    "gram-sum-pairs": Case(gram.sum_pairs_kernel, {"p_table": "*i32"}, {"b": 128}, slow=True),
    "direct-bf16": replace(direct_case("bf16", direct.SQUARE, 128, 128, 64, 8), blocks=2),
    "direct-bf16-wide": replace(direct_case("bf16", direct.SQUARE, 128, 256, 64, 8), wide=True, loop=200),
    "direct-chosen-bf16": Case(
        direct.chosen_kernel,
        {},
        {"LEFT": tl.bfloat16, "RIGHT": tl.bfloat16, "CONTIGUOUS": True, "ALIGNED": True}
        | {"b_m": 128, "b_n": 128, "b_t": 64},
        8,
        matrix=True,
        asynchronous=True,
    ),
    "direct-fp16-narrow": replace(direct_case("fp16", direct.SQUARE, 16, 128, 64, 4, slow=True), narrow=True),
    "direct-masked-bf16": direct_case("bf16", direct.MASKED_SQUARE, 128, 128, 64, 8),
    "direct-absolute-fp32": replace(direct_case("fp32", direct.ABSOLUTE, 64, 64, 32, 4), loop=1300, blocks=4),
    "direct-masked-fp32": replace(
        direct_case("fp32", direct.MASKED_SQUARE, 64, 64, 32, 4, slow=True), loop=1300, blocks=4
    ),
    "affine-bf16": Case(
        affine.affine_kernel,
        {},
        {"GRADIENT": tl.bfloat16, "X": tl.bfloat16, "CONTIGUOUS": True, "ALIGNED": True}
        | {"b_t": affine.TOKENS, "b_n": affine.COLUMNS},
    ),
    "weighted-bf16": replace(weighted_case(tl.bfloat16, 128, 128, 64, 8), loop=270),
    # An accumulator of 128 registers leaves four words over for the stack once, where the tile is stored.
    "weighted-bf16-wide": replace(weighted_case(tl.bfloat16, 128, 256, 64, 8), loop=400, wide=True, stack=16),
    "weighted-bf16-described": replace(weighted_case(tl.bfloat16, 128, 256, 64, 8, described=True), loop=400, stack=16),
    "weighted-fp32": replace(weighted_case(tl.float32, 64, 64, 32, 4, slow=True), loop=1400, blocks=4),
    "weighted-bf16-short": replace(weighted_case(tl.bfloat16, 128, 128, 16, 8, slow=True), loop=400),
    "weighted-parts": Case(
        weighted.add_parts_kernel,
        {},
        {"CONTIGUOUS": True, "ALIGNED": True, "b_m": 128, "b_n": 128, "b_row": 16},
        slow=True,
    ),
    "blocks": Case(blocks.blocks_kernel, {"p_table": "*i32"}, {}, slow=True),
    "cross-dense-bf16": cross_case("bf16", cross.DENSE, 128, 64, 8, slow=True),
    "cross-id-dense-bf16": cross_case("bf16", cross.ID_AGAINST_DENSE, 64, 64, 4),
    "cross-ids-bf16": cross_case("bf16", cross.IDS, 128, 64, 8, slow=True),
    "cross-dense-fp32": replace(cross_case("fp32", cross.DENSE, 64, 32, 8, slow=True), loop=700),
    "grouped-bf16": replace(grouped_case(tl.bfloat16, 16, 64, 4), narrow=True),
    "grouped-bf16-64": grouped_case(tl.bfloat16, 64, 64, 8, slow=True),
    "grouped-fp32": replace(grouped_case(tl.float32, 16, 32, 8, slow=True), loop=460),
    "head-bf16": Case(heads.gradient_kernel, {"p_logits": "*bf16"}, {"b": heads.HEAD_COLUMNS}, 8),
    "row-products": Case(
        bounds.products_kernel,
        {**HALF, "p_out": "*fp64"},
        {"b_t": bounds.TOKENS, "b_k": bounds.COLUMNS, "ORDER": 2, "ONE_HOT": False},
    ),
    # Triton takes a width of 1 for a constant.
    "row-products-of-columns": Case(
        bounds.products_kernel,
        {**HALF, "p_out": "*fp64", "m": 1, "n": 1},
        {"b_t": bounds.TOKENS, "b_k": bounds.COLUMNS, "ORDER": 2, "ONE_HOT": False},
        slow=True,
    ),
    "row-products-units": Case(
        bounds.sum_units_kernel, {"p_products": "*fp64", "p_out": "*fp64"}, {"b": 128}, 1, slow=True
    ),
    "token-counts": Case(
        bounds.counts_kernel,
        {"p_out": "*fp64"},
        {"LEFT": tl.bfloat16, "RIGHT": tl.bfloat16, "FIELDS": direct.FIELDS.value, "b_t": 32, "b_k": 128},
    ),
    "onehot-norm": onehot_norm_case(direct.SQUARE),
    "onehot-absolute": onehot_norm_case(direct.ABSOLUTE, slow=True),
    "onehot-masked": onehot_norm_case(direct.MASKED_SQUARE),
    "onehot-scatter": onehot_scatter_case(False, slow=True),
    "onehot-masked-scatter": onehot_scatter_case(True, slow=True),
    "onehot-long-norm": Case(
        onehot.long_norm_kernel, {}, {"b_n": onehot.COLUMNS, "KIND": direct.MASKED_SQUARE.value}, slow=True
    ),
    "onehot-long-scatter": Case(onehot.long_scatter_kernel, {}, {"b_n": onehot.COLUMNS, "MASKED": True}, slow=True),
    "sum-parts": Case(reduce.sum_parts_kernel, {}, {"b": 128}, 1),
    "snap-bf16": snap_case("bf16", 128, 8),
    "snap-fp32": snap_case("fp32", 128, 8),
    "snap-few": replace(snap_case("fp32", 16, 4, slow=True), loop=270),
    "snap-resolve": Case(snap.resolve_kernel, {"p_table": "*fp32"}, {"b_scan": 1024, "b_group": 32, "b_k": 64}),
    "snap-survey": Case(snap.survey_kernel, {}, {"b_t": 8, "b_k": 256}, slow=True),
    "dchi": Case(dchi.dchi_kernel, {"p_table": "*fp32"}, {"b_blocks": 64}, 2, stack=40),
    "uniforms": Case(choice.uniform_kernel, {"p_out": "*fp64"}, {"b": 128}, slow=True),
}


#: What their launchers hold to `launch.gram_side`.
TWO_TILES = ("gram-bf16", "gram-bf16-described", "cross-dense-bf16", "cross-ids-bf16")


def aligned_arguments(case):
    """Pointers on 16 bytes, and numbers that are multiples of 16."""
    return tuple(
        name
        for name in case.types
        if name not in VARYING and (name.startswith(("p_", "stride", "lefts", "widths")) or name in ("m", "n", "width"))
    )


@functools.cache
def built(name, capability):
    case = CASES[name]
    return compiled(
        case.kernel,
        {**case.types, **case.constants},
        capability,
        aligned=aligned_arguments(case),
        num_warps=case.num_warps,
        num_stages=case.num_stages,
        maxnreg=case.maxnreg,
    )


def check(name, capability):
    case, found = CASES[name], built(name, capability)
    assert found.shared <= SHARED_LIMIT[capability]
    assert found.registers * 32 * case.num_warps <= 65536
    # Registers are assigned for Hopper with the newest Triton; elsewhere words outside the loops over products may spill.
    if capability == 90 and tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9):
        assert found.stack == case.stack
        assert found.spills == 0 or case.stack
    else:
        assert found.stack <= case.stack + 256
        assert all(
            loop.counts.get("LDL", 0) <= 8 and not loop.counts.get("STL") for loop in found.loops if loop.multiplies
        )
    if case.matrix:
        names = ("HMMA", *MATRIX[capability]) if case.narrow else MATRIX[capability]
        assert any(found.has(name) for name in names)
    if case.asynchronous:
        assert found.has("LDGSTS") or found.has("UBLKCP") or found.has("UTMALDG")
        # Triton 3.6 compiles all of them, but waits for products of masked operands.
        if not triton.__version__.startswith("3.6."):
            check_loops(case, found, capability)
    if capability == 90:
        assert found.blocks >= case.blocks
    return found


def check_loops(case, found, capability):
    """A loop over products never waits for what it has just asked for, and is short enough to keep them coming."""
    loops = [loop for loop in found.loops if loop.multiplies]
    assert loops or capability >= 100  # products of Blackwell are asked for by one warp, whose waits are barriers
    for loop in loops:
        # The copy engine reports to barriers.
        assert (loop.loads is None and (capability >= 100 or found.has("UTMALDG"))) or loop.loads >= 1
        if loop.counts.get("HGMMA"):
            assert loop.products >= 1
        if capability == 90:
            assert loop.instructions <= case.loop


@cases("rounded, plain", [("noise-rounded", "noise"), ("adamw-rounded", "adamw")])
def test_rounding_takes_no_float64(rounded, plain):
    """What float32 leaves open is settled in another launch: rounding itself takes few operations and little room."""
    found, least = built(rounded, 90), built(plain, 90)
    assert not re.search(r"\bD(ADD|MUL|FMA|SETP)\b|\bMUFU\.\w*64", found.sass)
    assert found.blocks >= least.blocks // 2
    assert found.sass.count(";") - least.sass.count(";") <= 16 * 45


@cases("name", ["noise", "adamw"])
def test_a_round_of_noise_keeps_the_pipe_of_logic_for_logic(name):
    """Of 96 operations of a double round the 32 additions run elsewhere, as integer products."""
    loops = [loop for loop in built(name, 90).loops if loop.counts.get("SHF", 0) >= 32]
    assert loops
    for loop in loops:
        assert loop.logic <= 66
        assert loop.instructions <= 102


def test_a_double_round_is_priced_by_its_share_of_instructions():
    found = built("noise-rounded", 90)
    loop = next(loop for loop in found.loops if loop.counts.get("SHF", 0) >= 32)
    # There are two: that which makes another block for the tails runs in one tile of a million.
    everything = found.sass.count(";") + 8 * loop.instructions
    assert pytest.approx(loop.instructions / everything, rel=0.03) == meter.PER_DOUBLE_ROUND / meter.PER_NORMAL


@pytest.mark.parametrize("name", ["row-products-of-columns", *(name for name, case in CASES.items() if not case.slow)])
def test_fits_an_h200(name):
    check(name, 90)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.slow])
def test_every_variant_fits_an_h200(name):
    check(name, 90)


@cases("capability, name", [(90, "gram-bf16-described"), (100, "gram-bf16-described-short")])
def test_the_copy_engine_reads_described_factors(capability, name):
    found = check(name, capability)
    assert found.has("UTMALDG")
    assert not found.has("LDGSTS")
    assert found.spills == 0
    # Two finished tiles and an accumulator of 128 x 128 leave a Hopper program no register over.
    assert found.registers <= (168 if capability == 100 else 255)


@pytest.mark.slow
@pytest.mark.parametrize(*pairs(("capability", [80, 86, 89, 100, 120]), ("name", list(CASES))))
def test_fits_its_neighbours(name, capability, monkeypatch):
    if CASES[name].wide and capability not in (90, 100):
        # Launchers choose tiles this wide for the shared memory of these two alone.
        pytest.skip("never launched there")
    case = CASES[name]
    if capability == 100 and name in TWO_TILES:
        smaller = {key: min(64, value) for key, value in case.constants.items() if key in ("b_t", "b_k")}
        case = replace(case, constants={**case.constants, **smaller}, num_warps=4, num_stages=max(case.num_stages, 4))
        name = f"{name}-64"
        monkeypatch.setitem(CASES, name, case)
    check(name, capability)


@pytest.mark.slow
@pytest.mark.parametrize("target", [GPUTarget("cuda", 75, 32), GPUTarget("hip", "gfx942", 64)], ids=["sm_75", "gfx942"])
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.wide])
def test_fits_into_64_kilobytes(name, target, monkeypatch):
    """A T4's programs and an MI300's have so little shared memory; for the latter no limit of registers is compiled."""
    case = CASES[name]
    monkeypatch.setattr(launch, "shared_memory", lambda device: 64 << 10)
    monkeypatch.setattr(torch.version, "hip", "6.0" if target.backend == "hip" else None)
    limit = {} if case.maxnreg is None else launch.registers_of(case.maxnreg)
    stages = launch.stages_of(case.num_stages, torch.device("cpu"))
    made = binary(
        *(case.kernel, {**case.types, **case.constants}, target),
        aligned=aligned_arguments(case),
        num_warps=case.num_warps,
        num_stages=stages,
        **limit,
    )
    assert made.metadata.shared <= 64 << 10


def test_wide_tiles_are_nvidia_s(monkeypatch):
    """An MI300 says 9.4 where an H100 says 9.0."""
    monkeypatch.setattr(launch, "capability_of", lambda device: (9, 4))
    monkeypatch.setattr(torch.version, "hip", "6.0")
    assert not launch.has_wide_tiles(torch.device("cuda"))
    monkeypatch.setattr(torch.version, "hip", None)
    assert launch.has_wide_tiles(torch.device("cuda"))


def test_every_kernel_is_compiled_somewhere():
    found = pkgutil.iter_modules(fastdp.kernels.__path__, "fastdp.kernels.")
    modules = [importlib.import_module(module.name) for module in found]
    kernels = {
        f"{module.__name__}.{name}"
        for module in modules
        for name, value in vars(module).items()
        if name.endswith("_kernel") and isinstance(value, JITFunction)
    }
    assert kernels == {f"{case.kernel.fn.__module__}.{case.kernel.fn.__name__}" for case in CASES.values()}


def test_no_kernel_is_compiled_again_for_another_batch():
    """Token, unit and vocabulary counts, and what follows from them, are not specialised; seeds and keys are memory."""
    for case in CASES.values():
        for parameter in case.kernel.params:
            if parameter.name in VARYING:
                assert parameter.do_not_specialize, f"{case.kernel.fn.__name__}: {parameter.name}"
            assert "seed" not in parameter.name
            assert "step" not in parameter.name or parameter.name in ("step_size", "b_step")
