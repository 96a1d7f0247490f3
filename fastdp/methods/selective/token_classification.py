"""Any Hugging Face token-classification model as a detector of private text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from fastdp.accounting import model_name
from fastdp.calls.modes import in_mode
from fastdp.methods.selective.spans import Span
from fastdp.untrusted import encode


class TokenClassificationDetector:
    """A named-entity model as a `PrivacyDetector`: labels O, B-X, I-X (or plain X) become spans of entity X.

    The model's ``config.id2label`` names the labels, and its tokenizer must be fast. A text longer than the model is cut into
    windows, of which neighbours share ``stride`` tokens, and ``batch_size`` go through the model at once.
    """

    def __init__(self, model: nn.Module, tokenizer: Any, batch_size: int = 16, stride: int = 32) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise ValueError("the detector needs a fast tokenizer, which gives the characters of each token")
        config: Any = model.config
        self.model = model
        self.tokenizer = tokenizer
        self.batch_size = batch_size
        self.stride = stride
        self.labels: dict[int, str] = {int(key): value for key, value in config.id2label.items()}
        self.window = min(tokenizer.model_max_length, getattr(config, "max_position_embeddings", 512))
        if not 0 <= stride < self.window - tokenizer.num_special_tokens_to_add():
            raise ValueError(f"stride is {stride}: it must be below the model's {self.window} tokens")

    def detect(self, texts: Sequence[str]) -> list[list[Span]]:
        """The spans of each text; a span's score is the mean probability of its tokens' labels."""
        found: list[list[Span]] = [[] for _ in texts]
        if not any(texts):
            return found
        encoded = encode(
            self.tokenizer,
            list(texts),
            truncation=True,
            max_length=self.window,
            stride=self.stride,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
            return_special_tokens_mask=True,
        )
        keys = [key for key in ("input_ids", "attention_mask", "token_type_ids") if key in encoded]
        for start in range(0, len(encoded["input_ids"]), self.batch_size):
            rows = range(start, min(start + self.batch_size, len(encoded["input_ids"])))
            batch = self.tokenizer.pad({key: [encoded[key][row] for row in rows] for key in keys}, return_tensors="pt")
            for row, (scores, labels) in zip(rows, self._predict(batch)):
                spans = label_spans(
                    [self.labels[label] for label in labels],
                    scores,
                    encoded["offset_mapping"][row],
                    encoded["special_tokens_mask"][row],
                )
                found[encoded["overflow_to_sample_mapping"][row]] += spans
        return found

    def describe(self) -> dict[str, Any]:
        return {
            "name": "token classification",
            "model": model_name(self.model),
            "labels": sorted(set(self.labels.values())),
        }

    def _predict(self, batch: Any) -> Iterator[tuple[list[float], list[int]]]:
        device = next(self.model.parameters()).device
        with in_mode(self.model, training=False), torch.inference_mode():
            logits = self.model(**{key: value.to(device) for key, value in batch.items()}).logits
        best = logits.float().softmax(-1).max(-1)
        yield from zip(best.values.tolist(), best.indices.tolist())


def label_spans(
    labels: Sequence[str], scores: Sequence[float], offsets: Sequence[tuple[int, int]], special: Sequence[int]
) -> Iterator[Span]:
    """Runs of tokens of one entity; a B- label begins a new run."""
    entity, start, end = "", 0, 0
    seen: list[float] = []
    for label, score, (since, to), added in zip(labels, scores, offsets, special):
        mark, _, name = label.partition("-")
        if mark not in ("B", "I", "E", "S", "L", "U") or not name:
            mark, name = "I", "" if label == "O" else label
        if added or to <= since:
            continue
        if entity and (name != entity or mark in ("B", "S", "U")):
            yield Span(entity, start, end, min(1.0, sum(seen) / len(seen)))
            entity = ""
        if name:
            if not entity:
                entity, start, seen = name, since, []
            end = to
            seen.append(score)
    if entity:
        yield Span(entity, start, end, min(1.0, sum(seen) / len(seen)))
