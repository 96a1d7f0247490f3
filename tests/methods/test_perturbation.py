"""The species of methods whose privacy enters before or inside the forward pass: settings, opened, make releases with a claim."""

import dataclasses

import pytest
import torch

import fastdp
from fastdp.accounting import Gaussian, Metric, Pure
from fastdp.accounting.verification import verify
from fastdp.methods import ewft
from fastdp.methods.perturbation import Releases
from fastdp.methods.sap import SAPPerturbation
from tests.cases import cases
from tests.engine.models import batch, build
from tests.tokenizers_for_tests import quickstart

TOKENS, ROWS = 11, 4


def opened_ewft():
    settings = ewft.EWFTSettings(
        layer=1, noise=ewft.release_once(8.0, 1e-5), sequence_length=TOKENS, dataset_size=ROWS, autoencoder=None
    )
    model = build("bert")
    releases = settings.open(model)
    releases.set_epoch(1)
    model.train()
    items = releases.examples([{"input_ids": [1]}] * ROWS, training=True)
    model(**batch("bert", rows=ROWS, tokens=TOKENS), example_ids=torch.tensor([item["example_ids"] for item in items]))
    return settings, releases


def opened_sap():
    settings = SAPPerturbation(eta=2.0, mechanism="exponential", duplicates="merge")
    tokenizer, table = quickstart()
    releases = settings.open(table, tokenizer=tokenizer)
    releases.examples([{"input_ids": [5, 6], "labels": 1, "special_tokens_mask": [0, 0]}], training=True)
    return settings, releases


def opened_selective():
    settings = fastdp.SelectivePerturbation(2.0)
    tokenizer, table = quickstart()
    releases = settings.open(table, tokenizer=tokenizer)
    releases(["Please call Richard McCray on 0393 1144137."])
    return settings, releases


@cases(("opened", "kind"), [(opened_ewft, Gaussian), (opened_sap, Metric), (opened_selective, Pure)])
def test_settings_are_opened_and_make_releases_with_a_claim(opened, kind):
    settings, releases = opened()
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.noise = None
    assert isinstance(releases, Releases)
    assert type(releases.claim()) is kind
    assert releases.flaws() == []
    card = releases.card()
    assert [type(claim) for claim in card.claims] == [kind]
    assert verify(card).holds
    assert releases.claim().to_json()["unit"] == card["unit"]
    releases.remove()


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
