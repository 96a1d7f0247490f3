"""EW-FT's stacked autoencoder: fewer numbers to release, and so less noise in all (section 5.3)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

import fastdp.ops as ops
from fastdp.ops.stream import NoiseStream


class StackedAutoencoder(nn.Module):
    """Encoder ``width -> sizes[0] -> ... -> sizes[-1]`` and the mirrored decoder, GELU between layers.

    The last layer of each half is linear, so that codes and reconstructions may take any value.
    """

    def __init__(self, width: int, sizes: Sequence[int]):
        super().__init__()
        self.width = int(width)
        self.sizes = tuple(int(size) for size in sizes)
        if not self.sizes:
            raise ValueError(
                "the autoencoder has no sizes: give one at least, as in (64,), or autoencoder=None for none"
            )
        if min(self.sizes) < 1 or width < 1:
            raise ValueError(f"an autoencoder of width {width} and sizes {list(sizes)}: each must be at least 1")
        down = (self.width, *self.sizes)
        self.encoder = _stack(down)
        self.decoder = _stack(down[::-1])
        #: None until it is trained on public text, then ``"public"``. Kept with its state dict.
        self.trained_on: str | None = None

    def encode(self, hidden: Tensor) -> Tensor:
        """[..., width] -> [..., sizes[-1]]"""
        return self.encoder(hidden)

    def decode(self, code: Tensor) -> Tensor:
        """[..., sizes[-1]] -> [..., width]"""
        return self.decoder(code)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.decode(self.encode(hidden))

    def get_extra_state(self) -> str | None:
        """Kept in the state dict: a saved autoencoder remembers that it was trained on public text."""
        return self.trained_on

    def set_extra_state(self, state: str | None) -> None:
        self.trained_on = state


def _stack(sizes: Sequence[int]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in zip(sizes, sizes[1:]):
        layers += [nn.Linear(before, after), nn.GELU()]
    return nn.Sequential(*layers[:-1])


def train_autoencoder(
    autoencoder: StackedAutoencoder,
    hidden: Iterable[Tensor],
    *,
    learning_rate: float = 1e-3,
    max_norm: float = 1.0,
    std: float = 0.0,
    stream: NoiseStream | None = None,
) -> list[float]:
    """Train on hidden states of **public** text, one step a batch, and mark the autoencoder as trained on it.

    Batches are [B, T, width], such as `EWFT.hidden_states` yields. The decoder learns to expect codes clipped to ``max_norm``
    with noise of ``std``, or whole ones at 0. The loss of a step, which is returned, is the squared error of the
    reconstruction over the variance of the hidden states.
    """
    noise = stream or NoiseStream()
    optimizer = torch.optim.Adam(autoencoder.parameters(), lr=learning_rate)
    optimizer.zero_grad()
    losses = []
    for batch in hidden:
        if batch.shape[-1] != autoencoder.width:
            raise ValueError(f"hidden states are {batch.shape[-1]} wide, the autoencoder {autoencoder.width}")
        with torch.enable_grad():
            batch = batch.detach()
            code = autoencoder.encode(batch)
            if std > 0:
                code = ops.clip_noise(code, max_norm, std, noise)
            error = (autoencoder.decode(code) - batch).square().mean()
            loss = error / batch.float().var(dim=(0, 1)).mean().clamp_min(1e-12)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    if not losses:
        raise ValueError("there was no public text to train the autoencoder on")
    autoencoder.trained_on = "public"
    return losses
