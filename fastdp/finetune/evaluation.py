"""Held-out quality: perplexity of a text, accuracy and F1 of labels, the error of a number."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastdp.calls.modes import in_mode
from fastdp.data import IGNORED, Collator, Examples

#: The label of words that belong to no entity, where a task has it: being right about these counts for no F1.
OUTSIDE = "O"


@dataclass(frozen=True)
class Quality:
    """Of ``count`` labelled tokens (causal-lm, seq2seq), words, labels or examples; ``loss`` is the mean over these.

    Attributes:
        loss: in nats; for regression the squared error.
        perplexity: of the labelled tokens.
        accuracy: share of right labels.
        f1: of all labels that were given or found but `OUTSIDE`, taken together (multi-label, token-classification).
        rmse: root of the mean squared error, in the label's own units.
    """

    loss: float
    count: int
    perplexity: float | None = None
    accuracy: float | None = None
    f1: float | None = None
    rmse: float | None = None

    @property
    def figure(self) -> tuple[str, float]:
        """The name and value of the one figure to show."""
        for name in ("perplexity", "rmse", "f1", "accuracy"):
            if (value := getattr(self, name)) is not None:
                return name, value
        return "loss", self.loss

    @property
    def headline(self) -> str:
        """The figure to show, with its name."""
        name, value = self.figure
        return f"{name} {value:.2f}" if name == "perplexity" else f"{name} {value:.4f}"

    def as_dict(self) -> dict[str, Any]:
        """Without the figures that the task does not have."""
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
    measure, figures = _MEASURES[task]
    device = next(model.parameters()).device
    outside = getattr(getattr(model, "config", None), "label2id", None) or {}
    order = sorted(range(len(examples)), key=lambda index: len(examples[index]["input_ids"]))
    sums: dict[str, float] = {}
    with in_mode(model, training=False), torch.inference_mode():
        for start in range(0, len(order), batch_size):
            batch = collator([examples[index] for index in order[start : start + batch_size]])
            found, labels = predict(model, batch, task, precision, device)
            for name, value in measure(found, labels, outside.get(OUTSIDE)).items():
                sums[name] = sums.get(name, 0.0) + float(value)
    others = {name: _FIGURES[name](sums) for name in figures}
    return Quality(_share(sums, "loss", "count"), int(sums["count"]), **others)


def predict(
    model: nn.Module, batch: Mapping[str, Tensor], task: str, precision: str, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The model's logits in float32 beside the labels that they stand for; of a causal model, of the next tokens."""
    batch = {key: value.to(device) for key, value in batch.items()}
    labels = batch["labels"]
    if task != "seq2seq":
        # What a decoder reads is made of the labels; no other model may know them.
        del batch["labels"]
    with autocast(device, precision):
        logits = model(**batch).logits.float()
    if task in ("causal-lm", "seq2seq", "token-classification"):
        # Soft prompts put their own positions in front: the text's are the last ones.
        logits = logits[:, -labels.shape[1] :]
    if task == "causal-lm":
        logits, labels = logits[:, :-1], labels[:, 1:]
    return logits, labels


def _classes(logits: Tensor, labels: Tensor, outside: int | None) -> dict[str, Any]:
    flat = labels.reshape(-1)
    logits = logits.reshape(-1, logits.shape[-1])
    right, said = flat != IGNORED, logits.argmax(-1)
    hit = right & (said == flat)
    inside = (flat != outside, said != outside) if outside is not None else (right, right)
    return {
        "loss": F.cross_entropy(logits, flat, ignore_index=IGNORED, reduction="sum"),
        "count": right.sum(),
        "right": hit.sum(),
        "hits": (hit & inside[0]).sum(),
        "given": (right & inside[0]).sum() + (right & inside[1]).sum(),
    }


def _sets(logits: Tensor, labels: Tensor, outside: int | None) -> dict[str, Any]:
    said, given = logits > 0, labels > 0.5
    return {
        "loss": F.binary_cross_entropy_with_logits(logits, labels, reduction="sum"),
        "count": torch.tensor(labels.numel()),
        "right": (said == given).sum(),
        "hits": (said & given).sum(),
        "given": said.sum() + given.sum(),
    }


def _numbers(logits: Tensor, labels: Tensor, outside: int | None) -> dict[str, Any]:
    loss = F.mse_loss(logits.reshape(-1), labels.reshape(-1), reduction="sum")
    return {"loss": loss, "count": torch.tensor(labels.numel())}


def _share(sums: Mapping[str, float], part: str, whole: str) -> float:
    return sums[part] / sums[whole] if sums.get(whole) else math.nan


#: Each figure of the sums.
_FIGURES: dict[str, Callable[[Mapping[str, float]], float]] = {
    "perplexity": lambda sums: math.exp(loss) if (loss := _share(sums, "loss", "count")) < 700 else math.inf,
    "accuracy": lambda sums: _share(sums, "right", "count"),
    "f1": lambda sums: 2 * _share(sums, "hits", "given"),
    "rmse": lambda sums: math.sqrt(_share(sums, "loss", "count")),
}
#: What is summed over the batches of a task, and which figures it has.
_MEASURES: dict[str, tuple[Callable[[Tensor, Tensor, int | None], dict[str, Any]], tuple[str, ...]]] = {
    "causal-lm": (_classes, ("perplexity",)),
    "seq2seq": (_classes, ("perplexity",)),
    "classification": (_classes, ("accuracy",)),
    "token-classification": (_classes, ("accuracy", "f1")),
    "multi-label": (_sets, ("accuracy", "f1")),
    "regression": (_numbers, ("rmse",)),
}
