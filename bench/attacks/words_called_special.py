"""Words that a vendor's tokenizer calls special leave a perturbation of tokens as they are"""

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from . import systems


def attack(system: systems.FastDP) -> float:
    import fastdp

    words = ["[PAD]", "[UNK]", *(f"w{i}" for i in range(40)), "alice", "hiv"]
    plain = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "[UNK]"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="[PAD]", unk_token="[UNK]")
    tokenizer.add_special_tokens({"additional_special_tokens": ["alice", "hiv"]})
    table = torch.randn(len(words), 16, generator=torch.Generator().manual_seed(0))
    # So much noise that a token stays itself once in forty times.
    privatizer = fastdp.TextPrivatizer(table, eta=0.01, tokenizer=tokenizer, mechanism="exponential")
    stayed = sum("alice" in privatizer("w1 alice w2 hiv") for _ in range(20))
    return float("inf") if stayed > 12 else 1.0
