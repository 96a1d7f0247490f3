"""DP-ZO beside DP-SGD on SST-2 at equal epsilon: the last layer of MiniLM (770 numbers), on computed hidden states.

    fastdp bench utility --suite zeroth --model MODEL --train train.tsv --eval dev.tsv --json zeroth.json

DP-SGD steps by AdamW. DP-ZO steps by SGD, as its page says, and four times as often, in batches of a quarter. Learning rates
are tried on texts of their own; the bound of slopes is `MAX_SLOPE`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

import fastdp
from fastdp.accounting import calibrate, dpsgd

from . import frost, suite

SIZES = {
    "default": frost.Size(8000, 200, 256, frozen=6, epsilons=(2.0, 8.0)),
    "full": frost.Size(60000, 1000, 512, frozen=6, epsilons=(2.0, 8.0)),
    "tiny": frost.Size(300, 3, 32, 12, 6, 24, (8.0,)),
}
#: Of each form its steps over those of the size, and learning rates to try.
FORMS: dict[str, tuple[int, tuple[float, ...]]] = {"dpsgd": (1, (1e-2, 3e-2, 1e-1)), "dpzo": (4, (0.3, 1.0, 3.0))}
#: The median slope of untrained weights.
MAX_SLOPE = 1.0
#: Of the runs that try a rate; no row has it.
SEED = 100


class Bench(frost.Bench):
    """The data, and one run of any row."""

    def __init__(self, model: Path, train: Path, held_out: Path, size: frost.Size):
        super().__init__(model, train, held_out, replace(size, held_out=2 * size.held_out))
        both, half = self.held_out, size.held_out
        self.held_out, self.tuned_on = (both.part(slice(first, first + half)) for first in (0, half))
        self.rates: dict[str, float] = {}
        self.multiplier = cache(self._multiplier)

    def _multiplier(self, epsilon: float, steps: int, batch_size: int) -> float:
        rate = batch_size / len(self.train)
        return calibrate(lambda noise: dpsgd(noise, rate, steps), epsilon=epsilon, delta=self.delta)

    def run(self, row: dict[str, Any]) -> dict[str, Any]:
        """Train and evaluate once."""
        model: Any = self.model("full", row["seed"])
        model.requires_grad_(False)
        trained = list(model.classifier.requires_grad_(True).parameters())
        rate = row.get("learning_rate") or self.rates[row["form"]]
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
            "accuracy": self._accuracy(model, self.tuned_on if row["part"] == "rate" else self.held_out),
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


def settings(bench: Bench, table: suite.Table, seeds: int, only: str) -> Iterator[suite.Row]:
    """Learning rates at the largest epsilon, on beyond the edge while the best lies there; then rows with the best of them."""
    steps = {form: times * bench.size.steps for form, (times, _) in FORMS.items()}
    forms = [form for form in FORMS if only in form]
    for form in forms:
        row = {"part": "rate", "form": form, "steps": steps[form], "epsilon": bench.size.epsilons[-1]}
        tried = [*FORMS[form][1]]
        while True:
            yield from ({**row, "learning_rate": rate, "seed": SEED} for rate in tried)
            found = {own["learning_rate"]: own["accuracy"] for own in table.rows if row.items() <= own.items()}
            known = sorted(found)
            if len(known) < len(tried):
                # Time was up.
                return
            best = bench.rates[form] = max(known, key=found.__getitem__)
            if best not in (known[0], known[-1]) or len(known) == 8:
                break
            tried = [*known, known[0] ** 2 / known[1] if best == known[0] else known[-1] ** 2 / known[-2]]
    rows = [
        {"part": "accuracy", "form": form, "steps": steps[form], "epsilon": epsilon}
        for epsilon, form in itertools.product(bench.size.epsilons, forms)
    ]
    yield from suite.by_seed(rows, seeds)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is missing."""
    parser = suite.parser_of(
        __doc__,
        SIZES,
        model="folder of all-MiniLM-L6-v2 or another encoder",
        train="TSV with the columns sentence and label",
        eval="TSV of the same form, held out",
    )
    options, size = suite.begin(parser, arguments)
    bench, table = Bench(options.model, options.train, options.eval, size), suite.Table(options.json)
    suite.measure(table, settings(bench, table, options.seeds, options.only), bench.run, options.minutes)


if __name__ == "__main__":
    main()
