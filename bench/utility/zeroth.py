"""DP-ZO beside DP-SGD on SST-2 at equal epsilon: the head of MiniLM, or its last layer alone, on computed hidden states.

    python -m bench.utility.zeroth --model MODEL --train train.tsv --eval dev.tsv --json zeroth.json

Both forms take the same batches of a seed. DP-SGD steps by AdamW and DP-ZO by SGD, as its page says. Learning rates, and the
bound of slopes, are tried on texts of their own.
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
    "default": frost.Size(8000, 200, 256, frozen=6, epsilons=(2.0, 8.0)),
    "tiny": frost.Size(300, 3, 32, 12, 6, 24, (8.0,)),
}
#: By what is trained, the last layer (770 numbers) or the whole head (148,610): learning rates of DP-SGD and of DP-ZO to try,
#: and the median slope of untrained weights, which is the bound.
TRIED: dict[str, tuple[tuple[float, ...], tuple[float, ...], float]] = {
    "last": ((1e-2, 3e-2, 1e-1), (3e-3, 1e-2, 3e-2), 1.0),
    "head": ((1e-3, 3e-3, 1e-2), (1e-4, 3e-4, 1e-3), 2.0),
}
FORMS = ("dpsgd", "dpzo")
#: Of the runs that try a rate; no row has it.
SEED = 100


class Bench(frost.Bench):
    """The data, and one run of any row."""

    def __init__(self, model: Path, train: Path, held_out: Path, size: frost.Size):
        super().__init__(model, train, held_out, size)
        self.multiplier = cache(self._multiplier)
        self.chosen: dict[tuple[str, str], float] = {}

    def _multiplier(self, epsilon: float, steps: int) -> float:
        rate = self.size.batch_size / len(self.train)
        return calibrate(lambda noise: dpsgd(noise, rate, steps), epsilon=epsilon, delta=self.delta)

    def run(self, row: dict[str, Any]) -> dict[str, Any]:
        """Train and evaluate once."""
        model: Any = self.model("full", row["seed"])
        if row["trained"] == "last":
            model.requires_grad_(False)
            model.classifier.requires_grad_(True)
        trained = [p for p in model.parameters() if p.requires_grad]
        rate = row.get("learning_rate") or self.chosen[place(row)]
        if row["form"] == "dpzo":
            method: Any = fastdp.DPZO(max_slope=TRIED[row["trained"]][2], seed=row["seed"])
            optimizer: torch.optim.Optimizer = torch.optim.SGD(trained, lr=rate)
        else:
            method, optimizer = fastdp.DPSGD(), torch.optim.AdamW(trained, lr=rate, weight_decay=0.0)
        size = self.size
        run = fastdp.make_private(
            model,
            optimizer,
            DataLoader(self.train, batch_size=size.batch_size, collate_fn=self._first_tokens),
            method=method,
            noise_multiplier=self.multiplier(row["epsilon"], row["steps"]),
            target_delta=self.delta,
            epochs=(row["steps"] - 0.5) / math.ceil(len(self.train) / size.batch_size),
            shapes={"lengths": [3], "pad": {"inputs_embeds": 0.0, "attention_mask": 0}},
            # The same batches for all forms of a seed; the data is public.
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
            "batch_size": size.batch_size,
            "texts": len(self.train),
            "trained_parameters": sum(p.numel() for p in trained),
            "training_seconds": seconds,
        }

    def _first_tokens(self, indices: list[int]) -> dict[str, torch.Tensor]:
        """All that the head reads."""
        batch = self.train.collate(indices)
        return {**batch, **{name: batch[name][:, :2] for name in ("inputs_embeds", "attention_mask")}}

    def choose_rates(self, rows: Sequence[dict[str, Any]]) -> None:
        """Take the learning rate that did best among those tried."""
        tried = sorted((row for row in rows if row["part"] == "rate"), key=lambda row: row["accuracy"])
        self.chosen = {place(row): row["learning_rate"] for row in tried}


def place(row: dict[str, Any]) -> tuple[str, str]:
    """What rows of one learning rate share."""
    return row["trained"], row["form"]


def runs(bench: Bench, seeds: int, table: suite.Table) -> Iterator[suite.Run]:
    """Learning rates, then the rows with the best of these; last DP-ZO in three times as many steps, at the same rate."""
    forms: list[dict[str, Any]] = [
        {"trained": trained, "form": form, "steps": bench.size.steps}
        for form, trained in itertools.product(FORMS, TRIED)
    ]
    for form in forms:
        rates = TRIED[form["trained"]][:2][form["form"] == "dpzo"]
        yield from suite.interior(table, rates, partial(_rate, bench, form), "accuracy", largest=True, most=5)
    bench.choose_rates(table.rows)
    longer = [{**form, "steps": 3 * form["steps"]} for form in forms if form["form"] == "dpzo"]
    for some in (forms, longer):
        rows = [{"part": "accuracy", **form, "epsilon": e} for e, form in itertools.product(bench.size.epsilons, some)]
        yield from suite.each(suite.by_seed(rows, seeds), bench.run)


def _rate(bench: Bench, form: dict[str, Any], rate: float) -> suite.Run:
    """A learning rate at the largest epsilon."""
    row = {"part": "rate", **form, "epsilon": bench.size.epsilons[-1], "learning_rate": rate, "seed": SEED}
    return row, partial(bench.run, row)


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
