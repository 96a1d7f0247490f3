"""Turning rows of a table into the examples a model trains on, and examples into batches.

One row is one example, and one example is the unit that a private run protects: a row too long for the model is cut,
never split in two, because its halves would be protected half as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from fastdp import untrusted
from fastdp.methods.encoding import ADDED, encode_private
from fastdp.tables import DataError as DataError, Rows as Rows, as_text as as_text, read_rows as read_rows

IGNORED = -100


class Examples(Dataset):
    """Encoded examples, each a dict of lists of token ids; a map-style data set.

    `truncated` counts those that were cut to fit; `lengths` holds the tokens of each, by which a private loader sorts.
    """

    def __init__(self, items: list[dict[str, Any]], truncated: int) -> None:
        self.items = items
        self.truncated = truncated
        self.lengths = [len(item["input_ids"]) for item in items]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.items[index]


def causal_examples(
    tokenizer: PreTrainedTokenizerBase,
    targets: Sequence[str],
    max_length: int,
    prompts: Sequence[str] | None = None,
    separator: str = "\n",
    literal: bool = False,
) -> Examples:
    """Examples for a causal model: begin token, prompt and separator where there are prompts, target, end token.

    With prompts, only the target and the end token carry labels; without, every token does. An example longer than
    `max_length` loses the end of its target, and the beginning of its prompt where that alone takes over half the room.

    ``literal`` is for text that is privatized token by token: special tokens that it spells out are letters, and the items
    say under ``special_tokens_mask`` which tokens stand for none of it (see `fastdp.methods.encoding`).
    """
    start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]

    def encode(texts: Sequence[str]) -> list[list[int]]:
        if literal:
            return encode_private(tokenizer, texts)["input_ids"]
        return untrusted.encode(tokenizer, list(texts), add_special_tokens=False, verbose=False)["input_ids"]

    encoded_targets = encode(targets)
    encoded_prompts = encode([prompt + separator for prompt in prompts]) if prompts is not None else None
    items, truncated = [], 0
    for index, target in enumerate(encoded_targets):
        prompt = encoded_prompts[index] if encoded_prompts is not None else []
        body = target + end
        if len(start) + len(prompt) + len(body) > max_length:
            truncated += 1
            room = max(max_length // 2, max_length - len(start) - len(body))
            prompt = prompt[max(0, len(prompt) - room) :]
        prefix = start + prompt
        ids = (prefix + body)[:max_length]
        hidden = len(prefix) if prompts is not None else 0
        labels = [IGNORED] * hidden + ids[hidden:]
        items.append({"input_ids": ids, "labels": labels})
        if literal:
            added = [1] * len(start) + [0] * (len(prompt) + len(target)) + [1] * len(end)
            items[-1][ADDED] = added[:max_length]
    return Examples(items, truncated)


def classification_examples(
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    labels: Sequence[int | float | tuple[float, ...]],
    max_length: int,
    pairs: Sequence[str] | None = None,
    literal: bool = False,
) -> Examples:
    """Examples with one label each, encoded as the model expects: a class index, a number, or a tuple of 0 and 1 by class.

    ``literal`` is as in `causal_examples`.
    """
    arguments = (list(texts),) if pairs is None else (list(texts), list(pairs))
    cut: Mapping[str, Any]
    if literal:
        full = encode_private(tokenizer, texts, pairs, special=True)
        cut = encode_private(tokenizer, texts, pairs, special=True, truncation=True, max_length=max_length)
    else:
        full = untrusted.encode(tokenizer, *arguments, verbose=False)
        cut = untrusted.encode(tokenizer, *arguments, truncation=True, max_length=max_length)
    keys = [key for key in cut if key != "attention_mask"]
    items = [{key: cut[key][i] for key in keys} | {"labels": label} for i, label in enumerate(labels)]
    truncated = sum(len(ids) > max_length for ids in full["input_ids"])
    return Examples(items, truncated)


def word_examples(
    tokenizer: PreTrainedTokenizerBase, words: Sequence[list[str]], labels: Sequence[list[int]], max_length: int
) -> Examples:
    """Examples with a label for each word, which its first token carries; the words are joined by spaces.

    Args:
        labels: class indices, as many as words.

    Raises:
        ValueError: for a tokenizer that cannot say where in the text its tokens are.
    """
    if not tokenizer.is_fast:
        raise ValueError("its tokenizer cannot say to which word a token belongs: a tokenizer.json is needed")
    texts = [" ".join(row) for row in words]
    full = untrusted.encode(tokenizer, texts, verbose=False)["input_ids"]
    cut = untrusted.encode(tokenizer, texts, truncation=True, max_length=max_length, return_offsets_mapping=True)
    items = []
    for ids, offsets, row, own in zip(cut["input_ids"], cut["offset_mapping"], words, labels):
        # The word of each character and of the space behind it. A token may begin with the space before its word: so its end
        # decides.
        word_at = [index for index, word in enumerate(row) for _ in range(len(word) + 1)]
        unseen: dict[int | None, int] = dict(enumerate(own))
        at = [word_at[end - 1] if end > begin else None for begin, end in offsets]
        items.append({"input_ids": ids, "labels": [unseen.pop(index, IGNORED) for index in at]})
    return Examples(items, sum(len(ids) > max_length for ids in full))


def sequence_examples(
    tokenizer: PreTrainedTokenizerBase, sources: Sequence[str], targets: Sequence[str], max_length: int
) -> Examples:
    """Examples for an encoder and a decoder: a source, and a target that ends with the end token; each at most `max_length`."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    given: list[dict[str, Any]] = [{"text": list(sources)}, {"text_target": list(targets)}]
    full = [untrusted.encode(tokenizer, **texts, verbose=False)["input_ids"] for texts in given]
    cut = [untrusted.encode(tokenizer, **texts, truncation=True, max_length=max_length)["input_ids"] for texts in given]
    items = [
        {"input_ids": source, "labels": target if target[-1:] == end else target[: max_length - len(end)] + end}
        for source, target in zip(*cut)
    ]
    return Examples(items, sum(max(map(len, pair)) > max_length for pair in zip(*full)))


@dataclass(frozen=True)
class Collator:
    """Pads lists on the right, each to the longest of the batch, or to ``length`` tokens where lengths must not show.

    The attention mask covers what was there before. Numbers, and tuples, which are as long in every example, stay as they are.

    The mask comes from lengths, not from comparing with the padding token, which in GPT-2's vocabulary is also the end
    token and carries a label.
    """

    pad_token: int
    length: int | None = None

    def __call__(self, examples: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """[B] examples -> input_ids, attention_mask and other token fields int64 [B, T]; labels [B, T], [B] or [B, classes]."""
        fill = {"input_ids": self.pad_token, "labels": IGNORED}

        def padded(values: list[Any], fill: int) -> list[Any]:
            if not isinstance(values[0], list):
                return values
            longest = self.length or max(map(len, values))
            return [value + [fill] * (longest - len(value)) for value in values]

        batch = {
            key: torch.tensor(padded([example[key] for example in examples], fill.get(key, 0))) for key in examples[0]
        }
        batch["attention_mask"] = torch.tensor(padded([[1] * len(example["input_ids"]) for example in examples], 0))
        return batch
