"""DP-ZO beside DP-SGD on SST-2 at equal epsilon: the last layer of MiniLM (770 numbers), on computed hidden states.

    fastdp bench utility --suite zeroth --model MODEL --train train.tsv --eval dev.tsv --json zeroth.json

DP-SGD steps by AdamW. DP-ZO steps by SGD, as its page says, and four times as often, in batches of a quarter.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

import fastdp
from fastdp.accounting import calibrate, dpsgd

from . import frost, suite

SIZES = {
    "default": frost.Size(8000, 200, 256, frozen=6, epsilons=(2.0, 8.0)),
    "tiny": frost.Size(300, 3, 32, 12, 6, 24, (8.0,)),
}
#: Of each form its steps over those of the size, and the best learning rate of those tried on other texts
#: (`bench/results/utility/zeroth.json`).
FORMS: dict[str, tuple[int, float]] = {"dpsgd": (1, 0.1), "dpzo": (4, 0.3)}
#: The median slope of untrained weights.
MAX_SLOPE = 1.0


class Bench(frost.Bench):
    """The data, and one run of any row."""

    def __init__(self, model: Path, train: Path, held_out: Path, size: frost.Size):
        super().__init__(model, train, held_out, size)
        self.multiplier = cache(self._multiplier)

    def _multiplier(self, epsilon: float, steps: int, batch_size: int) -> float:
        rate = batch_size / len(self.train)
        return calibrate(lambda noise: dpsgd(noise, rate, steps), epsilon=epsilon, delta=self.delta)

    def run(self, row: dict[str, Any]) -> dict[str, Any]:
        """Train and evaluate once."""
        model: Any = self.model("full", row["seed"])
        model.requires_grad_(False)
        trained = list(model.classifier.requires_grad_(True).parameters())
        rate = FORMS[row["form"]][1]
        zeroth = row["form"] == "dpzo"
        optimizer = torch.optim.SGD(trained, lr=rate) if zeroth else torch.optim.AdamW(trained, rate, weight_decay=0.0)
        size = self.size.batch_size * self.size.steps // row["steps"]
        run = fastdp.make_private(
            model,
            optimizer,
            DataLoader(self.train, batch_size=size, collate_fn=self._first_tokens),
            method=fastdp.DPZO(max_slope=MAX_SLOPE, seed=row["seed"]) if zeroth else fastdp.DPSGD(),
            noise_multiplier=self.multiplier(row["epsilon"], row["steps"], size),
            target_delta=self.delta,
            epochs=(row["steps"] - 0.5) / math.ceil(len(self.train) / size),
            shapes={"lengths": [3], "pad": {"inputs_embeds": 0.0, "attention_mask": 0}},
            # The data is public.
            unsafe_seed=row["seed"],
        )
        seconds = suite.train(run)
        event = run.ledger.event()
        run.detach()
        return {
            "accuracy": self._accuracy(model, self.held_out),
            "true_epsilon": float(fastdp.accounting.epsilon(event, self.delta)),
            "noise_multiplier": run.noise_multiplier,
            "used_learning_rate": rate,
            "batch_size": size,
            "texts": len(self.train),
            "trained_parameters": sum(p.numel() for p in trained),
            "training_seconds": seconds,
        }

    def _first_tokens(self, indices: list[int]) -> dict[str, torch.Tensor]:
        """All that the head reads."""
        batch = self.train.collate(indices)
        return {**batch, **{name: batch[name][:, :2] for name in ("inputs_embeds", "attention_mask")}}


def settings(bench: Bench, seeds: int) -> Iterator[suite.Row]:
    """Each form at each epsilon; the first seed of everything comes first."""
    rows = [
        {"part": "accuracy", "form": form, "steps": times * bench.size.steps, "epsilon": epsilon}
        for epsilon, (form, (times, _)) in itertools.product(bench.size.epsilons, FORMS.items())
    ]
    return suite.by_seed(rows, seeds)


#: Measures what is missing, by the arguments of a command line.
main = partial(suite.main, __doc__, SIZES, Bench, settings, frost.PATHS)
