"""What a draw costs at a strength, written out on small tables."""

import pytest
import torch

from fastdp.methods.selective.mechanism import TokenMechanism


@pytest.mark.parametrize("radius", [0.5, 1.5, 4.0])
@pytest.mark.parametrize("strength", [0.5, 3.0])
def test_the_cost_is_half_the_strength_and_the_spread_of_the_normalisers(radius, strength):
    table = torch.tensor([[0.0], [0.3], [1.0], [2.5], [2.6], [6.0]])
    mechanism = TokenMechanism("local", table, radius=radius)
    distances = torch.cdist(table.double(), table.double()).clamp(max=radius)
    logs = (-strength / (2 * radius) * distances).logsumexp(1)
    cost = min(strength, strength / 2 + float(logs.max() - logs.min()))
    assert mechanism.epsilon(strength) == pytest.approx(cost, rel=1e-3)
    laws = torch.stack([mechanism.log_probabilities(token, strength) for token in range(len(table))])
    told = float((laws.max(0).values - laws.min(0).values).max())
    assert told <= mechanism.epsilon(strength) <= strength
