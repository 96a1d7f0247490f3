"""Judges: each example's score is its own, lies in [0, 1], and moves a released sum by exactly that."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, strategies as st

from fastdp.data import Collator
from fastdp.finetune import judges
from fastdp.finetune.judges import noised_means, scores
from fastdp.ops import NoiseStream


@pytest.mark.parametrize(
    ("shape", "rows", "labels"), [((1, 5, 7), (1, 5), (0, 1, -100)), ((1, 2), (1,), (0, 1))], ids=["text", "label"]
)
def test_every_score_is_bounded(shape, rows, labels):
    """Whatever the logits are: huge, not numbers, all of one class, without a label."""
    for fill in (0.0, 1e30, -1e30, float("nan"), float("inf")):
        logits = torch.full(shape, fill)
        logits[..., 0] = 0.0
        for label in labels:
            found = judges.bounded_score(logits, torch.full(rows, label))
            assert bool(((found >= 0) & (found <= 1)).all()), (fill, label, found)
            assert found.norm() <= found.shape[1] ** 0.5


class LooksAround(torch.nn.Module):
    """A classifier that takes off its batch's mean, and reads how far its batch was padded."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(1.0))

    def forward(self, input_ids, attention_mask, labels=None):
        own = (input_ids * attention_mask).sum(1, keepdim=True).float() * self.weight
        return SimpleNamespace(logits=torch.cat([own - own.mean(0) + input_ids.shape[1], torch.ones_like(own)], 1))


def test_one_example_more_changes_no_other_score():
    examples = [{"input_ids": list(range(1, 2 + i)), "labels": i % 2} for i in range(5)]
    more = [{"input_ids": [900] * 40, "labels": 1}, *examples]
    model, collator = LooksAround(), Collator(0)
    without, beside = (scores(model, each, collator, "classification", "float32") for each in (examples, more))
    assert torch.equal(beside[1:], without)
    assert without.unique(dim=0).shape[0] > 1


@given(st.integers(1, 3_000), st.integers(0, 2**32 - 1), st.booleans())
def test_one_row_moves_the_released_sum_by_its_score_and_no_more(count, seed, certain):
    """In the float32 sum that noise is added to; most scores near 1, where sums are largest."""
    own = torch.rand(count, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    own = own.pow(0.01) if certain else own
    released = []

    def add(total, std, stream):
        released.append(total.clone())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(judges, "add_noise_", add)
        for gone in (0.0, 1.0):
            noised_means(torch.cat([own, torch.tensor([[gone]], dtype=torch.float64)]), 1.0, NoiseStream())
    assert float(released[1]) - float(released[0]) == 1.0


def test_more_judges_than_a_sum_holds_are_refused():
    with pytest.raises(ValueError, match="let fewer judge"):
        noised_means(torch.zeros(1, 1).expand(2**24 + 1, 1), 1.0, NoiseStream())
    # A million ones and a half: without the grid the half is rounded, to where depends on the others.
    own = torch.ones(2**20 + 1, 1, dtype=torch.float64)
    own[0] = 0.53
    assert noised_means(own, 2.0**-60, NoiseStream())[0] * (2**20 + 1) == pytest.approx(2**20 + 0.5, abs=1e-3)
