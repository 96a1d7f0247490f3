"""Small models of the layers that are no transformer's: images, bags of words in a window, sequences with a state."""

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


def images(layers: int, width: int, *, norm: bool) -> Classifier:
    """Convolutions that double their channels and halve the image, each with a group norm or none."""
    body: list[nn.Module] = []
    for layer in range(layers):
        into, out = (3 if layer == 0 else width << layer - 1), width << layer
        body += [nn.Conv2d(into, out, 3, padding=1), *([nn.GroupNorm(8, out)] if norm else []), nn.ReLU()]
        body += [nn.MaxPool2d(2)] if layer + 1 < layers else [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return Classifier(nn.Sequential(*body), width << layers - 1)


class Windows(nn.Module):
    """Convolutions over 3, 4 and 5 words and their largest values."""

    def __init__(self, vocabulary: int, width: int):
        super().__init__()
        self.table = nn.Embedding(vocabulary, width)
        self.windows = nn.ModuleList(nn.Conv1d(width, width, size) for size in (3, 4, 5))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        words = self.table(ids).transpose(1, 2)
        return torch.cat([F.relu(window(words)).amax(2) for window in self.windows], 1)


def windows(vocabulary: int, width: int) -> Classifier:
    """Words in windows."""
    return Classifier(Windows(vocabulary, width), 3 * width)


class Sequence(nn.Module):
    """An LSTM's last output."""

    def __init__(self, vocabulary: int, width: int, layers: int):
        super().__init__()
        self.table = nn.Embedding(vocabulary, width)
        self.inner = nn.LSTM(width, width, layers, batch_first=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        states: torch.Tensor = self.inner(self.table(ids))[0]
        return states[:, -1]


def sequence(vocabulary: int, width: int, layers: int) -> Classifier:
    """Words one after the other."""
    return Classifier(Sequence(vocabulary, width, layers), width)


class Encoder(nn.Module):
    """Torch's own encoder layers over words, and the mean of what they return."""

    def __init__(self, vocabulary: int, width: int, layers: int):
        super().__init__()
        self.table = nn.Embedding(vocabulary, width)
        self.inner = nn.Sequential(
            *(nn.TransformerEncoderLayer(width, width // 64, 4 * width, batch_first=True) for _ in range(layers))
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        states: torch.Tensor = self.inner(self.table(ids))
        return states.mean(1)


def encoder(vocabulary: int, width: int, layers: int) -> Classifier:
    """Attention over words."""
    return Classifier(Encoder(vocabulary, width, layers), width)
