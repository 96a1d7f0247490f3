"""The quickstart's tokenizer and table, a small model of it, and tokenizers of whole words."""

from functools import lru_cache
from importlib import resources

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast


@lru_cache
def quickstart():
    """(tokenizer, float32 embedding table) of the model that the package carries."""
    with resources.as_file(resources.files("fastdp.quickstart") / "model") as folder:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return tokenizer, model.get_input_embeddings().weight.detach()


def small_gpt2(folder, **sizes):
    """A random GPT-2 and the quickstart's tokenizer, which a folder holds as well."""
    tokenizer = AutoTokenizer.from_pretrained(str(resources.files("fastdp.quickstart") / "model"))
    torch.manual_seed(0)
    usual = {"n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 64, "vocab_size": len(tokenizer)}
    model = GPT2LMHeadModel(GPT2Config(**usual | {"bos_token_id": 0, "eos_token_id": 0} | sizes))
    for each in (model, tokenizer):
        each.save_pretrained(folder)
    return model, tokenizer


def word_tokenizer(words, pair=None, **options):
    """Whole words, numbered in their order; whatever is not among them is [UNK], the first where they do not hold it.

    With ``pair``, a template, texts stand between [CLS] and [SEP], which are tokens 2 and 3.
    """
    words = [*words] if "[UNK]" in words else ["[UNK]", *words]
    core = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    if pair is not None:
        special = [("[CLS]", 2), ("[SEP]", 3)]
        core.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", pair, special)
    return PreTrainedTokenizerFast(tokenizer_object=core, **{"unk_token": "[UNK]", **options})
