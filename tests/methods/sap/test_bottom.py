"""Noise on hidden rows: its law, and the customer's half that adds it. A false alarm comes once in 10^8 runs."""

import math

import pytest
import torch
from scipy import stats

from fastdp.methods.sap import PrivateBottom, add_dchi_noise, split_model
from fastdp.ops import NoiseStream
from tests.cases import cases
from tests.engine.models import build
from tests.methods.sap.test_split import inputs_of


@cases("width", [1, 3, 40])
def test_noise_has_one_gamma_radius_a_row_and_a_uniform_direction(width):
    eta = 7.0
    noise = add_dchi_noise(torch.zeros(100, 30, width), eta, NoiseStream.unsafe_reproducible(width))
    rows = noise.reshape(-1, width).double()
    radius = rows.norm(dim=1)
    assert stats.kstest((radius * eta).numpy(), stats.gamma(width).cdf).pvalue > 1e-9
    # Drawn per coordinate, the radius would be sqrt(width + 1) times as long.
    assert float(radius.mean()) * eta / width == pytest.approx(1, abs=6.2 / math.sqrt(width * 3000))
    positive = int((rows[:, 0] > 0).sum())
    assert stats.binomtest(positive, 3000).pvalue > 1e-9
    if width > 1:
        along = (rows[:, 0] / radius).square().numpy()
        assert stats.kstest(along, stats.beta(0.5, (width - 1) / 2).cdf).pvalue > 1e-9


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_after_the_sum(dtype):
    """Noise rounded to the rows' grid first would give each row its own set of possible values."""
    rows = torch.randn(200, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    noisy = add_dchi_noise(rows, 20.0, NoiseStream.unsafe_reproducible(1))
    exact = add_dchi_noise(rows.float(), 20.0, NoiseStream.unsafe_reproducible(1))
    assert noisy.dtype == dtype
    assert torch.equal(noisy, exact.to(dtype))


def test_a_frozen_bottom_releases_without_gradients():
    bottom, top = split_model(build("bert"), 1)
    private = PrivateBottom(bottom, eta=1e7)
    inputs = inputs_of("bert")
    noisy = private(**inputs)
    assert not noisy.requires_grad
    mask = inputs["attention_mask"].bool()
    assert torch.allclose(noisy[mask], bottom(**inputs)[mask], atol=1e-3)
    assert (noisy[~mask] == 0).all()
    assert private.rows_released == int(mask.sum())
    top(inputs_embeds=noisy, attention_mask=inputs["attention_mask"]).logits.sum().backward()
    statement = private.statement()
    assert statement["guarantee"].startswith("metric")
    assert "1e+07" in statement["bound"]


def test_a_trainable_bottom_gets_gradients_and_no_guarantee():
    bottom, top = split_model(build("bert"), 1)
    bottom.requires_grad_()
    private = PrivateBottom(bottom, eta=10.0)
    inputs = inputs_of("bert")
    top(inputs_embeds=private(**inputs), attention_mask=inputs["attention_mask"]).logits.sum().backward()
    assert all(p.grad is not None for name, p in bottom.named_parameters() if "layer.0" in name)
    statement = private.statement(releases=3)
    assert statement["guarantee"] == "none"
    assert "exp(30 *" in statement["bound"]


def test_refusals():
    bottom, _ = split_model(build("bert"), 1)
    for eta in (0, -1, math.nan):
        with pytest.raises(ValueError, match="above 0"):
            PrivateBottom(bottom, eta=eta)
        with pytest.raises(ValueError, match="above 0"):
            add_dchi_noise(torch.zeros(2, 3), eta, NoiseStream())
    with pytest.raises(ValueError, match="at least 1"):
        PrivateBottom(bottom, eta=1.0).statement(0)
    assert PrivateBottom(bottom, eta=1.0, unsafe_seed=0).statement()["guarantee"] == "none"
