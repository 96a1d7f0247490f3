"""Training below EW-FT's noise on public text: the layers learn what to make large under the clip, and are frozen after."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from fastdp.calls.modes import in_mode
from fastdp.methods.blocks import Layer
from fastdp.methods.ewft.autoencoder import StackedAutoencoder
from fastdp.methods.ewft.noise import NoiseSchedule
from fastdp.methods.ewft.releases import EWFT


def rehearse(
    model: nn.Module,
    public_batches: Iterable[Mapping[str, Any]],
    *,
    layer: Layer,
    noise: NoiseSchedule,
    sequence_length: int,
    passes: int = 3,
    learning_rate: float = 2e-4,
    max_norm: float = 1.0,
    autoencoder: StackedAutoencoder | None = None,
    lengths: str = "hidden",
    unsafe_seed: int | None = None,
) -> list[float]:
    """Train a model on **public** labelled text under the clip and noise that its private releases will have.

    Frozen pretrained layers spend the norm that the clip allows on what all texts share, and the noise covers the rest. Layers
    that were trained under the noise keep what matters. They see no private text, so the guarantee of what follows is the same.
    Then make the `EWFT`, which freezes them, with the same settings. Returns the loss of each step.

    Args:
        model: its parameters with ``requires_grad`` are trained by AdamW, above the layer and below.
        public_batches: model inputs with labels, padded to ``sequence_length``; gone through ``passes`` times.
        noise: the schedule to come; its last level is rehearsed, which is that of inference too.
        autoencoder: the one that will be used; one that is untrained learns to reconstruct first, and any learns along.
    """
    batches = [dict(batch) for batch in public_batches]
    if not batches or passes < 1:
        raise ValueError("there is nothing to rehearse on: give batches of public text, and at least one pass")
    if any("labels" not in batch for batch in batches):
        raise ValueError("a batch to rehearse on has no labels: give labelled public text")
    first = [0, *itertools.accumulate(len(batch["labels"]) for batch in batches)]
    practice = NoiseSchedule("rehearsal on public text", (noise.ratios[-1],) * passes, noise.delta)
    rehearsal = EWFT(
        model,
        layer=layer,
        noise=practice,
        sequence_length=sequence_length,
        dataset_size=first[-1],
        max_norm=max_norm,
        autoencoder=autoencoder,
        bottom="trained",
        lengths=lengths,
        unsafe_seed=unsafe_seed,
    )
    losses = []
    try:
        if autoencoder is not None and autoencoder.trained_on is None:
            rehearsal.train_autoencoder(batches)
        trained = [p for p in model.parameters() if p.requires_grad] + rehearsal.trained_parameters()
        optimizer = torch.optim.AdamW(trained, lr=learning_rate, weight_decay=0.0)
        with in_mode(model, training=True):
            for epoch in range(1, passes + 1):
                rehearsal.set_epoch(epoch)
                for index in torch.randperm(len(batches)).tolist():
                    ids = torch.arange(first[index], first[index + 1])
                    loss = model(**batches[index], example_ids=ids).loss
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    losses.append(float(loss.detach()))
    finally:
        rehearsal.remove()
    return losses
