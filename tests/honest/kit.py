"""Small models, texts, images and collators that the programs share."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
import transformers as hf
from torch import nn
from torch.utils.data import TensorDataset

from tests.tokenizers_for_tests import word_tokenizer

from .harness import ROWS

#: Words 0 to 4 are special: padding, unknown, beginning, end, mask.
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
VOCABULARY, WIDTH, CLASSES = 96, 16, 3
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 3,
}
PAIR: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "decoder_start_token_id": 3,
    "forced_eos_token_id": 3,
}
GPT = {"n_embd": WIDTH, "n_layer": 2, "n_head": 2, "n_positions": 64}
IMAGE = {"image_size": 16, "patch_size": 4, "num_labels": CLASSES}


@lru_cache
def tokenizer(side: str = "right", pair: bool = True) -> Any:
    """Whole words; `pair` puts texts between [CLS] and [SEP]."""
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    words = [*SPECIAL, *(f"w{number}" for number in range(VOCABULARY - len(SPECIAL)))]
    options = {"padding_side": side, "model_max_length": 64, "eos_token": "[SEP]", "bos_token": "[CLS]", **names}
    return word_tokenizer(words, "[CLS] $A [SEP] $B:1 [SEP]:1" if pair else None, **options)


def texts(count: int = ROWS, low: int = 4, high: int = 12, seed: int = 0) -> list[str]:
    """Random sentences of that vocabulary."""
    draw = random.Random(seed)
    return [" ".join(f"w{draw.randrange(90)}" for _ in range(draw.randint(low, high))) for _ in range(count)]


def id_rows(count: int = ROWS, low: int = 4, high: int = 12, seed: int = 0) -> list[dict[str, Any]]:
    """Token ids and masks of varying length."""
    draw = random.Random(seed)
    lengths = [draw.randint(low, high) for _ in range(count)]
    return [
        {"input_ids": [draw.randrange(5, VOCABULARY) for _ in range(n)], "attention_mask": [1] * n} for n in lengths
    ]


def labelled(count: int = ROWS, classes: int = CLASSES, **options: Any) -> list[dict[str, Any]]:
    """Token ids with one label a row."""
    return [{**row, "labels": number % classes} for number, row in enumerate(id_rows(count, **options))]


def padded(sequences: Sequence[Any], value: int = 0, left: bool = False) -> torch.Tensor:
    """[rows, tokens], padded to the longest."""
    side = "left" if left else "right"
    tensors = [torch.as_tensor(sequence) for sequence in sequences]
    return nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=value, padding_side=side)


def classify(rows: list[Any]) -> dict[str, torch.Tensor]:
    """Pad on the right, and stack one label a row."""
    return {
        "input_ids": padded([row["input_ids"] for row in rows]),
        "attention_mask": padded([row["attention_mask"] for row in rows]),
        "labels": torch.tensor([row["labels"] for row in rows]),
    }


def causal(rows: list[Any], left: bool = False) -> dict[str, torch.Tensor]:
    """Pad, and copy the ids as labels, -100 at padding."""
    ids = padded([row["input_ids"] for row in rows], left=left)
    mask = padded([row["attention_mask"] for row in rows], left=left)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def unlabelled(rows: list[Any]) -> dict[str, torch.Tensor]:
    """Ids and mask alone: the loop makes the labels."""
    return {name: value for name, value in causal(rows).items() if name != "labels"}


def pair_rows(count: int = ROWS) -> list[dict[str, Any]]:
    """Sources and targets for encoder-decoder models."""
    return [
        {**source, "labels": target["input_ids"]}
        for source, target in zip(id_rows(count), id_rows(count, 3, 8, seed=1))
    ]


def translate(rows: list[Any]) -> dict[str, torch.Tensor]:
    """Pad sources, and targets by -100."""
    labels = padded([row["labels"] for row in rows], -100)
    return {**unlabelled(rows), "labels": labels}


def bert(head: str = "SequenceClassification", **options: Any) -> Any:
    """A BERT; `head` None gives the encoder."""
    settings = {k: v for k, v in SMALL.items() if k not in ("num_key_value_heads", "bos_token_id", "eos_token_id")}
    config = hf.BertConfig(**{**settings, "num_labels": CLASSES, **options})
    return getattr(hf, f"BertFor{head}")(config) if head else hf.BertModel(config, add_pooling_layer=False)


def gpt2(head: str = "GPT2LMHeadModel", **options: Any) -> Any:
    """A GPT-2."""
    settings = {"vocab_size": VOCABULARY, **GPT, "bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0}
    return getattr(hf, head)(hf.GPT2Config(**{**settings, **options}))


def llama(**options: Any) -> Any:
    """A Llama."""
    return hf.LlamaForCausalLM(hf.LlamaConfig(**{**SMALL, **options}))


def t5(**options: Any) -> Any:
    """A T5."""
    sizes = {"d_model": WIDTH, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}
    config = hf.T5Config(
        vocab_size=VOCABULARY, pad_token_id=0, eos_token_id=3, decoder_start_token_id=0, **sizes, **options
    )
    return hf.T5ForConditionalGeneration(config)


def numbers(features: int = 12, count: int = ROWS, classes: int = CLASSES) -> TensorDataset:
    """Rows of numbers between 0 and 1, and one label each."""
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.rand(count, features, generator=generator), torch.arange(count) % classes)


def regression(features: int = 12, count: int = ROWS) -> TensorDataset:
    """Rows of numbers and a real target each."""
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.rand(count, features, generator=generator), torch.rand(count, generator=generator))


def images(size: int = 16, channels: int = 3, count: int = ROWS) -> list[tuple[torch.Tensor, int]]:
    """Random pictures with a label."""
    generator = torch.Generator().manual_seed(0)
    return [(torch.rand(channels, size, size, generator=generator), number % CLASSES) for number in range(count)]


def pictures(rows: list[Any]) -> dict[str, torch.Tensor]:
    """Pictures as image models of transformers take them."""
    return {"pixel_values": torch.stack([x for x, _ in rows]), "labels": torch.tensor([y for _, y in rows])}


def mlp(inputs: int = 12, outputs: int = CLASSES, *middle: nn.Module) -> nn.Sequential:
    """Two layers, with `middle` between them."""
    return nn.Sequential(nn.Linear(inputs, WIDTH), *(middle or (nn.ReLU(),)), nn.Linear(WIDTH, outputs))


def convnet(norm: Any = None) -> nn.Sequential:
    """Two convolutions, pooling, and a head; `norm` makes a normalisation of so many channels."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 8), (8, WIDTH)):
        layers += [nn.Conv2d(inputs, outputs, 3, 1, 1), *([norm(outputs)] if norm else []), nn.ReLU(), nn.AvgPool2d(2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDTH, CLASSES))


class Wrapped(nn.Module):
    """A model that returns the loss which a function computes from its parts and a batch."""

    def __init__(self, function: Any, **parts: Any):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def unpack(model: Any, batch: Any) -> torch.Tensor:
    """A model that takes a tuple and returns its loss."""
    return model(*batch)


def keywords(model: Any, batch: Any) -> torch.Tensor:
    """A model that takes keywords and returns its loss alone."""
    return model(**batch)


def crossentropy(model: Any, batch: Any) -> torch.Tensor:
    """torch's tutorial: cross-entropy in the loop."""
    return F.cross_entropy(model(batch[0]), batch[1])


#: The loop computes a mean over rows.
MEAN: dict[str, Any] = {}
