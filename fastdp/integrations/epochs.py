"""A callback by which transformers' Trainer tells EW-FT each epoch, on which its noise depends."""

from __future__ import annotations

import math
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from fastdp.methods.ewft.releases import EWFT


class EpochCallback(TrainerCallback):
    """Tells an `EWFT` which epoch begins; Trainer needs ``remove_unused_columns=False`` besides, for ``example_ids``."""

    def __init__(self, ewft: EWFT):
        self.ewft = ewft

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Set the epoch, which EW-FT counts from 1."""
        # Trainer counts from 0 by adding up fractions, so that a whole number is one up to rounding.
        self.ewft.set_epoch(math.floor((state.epoch or 0.0) + 1e-6) + 1)
