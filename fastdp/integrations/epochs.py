"""EW-FT's noise in step with transformers' Trainer."""

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
        """Trainer counts epochs from 0, in fractions."""
        # At the start of an epoch the fraction is whole up to rounding.
        self.ewft.set_epoch(math.floor((state.epoch or 0.0) + 1e-6) + 1)
