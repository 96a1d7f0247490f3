"""EW-FT at a pure epsilon: one code of a sequence leaves, once, in the place of its hidden states."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

import fastdp.accounting as accounting
from fastdp.accounting.statements import LOCAL_GUARANTEE, ONE_SEQUENCE
from fastdp.methods.blocks import Layer, layer_name
from fastdp.methods.ewft.hooks import LayerReleases, NoisePlace
from fastdp.methods.ewft.pooled import Codebook, Codes, pool_rows
from fastdp.methods.ewft.records import Records
from fastdp.methods.public import PublicText, describe_origin


class PureEWFT(LayerReleases):
    """Replaces the hidden states after one layer by what a pure-epsilon draw tells of them, in training and in inference.

    The states of a sequence are averaged over its tokens, made a code that `learn` took from public text, and told by
    randomised response, once: the draw of a training record is kept and used in every epoch. What follows
    the layer sees, at every position, the state that stands for the answer.

    Args:
        model: as for `EWFT`; what precedes the layer is frozen.
        mechanism: `ewft.codebook`.
        layer, sequence_length, dataset_size, lengths, public_texts: as in `NoisePlace`.
        unsafe_seed: draws that whoever knows the seed can repeat: for tests, and the card says so.

    What is training, and what a query, is decided as by `EWFT`. Each record is known by its id.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        layer: Layer,
        mechanism: Codebook,
        sequence_length: int,
        dataset_size: int,
        lengths: str = "hidden",
        public_texts: Sequence[PublicText] = (),
        unsafe_seed: int | None = None,
    ):
        self.settings = NoisePlace(
            layer=layer_name(model, layer),
            sequence_length=sequence_length,
            dataset_size=dataset_size,
            lengths=lengths,
            public_texts=public_texts,
        )
        self.mechanism = mechanism
        super().__init__(model, self.settings, unsafe_seed)
        self._records = Records(self.settings.dataset_size)
        self._codes: Codes | None = None
        self._with_labels = False
        self.attach(freeze=True)

    def learn(self, public_batches: Iterable[Mapping[str, Any]], *, labels: bool = True) -> None:
        """Learn the codes from **public** batches of model inputs; if they have ``labels`` [B], what tells those apart.

        Raises ValueError for too few or too uniform texts, and once something was released: its codes would lose their meaning.
        """
        if not self.untouched or self.inference_releases:
            raise ValueError(
                "texts were released by the codes that there are: by others their answers would mean another thing"
            )
        states, given = [], []
        for batch in public_batches:
            states.append(pool_rows(self.read_layer(batch, "hidden"), batch.get("attention_mask")))
            given.append(batch.get("labels"))
        if not states:
            raise ValueError("there was no public text to learn from")
        known = labels and all(
            isinstance(own, Tensor) and own.dim() == 1 and not own.is_floating_point() for own in given
        )
        self._codes = Codes.learn(states, given if known else None, self.mechanism.cells)  # type: ignore[arg-type]
        self._with_labels = known

    def release(self, hidden: Tensor, mask: Tensor | None, ids: Tensor | None) -> Tensor:
        if self._codes is None:
            raise RuntimeError("there are no codes yet: call learn with public text")
        code = self._codes.encode(pool_rows(hidden, mask))
        if not self.training:
            self.inference_releases += len(code)
            return self._drawn(code).to(hidden.device)
        return self._records.reused(code, ids, self._drawn).to(hidden.device)

    def _drawn(self, code: Tensor) -> Tensor:
        return self.mechanism.release(code, self.stream)

    def decode(self, code: Tensor) -> Tensor:
        assert self._codes is not None
        state = self._codes.states[code.cpu()].to(code.device)
        dtype = next(self.blocks.base.parameters()).dtype
        return state.to(dtype)[:, None, :].expand(-1, self.settings.sequence_length, -1).contiguous()

    @property
    def untouched(self) -> bool:
        return not bool(self._records.seen.any())

    def epsilon(self) -> float:
        """What was told of a training record so far; inf of draws that whoever knows their seed can repeat."""
        if self.untouched:
            return 0.0
        return math.inf if self.stream.reproducible else self.mechanism.epsilon

    def inference_epsilon(self, queries: int = 1) -> float:
        """What a sequence costs that was sent ``queries`` times in inference; every query is a draw of its own."""
        return math.inf if self.stream.reproducible else self.mechanism.epsilon * queries

    def claim(self) -> accounting.Pure:
        return accounting.Pure(ONE_SEQUENCE, self.mechanism.epsilon, units=1)

    def figure(self) -> str:
        return f"epsilon {self.mechanism.epsilon:g} without a delta for one user's sequence (local)"

    def card(self) -> accounting.Card:
        settings = self.settings
        return accounting.Card.of(
            self.claim(),
            mechanism={
                **self.mechanism.describe(),
                "layer": settings.layer,
                "sequence_length": settings.sequence_length,
                "encoder": None
                if self._codes is None
                else f"public text, {'with' if self._with_labels else 'without'} labels",
                "public_text": [text.describe() for text in settings.public_texts] or describe_origin(None),
            },
            noise_source=accounting.noise_source(self.stream.reproducible, rounds=self.stream.rounds),
            flaws=self.flaws(),
            assumptions=self.assumptions(),
            notes=(
                f"{LOCAL_GUARANTEE}what is told",
                f"each inference query tells as much again about the sequence in it; {self.inference_releases} were made",
            ),
            unprotected=self.unprotected(),
            facts={
                "dataset_size": settings.dataset_size,
                "released_records": int(self._records.seen.sum()),
                "model": self.described(),
            },
        )

    def state_dict(self) -> dict[str, Any]:
        """The codes, and the draws that are used again. They hold answers, and no key."""
        return {
            "learned": None if self._codes is None else vars(self._codes),
            "with_labels": self._with_labels,
            "seen": self._records.seen,
            "codes": self._records.codes,
            "inference_releases": self.inference_releases,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave: kept draws are used again in place of new ones."""
        if len(state["seen"]) != self.settings.dataset_size:
            raise ValueError(f"this state is of {len(state['seen'])} records, not {self.settings.dataset_size}")
        if state["learned"] is not None:
            self._codes = Codes(**state["learned"])
        self._with_labels = state["with_labels"]
        self._records.seen, self._records.codes = state["seen"], state["codes"]
        self.inference_releases = max(self.inference_releases, state["inference_releases"])
