"""``snap`` against distances in float64: exact, ties to the lowest index, whatever the first pass rounds to."""

import importlib
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings, strategies as st

from fastdp import _native
from fastdp.ops import snap
from fastdp.ops.snap import SNAP
from tests.cases import cases, pairs
from tests.ops.uses import by_threads

module = importlib.import_module("fastdp.ops.snap")


@pytest.fixture(params=[True, False], ids=["bfloat16", "float32"])
def _first_pass(request, monkeypatch):
    monkeypatch.setattr(module, "multiplies_in_bf16", lambda: request.param)


def nearest(x, table):
    """The definition, all at once: float64 differences, squared, summed; the first of equal minima."""
    wide = table.double()
    return torch.cat([(wide - part.double()[:, None]).square().sum(2).argmin(1) for part in x.split(16)])


@pytest.mark.usefixtures("_first_pass")
def test_exact_over_several_tiles_and_chunks(monkeypatch):
    monkeypatch.setattr(module, "BLOCK_ROWS", 37)
    monkeypatch.setattr(module, "TABLE_ROWS", 100)
    x, table = torch.randn(113, 48), torch.randn(1057, 48)
    assert torch.equal(snap(x, table), nearest(x, table))


def sizes(rows, gen):
    """Each row times a number between 1e-20 and 1e20."""
    return rows * 10.0 ** (40 * torch.rand(len(rows), 1, generator=gen) - 20)


def picked(rows, count, gen):
    return rows[torch.randint(len(rows), (count,), generator=gen)]


def outlier_dimension(x, table, gen):
    table[:, 0] *= 300
    return x + picked(table, len(x), gen), table


def clusters(x, table, gen):
    """Far more rows within the error of the first pass than a row's list holds."""
    centres = torch.randn(3, x.shape[1], generator=gen)
    return picked(centres, len(x), gen) + 1e-6 * x, picked(centres, len(table), gen) + 1e-6 * table


FAMILIES = {
    "far from the origin": lambda x, table, gen: (1e3 + 1e-3 * x, 1e3 + 1e-3 * table),
    "huge": lambda x, table, gen: (1e37 * x, 1e37 * table),
    "tiny": lambda x, table, gen: (1e-36 * x, 1e-36 * table),
    "x huge": lambda x, table, gen: (1e30 * x, 1e-5 * table),
    "x tiny": lambda x, table, gen: (1e-35 * x, 1e5 * table),
    "rows of all sizes": lambda x, table, gen: (sizes(x, gen), sizes(table, gen)),
    "outlier dimension": outlier_dimension,
    "clusters": clusters,
    # Each row of the table is nearer than the one before.
    "ever nearer": lambda x, table, gen: (1e-3 * x, torch.linspace(1, 1e-3, len(table))[:, None].expand_as(table)),
    "rows of the table": lambda x, table, gen: (picked(table, len(x), gen), table),
}


@pytest.mark.usefixtures("_first_pass")
@cases("name", FAMILIES)
def test_exact_where_rounding_hurts(name):
    for seed, (n, v, d) in enumerate([(33, 1300, 24), (17, 301, 131)]):
        gen = torch.Generator().manual_seed(seed)
        x, table = FAMILIES[name](torch.randn(n, d, generator=gen), torch.randn(v, d, generator=gen), gen)
        assert torch.equal(snap(x, table), nearest(x, table))


@pytest.mark.usefixtures("_first_pass")
@settings(max_examples=80)
@given(
    n=st.integers(0, 9),
    v=st.integers(1, 200),
    d=st.integers(1, 40),
    levels=st.integers(1, 4),
    shift=st.integers(-20, 20),
    seed=st.integers(0, 2**31),
)
def test_ties_go_to_the_lowest_index(n, v, d, levels, shift, seed):
    # Small integers times a power of two: distances are exact, and often equal.
    gen = torch.Generator().manual_seed(seed)
    x = torch.randint(-levels, levels + 1, (n, d), generator=gen) * 2.0**shift
    table = torch.randint(-levels, levels + 1, (v, d), generator=gen) * 2.0**shift
    assert torch.equal(snap(x, table), nearest(x, table))


@pytest.mark.usefixtures("_first_pass")
def test_equal_rows():
    x = torch.randn(5, 33)
    assert snap(x, torch.ones(3000, 33)).tolist() == [0] * 5
    assert snap(x, torch.zeros(3000, 33)).tolist() == [0] * 5
    table = torch.randn(400, 33)
    doubled = torch.cat([table, table, x[:1], table])
    found = snap(torch.cat([x, table]), doubled)
    assert torch.equal(found, nearest(torch.cat([x, table]), doubled))
    assert (found[1:] < 400).all()
    assert found[0] == 800
    # Halfway between two rows, as for -0.0 and 0.0.
    assert snap(torch.tensor([[0.0], [-0.0]]), torch.tensor([[3.0], [1.0], [-1.0], [1.0]])).tolist() == [1, 1]


