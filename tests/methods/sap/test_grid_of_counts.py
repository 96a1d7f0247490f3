"""Clipped counts lie on a grid whose sums float32 holds exactly."""

import pytest
import torch

from fastdp import ops
from fastdp.methods import sap
from fastdp.ops import NoiseStream
from fastdp.ops.grid import exact_spacing


@pytest.mark.parametrize("bound", [0.7, 1.0, 5.0])
def test_no_texts_counts_are_rounded_where_anothers_are(monkeypatch, bound):
    asked = []
    monkeypatch.setattr(ops, "add_noise_", lambda counts, std, stream: asked.append(counts) or counts)
    texts = [[0, 1, 2], [0, 0, 0, 1], [3, 4, 5, 6, 7], [1, 1, 2, 7]] * 7
    sap.noised_counts(texts, [0, 1] * 14, 2, 8, noise_multiplier=1.0, max_norm=bound, stream=NoiseStream())
    steps = asked[0].double() / exact_spacing(len(texts), bound)
    assert torch.equal(steps, steps.round())
    assert float(steps.max()) <= 2**24
