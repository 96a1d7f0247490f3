"""Small classifiers of images and texts, as tutorials have them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_outputs import SequenceClassifierOutput

CLASSES = 10


class Classifier(nn.Module):
    """A body and a linear head over its features, with the cross-entropy that stock models return."""

    def __init__(self, body: nn.Module, features: int):
        super().__init__()
        self.body, self.head = body, nn.Linear(features, CLASSES)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> SequenceClassifierOutput:
        logits = self.head(self.body(x))
        return SequenceClassifierOutput(loss=None if labels is None else F.cross_entropy(logits, labels), logits=logits)


class _Windows(nn.Module):
    """Convolutions over 3, 4 and 5 words and their largest values."""

    def __init__(self, vocabulary: int, width: int):
        super().__init__()
        self.table = nn.Embedding(vocabulary, width)
        self.windows = nn.ModuleList(nn.Conv1d(width, width, size) for size in (3, 4, 5))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        words = self.table(ids).transpose(1, 2)
        return torch.cat([F.relu(window(words)).amax(2) for window in self.windows], 1)


class _Words(nn.Module):
    """Linear layers over the mean of the words."""

    def __init__(self, vocabulary: int, width: int, layers: int):
        super().__init__()
        self.table = nn.Embedding(vocabulary, width)
        self.inner = nn.Sequential(*(part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        states: torch.Tensor = self.inner(self.table(ids).mean(1))
        return states


def cnn(_vocabulary: int, width: int, layers: int) -> Classifier:
    """Convolutions that double their channels and halve the image."""
    body: list[nn.Module] = []
    for layer in range(layers):
        into, out = (3 if layer == 0 else width << layer - 1), width << layer
        body += [nn.Conv2d(into, out, 3, padding=1), nn.ReLU()]
        body += [nn.MaxPool2d(2)] if layer + 1 < layers else [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return Classifier(nn.Sequential(*body), width << layers - 1)


#: (vocabulary, width, layers) -> the model.
KINDS = {
    "cnn": cnn,
    "text-cnn": lambda v, w, n: Classifier(_Windows(v, w), 3 * w),
    "words": lambda v, w, n: Classifier(_Words(v, w, n), w),
}