def test_dtypes_strides_gradients_and_empty():
    x, table = torch.randn(9, 20), torch.randn(65, 20)
    for dtype in (torch.bfloat16, torch.float16):
        a, b = x.to(dtype), table.to(dtype)
        assert torch.equal(snap(a, b), nearest(a, b))
        assert torch.equal(snap(x, b), nearest(x, b))
    assert torch.equal(snap(x.t().contiguous().t(), table[::2]), nearest(x, table[::2]))
    assert torch.equal(snap(x[:, 3:9], table[:, 3:9]), nearest(x[:, 3:9], table[:, 3:9]))
    assert torch.equal(snap(x.requires_grad_(), torch.nn.Parameter(table)), nearest(x, table))
    assert torch.equal(SNAP.reference(x, table), nearest(x, table))
    assert snap(x[:0], table).shape == SNAP.reference(x[:0], table).shape == (0,)
    assert snap(x[:, :0], table[:, :0]).tolist() == [0] * 9


def test_autocast_and_lower_precision_do_not_touch_the_answer(monkeypatch):
    x, table = torch.randn(64, 96), torch.randn(900, 96)
    truth = nearest(x, table)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(snap(x, table), truth)
        monkeypatch.setattr(module, "multiplies_in_bf16", lambda: False)
        assert torch.equal(snap(x, table), truth)
    monkeypatch.undo()
    monkeypatch.setattr(_native, "has_bf16_products", lambda: False)
    torch.set_float32_matmul_precision("medium")
    try:
        assert module.multiplies_in_bf16()
        assert torch.equal(snap(x, table), truth)
    finally:
        torch.set_float32_matmul_precision("highest")


def test_threads_do_not_matter():
    x, table = torch.randn(100, 64), torch.randn(3000, 64)
    by_threads(lambda: snap(x, table))


@cases(*pairs(("bad", [float("nan"), float("inf"), float("-inf")]), ("implementation", [snap, SNAP.reference])))
def test_non_finite_rows_are_named(bad, implementation):
    x, table = torch.randn(40, 19), torch.randn(2100, 19)
    broken = x.clone()
    broken[17, 18] = bad
    broken[23, 0] = bad
    with pytest.raises(ValueError, match="row 17 of x"):
        implementation(broken, table)
    broken = table.clone()
    broken[1999, 3] = bad
    broken[2050, 3] = bad
    with pytest.raises(ValueError, match="row 1999 of table"):
        implementation(x, broken)


@cases("v", [5, 28, 40])
def test_equal_rows_answer_with_the_lowest_index_in_any_layout(v):
    for d in range(2, 40):
        table = torch.randn(d).repeat(v, 1).T.contiguous().T
        x = torch.randn(3, d)
        assert SNAP.reference(x, table).tolist() == snap(x, table).tolist() == [0, 0, 0], d


def test_refusals():
    x, table = torch.randn(4, 8), torch.randn(5, 8)
    for bad_x, bad_table, error, message in (
        (x, table[:0], ValueError, "0 rows"),
        (x, table[0], ValueError, "1 dimensions"),
        (x[:, :7], table, ValueError, "must be \\[N, 8\\]"),
    ):
        with pytest.raises(error, match=message):
            snap(bad_x, bad_table)


def peak_above_inputs(n, v, d):
    """MiB by which the peak of a fresh process rises during one call of snap, inputs and a warm-up call done before."""
    program = f"""
import torch
from fastdp.ops import snap
x, table = torch.randn({n}, {d}), torch.randn({v}, {d})
snap(x[:8, :8], table[:8, :8])
def read(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key))
open("/proc/self/clear_refs", "w").write("5")
before = read("VmRSS")
snap(x, table)
print((read("VmHWM") - before) / 1024)
"""
    # Each thread holds some memory of its own.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, check=True, capture_output=True, text=True)
    return float(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="reads peak memory from /proc")
def test_memory_does_not_grow_with_the_table():
    # A matrix of all distances would be 96 MiB.
    assert peak_above_inputs(1024, 24576, 64) < 32


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads peak memory from /proc")
def test_memory_at_the_size_of_gpt2():
    assert peak_above_inputs(1024, 50257, 768) < 64
