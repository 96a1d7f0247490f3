"""What axes can gain for Adam: no choice passes the most, and the best reaches it."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

pytest.importorskip("matplotlib")

from fastdp.bench.utility.shaping import Known, gain, known

from tests.engine.runs import Classifier, collate, examples, one_by_one


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32 - 1), st.floats(0, 3))
def test_no_axes_pass_the_most_and_agreement_reaches_it(seed: int, spread: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    found, axes, best = {}, {}, {}
    for name, shape in (("a", (3, 5)), ("b", (7,))):
        squares = (spread * torch.randn(shape, generator=generator)).exp().double()
        common = squares * torch.rand(shape, generator=generator).clamp_min(1e-3)
        found[name] = Known(squares, (common, common))
        axes[name] = (spread * torch.randn(shape, generator=generator)).exp()
        best[name] = squares / common
    some = gain(found, axes)
    assert some["signal_over_noise"] <= some["most"] * (1 + 1e-6)
    assert gain(found, best)["signal_over_noise"] == pytest.approx(some["most"], rel=1e-6)
    even = gain(found, {name: torch.full((1,), 3.0) for name in found})
    assert even["signal_over_noise"] == pytest.approx(1)
    # One number a parameter leaves less to choose.
    assert 1 - 1e-6 <= even["most"] <= some["most"] * (1 + 1e-6)


def test_where_all_coordinates_agree_alike_axes_only_lose() -> None:
    squares = torch.tensor([1.0, 4.0, 9.0])
    found = {"a": Known(squares, (squares / 10, squares / 10))}
    shaped = gain(found, {"a": squares.sqrt()})
    assert shaped["most"] == pytest.approx(1)
    assert shaped["signal_over_noise"] == pytest.approx(6 / 42**0.5)
    assert shaped["in_common"] == pytest.approx(0.1)


def test_what_is_known_is_of_single_examples_and_without_bias() -> None:
    model = Classifier()
    rows = examples(9)
    singles = one_by_one(Classifier(), collate(rows))
    found = known(model, (collate([row]) for row in rows))
    for name, own in found.items():
        every = torch.stack([single[name] for single in singles])
        assert torch.allclose(own.squares, every.square().mean(0), rtol=1e-4, atol=1e-9)
        for half, mine in zip((every[::2], every[1::2]), own.halves):
            pairs = [a * b for i, a in enumerate(half) for j, b in enumerate(half) if i != j]
            assert torch.allclose(mine, torch.stack(pairs).mean(0), rtol=1e-3, atol=1e-7)
