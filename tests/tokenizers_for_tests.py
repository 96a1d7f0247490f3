"""The quickstart's tokenizer and table, and a word tokenizer that lacks words."""

from functools import lru_cache
from importlib import resources

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast


@lru_cache
def quickstart():
    """(tokenizer, float32 embedding table) of the model that the package carries."""
    with resources.as_file(resources.files("fastdp.quickstart") / "model") as folder:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return tokenizer, model.get_input_embeddings().weight.detach()


def word_tokenizer(words):
    """Whole words only; whatever is not among ``words`` is [UNK], the special token 0."""
    vocabulary = {"[UNK]": 0} | {word: index + 1 for index, word in enumerate(words)}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="[UNK]")
