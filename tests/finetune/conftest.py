"""What runs of `fastdp finetune` are given in tests: a tiny model, files, and settings."""

import csv
import json
import runpy
from pathlib import Path

import pytest
import torch

from fastdp.finetune import FinetuneConfig, run
from fastdp.finetune.machine import Machine
from fastdp.quickstart.corpus import private_records
from tests.tokenizers_for_tests import small_gpt2

EXAMPLES = Path(__file__).parents[2] / "examples"
#: Every example as long, so that a step's time is known: micro-batches of 8, and none of another length than the first.
MACHINE = Machine(0.02, 1e-4, 0.1, 0.5, 3.0, 1 << 30, 8, (32,), "measured here, on a test's word")


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """A random GPT-2 of two layers with the tokenizer of the quickstart's model."""
    folder = tmp_path_factory.mktemp("model")
    small_gpt2(folder)
    return folder


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """Records as JSON lines, as prompt and target columns, and with labels."""
    folder = tmp_path_factory.mktemp("data")
    records = private_records(48, seed=1)
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": record}) + "\n" for record in records))
    with open(folder / "pairs.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["mr", "ref"])
        writer.writerows(record.split(". ", 1) for record in records)
    lines = [f"{record}\t{'often' if 'twice' in record else 'seldom'}\n" for record in records]
    (folder / "labels.tsv").write_text("sentence\tlabel\n" + "".join(lines))
    others = private_records(48, seed=2)
    (folder / "public.jsonl").write_text("".join(json.dumps({"text": record}) + "\n" for record in others))
    lines = [f"{record}\t{'often' if 'twice' in record else 'seldom'}\n" for record in others]
    (folder / "public.tsv").write_text("sentence\tlabel\n" + "".join(lines))
    return folder


@pytest.fixture(scope="session")
def functions(tmp_path_factory):
    """Files of each kind, as the examples' own program writes them, of some modules."""
    program = runpy.run_path(str(EXAMPLES / "functions.py"))
    program["MODULES"][24:] = []
    every = list(program["functions"]())[::4]
    program["write"].__globals__["functions"] = lambda: every
    folder = tmp_path_factory.mktemp("functions")
    assert program["write"](folder) > 64
    return folder


@pytest.fixture
def moved(monkeypatch):
    """Tells whether the last run moved a weight. The loss of so small a model may round to what it was."""
    seen, make = [], run.FinetuneRun.make_private

    def kept(self, resume):
        seen[:] = [(p, p.detach().clone()) for p in self.model.parameters() if p.requires_grad]
        return make(self, resume)

    monkeypatch.setattr(run.FinetuneRun, "make_private", kept)
    return lambda: any(not torch.equal(now, before) for now, before in seen)


@pytest.fixture
def config(model_folder, files, tmp_path):
    return FinetuneConfig(
        model=str(model_folder),
        train=str(files / "text.jsonl"),
        eval=str(files / "text.jsonl"),
        output=str(tmp_path / "run"),
        epsilon=8.0,
        delta=1e-3,
        max_length=48,
        epochs=1,
        batch_size=16,
        physical_batch_size=8,
        checkpoint_every=2,
        lora_r=2,
        bottleneck_size=4,
        prompt_tokens=3,
    )
