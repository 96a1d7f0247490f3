"""Held-out examples that judge a model: a bounded score of each by itself, and the noised means of such scores.

What is released is a sum to which one example adds at most 1. That is so by construction: an example is alone in its batch,
so that no other's score depends on it, by padding, by place, or by a model that looks at its batch; and scores are rounded to
a grid on which their float32 sums are exact, so that no sum is rounded elsewhere because of it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastdp.calls.modes import in_mode
from fastdp.data import IGNORED, Collator
from fastdp.finetune.evaluation import predict
from fastdp.ops import NoiseStream, add_noise_
from fastdp.ops.grid import exact_spacing

#: In nats; a larger loss of one example counts as this.
LARGEST_LOSS = 10.0
#: Tasks whose examples have such scores.
JUDGED = ("causal-lm", "classification")


def scores(model: nn.Module, examples: Any, collator: Collator, task: str, precision: str) -> Tensor:
    """Of every example the loss over its largest and, of a label, whether it is right: float64 [N, 1 or 2], in [0, 1].

    Without gradients and dropout; the model's mode is put back.
    """
    device = next(model.parameters()).device
    with in_mode(model, training=False), torch.inference_mode():
        predicted = (predict(model, collator([example]), task, precision, device) for example in examples)
        return torch.cat([bounded_score(logits, labels) for logits, labels in predicted])


def noised_means(scores: Tensor, multiplier: float, stream: NoiseStream) -> list[float]:
    """The mean of each column, with noise that is worth ``multiplier`` whatever one row is.

    Args:
        scores: [N, k], in [0, 1].
        multiplier: the noise's standard deviation over the most that one row moves all sums by, the root of k.

    Raises ValueError for 2^24 rows or more, whose sums float32 does not hold.
    """
    count = len(scores)
    spacing = exact_spacing(count, 1.0)
    if spacing > 1.0:
        raise ValueError(f"{count} examples judge, and a sum of scores is exact below 2^24 of them: let fewer judge")
    total = ((scores.double() / spacing).round().sum(0) * spacing).to(torch.float32)
    add_noise_(total, multiplier * math.sqrt(len(total)), stream)
    return [float(value) / count for value in total]


def bounded_score(logits: Tensor, labels: Tensor) -> Tensor:
    losses = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none", ignore_index=IGNORED)
    known = (labels != IGNORED).double()
    means = (losses.view_as(labels).double() * known).reshape(len(labels), -1).sum(1)
    means = means / known.reshape(len(labels), -1).sum(1).clamp(min=1)
    # What is not a number counts as the largest loss: it must not pass the bound.
    found = [means.nan_to_num(nan=LARGEST_LOSS, posinf=LARGEST_LOSS).clamp(0, LARGEST_LOSS) / LARGEST_LOSS]
    if labels.dim() == 1:
        found.append((logits.argmax(-1) == labels).double())
    return torch.stack(found, 1).cpu()
