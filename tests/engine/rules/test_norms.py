"""Layer, group and instance norm against one example at a time, and layers of which one parameter is trained."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.cases import cases, pairs
from tests.engine.rules.exact import assert_exact_layer
from tests.engine.rules.test_recurrent import states


@cases(
    *pairs(
        (
            "layer, shape",
            [
                (nn.GroupNorm(2, 6), (6, 5, 3)),
                (nn.GroupNorm(1, 6), (6, 7)),
                (nn.GroupNorm(2, 6), (6,)),
                (nn.GroupNorm(3, 3), (3, 2, 3, 2)),
                (nn.InstanceNorm1d(4, affine=True), (4, 7)),
                (nn.InstanceNorm2d(3, affine=True), (3, 5, 2)),
                (nn.InstanceNorm3d(2, affine=True), (2, 3, 2, 2)),
            ],
        ),
        ("rows", [1, 4]),
        ("two_pass", [False, True]),
    )
)
def test_norms_over_groups_of_channels(layer: nn.Module, shape: tuple[int, ...], rows: int, two_pass: bool) -> None:
    assert_exact_layer(layer, torch.randn(rows, *shape) + 1, two_pass=two_pass)


@cases("trained", ["both", "weight", "bias"])
def test_a_weight_that_is_one_more_than_its_parameter(trained: str) -> None:
    """As Nemotron's: the weight is computed, the bias is a parameter."""

    def shifted(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, layer.normalized_shape, layer.weight + 1, layer.bias, layer.eps)

    layer = nn.LayerNorm(6)
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(trained in (name, "both"))
    assert_exact_layer(layer, torch.randn(3, 5, 6), call=shifted)


@cases(
    "layer, shape, trained",
    [
        *((nn.GroupNorm(2, 6), (6, 5), name) for name in ("weight", "bias")),
        *((nn.Conv2d(2, 3, 3), (2, 5, 5), name) for name in ("weight", "bias")),
        *((nn.GRU(3, 4, batch_first=True), (5, 3), name) for name in ("weight_ih_l0", "weight_hh_l0", "bias_hh_l0")),
    ],
)
def test_one_parameter_of_a_layer_alone(layer: nn.Module, shape: tuple[int, ...], trained: str) -> None:
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(name == trained)
    call = {"call": states} if isinstance(layer, nn.GRU) else {}
    assert_exact_layer(layer, torch.randn(3, *shape), **call)


def test_a_large_mean_hides_nothing() -> None:
    """The weight's gradient is that of the centred input: taking the mean out afterwards would cancel all its digits."""
    assert_exact_layer(nn.GroupNorm(2, 4), 30 + torch.randn(3, 4, 50))
