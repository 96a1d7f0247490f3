"""Held-out quality: perplexity by token mean for causal models, accuracy for classifiers."""

from __future__ import annotations

import contextlib
import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from fastdp.data import IGNORED, Collator, Examples


@dataclass(frozen=True)
class Quality:
    """`loss` is the mean over `count` labelled tokens (causal-lm) or examples (classification), in nats."""

    loss: float
    count: int
    perplexity: float | None = None
    accuracy: float | None = None

    @property
    def headline(self) -> str:
        """The figure to show, with its name."""
        if self.accuracy is not None:
            return f"accuracy {self.accuracy:.4f}"
        return f"perplexity {self.perplexity:.2f}"

    def as_dict(self) -> dict[str, Any]:
        """Without the figure that the task does not have."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def autocast(device: torch.device, precision: str) -> contextlib.AbstractContextManager:
    """bfloat16 autocast on the model's device, or nothing for float32."""
    if precision == "bfloat16":
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return contextlib.nullcontext()


def evaluate(
    model: nn.Module, examples: Examples, collator: Collator, batch_size: int, task: str, precision: str = "float32"
) -> Quality:
    """Evaluate without gradients and without dropout; the model's mode is put back.

    Batches are formed by length, which spares padding and changes no example's own figure.
    """
    device = next(model.parameters()).device
    order = sorted(range(len(examples)), key=lambda index: len(examples[index]["input_ids"]))
    total, count, correct = 0.0, 0, 0
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            for start in range(0, len(order), batch_size):
                batch = collator([examples[index] for index in order[start : start + batch_size]])
                batch = {key: value.to(device) for key, value in batch.items()}
                labels = batch.pop("labels")
                with autocast(device, precision):
                    logits = model(**batch).logits.float()
                if task == "causal-lm":
                    # Soft prompts put their own positions in front: the text's are the last ones.
                    logits = logits[:, -labels.shape[1] :][:, :-1]
                    labels = labels[:, 1:]
                flat = labels.reshape(-1)
                logits = logits.reshape(-1, logits.shape[-1])
                total += F.cross_entropy(logits, flat, ignore_index=IGNORED, reduction="sum").item()
                count += int((flat != IGNORED).sum())
                correct += int((logits.argmax(-1) == flat).sum())
    finally:
        model.train(was_training)
    loss = total / count if count else math.nan
    if task == "causal-lm":
        return Quality(loss, count, perplexity=math.exp(loss) if loss < 700 else math.inf)
    return Quality(loss, count, accuracy=correct / count if count else math.nan)
