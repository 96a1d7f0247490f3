"""The planner takes the route it predicts to be cheapest, and instantiates only what is smaller than its factors."""

import pytest
import torch
from hypothesis import given, strategies as st

from fastdp.ops.routes import DEFAULTS, ROUTES, RouteConstants, constants_for, plan_route, predicted_seconds
from tests.cases import cases, pairs

sizes = st.integers(1, 20_000)
shapes = st.fixed_dictionaries({"m": sizes, "n": sizes, "length": st.integers(0, 8192), "units": st.integers(1, 512)})
settings_of_a_use = st.fixed_dictionaries(
    {
        "one_hot": st.booleans(),
        "keeps_factors": st.booleans(),
        "dtype": st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
        "device": st.sampled_from(["cpu", "cuda", "meta"]),
    }
)


@given(shape=shapes, use=settings_of_a_use, route=st.sampled_from(ROUTES))
def test_more_units_and_longer_ones_never_cost_less(shape, use, route):
    cost = predicted_seconds(route, **shape, **use)
    assert predicted_seconds(route, **{**shape, "units": shape["units"] + 1}, **use) >= cost
    assert predicted_seconds(route, **{**shape, "length": shape["length"] + 1}, **use) >= cost


def test_well_known_shapes():
    assert plan_route(8, 512, 128, 8) == "instantiate"  # LoRA
    assert plan_route(512, 2048, 128, 8) == "gram"  # short sequences
    assert plan_route(8192, 512, 128, 8) == "gram"  # a head
    assert plan_route(512, 512, 1, 8) == "gram"  # one token a unit
    assert plan_route(512, 512, 1024, 8) == "instantiate"  # long ones: the gradients are smaller and the sum reads them
    assert plan_route(512, 512, 1024, 8, keeps_factors=False) == "direct"  # long ones of which only norms are wanted
    assert plan_route(8192, 512, 128, 8, one_hot=True) != "instantiate"


def test_constants_decide():
    slow_gram = RouteConstants(
        "made up", gram_flops=1e6, direct_flops=1e12, product_flops=1e12, bandwidth=1e11, call_seconds=0
    )
    assert plan_route(512, 2048, 128, 8, constants=slow_gram) == "direct"


@cases(*pairs(("dtype", [torch.bfloat16, torch.float32]), ("rank", [4, 16, 64])))
def test_adapters_go_out_together_on_a_gpu(rank: int, dtype: torch.dtype) -> None:
    """Each by itself would be launches of its own for every matrix, which take longer than what they do."""
    for tokens, units in ((512, 16), (2048, 4), (4096, 1)):
        assert plan_route(4096, rank, tokens, units, dtype=dtype, device="cuda") == "instantiate"
        assert plan_route(rank, 4096, tokens, units, dtype=dtype, device="cuda") == "instantiate"
    assert plan_route(2048, 2048, 1024, 4, dtype=torch.bfloat16, device="cuda") == "gram"


def test_every_default_says_what_it_was_measured_on():
    for (kind, _), constants in DEFAULTS.items():
        assert constants.device
        assert constants_for(kind, torch.float32) in DEFAULTS.values()
    assert constants_for("cpu", torch.bfloat16) is DEFAULTS["cpu", 4]


def test_an_unknown_route_is_refused():
    with pytest.raises(ValueError, match="route is 'ghost'"):
        predicted_seconds("ghost", 1, 1, 1, 1)
