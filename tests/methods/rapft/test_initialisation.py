"""Where relevance starts."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

from fastdp.methods.rapft import Initialisation, initialisation
from tests.cases import cases


def random_logits(seed, rows=2, length=4, words=300, spread=3.0):
    return spread * torch.randn(rows, length, words, generator=torch.Generator().manual_seed(seed))


def test_all_of_the_distribution_is_the_softmax_of_the_counted_positions():
    logits = random_logits(0)
    counted = torch.tensor([[True, False, True, True], [False, False, True, False]])
    assert torch.equal(Initialisation(p=1.0).generation(logits, counted), torch.softmax(logits, -1)[counted])


@settings(max_examples=30)
@given(seed=st.integers(0, 10**6), p=st.floats(0.05, 1.0), spread=st.floats(0.01, 8))
def test_top_p_keeps_the_fewest_likeliest_that_reach_p(seed, p, spread):
    """With logits spread little, more than the first few tokens are needed, and the whole vocabulary is sorted."""
    logits = random_logits(seed, spread=spread)
    everywhere = torch.ones(logits.shape[:2], dtype=torch.bool)
    found, probabilities = Initialisation(p).generation(logits, everywhere), torch.softmax(logits, -1).flatten(0, 1)
    for kept, whole in zip(found, probabilities):
        size = int((kept > 0).sum())
        ordered = whole.sort(descending=True).values
        assert torch.allclose(kept.sort(descending=True).values[:size], ordered[:size])
        assert float(ordered[:size].sum()) >= p - 1e-5
        assert float(ordered[: size - 1].sum()) < p + 1e-5


def test_one_hot_of_the_label_or_the_likeliest_class():
    logits = torch.tensor([[1.0, 3.0, 2.0], [5.0, 1.0, 0.0]])
    assert initialisation.one_hot(logits, torch.tensor([2, 0])).tolist() == [[0, 0, 1], [1, 0, 0]]
    assert initialisation.one_hot(logits, None).tolist() == [[0, 1, 0], [1, 0, 0]]


@cases("p", [0.0, 1.5])
def test_bad_settings(p):
    with pytest.raises(ValueError):
        Initialisation(p)
