"""A laptop's share of a fine-tuning run: hidden states below a split are computed once, only the top is trained."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fastdp.methods.sap import Bottom
from fastdp.tables import read_rows
from fastdp.untrusted import load_pretrained


@dataclass(frozen=True)
class Texts:
    """Padded sequences of one length: ids and mask int64 [N, T], labels int64 [N]."""

    ids: Tensor
    mask: Tensor
    labels: Tensor

    def with_ids(self, ids: Tensor) -> Texts:
        return replace(self, ids=ids)

    def to(self, device: torch.device) -> Texts:
        return Texts(self.ids.to(device), self.mask.to(device), self.labels.to(device))


def read_texts(path: Path, tokenizer: Any, length: int, count: int, seed: int) -> Texts:
    """``count`` texts of an SST-2 file, or pairs of an E2E file, drawn without replacement."""
    table = read_rows(path)
    order = torch.randperm(len(table), generator=torch.Generator().manual_seed(seed))[:count].tolist()
    if "ref" in table.columns:
        texts, labels = matched_pairs(table.column("mr", "meaning"), table.column("ref", "text"))
    else:
        texts, labels = table.column("sentence", "text"), [int(label) for label in table.column("label", "label")]
    return encode([texts[i] for i in order], tokenizer, length, [labels[i] for i in order])


def matched_pairs(meanings: list[str], references: list[str]) -> tuple[list[Any], list[int]]:
    """Each reference of E2E with a meaning and a label, by turns: its own (1), and that of a row half the file away (0)."""
    labels = [i % 2 for i in range(len(references))]
    own = [i if label else (i + len(labels) // 2) % len(labels) for i, label in enumerate(labels)]
    return [(meanings[i], reference) for i, reference in zip(own, references)], labels


def read_public(path: Path, tokenizer: Any, length: int, count: int) -> Texts:
    """The first long lines of a plain text file, as unlabelled public text."""
    lines = [text for text in read_rows(path).column("text", "text") if len(text) > 40][:count]
    return encode(lines, tokenizer, length, [0] * len(lines))


def encode(texts: list[Any], tokenizer: Any, length: int, labels: list[int]) -> Texts:
    made = tokenizer(texts, truncation=True, padding="max_length", max_length=length, return_tensors="pt")
    return Texts(made["input_ids"], made["attention_mask"], torch.tensor(labels))


def load(model: Path, seed: int) -> nn.Module:
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(seed)
    return load_pretrained(AutoModelForSequenceClassification, model, num_labels=2)


@torch.no_grad()
def hidden_states(bottom: Bottom, texts: Texts, rows: int = 64) -> Tensor:
    """Hidden states [N, T, d] without dropout, where the texts are."""
    bottom.eval()
    device = next(bottom.parameters()).device
    pairs = zip(texts.ids.to(device).split(rows), texts.mask.to(device).split(rows))
    return torch.cat([bottom(ids, mask).to(texts.ids.device) for ids, mask in pairs])


def train_top(
    top: nn.Module,
    states: Tensor,
    texts: Texts,
    *,
    size: Any,
    seed: int,
    extra: Iterable[nn.Parameter] = (),
    begin_epoch: Callable[[int], None] | None = None,
    ids: bool = False,
) -> None:
    """Train by AdamW on hidden states [N, T, d].

    ``size`` has ``epochs``, ``batch_size`` and ``learning_rate``; ``ids`` passes example_ids, ``extra`` are further parameters.
    """
    parameters = [p for p in top.parameters() if p.requires_grad] + list(extra)
    optimizer = torch.optim.AdamW(parameters, lr=size.learning_rate, weight_decay=0.0)
    generator = torch.Generator().manual_seed(seed)
    top.train()
    for epoch in range(1, size.epochs + 1):
        if begin_epoch is not None:
            begin_epoch(epoch)
        for rows in torch.randperm(len(texts.labels), generator=generator).split(size.batch_size):
            batch = {"inputs_embeds": states[rows], **({"example_ids": rows} if ids else {})}
            top(**batch, attention_mask=texts.mask[rows], labels=texts.labels[rows]).loss.backward()
            optimizer.step()
            optimizer.zero_grad()


@torch.no_grad()
def accuracy(top: nn.Module, states: Tensor, texts: Texts, rows: int = 64) -> float:
    """Share of the texts that a top classifies as labelled, by their hidden states."""
    top.eval()
    pairs = zip(states.split(rows), texts.mask.split(rows))
    found = [top(inputs_embeds=some, attention_mask=mask).logits.argmax(1) for some, mask in pairs]
    return float((torch.cat(found) == texts.labels).double().mean())
