"""Mistakes seen in real systems; `tests/mutants.yaml` makes most of them, one at a time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import fastdp
from fastdp.ops.noise import standard_normals
from tests.engine.runs import (
    CLIPPED,
    Classifier,
    clipped_sum,
    error,
    examples,
    join,
    loader,
    logical_step,
    one_by_one,
    start,
)
from tests.noise import Add, replace_noise


def notices(check: Callable[[], None], *errors: type[BaseException]) -> None:
    """Assert that a check fails now that the fault is in."""
    with pytest.raises((AssertionError, *errors)):
        check()


def test_noise_is_drawn_in_float32_for_bf16_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    std, seed = 1e6, 3

    def check() -> None:
        model = Classifier().bfloat16()
        data = [{**e, "x": e["x"].bfloat16()} for e in examples()]
        # On a grid the noise would differ from the normals by more than bf16's rounding.
        options = {"noise_multiplier": std, "unsafe_seed": seed, "secure_rounding": False}
        got, _ = logical_step(start(model, loader(data), **options))
        stream = fastdp.NoiseStream.unsafe_reproducible(2 * seed)
        for index, (name, gradient) in enumerate(got.items()):
            noise = std / 8 * standard_normals(stream.at(0, index).take(), gradient.numel()).view(gradient.shape)
            assert gradient.dtype == torch.bfloat16
            # Half a unit in the last of bf16's 8 bits, at most 2^-8; the clipped sum over 8 and float32's rounding are below 4.
            assert bool(((gradient.double() - noise).abs() <= noise.abs() * 2**-8 + 4).all()), name

    check()

    def in_bf16(total: torch.Tensor, std: float, add: Add) -> None:
        noise = torch.zeros_like(total, dtype=torch.bfloat16)
        add(noise, 1.0)
        total.add_(noise.float() * std)

    replace_noise(monkeypatch, in_bf16)
    notices(check)


def test_a_batch_that_was_begun_and_left_adds_nothing_to_the_next() -> None:
    private = start(method=fastdp.DPSGD(max_grad_norm=0.5), max_physical_batch_size=2)
    private.model(**next(iter(private.data_loader)))["loss"].backward()  # begun, and left
    got, batches = logical_step(private)
    expected = clipped_sum(one_by_one(private.model, join(batches)), 0.5)
    assert error(got, {n: t / 8 for n, t in expected.items()}) < CLIPPED
