"""Convolutions of every kind against one example at a time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from tests.engine.rules.exact import assert_exact_layer

FORWARDS, TRANSPOSED = ("Conv1d", "Conv2d", "Conv3d"), ("ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d")


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[nn.Module, torch.Tensor]:
    count, transposed = draw(st.sampled_from((1, 2, 3))), draw(st.booleans())
    groups = draw(st.sampled_from((1, 1, 2, 3)))
    into, out = (groups * draw(st.integers(1, 3 if count < 3 else 2)) for _ in range(2))

    def numbers(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(count))

    kernel, dilation, stride, padding = numbers(1, 4 - count // 3), numbers(1, 2), numbers(1, 3), numbers(0, 2)
    options = {"groups": groups, "dilation": dilation, "bias": draw(st.booleans())}
    sizes = [max(2, d * (k - 1) + 1) + draw(st.integers(0, 4)) for k, d in zip(kernel, dilation)]
    if transposed:
        padding = tuple(min(p, d * (k - 1) // 2) for p, d, k in zip(padding, dilation, kernel))
        beside = tuple(draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation))
        layer = getattr(nn, TRANSPOSED[count - 1])(
            into, out, kernel, stride=stride, padding=padding, output_padding=beside, **options
        )
    elif draw(st.integers(0, 3)) == 0:
        layer = getattr(nn, FORWARDS[count - 1])(into, out, kernel, padding="same", **options)
    else:
        layer = getattr(nn, FORWARDS[count - 1])(into, out, kernel, stride=stride, padding=padding, **options)
    return layer, torch.randn(draw(st.integers(1, 5)), into, *sizes, generator=torch.Generator().manual_seed(0))


@settings(max_examples=10, deadline=None, derandomize=True)
@given(convolutions(), st.booleans())
@pytest.mark.filterwarnings("ignore:Using padding='same'")
def test_any_convolution_matches_one_example_at_a_time(case: tuple[nn.Module, torch.Tensor], two_pass: bool) -> None:
    layer, x = case
    assert_exact_layer(layer, x, two_pass=two_pass)


def test_a_convolution_that_is_called_twice_sums_before_it_measures() -> None:
    def twice(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return layer(torch.tanh(layer(x))[..., 1:])

    assert_exact_layer(nn.Conv1d(16, 16, 3), torch.randn(3, 16, 40), call=twice)
    assert_exact_layer(nn.Conv1d(16, 16, 3), torch.randn(3, 16, 9), call=twice)
