"""What programs may ask of a method whose privacy enters before or inside the forward pass."""

import pytest

import fastdp
from fastdp.methods.perturbation import Releases
from tests.tokenizers_for_tests import quickstart


def test_what_leaves_examples_alone_says_so():
    releases = Releases()
    items = [{"input_ids": [1, 2], "labels": 0}]
    assert releases.examples(items, training=True) == items
    assert releases.trained_parameters() == []
    assert releases.untouched
    assert releases.epsilon() == float("inf")


def test_a_perturbed_text_is_that_of_the_settings_called():
    tokenizer, table = quickstart()
    texts = ["Please call Richard McCray on 0393 1144137."]
    settings = fastdp.SelectivePerturbation(2.0)
    with pytest.raises(RuntimeError, match="nothing was perturbed yet"):
        settings.open(table, tokenizer=tokenizer).card()
    stream = fastdp.NoiseStream.unsafe_reproducible(3)
    again = fastdp.NoiseStream.unsafe_reproducible(3)
    assert (
        settings(texts, tokenizer, table, stream=stream).ids
        == settings.open(table, tokenizer=tokenizer, stream=again)(texts).ids
    )
