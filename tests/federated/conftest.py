"""Federated tests need Flower for what speaks Flower, and nothing for the rest."""

import json

import pytest

from fastdp.quickstart.corpus import private_records
from tests.tokenizers_for_tests import small_gpt2


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    """A folder with a tiny model, texts to train on and held-out texts."""
    folder = tmp_path_factory.mktemp("world")
    small_gpt2(folder / "model", n_embd=16, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    records = private_records(36, 0)
    for name, part in (("train", records[:24]), ("eval", records[24:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in part))
    return folder


def small(world, folder):
    """Settings of a small run whose server keeps its own in ``folder``."""
    return {
        "model": str(world / "model"),
        "train": str(world / "train.jsonl"),
        "eval": str(world / "eval.jsonl"),
        "output": str(folder / "out"),
        "rounds": 2,
        "min_clients": 2,
        "wait_seconds": 0.3,
        "round_seconds": 20.0,
        "bottleneck_size": 4,
        "batch_size": 8,
        "max_length": 32,
        "learning_rate": 5e-3,
        "perturbation": "none",
    }


@pytest.fixture
def settings(world, tmp_path):
    """Settings of a small run; tests change some of them."""
    return small(world, tmp_path)
