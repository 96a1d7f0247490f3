"""The customer's side of a split after encoder blocks: noise on the rows of the hidden state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import fastdp.ops as ops
from fastdp.accounting import Card, Metric, noise_source
from fastdp.accounting.statements import NOISED_ROWS, ONE_TEXT, PUBLIC_BOTTOM, TRAINABLE
from fastdp.methods.sap.importance import check_eta
from fastdp.ops.stream import NoiseStream


def add_dchi_noise(rows: Tensor, eta: float, stream: NoiseStream) -> Tensor:
    """Rows [..., d] plus multivariate Laplace noise, density ~ exp(-eta ||noise||), independent for each row.

    Rows of half precision are added as float32 and rounded after: noise on a coarse grid of its own would give each row its
    own set of possible values. Differentiable in ``rows``. Raises ValueError for eta not above 0.
    """
    check_eta(eta)
    width = rows.shape[-1]
    each = torch.full((rows.numel() // max(1, width),), eta, dtype=torch.float64, device=rows.device)
    noise = ops.dchi_vectors(each, width, stream)
    wide = torch.promote_types(rows.dtype, torch.float32)
    return (rows.to(wide) + noise.reshape(rows.shape).to(wide)).to(rows.dtype)


class PrivateBottom:
    """Runs a bottom and perturbs each row of what it returns: all that leaves the customer.

    Two texts of one length are told apart by at most ``eta * sum_j ||h_j - h'_j||`` nats, over all rows: after encoder blocks
    one changed token moves every row. Rows of padding leave as zeros.

    Args:
        bottom: the bottom of `split_model`. Trainable, it gets gradients, and every call is a further release of its texts;
            frozen, it runs without dropout, and each text should be sent once and kept.
        eta: privacy parameter of a row, in units of 1 / distance.
        unsafe_seed: randomness that whoever knows the seed can repeat: for tests.
    """

    def __init__(self, bottom: nn.Module, *, eta: float, unsafe_seed: int | None = None):
        self.bottom, self.eta = bottom, check_eta(eta)
        self.trainable = any(p.requires_grad for p in bottom.parameters())
        self.stream = NoiseStream() if unsafe_seed is None else NoiseStream.unsafe_reproducible(unsafe_seed)
        #: Rows of text that left.
        self.rows_released = 0

    def __call__(self, input_ids: Tensor, attention_mask: Tensor | None = None, **inputs: Any) -> Tensor:
        """Model inputs [B, T] -> perturbed hidden states [B, T, d]."""
        if not self.trainable:
            self.bottom.eval()
        with torch.set_grad_enabled(self.trainable and torch.is_grad_enabled()):
            hidden = self.bottom(input_ids, attention_mask, **inputs)
            noisy = add_dchi_noise(hidden, self.eta, self.stream)
            if attention_mask is not None:
                noisy = noisy * attention_mask[:, :, None].to(noisy.dtype)
        self.rows_released += int(input_ids.numel() if attention_mask is None else attention_mask.sum())
        return noisy

    @property
    def in_short(self) -> str:
        return f"noise on rows, eta {self.eta:g}"

    def statement(self, releases: int = 1) -> Card:
        """The card of a text that was sent ``releases`` times."""
        distance = "the sum over positions of the distance of the hidden rows"
        return Card.of(
            Metric(ONE_TEXT, self.eta, releases=releases, distance=distance),
            mechanism={"name": "multivariate Laplace noise on hidden rows", "bottom_trained": self.trainable},
            noise_source=noise_source(self.stream.reproducible, rounds=self.stream.rounds),
            flaws=(TRAINABLE,) if self.trainable else (),
            assumptions=PUBLIC_BOTTOM,
            unprotected=NOISED_ROWS,
            facts={"eta": self.eta, "rows_released": self.rows_released},
        )
