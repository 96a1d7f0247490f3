"""Layer, group and instance norm against one example at a time, and layers of which one parameter is trained."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import nn
from torch.utils.data import DataLoader

import fastdp
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


def _resnet() -> nn.Module:
    sizes = {"embedding_size": 4, "hidden_sizes": [4, 8], "depths": [1, 1], "num_labels": 3}
    torch.manual_seed(0)
    model = hf.ResNetForImageClassification(hf.ResNetConfig(**sizes, layer_type="basic"))
    model.resnet.requires_grad_(False)
    return model.train()


def test_a_head_is_tuned_behind_frozen_batch_normalisation() -> None:
    model = _resnet()
    optimizer = torch.optim.SGD(model.classifier.parameters(), lr=0.1)
    images = [{"pixel_values": torch.randn(3, 9, 9), "labels": i % 3} for i in range(6)]
    options = {"noise_multiplier": 1.0, "target_delta": 1e-3, "epochs": 2}
    with pytest.raises(ValueError, match="is a batch normalisation"):
        fastdp.make_private(model, optimizer, DataLoader(images, batch_size=3), **options)
    for module in model.resnet.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    private = fastdp.make_private(model, optimizer, DataLoader(images, batch_size=3), sampling="shuffled", **options)
    batches = iter(private.data_loader)
    model(**next(batches)).loss.backward()
    optimizer.step()
    model.train()
    with pytest.raises(ValueError, match="resnet.embedder.embedder.normalization is a batch normalisation"):
        model(**next(batches))
