"""Small models of the layers that are no transformer's: images, bags of words in a window, sequences with a state, attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

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


def _norm(kind: str | None, width: int) -> list[nn.Module]:
    if kind == "group":
        return [nn.GroupNorm(8, width)]
    return [nn.InstanceNorm2d(width, affine=True)] if kind == "instance" else []


_VOLUMES: tuple[Any, ...] = (nn.Conv3d, nn.MaxPool3d, nn.AdaptiveAvgPool3d)


def _images(
    _vocabulary: int, width: int, layers: int, *, norm: str | None = None, depthwise: bool = False, of: Any = None
) -> nn.Module:
    """Convolutions that double their channels and halve the image, each with a norm or none."""
    convolution, largest, mean = of or (nn.Conv2d, nn.MaxPool2d, nn.AdaptiveAvgPool2d)
    body: list[nn.Module] = []
    for layer in range(layers):
        into, out = (3 if layer == 0 else width << layer - 1), width << layer
        if depthwise:
            body += [nn.Conv2d(into, into, 3, padding=1, groups=into), nn.Conv2d(into, out, 1)]
        else:
            body.append(convolution(into, out, 3, padding=1))
        body += [*_norm(norm, out), nn.ReLU()]
        body += [largest(2)] if layer + 1 < layers else [mean(1), nn.Flatten()]
    return Classifier(nn.Sequential(*body), width << layers - 1)


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


class _Sequence(nn.Module):
    """The last output of a recurrent net."""

    def __init__(self, net: type[nn.RNNBase], vocabulary: int, width: int, layers: int):
        super().__init__()
        self.table = nn.Embedding(vocabulary, width)
        self.inner = net(width, width, layers, batch_first=True)  # type: ignore[call-arg, arg-type]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        states: torch.Tensor = self.inner(self.table(ids))[0]
        return states[:, -1]


class _Attention(nn.Module):
    """Torch's own attention of words to each other, and the mean of what it returns."""

    def __init__(self, vocabulary: int, width: int):
        super().__init__()
        self.table = nn.Embedding(vocabulary, width)
        self.inner = nn.MultiheadAttention(width, width // 64, batch_first=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        words = self.table(ids)
        states: torch.Tensor = self.inner(words, words, words, need_weights=False)[0]
        return states.mean(1)


class _Encoder(nn.Module):
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


@dataclass(frozen=True)
class Kind:
    """A small model and what it sees.

    Args:
        build: (vocabulary, width, layers) -> the model.
        dimensions: of an image or a volume of 3 channels; 0 for words.
        replaced: whether Opacus needs a layer of its own in place of torch's.
    """

    build: Callable[[int, int, int], nn.Module]
    dimensions: int = 0
    replaced: bool = False


def _recurrent(net: type[nn.RNNBase]) -> Kind:
    return Kind(lambda v, w, n: Classifier(_Sequence(net, v, w, n), w), replaced=True)


KINDS = {
    "cnn": Kind(_images, 2),
    "cnn-gn": Kind(partial(_images, norm="group"), 2),
    "cnn-in": Kind(partial(_images, norm="instance"), 2),
    "depthwise": Kind(partial(_images, depthwise=True), 2),
    "conv3d": Kind(partial(_images, of=_VOLUMES), 3),
    "text-cnn": Kind(lambda v, w, n: Classifier(_Windows(v, w), 3 * w)),
    "words": Kind(lambda v, w, n: Classifier(_Words(v, w, n), w)),
    "bags": Kind(lambda v, w, n: Classifier(nn.EmbeddingBag(v, w), w)),
    "lstm": _recurrent(nn.LSTM),
    "gru": _recurrent(nn.GRU),
    "rnn": _recurrent(nn.RNN),
    "attention": Kind(lambda v, w, n: Classifier(_Attention(v, w), w), replaced=True),
    "encoder-layer": Kind(lambda v, w, n: Classifier(_Encoder(v, w, n), w), replaced=True),
}
