"""Ranking and masks."""

import math

import pytest
import torch
from hypothesis import given, strategies as st

from fastdp.methods.rapft.masks import normalised, weak_masks
from tests.cases import cases


def relevance(seed=0, **sizes):
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


EVEN = [{"a": torch.full((4,), value), "b": torch.full((2, 2), value)} for value in (0.0, 2.5)]


@cases(
    ("values", "ratio", "message"),
    [
        *((relevance(a=10), ratio, "above .5 and at most 1") for ratio in (0.5, 0.3, 0.0, 1.01, math.nan)),
        (relevance(a=10, b=20), 1.0, "r_s = 0"),
        (EVEN[0], 0.7, "every relevance is 0.*map_after"),
        (EVEN[1], 0.7, "every relevance is tied.*map_after"),
        ({"a": torch.randn(4), "b": torch.tensor([1.0, torch.nan])}, 0.7, "relevance of b is not finite"),
        ({"a": torch.randn(4), "b": torch.tensor([1.0, torch.inf])}, 0.7, "relevance of b is not finite"),
    ],
)
def test_what_cannot_be_ranked_is_refused(values, ratio, message):
    with pytest.raises(ValueError, match=message):
        weak_masks(values, ratio)
