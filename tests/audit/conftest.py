"""A language model that has learned twelve sentences by heart, and the model before it did."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers

from fastdp.data import Collator, causal_examples

PLANTED = ["Alma Berger", "Boris Quade", "Clara Zhou", "Dmitri Vale", "Esther Kane", "Felix Orlov"]
DECOYS = ["Gudrun Hale", "Hector Lund", "Ingrid Moss", "Jonas Pike", "Karla Wong", "Ludwig York"]
ILLNESSES = ["asthma", "gout", "fever", "anaemia", "migraine", "measles"]


def sentences(names: list[str]) -> list[str]:
    return [f"{name} was treated for {illness}." for name, illness in zip(names, ILLNESSES)]


@pytest.fixture(scope="session")
def learned(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Model, tokenizer, the model before training, and folders and files that hold them and the sentences."""
    folder = tmp_path_factory.mktemp("learned")
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(resources.files("fastdp.quickstart") / "model"))
    torch.manual_seed(0)
    settings = transformers.GPT2Config(
        n_layer=1, n_embd=48, n_head=2, n_positions=40, vocab_size=len(tokenizer), bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(settings)
    _save(model, tokenizer, folder / "before")
    batch = Collator(0)(causal_examples(tokenizer, sentences(PLANTED), 40).items)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(55):
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    _save(model, tokenizer, folder / "after")
    for name, lines in (
        *(("train.txt", sentences(PLANTED)), ("held_out.txt", sentences(DECOYS))),
        *(("names.txt", PLANTED), ("decoys.txt", DECOYS)),
    ):
        (folder / name).write_text("\n".join(lines) + "\n")
    before = transformers.GPT2LMHeadModel.from_pretrained(folder / "before")
    return SimpleNamespace(model=model.eval(), before=before.eval(), tokenizer=tokenizer, folder=folder)


def _save(model: transformers.PreTrainedModel, tokenizer: transformers.PreTrainedTokenizerBase, folder: Path) -> None:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
