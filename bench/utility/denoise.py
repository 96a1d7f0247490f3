"""Split-and-denoise (Mai et al., 2024, arXiv 2310.09130) as a baseline of SAP.

Rows of tokens leave with noise, the text's embedding comes back, and a network that the vendor trained on public text takes
the noise out of it, at the customer's.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import fastdp.ops as ops
from fastdp.methods.sap.bottom import add_dchi_noise
from fastdp.ops.stream import NoiseStream

from .tops import Texts

#: Of the denoiser: blocks (the paper has six), texts a step and the rate of its AdamW.
BLOCKS = 2
BATCH_SIZE = 64
LEARNING_RATE = 5e-4


@dataclass
class Sent:
    """What a text sent: its rows, their noise, both [N, T, d], and what came back, [N, d]."""

    rows: Tensor
    noise: Tensor
    returned: Tensor
    mask: Tensor

    def guessed(self, table: Tensor) -> Tensor:
        """The tokens nearest to the rows that left, int64 [N, T]."""
        return ops.snap((self.rows + self.noise).flatten(0, 1), table).view(self.mask.shape)


class Denoiser(nn.Module):
    """From what came back, the rows and their noise to the embedding without noise."""

    def __init__(self, width: int):
        super().__init__()
        block = nn.TransformerEncoderLayer(width, 6, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, BLOCKS, enable_nested_tensor=False)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.out = nn.Linear(width, width)
        # Begins as no change at all.
        nn.init.zeros_(self.out.weight)

    def forward(self, sent: Sent) -> Tensor:
        """Embeddings [N, d]."""
        given = (sent.returned[:, None], sent.rows, sent.noise)
        sequence = torch.cat([norm(own) for norm, own in zip(self.norms, given)], dim=1)
        there = torch.cat([sent.mask.new_ones(len(sent.mask), 1), sent.mask, sent.mask], dim=1).bool()
        return sent.returned + self.out(self.blocks(sequence, src_key_padding_mask=~there)[:, 0])


class Embedder:
    """A vendor's frozen encoder, which serves the mean of its last states for rows in the place of tokens."""

    def __init__(self, encoder: Any, stream: NoiseStream):
        self.encoder, self.stream = encoder.eval(), stream
        self.table = encoder.get_input_embeddings().weight

    @torch.no_grad()
    def send(self, texts: Texts, eta: float | None, part: slice | Tensor = slice(None)) -> Sent:
        """The texts with noise on each token's row, but those that open, close and pad; without for an eta of None."""
        width = int(texts.mask[part].sum(1).max())  # no wider than the longest
        ids, mask = texts.ids[part, :width], texts.mask[part, :width]
        rows = self.table[ids]
        inner = (
            mask.bool()
            & (torch.arange(ids.shape[1]) > 0)
            & (torch.arange(ids.shape[1]) < mask.sum(1, keepdim=True) - 1)
        )
        noise = torch.zeros_like(rows)
        if eta is not None:
            noise[inner] = add_dchi_noise(noise[inner], eta, self.stream)
        returned = [
            (self.encoder(inputs_embeds=own, attention_mask=there).last_hidden_state * there[..., None]).sum(1)
            for own, there in zip((rows + noise).split(BATCH_SIZE), mask.split(BATCH_SIZE))
        ]
        return Sent(rows, noise, torch.cat(returned) / mask.sum(1, keepdim=True), mask)


def trained(embedder: Embedder, public: Texts, eta: float, steps: int, seed: int) -> Denoiser:
    """A denoiser of public texts, each of which gets other noise every time it is seen; by squared error, as in the paper."""
    torch.manual_seed(seed)
    denoiser = Denoiser(embedder.table.shape[1])
    optimizer = torch.optim.AdamW(denoiser.parameters(), lr=LEARNING_RATE)
    slower = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    truth = embedder.send(public, None).returned
    for _, part in zip(range(steps), _parts(public.mask.sum(1), seed)):
        nn.functional.mse_loss(denoiser(embedder.send(public, eta, part)), truth[part]).backward()
        optimizer.step()
        optimizer.zero_grad()
        slower.step()
    return denoiser.eval().requires_grad_(False)


def _parts(lengths: Tensor, seed: int) -> Iterator[Tensor]:
    """Batches of texts of about one length each, in another order in every pass."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        parts = (lengths + 2 * torch.rand(len(lengths), generator=generator)).argsort().split(BATCH_SIZE)
        yield from (parts[i] for i in torch.randperm(len(parts), generator=generator).tolist())
