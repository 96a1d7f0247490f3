"""Nearest rows, d_chi rows and the exponential choice in Triton against their definitions."""

import functools

import pytest
import torch
from fastdp.kernels.choice import uniforms
from fastdp.kernels.dchi import dchi_rows
from fastdp.kernels.snap import named_bad_row, survey

from fastdp import ops
from fastdp.methods.sap import TextPrivatizer
from fastdp.ops.choice import choice_log_probabilities
from fastdp.ops.dchi import dchi_noise
from fastdp.ops.table import OPS
from tests.elsewhere import DEVICE, elsewhere
from tests.ops.uses import factor

ON_GPU = {name: functools.partial(op.on, "cuda") for name, op in OPS.items()}


def position():
    return ops.NoiseStream.unsafe_reproducible(9).at(4, 5).take()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e18, 1e30])
def test_snap_where_the_first_pass_says_nothing(scale):
    """Equal rows, and numbers whose squares float32 cannot hold: every group is compared in float64."""
    table = scale * factor(70, 5, 1)
    x = table[[3, 69, 40]].clone()
    assert torch.equal(ON_GPU["snap"](x, table), OPS["snap"].reference(x, table))


def test_snap_tells_rows_a_float32_distance_cannot():
    row = torch.full((1, 40), 100.0)
    table = row.repeat(65, 1)
    table[:, 0] += torch.arange(65).flip(0) * 2.0**-17
    assert ON_GPU["snap"](row, table).tolist() == [64]


def test_a_row_without_a_nearest_one_is_named():
    table = factor(40, 6, 0)
    x = factor(20, 6, 1)
    x[13, 2], x[9, 5] = float("nan"), float("-inf")
    assert named_bad_row(survey(x)[1]) == 9
    assert named_bad_row(survey(table)[1]) is None
    with pytest.raises(ValueError, match="row 9 of x"):
        ON_GPU["snap"](x, table)
    table[31, 0] = float("nan")
    with pytest.raises(ValueError, match="row 31 of table"):
        ON_GPU["private_snap"](
            torch.zeros(3, dtype=torch.int64), table, torch.ones((), dtype=torch.float64), position()
        )
    with pytest.raises(ValueError, match="eta is so small"):
        ON_GPU["private_snap"](
            torch.zeros(1, dtype=torch.int64), x[:8], torch.tensor(1e-300, dtype=torch.float64), position()
        )


@pytest.mark.parametrize("d", [1, 123, 300])
def test_dchi_rows(d):
    table, ids = factor(40, d, 0), torch.randint(0, 40, (2,))
    for eta in (torch.tensor(1.5, dtype=torch.float64), torch.rand(2, dtype=torch.float64) + 0.5):
        got = dchi_rows(ids, table, eta.reshape(-1), position())
        truth = table[ids].double() + dchi_noise(position(), 2, d) / eta.reshape(-1, 1)
        assert float((got - truth).abs().max() / truth.abs().max()) <= 1e-6


def test_dchi_vectors():
    eta = torch.rand(3, dtype=torch.float64) + 0.5
    got, truth = (f(eta, 40, position()) for f in (ON_GPU["dchi_vectors"], OPS["dchi_vectors"].reference))
    assert float((got - truth).abs().max() / truth.abs().max()) <= 1e-6


@pytest.mark.parametrize("mechanism", ["laplace", "exponential"])
def test_a_privatizer_runs_the_kernels_of_its_tables_device(mechanism):
    table, ids = factor(10, 12, 0), torch.arange(10)
    here = TextPrivatizer(table, eta=1.0, mechanism=mechanism, unsafe_seed=1)
    with elsewhere("cuda") as ran:
        there = TextPrivatizer(table.to(DEVICE), eta=1.0, mechanism=mechanism, unsafe_seed=1)
        got = there(ids)
        assert ran == {"private_snap" if mechanism == "laplace" else "exponential_choice": 1}
    # Of the exponential mechanism a processor draws the same law in another way.
    assert mechanism == "exponential" or torch.equal(got, here(ids))
    assert int((got != ids).sum()) > 0


@pytest.mark.parametrize("full", [False, True])
def test_exponential_choice_draw_by_draw(full):
    table, ids = factor(50, 9, 0), torch.randint(0, 50, (61,))
    table[20] = table[3]
    scale = torch.tensor(1.5, dtype=torch.float64)
    rest = (None, None)
    if full:
        prior = torch.randn(50, dtype=torch.float64)
        prior[-3:] = -float("inf")
        scale = torch.rand(61, dtype=torch.float64).round(decimals=1)
        rest = (2.0, prior)
    got = ON_GPU["exponential_choice"](ids, table, scale, position(), *rest)
    for i, draw in enumerate(uniforms(position(), 61, torch.device("cpu"))):
        law = choice_log_probabilities(int(ids[i]), table, float(scale.expand(61)[i]), *rest).exp()
        ends = law.cumsum(0)
        assert got[i] == torch.searchsorted(ends, draw * ends[-1], right=True)
