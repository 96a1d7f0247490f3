"""Private releases as modules of a user's own model: a noisy hidden state, and an embedding that replaces tokens."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fastdp.accounting import Card
from fastdp.methods.ewft import EWFT, NoiseSchedule
from fastdp.methods.sap import CTI, TextPrivatizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class NoisyHidden(nn.Module):
    """EW-FT's release as a layer: clip each sequence's hidden states to Frobenius norm C, and add Gaussian noise.

    Every path from a private input must go through it, which nothing checks in a model of your own. What precedes gets no
    gradient. `fastdp.EWFT` finds a place in a stock model, freezes what precedes it and takes ``example_ids`` out of the batch.

    Args:
        noise: a schedule, such as ``fastdp.methods.ewft.release_once(epsilon, delta)``.
        sequence_length: T, of every batch.
        dataset_size: training records, N; public.
        max_norm: C.
        unchecked_records, secure_rounding, output_dir, resume, unsafe_seed: as in `fastdp.EWFT`.

    Attributes:
        releases: the `fastdp.EWFT` behind it, which has `set_epoch`, `epsilon`, the ledger and `state_dict`.

    >>> import fastdp, torch
    >>> from fastdp.methods.ewft import release_once
    >>> noisy = fastdp.nn.NoisyHidden(noise=release_once(8.0, 1e-5), sequence_length=4, dataset_size=10)
    >>> noisy.releases.set_epoch(1)
    >>> noisy(torch.randn(2, 4, 8), example_ids=torch.tensor([0, 3])).shape
    torch.Size([2, 4, 8])
    >>> 7.9 < noisy.releases.epsilon() <= 8
    True
    """

    def __init__(
        self,
        *,
        noise: NoiseSchedule,
        sequence_length: int,
        dataset_size: int,
        max_norm: float = 1.0,
        unchecked_records: bool = False,
        secure_rounding: bool = True,
        output_dir: str | os.PathLike[str] | None = None,
        resume: bool = False,
        unsafe_seed: int | None = None,
    ):
        super().__init__()
        self.place = nn.Identity()
        self.releases = EWFT(
            self,
            layer="place",
            noise=noise,
            sequence_length=sequence_length,
            dataset_size=dataset_size,
            max_norm=max_norm,
            autoencoder=None,
            lengths="public",
            unchecked_records=unchecked_records,
            secure_rounding=secure_rounding,
            output_dir=output_dir,
            resume=resume,
            unsafe_seed=unsafe_seed,
        )

    def forward(
        self, hidden: Tensor, *, attention_mask: Tensor | None = None, example_ids: Tensor | None = None
    ) -> Tensor:
        """Hidden states [B, T, d] -> their release; padding, 0 in the mask [B, T], takes no part in the clip.

        ``example_ids`` [B] are needed in training, as `fastdp.EWFT` says.
        """
        if not self.releases.attached:
            raise RuntimeError("This layer's noise was removed, and hidden states would pass. Make a new NoisyHidden.")
        released: Tensor = self.place(hidden)
        return released

    def card(self) -> Card:
        """What was released about a training record, and what it costs."""
        return self.releases.card()


class PrivateEmbedding(nn.Embedding):
    """SAP's table as a layer: each token is replaced at random by one near it, and the row of that one is returned.

    It takes the place of a model's embedding, ``model.set_input_embeddings(PrivateEmbedding(embedding, eta=...))``, and shares
    its weight, which is frozen: the table must be public. Every lookup of a text is a release of its own.

    Args:
        embedding: the model's own; its forward makes the rows.
        eta, epsilon, tokenizer, mechanism, cti, unknown, duplicates, special_ids, unsafe_seed: as in
            `fastdp.TextPrivatizer`. Padding stays where a tokenizer, or ``special_ids``, tells it.

    Attributes:
        privatizer: the `fastdp.TextPrivatizer` behind it.
        lookups: its ledger: how often each text was looked up, by digest, whatever its padding and special tokens. Give a
            tokenizer or ``special_ids``, which tell padding. A text that is looked up as a part of longer ones is not found.

    >>> import fastdp, torch
    >>> table = torch.nn.Embedding(50, 8)
    >>> private = fastdp.nn.PrivateEmbedding(table, eta=4.0, mechanism="exponential")
    >>> rows = [private(torch.tensor([[3, 1, 4]])) for epoch in range(2)]
    >>> rows[0].shape, private.releases, private.card()["bound"]
    (torch.Size([1, 3, 8]), 2, "exp(8 * distance of the tokens' rows)")
    """

    def __init__(
        self,
        embedding: nn.Embedding,
        *,
        eta: float | None = None,
        epsilon: float | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        mechanism: str | None = None,
        cti: CTI | None = None,
        unknown: str = "perturb",
        duplicates: str = "refuse",
        special_ids: Sequence[int] = (),
        unsafe_seed: int | None = None,
    ):
        weight: Any = embedding.weight
        super().__init__(weight.shape[0], weight.shape[1], padding_idx=embedding.padding_idx, _weight=weight)
        self.weight = weight.requires_grad_(False)
        # Not a module of this one: its weight would be saved under two names.
        self._rows_of = [embedding]
        self.privatizer = TextPrivatizer(
            weight,
            eta=eta,
            epsilon=epsilon,
            tokenizer=tokenizer,
            mechanism=mechanism,
            cti=cti,
            unknown=unknown,
            duplicates=duplicates,
            special_ids=special_ids,
            unsafe_seed=unsafe_seed,
        )
        self.lookups: Counter[bytes] = Counter()
        self._uncounted = self.privatizer.kept.cpu().clone()
        if embedding.padding_idx is not None:
            self._uncounted[embedding.padding_idx] = True

    def forward(self, input: Tensor) -> Tensor:
        """Ids [..., T] -> the rows [..., T, d] of what stands in their place."""
        drawn = self.privatizer(input)
        rows = input.reshape(-1, input.shape[-1] if input.dim() else 1).to("cpu", torch.int64)
        # A text is padded as its batch is, and comes again in another one.
        texts = (row[~self._uncounted[row]].numpy().tobytes() for row in rows)
        self.lookups.update(hashlib.blake2b(text, digest_size=16).digest() for text in texts if text)
        found: Tensor = self._rows_of[0](drawn)
        return found

    @property
    def releases(self) -> int:
        """How often the text was looked up that came most often."""
        return max(self.lookups.values(), default=0)

    def card(self) -> Card:
        """What holds of the text that was looked up most often, and what does not."""
        return self.privatizer.statement(max(1, self.releases))
