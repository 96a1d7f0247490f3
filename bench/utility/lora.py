r"""Private LoRA at its best, on E2E references: each form at its own best learning rate, pairs of the same batches and noise.

    fastdp bench utility --suite lora --model MODEL --train train.csv --eval test.csv --json lora.json
    fastdp bench utility --suite lora --tuning full --forms warmed --column text --model MODEL --train train.txt --eval test.txt \
        --json full.json

Every row spends its ``epsilon`` truly (PLD). The protocol is one for all forms: three learning rates, and more while the best
is at the grid's edge, each once at the middle epsilon, on held-out texts and with a seed that nothing else uses; like
anybody's choice of them, that is not accounted for. A seed's forms share new weights, batches and noise, so that their
differences have a standard error of their own. Forms that are ``warmed`` make a pass over 64 public examples first; any method
may that is given some.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import fastdp
from fastdp.data import Examples
from fastdp.finetune.evaluation import evaluate
from fastdp.integrations.adapters import fix_lora_projections
from fastdp.methods import rapft
from fastdp.private.method import Method

from ..plots import picture
from . import rapft as suite_of_rapft, suite

DELTA = suite_of_rapft.DELTA
#: Learning rates by what is trained.
RATES = {"lora": (5e-3, 1e-2, 2e-2), "full": (2e-3, 4e-3, 8e-3)}
BASELINE = "DP-SGD"


@dataclass(frozen=True)
class Form:
    """What is done to plain DP-SGD, on LoRA of rank 4 and scale 8 or on all weights.

    Args:
        fixed: the first matrix is frozen with orthonormal rows (`fix_lora_projections`).
        warmed: a pass over the public examples first.
        renewed: gradients are clipped and noised along axes of single public examples' gradients, made anew before every so
            many steps; None for no axes.
        at_once: of so many public examples each time; None for all.
    """

    fixed: bool = False
    warmed: bool = False
    renewed: int | None = None
    at_once: int | None = None


FORMS = {
    BASELINE: Form(),
    "first matrix fixed": Form(fixed=True),
    "warmed": Form(warmed=True),
    "warmed, axes of single examples, renewed": Form(warmed=True, renewed=2),
    "warmed, axes of single examples, renewed from eight": Form(warmed=True, renewed=4, at_once=8),
    "warmed, fixed": Form(warmed=True, fixed=True),
}


@dataclass(frozen=True)
class Size:
    """How much is run; ``tuned_on`` held-out texts choose the learning rates."""

    steps: int = 12
    batch_size: int = 64
    length: int = 48
    held_out: int = 160
    tuned_on: int = 96
    public: int = 64
    epsilons: tuple[float, ...] = (1.0, 3.0, 8.0)
    tuning: str = "lora"

    @property
    def rates(self) -> tuple[float, ...]:
        """The learning rates that are tried first."""
        return RATES[self.tuning]

    @property
    def middle(self) -> float:
        """The epsilon at which learning rates are tried."""
        return self.epsilons[len(self.epsilons) // 2]


TINY = Size(2, 8, 32, 8, 8, 8, (5.0,))
FULL = Size(820, 256, 128, 4000, 600)


class Bench(suite_of_rapft.Bench):
    """The data, and one run of any row."""

    def __init__(
        self,
        model: Path,
        train: Path,
        held_out: Path,
        size: Size,
        column: str = "ref",
        public_rate: float | None = None,
    ):
        shared = suite_of_rapft.Size(
            steps=size.steps,
            batch_size=size.batch_size,
            length=size.length,
            held_out=size.held_out + size.tuned_on,
            public=size.public,
        )
        super().__init__(model, train, held_out, shared, column)
        self.tuning = size.tuning
        self.public_rate = public_rate or suite_of_rapft.LEARNING_RATES[size.tuning]
        items: Any = self.held_out.items
        self.tuned_on = Examples(items[: size.tuned_on], 0)
        self.judged_on = Examples(items[size.tuned_on :], 0)

    def fresh(self, form: Form, seed: int) -> torch.nn.Module:
        """A fresh model with its trained parameters."""
        model = self.model(self.tuning, seed)
        if form.fixed:
            torch.manual_seed(seed)
            fix_lora_projections(model)
        if form.warmed:
            rapft.warm_up(model, self.public, self.public_rate)
        return model

    def start(self, form: Form, row: dict[str, Any]) -> fastdp.Private:
        """The private run of a row, not begun."""
        model = self.fresh(form, row["seed"])
        return suite.private_run(
            model,
            self.train,
            self.collator,
            self._method(form),
            rate=row["learning_rate"],
            batch_size=self.size.batch_size,
            steps=self.size.steps,
            target_epsilon=row["epsilon"],
            target_delta=DELTA,
            max_physical_batch_size=32,
            # The same batches and noise for all forms of a seed; the data is public.
            unsafe_seed=row["seed"],
        )

    def run(self, row: dict[str, Any]) -> dict[str, Any]:
        """Train once and evaluate: perplexity, true epsilon, noise multiplier."""
        form = FORMS[row["form"]]
        run = self.start(form, row)
        list(suite.train(run))
        examples = self.tuned_on if row["part"] == "rate" else self.judged_on
        quality = evaluate(run.model, examples, self.collator, 32, "causal-lm")
        found = {
            "perplexity": quality.perplexity,
            "true_epsilon": float(fastdp.accounting.epsilon(run.ledger.event(), DELTA)),
            "noise_multiplier": run.noise_multiplier,
            "trained_parameters": sum(p.numel() for p in run.parameters.values()),
        }
        run.detach()
        return found

    def _method(self, form: Form) -> Method:
        if form.renewed is None:
            return fastdp.DPSGD()
        singles = [
            {key: value[i : i + 1] for key, value in batch.items()}
            for batch in self.public
            for i in range(len(batch["labels"]))
        ]
        source = rapft.PublicGradients(singles, at_once=form.at_once)
        return fastdp.RapFT(source, allocation="axes", map_every=form.renewed)


def settings(size: Size, seeds: int, rates: Mapping[str, float] | None = None) -> Iterator[dict[str, Any]]:
    """The rows of perplexity; the middle epsilon of every form and seed comes first."""
    known = dict.fromkeys(FORMS, size.rates[1]) if rates is None else rates
    for epsilon in sorted(size.epsilons, key=lambda epsilon: epsilon != size.middle):
        rows = [
            {"part": "perplexity", "form": form, "epsilon": epsilon, "learning_rate": known[form]} for form in known
        ]
        yield from suite.by_seed(rows, seeds)


def runs(bench: Bench, size: Size, table: suite.Table, seeds: int, forms: Sequence[str]) -> Iterator[suite.Run]:
    """Learning rates first, then the rows at the best of them."""
    for form in forms:

        def at(rate: float, form: str = form) -> suite.Run:
            row = {"part": "rate", "form": form, "epsilon": size.middle, "learning_rate": rate, "seed": seeds}
            return row, partial(bench.run, row)

        yield from suite.interior(table, size.rates, at, "perplexity", largest=False)
    yield from suite.each(settings(size, seeds, {form: best_rate(table.rows, form, size) for form in forms}), bench.run)


def best_rate(rows: Sequence[dict[str, Any]], form: str, size: Size) -> float:
    """The learning rate that did best among those tried; the middle of the grid if none was."""
    tried = [row for row in rows if row["part"] == "rate" and row["form"] == form]
    return min(tried, key=lambda row: row["perplexity"])["learning_rate"] if tried else size.rates[1]


def plot(rows: Sequence[dict[str, Any]], folder: Path, size: Size) -> None:
    """Perplexity against epsilon."""
    with picture(folder / "lora-epsilon.png", panel=(6.8, 5.2), legends=5) as (axes,):
        for form in FORMS:
            suite.curve(axes, rows, "perplexity", "epsilon", size.epsilons, form, part="perplexity", form=form)
        suite.by_epsilon(axes, size.epsilons, "perplexity")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is missing, then draw."""
    parser = suite.parser_of(
        __doc__,
        {"default": Size(), "tiny": TINY, "full": FULL},
        seeds=5,
        model="folder of a small GPT-2",
        train="file of rows with texts",
        eval="file of the same form, held out",
    )
    parser.add_argument("--column", default="ref", help="of the texts")
    parser.add_argument("--tuning", choices=tuple(RATES), default="lora", help="what is trained")
    parser.add_argument("--public-rate", type=float, help="learning rate of the pass over public examples")
    parser.add_argument("--forms", nargs="+", choices=tuple(FORMS), default=tuple(FORMS), help="only these")
    options, size, table = suite.begin(parser, arguments)
    size = dataclasses.replace(size, tuning=options.tuning)
    bench = Bench(options.model, options.train, options.eval, size, options.column, options.public_rate)
    wanted = runs(bench, size, table, options.seeds, options.forms)
    suite.finish(table, wanted, options, partial(plot, size=size))


if __name__ == "__main__":
    main()
