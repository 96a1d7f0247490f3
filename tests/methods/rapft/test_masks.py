"""Ranking and masks."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, strategies as st

from fastdp.methods.rapft.masks import normalised, weak_masks
from tests.cases import cases


def relevance(seed: int = 0, **sizes: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: 10**i * torch.randn(n, generator=generator) for i, (name, n) in enumerate(sizes.items())}


@given(seed=st.integers(0, 1000), ratio=st.floats(0.51, 0.99), n=st.integers(2, 200), ties=st.booleans())
def test_the_least_relevant_are_weak(seed, ratio, n, ties):
    values = relevance(seed, a=n, b=300)
    if ties:
        values["a"] = values["a"].round()
    mask = weak_masks(values, ratio)
    for name, found in mask.items():
        count = math.ceil(ratio * found.numel())
        assert abs(int(found.sum()) - count) <= (abs(ratio * found.numel() - round(ratio * found.numel())) < 1e-8)
        if found.any() and not found.all():
            assert values[name][found].max() <= values[name][~found].min()


def test_the_size_of_a_block_does_not_depend_on_the_values():
    tied = {"a": torch.tensor([0.0] * 9 + [1.0]), "b": torch.zeros(7)}
    with pytest.warns(UserWarning, match="b are equal"):
        mask = weak_masks(tied, 0.7)
    assert [int(m.sum()) for m in mask.values()] == [7, 5]
    assert not mask["a"][-1]


def test_min_max_by_layer():
    scaled = normalised({"a": torch.tensor([-3.0, 1.0, 5.0]), "b": torch.tensor([[2.0, 4.0]])})
    assert scaled["a"].tolist() == [0.0, 0.5, 1.0]
    assert scaled["b"].tolist() == [[0.0, 1.0]]


@cases("ratio", [0.5, 0.3, 0.0, 1.01, math.nan])
def test_ratio_out_of_range(ratio):
    with pytest.raises(ValueError, match="above .5 and at most 1"):
        weak_masks(relevance(a=10), ratio)


def test_nothing_strong():
    with pytest.raises(ValueError, match="r_s = 0"):
        weak_masks(relevance(a=10, b=20), 1.0)


@pytest.mark.parametrize(("value", "what"), [(0.0, "is 0"), (2.5, "is tied")])
def test_nothing_to_rank(value, what):
    with pytest.raises(ValueError, match=f"every relevance {what}.*map_after"):
        weak_masks({"a": torch.full((4,), value), "b": torch.full((2, 2), value)}, 0.7)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_not_finite(value):
    with pytest.raises(ValueError, match="relevance of b is not finite"):
        weak_masks({"a": torch.randn(4), "b": torch.tensor([1.0, value])}, 0.7)
