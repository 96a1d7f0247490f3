"""The kernel of a head's logits against float64, by the tests of the op's definition."""

import pytest
import torch
from fastdp.kernels import heads

from fastdp import ops
from tests.cases import pairs
from tests.ops.test_heads import IGNORED, labelled, require_exact
from tests.ops.uses import DTYPES


@pytest.mark.parametrize(
    *pairs(
        ("dtype", DTYPES),
        ("tokens, words, behind", [(1, 1, 0), (7, 129, 0), (3, 257, 15), (2, 4099, 13), (3, 9000, 0)]),
    )
)
def test_logits_become_their_gradient(tokens, words, behind, dtype):
    logits, target, weights = labelled(tokens, words, behind, dtype)
    given = logits[:, :words].clone()
    losses = heads.cross_entropy_gradient_(logits, target, weights, IGNORED, words)
    require_exact(logits[:, :words], given, target, weights, losses)
    assert not logits[:, words:].any()
    assert not logits[(target == IGNORED) | (weights == 0)].any()


def test_what_is_not_finite_stays_in_its_row(as_on_a_gpu):
    logits, target, weights = labelled(8, 65, 15, torch.bfloat16)
    given = logits[:, :65].clone()
    logits[2, 5], logits[3, 1], logits[4, :64] = float("nan"), float("inf"), float("-inf")
    target[3], target[4], weights[4] = IGNORED, 64, 1.0
    losses = ops.cross_entropy_gradient_(logits, target, weights, IGNORED, 65)
    assert losses[2].isnan()
    assert not logits[3].any()
    # Words that are masked out leave the last one certain.
    assert losses[4] == 0
    assert not logits[4].any()
    rest = [0, 1, 5, 6, 7]
    require_exact(logits[rest, :65], given[rest], target[rest], weights[rest], losses[rest])
    assert heads.cross_entropy_gradient_(logits[:0], target[:0], weights[:0], IGNORED, 65).shape == (0,)
