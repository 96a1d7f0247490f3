"""DP-ZO beside DP-SGD on SST-2 at equal epsilon: the top block of MiniLM with its head, or the last layer alone.

    python -m bench.utility.zeroth --model MODEL --train train.tsv --eval dev.tsv --json zeroth.json

The blocks below are frozen for both and computed once. Both take equally many steps of the same batches, with the same seeds.
DP-SGD steps by AdamW and DP-ZO by SGD, as its page says. Learning rates, and the bound of slopes, are tried on texts of their own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

import fastdp
from fastdp.accounting import calibrate, dpsgd

from . import frost, suite

SIZES = {
    "default": frost.Size(8000, 200, 256, frozen=5, epsilons=(2.0, 8.0)),
    "tiny": frost.Size(300, 3, 32, 12, 5, 24, (8.0,)),
}
#: What is trained: the last layer, or all above the frozen blocks. Of each, learning rates to try, and the bound of slopes.
TRIED = {
    ("last", "dpsgd"): (1e-2, 3e-2, 1e-1),
    ("last", "dpzo"): (1e-3, 3e-3, 1e-2),
    ("block", "dpsgd"): (1e-3, 3e-3, 1e-2),
    ("block", "dpzo"): (1e-5, 3e-5, 1e-4),
}
SLOPES = {"last": 1.0, "block": 3.0}


class Bench(frost.Bench):
    """The data, and one run of any row."""

    def __init__(self, model: Path, train: Path, held_out: Path, size: frost.Size):
        super().__init__(model, train, held_out, size)
        self.multiplier = cache(self._multiplier)

    def _multiplier(self, epsilon: float) -> float:
        rate = self.size.batch_size / len(self.train)
        return calibrate(lambda noise: dpsgd(noise, rate, self.size.steps), epsilon=epsilon, delta=self.delta)

    def run(self, row: dict[str, Any]) -> dict[str, Any]:
        """Train and evaluate once."""
        model = self.model("full", row["seed"])
        if row["trained"] == "last":
            model.requires_grad_(False)
            model.classifier.requires_grad_(True)
        zeroth = row["form"] == "dpzo"
        method = fastdp.DPZO(max_slope=SLOPES[row["trained"]], seed=row["seed"]) if zeroth else fastdp.DPSGD()
        kind: Any = torch.optim.SGD if zeroth else partial(torch.optim.AdamW, weight_decay=0.0)
        trained = [p for p in model.parameters() if p.requires_grad]
        rate = row.get("learning_rate") or self.rates[row["trained"], row["form"]]
        size = self.size
        run = fastdp.make_private(
            model,
            kind(trained, lr=rate),
            DataLoader(self.train, batch_size=size.batch_size, collate_fn=self._collate),
            method=method,
            noise_multiplier=self.multiplier(row["epsilon"]),
            target_delta=self.delta,
            epochs=(size.steps - 0.5) / math.ceil(len(self.train) / size.batch_size),
            shapes={"lengths": [size.length + 1], "pad": {"inputs_embeds": 0.0, "attention_mask": 0}},
            max_physical_batch_size=64,
            # The same batches for both methods of a seed; the data is public.
            unsafe_seed=row["seed"],
        )
        seconds, _ = suite.timed(lambda: list(suite.train(run)))
        event = run.ledger.event()
        run.detach()
        return {
            "accuracy": self._accuracy(model, self.tuned_on if row["part"] == "rate" else self.held_out),
            "true_epsilon": float(fastdp.accounting.epsilon(event, self.delta)),
            "noise_multiplier": run.noise_multiplier,
            "used_learning_rate": rate,
            "steps": size.steps,
            "batch_size": size.batch_size,
            "texts": len(self.train),
            "trained_parameters": sum(p.numel() for p in trained),
            "training_seconds": seconds,
        }

    def _collate(self, indices: list[int]) -> dict[str, torch.Tensor]:
        """Every row as long as the longest may be."""
        batch, length = self.train.collate(indices), self.size.length
        for name in ("inputs_embeds", "attention_mask"):
            rest = length - batch[name].shape[1]
            batch[name] = torch.nn.functional.pad(batch[name], [0] * (2 * batch[name].dim() - 4) + [0, rest])
        return batch

    def learn_rates(self, rows: Sequence[dict[str, Any]]) -> None:
        """Take the learning rate that did best among those tried."""
        for place in TRIED:
            tried = [row for row in rows if row["part"] == "rate" and (row["trained"], row["form"]) == place]
            if tried:
                self.rates[place] = max(tried, key=lambda row: row["accuracy"])["learning_rate"]


def runs(bench: Bench, seeds: int, table: suite.Table) -> Iterator[suite.Run]:
    """Learning rates, then the rows with the best of these; the last layer alone first."""
    for trained in SLOPES:
        for form in ("dpsgd", "dpzo"):
            tried = partial(_rate, bench, trained, form, seeds)
            yield from suite.interior(table, TRIED[trained, form], tried, "accuracy", largest=True, most=5)
        bench.learn_rates(table.rows)
        rows = [
            {"part": "accuracy", "trained": trained, "form": form, "epsilon": epsilon}
            for epsilon, form in itertools.product(bench.size.epsilons, ("dpsgd", "dpzo"))
        ]
        yield from suite.each(suite.by_seed(rows, seeds), bench.run)


def _rate(bench: Bench, trained: str, form: str, seed: int, rate: float) -> suite.Run:
    """A learning rate at the largest epsilon, by a seed that no row has."""
    row = {"part": "rate", "trained": trained, "form": form, "epsilon": bench.size.epsilons[-1], "learning_rate": rate}
    return (row := {**row, "seed": seed}), partial(bench.run, row)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is missing."""
    parser = suite.parser_of(
        __doc__,
        SIZES,
        model="folder of all-MiniLM-L6-v2 or another encoder",
        train="TSV with the columns sentence and label",
        eval="TSV of the same form, held out",
    )
    options, size, table = suite.begin(parser, arguments)
    bench = Bench(options.model, options.train, options.eval, size)
    suite.measure(table, runs(bench, options.seeds, table), options.minutes, options.shard, options.skip_failures)


if __name__ == "__main__":
    main()
