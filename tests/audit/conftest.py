"""A language model that has learned twelve sentences by heart, and the model before it did."""

from types import SimpleNamespace

import pytest
import torch
import transformers

from fastdp.data import Collator, causal_examples
from tests.tokenizers_for_tests import small_gpt2

PLANTED = ["Alma Berger", "Boris Quade", "Clara Zhou", "Dmitri Vale", "Esther Kane", "Felix Orlov"]
DECOYS = ["Gudrun Hale", "Hector Lund", "Ingrid Moss", "Jonas Pike", "Karla Wong", "Ludwig York"]
ILLNESSES = ["asthma", "gout", "fever", "anaemia", "migraine", "measles"]


def sentences(names):
    return [f"{name} was treated for {illness}." for name, illness in zip(names, ILLNESSES)]


@pytest.fixture(scope="session")
def learned(tmp_path_factory):
    """Model, tokenizer, the model before training, and folders and files that hold them and the sentences."""
    folder = tmp_path_factory.mktemp("learned")
    model, tokenizer = small_gpt2(folder / "before", n_layer=1, n_embd=48, n_positions=40)
    batch = Collator(0)(causal_examples(tokenizer, sentences(PLANTED), 40).items)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(55):
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    for each in (model, tokenizer):
        each.save_pretrained(folder / "after")
    for name, lines in (
        *(("train.txt", sentences(PLANTED)), ("held_out.txt", sentences(DECOYS))),
        *(("names.txt", PLANTED), ("decoys.txt", DECOYS)),
    ):
        (folder / name).write_text("\n".join(lines) + "\n")
    before = transformers.GPT2LMHeadModel.from_pretrained(folder / "before")
    return SimpleNamespace(model=model.eval(), before=before.eval(), tokenizer=tokenizer, folder=folder)
