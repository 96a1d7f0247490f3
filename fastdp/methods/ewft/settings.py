"""What an EW-FT perturbation is, before there is a model: its settings, the header of its ledger, and what voids it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fastdp.accounting as accounting
from fastdp.accounting.ledger import STEP
from fastdp.methods.blocks import Layer
from fastdp.methods.ewft.autoencoder import StackedAutoencoder
from fastdp.methods.ewft.noise import NoiseSchedule
from fastdp.methods.public import PublicText
from fastdp.validate import one_of, positive

_TRAINED_BOTTOM = (
    "the layers before the perturbation are trained on sequences without noise: whoever sees them, or an update of them, "
    "learns about the sequences in a way that the noise does not cover"
)
_JOINT_AUTOENCODER = "the autoencoder is trained together with the model, on sequences without noise, and then shared"


@dataclass(frozen=True, kw_only=True)
class NoisePlace:
    """Where a model is perturbed, and what of its batches is public; see `EWFTSettings`.

    Raises ValueError for values out of range.
    """

    layer: Layer
    sequence_length: int
    dataset_size: int
    lengths: str = "hidden"
    public_texts: Sequence[PublicText] = ()

    def __post_init__(self) -> None:
        for name in ("sequence_length", "dataset_size"):
            value = getattr(self, name)
            if isinstance(value, bool) or not (isinstance(value, int) and value >= 1):
                raise ValueError(f"{name} is {value!r}: it must be a whole number of at least 1")
        one_of(("hidden", "public"), lengths=self.lengths)


@dataclass(frozen=True, kw_only=True)
class EWFTSettings(NoisePlace):
    """Settings of `EWFT`, all public.

    Args:
        layer: ``embeddings`` (0), the number of a block counted from 1, or ``output``; or the dotted name of such a module.
            In an architecture that is not known, the dotted name of a module that every path goes through.
        noise: a `NoiseSchedule`, such as ``ewft.release_once(epsilon, delta)`` or ``ewft.dp_forward(...)``.
        sequence_length: tokens of every padded sequence. Batches of another length are refused: a length that follows the
            text gives it away.
        dataset_size: records in the training data, N; public.
        max_norm: C.
        autoencoder: sizes of its layers down to the code, such as ``(64,)`` or ``(256, 64, 4)``; a `StackedAutoencoder`
            of the model's width; or None for none (DP-Forward).
        bottom: ``frozen`` turns off the gradients of all that precedes the layer, tied weights included (see
            ``frozen_parameters``); ``trained`` leaves them, which voids the guarantee, and the card says so.
        lengths: ``hidden`` lets the layers that follow attend to padding too, since their mask would show each length;
            ``public`` leaves the mask alone, and the card says so.
        joint_autoencoder: train the autoencoder with the model, as the paper does; this voids the guarantee.
        unchecked_records: train without ``example_ids``, if the loader surely uses each record once an epoch. Only the
            number of rows is looked at then, and the card states the assumption.
        secure_rounding: as in `fastdp.ops.clip_noise`.
        public_texts: what the autoencoder or the layers below the noise learned from, for the card.

    Raises:
        ValueError: for values out of range, or that contradict each other.
    """

    noise: NoiseSchedule
    max_norm: float = 1.0
    autoencoder: Sequence[int] | StackedAutoencoder | None = (64,)
    bottom: str = "frozen"
    joint_autoencoder: bool = False
    unchecked_records: bool = False
    secure_rounding: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(max_norm=self.max_norm)
        one_of(("frozen", "trained"), bottom=self.bottom)
        if self.unchecked_records and self.noise.reuse:
            raise ValueError(
                "a schedule that releases once finds its releases by example_ids: leave unchecked_records out"
            )

    @property
    def exposed(self) -> bool:
        """Whether gradients reach what precedes the noise."""
        return self.bottom == "trained" or self.joint_autoencoder

    def flaws(self) -> list[str]:
        """Why runs with these settings carry no guarantee; empty if they do."""
        found = list(self.noise.flaws)
        if self.bottom == "trained":
            found.append(_TRAINED_BOTTOM)
        if self.joint_autoencoder and self.autoencoder is not None:
            found.append(_JOINT_AUTOENCODER)
        return found

    def ledger(self, output_dir: str | os.PathLike[str] | None, resume: bool) -> accounting.Ledger:
        """The ledger in a folder, or in memory: one release of every record for each level of noise, by `kind`.

        Raises ValueError as `Ledger.open_or_create` does.
        """
        header: dict[str, Any] = {
            "mechanism": self.noise.name,
            "dataset_size": self.dataset_size,
            "unit": "one user's sequence",
            "adjacency": "replace_one",
            "noise_std_over_max_norm": list(self.noise.ratios),
            "layer": self.layer,
            "max_norm": float(self.max_norm),
            "unchecked_records": self.unchecked_records,
            "flaws": self.flaws(),
        }
        first, *later = (accounting.EventModel(accounting.gaussian(ratio)) for ratio in self.noise.ratios)
        return accounting.Ledger.open_or_create(
            None if output_dir is None else Path(output_dir) / "ledger.jsonl",
            header,
            event=first,
            budget_steps=1,
            side={kind(epoch): (model, 1) for epoch, model in enumerate(later, start=2)},
            resume=resume,
        )


def kind(epoch: int) -> str:
    """What the ledger calls the release of every record in an epoch."""
    return STEP if epoch == 1 else f"epoch {epoch}"
