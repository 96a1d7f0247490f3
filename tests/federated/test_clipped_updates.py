"""Central DP: whatever an update's norm, it moves the sum by the bound at most."""

import pytest
import torch

from fastdp.federated import Aggregator, RefusedUpdate
from tests.cases import cases
from tests.federated.test_aggregation import BOUNDS, START, add


@cases("size", [0.5, 1.0, 1.5, 1.999, 2.5, 8.0])
def test_one_update_moves_the_sum_by_its_bound_at_most(size):
    """Norms are given in units of the bound: those a little above it count as much as those far above."""
    clip, entries = 3.0, sum(t.numel() for t in START.values())
    aggregator = Aggregator(START, BOUNDS, clip=clip)
    step = size * clip / entries**0.5
    norm = add(aggregator, {name: tensor + step for name, tensor in START.items()})
    assert norm == pytest.approx(size * clip, rel=1e-5)
    moved = torch.cat([(aggregator.mean()[name].double() - START[name].double()).flatten() for name in START]).norm()
    assert float(moved) == pytest.approx(min(size, 1.0) * clip, rel=1e-5)


@cases(("size", "refused"), [(0.99, False), (1.01, True), (5.0, True)])
def test_an_update_a_little_beyond_the_largest_norm_is_refused(size, refused):
    aggregator = Aggregator(START, BOUNDS)
    entries = sum(t.numel() for t in START.values())
    state = {name: tensor + size * BOUNDS.max_norm / entries**0.5 for name, tensor in START.items()}
    if not refused:
        add(aggregator, state)
        return
    with pytest.raises(RefusedUpdate, match="beyond the bound"):
        add(aggregator, state)
    assert aggregator.accepted == 0


def test_without_weights_a_client_with_more_examples_counts_as_much():
    aggregator = Aggregator(START, BOUNDS)
    for shift, examples in ((1.0, 90), (3.0, 1)):
        add(aggregator, {name: tensor + shift for name, tensor in START.items()}, examples)
    assert aggregator.examples == 91
    for name, tensor in aggregator.mean().items():
        torch.testing.assert_close(tensor, START[name] + 2.0)
