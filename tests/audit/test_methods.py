"""Audits of runs by other methods than DP-SGD: their groups, masks and stages are the run's own, not the audit's."""

import pytest
import torch
from torch.utils.data import DataLoader

import fastdp
from fastdp import audit
from fastdp.methods.rapft import NoisyMap, PublicMap, RapFT
from tests.audit import faults
from tests.engine.models import build
from tests.loops import train
from tests.private.test_preparation import Drawn

CONFIDENCE = 1 - 1e-5


def rows(count):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 61, (count, 5), generator=generator)
    return [{"input_ids": row, "labels": row} for row in ids]


def public():
    return [{key: torch.stack([row[key] for row in rows(3)]) for key in ("input_ids", "labels")}]


def start(method):
    model = build("gpt2")
    return fastdp.make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=1e-4),
        DataLoader(rows(6), batch_size=6),
        method=method,
        target_epsilon=1.0,
        target_delta=1e-8,
        epochs=4,
    )


def audited(method, noise=1.0):
    private = start(method)
    canaries = audit.GradientCanaries(private, 600)
    if noise != 1.0:
        private.observe(faults.Weaker(noise))
    train(private)
    if isinstance(method, fastdp.DPFrost):
        frozen = [p for p in private.model.parameters() if not p.requires_grad]
        assert frozen, "the selection froze nothing, and the canaries all reached what was trained"
    return canaries.result(CONFIDENCE, shares=(0.2, 0.5))


@pytest.mark.parametrize(
    "method",
    [
        RapFT(source=PublicMap(public()), allocation="printed"),
        RapFT(source=PublicMap(public()), allocation="optimal"),
        fastdp.DPFrost(unfreezing_ratio=0.7, selection_steps=2, selection_rate=0.5),
    ],
    ids=["printed", "optimal", "selection"],
)
def test_a_mechanism_passes_and_is_caught_at_a_tenth_of_its_noise(method):
    """Masks, and training after a selection. An audit misses a tenth less than once in 10^4: it is made up to four times."""
    assert not audited(method).refuted
    assert any(audited(method, 0.1).refuted for _ in range(4))


def test_a_method_prepares_without_the_excluded_canaries():
    private = start(RapFT(source=NoisyMap(noise_multiplier=20.0, sample_rate=1.0)))
    canaries = audit.ExampleCanaries(private, range(6), unsafe_seed=1)
    watch = Drawn()
    private.observe(watch)
    private.prepare()
    assert watch.units == canaries.included.nonzero().reshape(-1).tolist()
    assert watch.kinds == ["relevance"]
    assert 0 < len(watch.units) < 6


@pytest.mark.slow
def test_a_mask_from_private_data_is_caught_and_one_from_public_data_passes():
    assert faults.mask(300, private_mask=True).refuted
    assert not faults.mask(300, private_mask=False).refuted


@pytest.mark.slow
def test_halved_noise_is_caught_and_whole_noise_passes():
    """At 95%: of three audits of the faulty mechanism most must catch it, of the correct one none may."""
    assert sum(faults.weaker_noise(80_000, 0.5).refuted for _ in range(3)) >= 2
    assert sum(faults.weaker_noise(80_000, 1.0).refuted for _ in range(3)) == 0
