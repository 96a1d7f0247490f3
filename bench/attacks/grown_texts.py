"""Texts perturbed once, and again in a file that has grown by one: two draws, each counted as the only one"""

import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from . import systems


def attack(system: systems.FastDP) -> float:
    import fastdp

    words = ["[PAD]", "[UNK]", *(f"w{i}" for i in range(40))]
    plain = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "[UNK]"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="[PAD]", unk_token="[UNK]")
    table = torch.randn(len(words), 16, generator=torch.Generator().manual_seed(0))
    perturb = fastdp.SelectivePerturbation(2.0, scope="all")
    folder = Path(tempfile.mkdtemp())
    # Nobody else has written these.
    texts = [f"w1 w2 w3 {folder.name} w{i} w{i + 7} w{i + 9}" for i in range(8)]
    perturb(texts, tokenizer, table, cache=folder / "one" / "drawn")
    again = perturb([*texts, "w30 w31 w32 w33"], tokenizer, table, cache=folder / "two" / "drawn")
    return 1.0 if again.card().get("earlier_releases") else 2.0
