"""The planner against brute force: every route's work counted step by step, and what a benchmark measured."""

from __future__ import annotations

import itertools
import json
import math
import random
from functools import cache
from pathlib import Path

import pytest
import torch

from fastdp.ops.routes import (
    DEFAULTS,
    NARROW,
    ROUTES,
    RouteConstants,
    constants_for,
    longest_by_gram,
    plan_route,
    predicted_seconds,
)
from tests.cases import cases, pairs

MEASURED = Path(__file__).parents[2] / "bench" / "results" / "cpu" / "planner.json"
SIZES = (1, 4, 16, 64, 65, 200, 768, 3072)
LENGTHS = (1, 3, 16, 100, 129, 1000)


@cache
def gram_products(length: int) -> int:
    """Pairs of tokens that the Gram kernel multiplies: whole blocks of 4 by 4, on the diagonal and below it."""
    return sum(16 * (row + 1) for row in range(math.ceil(length / 4)))


def seconds(route: str, m: int, n: int, length: int, units: int, keeps: bool, width: int, c: RouteConstants) -> float:
    """The time of a use's norms and of its sum, from what each step reads, writes and multiplies."""
    numbers = units * length
    read = (numbers * m + numbers * n) * width / c.bandwidth
    product = 2 * numbers * m * n / c.product_flops
    if route == "instantiate":
        # Written, read to be squared, and read to be added.
        moved = (2 + keeps) * 4 * units * m * n / c.bandwidth
        launches = 0 if c.grouped and keeps and min(m, n) <= NARROW else 2 + keeps
        return product + read + moved + launches * c.call_seconds
    if route == "gram":
        norms = units * 2 * gram_products(length) * (m + n) / c.gram_flops
        launches = 0 if c.grouped and keeps else 1
    else:
        # Squaring an entry costs as much as three tokens.
        norms = sum(2 * (length + 3) * m * n for _ in range(units)) / c.direct_flops
        launches = 2
    if not keeps:
        return norms + read + launches * c.call_seconds
    # The narrower factor is read, written in float32 with its weights, and read again.
    scaled = 3 * 4 * numbers * min(m, n) / c.bandwidth
    launches += 0 if c.grouped else 1
    return norms + read + scaled + product + launches * c.call_seconds


def fits(m: int, n: int, length: int, units: int, width: int, device: str) -> bool:
    """Whether whole gradients take the place of factors: half the larger one; of a single unit less than both.

    Less than both, too, of 16-bit factors on a GPU.
    """
    gradients, left, right = 4 * units * m * n, width * units * length * m, width * units * length * n
    fast = units == 1 or (device == "cuda" and width == 2)
    return gradients < left + right if fast else 2 * gradients <= max(left, right)


@cases(*pairs(("device, dtype", [("cpu", torch.float32), ("cuda", torch.bfloat16)]), ("keeps", [True, False])))
def test_the_plan_is_the_cheapest_of_what_fits(device: str, dtype: torch.dtype, keeps: bool) -> None:
    width, seen = dtype.itemsize, set()
    constants = DEFAULTS[device, width]
    every = list(itertools.product(SIZES, SIZES, LENGTHS, (1, 8)))
    for m, n, length, units in random.Random(0).sample(every, 400):
        routes = [route for route in ROUTES if route != "instantiate" or fits(m, n, length, units, width, device)]
        costs = {route: seconds(route, m, n, length, units, keeps, width, constants) for route in routes}
        chosen = plan_route(m, n, length, units, keeps_factors=keeps, dtype=dtype, device=device)
        assert chosen in costs, (m, n, length, units)
        assert costs[chosen] <= min(costs.values()) * (1 + 1e-9), (m, n, length, units, costs)
        seen.add(chosen)
        options = {"keeps_factors": keeps, "dtype": dtype, "device": device}
        for route in routes:
            found = predicted_seconds(route, m, n, length, units, **options)
            assert found == pytest.approx(costs[route], rel=1e-9)
    assert len(seen) > 1


def test_the_plan_costs_little_more_than_the_fastest_that_was_measured() -> None:
    """On the machine of the committed benchmark, by its constants: a tenth of all time is lost at most, and half of one."""
    figures = json.loads(MEASURED.read_text())["figures"]
    constants = RouteConstants(**figures["constants"])
    uses: dict[tuple[int, ...], dict[str, float]] = {}
    for row in figures["rows"]:
        key = row["m"], row["n"], row["tokens"], row["units"]
        uses.setdefault(key, {})[row["route"]] = row["measured"]
    taken, least = 0.0, 0.0
    for key, times in uses.items():
        chosen = plan_route(*key, constants=constants)
        assert times[chosen] <= 1.5 * min(times.values()), (key, times)
        taken, least = taken + times[chosen], least + min(times.values())
    assert taken <= 1.1 * least


@cases("m, n", [(65, 65), (512, 512), (3072, 768), (2304, 768), (200, 4000)])
def test_units_are_measured_by_gram_matrices_up_to_where_that_is_slower(m: int, n: int) -> None:
    constants = DEFAULTS["cpu", 4]
    longest = longest_by_gram(m, n)

    def gram_is_faster(length: int) -> bool:
        direct = 2 * (length + 3) * m * n / constants.direct_flops
        return 2 * gram_products(length) * (m + n) / constants.gram_flops <= direct

    # Near the border a length that fills its blocks may be faster than a shorter one.
    assert all(gram_is_faster(length) for length in range(1, longest - 3))
    assert not any(gram_is_faster(length) for length in range(longest + 5, longest + 60))
    assert 4 <= longest < 2 * (m + n)
    assert longest_by_gram(NARROW, n) == 0


def test_well_known_shapes() -> None:
    assert plan_route(8, 512, 128, 8) == "instantiate"  # LoRA
    assert plan_route(512, 2048, 128, 8) == "gram"  # short sequences
    assert plan_route(8192, 512, 128, 8) == "gram"  # a head
    assert plan_route(512, 512, 1, 8) == "gram"  # one token a unit
    assert plan_route(512, 512, 1024, 8) == "instantiate"  # long ones: the gradients are smaller and the sum reads them
    assert plan_route(512, 512, 1024, 8, keeps_factors=False) == "direct"  # long ones of which only norms are wanted


@cases(*pairs(("dtype", [torch.bfloat16, torch.float32]), ("rank", [4, 16, 64])))
def test_adapters_go_out_together_on_a_gpu(rank: int, dtype: torch.dtype) -> None:
    """Each by itself would be launches of its own for every matrix, which take longer than what they do."""
    for tokens, units in ((512, 16), (2048, 4), (4096, 1)):
        assert plan_route(4096, rank, tokens, units, dtype=dtype, device="cuda") == "instantiate"
        assert plan_route(rank, 4096, tokens, units, dtype=dtype, device="cuda") == "instantiate"
    assert plan_route(2048, 2048, 1024, 4, dtype=torch.bfloat16, device="cuda") == "gram"


def test_every_default_says_what_it_was_measured_on() -> None:
    for (kind, _), constants in DEFAULTS.items():
        assert constants.device
        assert constants_for(kind, torch.float32) in DEFAULTS.values()
    assert constants_for("cpu", torch.bfloat16) is DEFAULTS["cpu", 4]
