"""Rap-FT's tables I, II, IV and figure 5 at laptop size: a small GPT-2 on E2E references, at equal true epsilon.

    fastdp bench utility --suite rapft --model MODEL --train train.csv --eval test.csv --json rapft.json --pictures FOLDER

Every private row spends its ``epsilon`` truly, but for those of form ``paper``: they meet it as printed, with a mask from
private examples, so that no epsilon is true of them; ``fixed_mask_epsilon`` says what their steps alone cost. All rows of one
kind of fine-tuning share learning rate, steps and batch size.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import peft
import torch
import transformers as hf

import fastdp
from fastdp.data import Collator, Examples, causal_examples, read_rows
from fastdp.finetune.evaluation import evaluate
from fastdp.integrations.adapters import train_biases_only
from fastdp.methods import rapft
from fastdp.private.method import Method
from fastdp.private.plan import Plan
from fastdp.untrusted import load_pretrained

from ..plots import picture
from . import suite

DELTA = 1e-5
TUNINGS = ("adapter", "bitfit", "lora")
FORMS = ("printed", "optimal")
#: Forms that are measured at the middle epsilon first.
FEWER = ("noised", "paper")
#: The best for DP-SGD at epsilon 5 of those tried at the default size, each about twice the one before; the other forms take
#: the same.
LEARNING_RATES = {"adapter": 1.2e-2, "bitfit": 4e-2, "lora": 1e-2, "full": 1e-3}
#: The noised map of form ``noised``: sigma_R and q_R.
NOISED = (2.0, 0.02)
#: What is not swept in a row, and the epsilon of those that are not compared at every one. Relevance passes a layer behind an
#: activation by its positive contributions alone, as the paper prints (equation 7).
USUAL: dict[str, Any] = {
    "irrelevance_ratio": 0.7,
    "initialisation": "top_p",
    "initialised_by": {"p": 0.9},
    "positive_after_activation": True,
}
MIDDLE = 5.0


@dataclass(frozen=True)
class Size:
    """How much is run. Steps and batch size are few, but are drawn from, and accounted over, all training examples.

    Args:
        tried: learning rates over `LEARNING_RATES` that are tried first, by DP-SGD at the middle epsilon.
        every_form_at: further epsilons, after everything else, of the forms that else have the middle one alone.
    """

    steps: int = 16
    batch_size: int = 64
    physical_batch_size: int = 32
    length: int = 64
    held_out: int = 96
    public: int = 64
    epsilons: tuple[float, ...] = (3.0, 5.0, 7.0)
    tunings: tuple[str, ...] = TUNINGS
    ratios: tuple[float, ...] = (0.55, 0.6, 0.7, 0.8, 0.9)
    initialisations: tuple[tuple[str, dict[str, Any]], ...] = (
        ("naive", {}),
        ("top_p", {"p": 0.9}),
    )
    tried: tuple[float, ...] = ()
    every_form_at: tuple[float, ...] = ()


TINY = Size(2, 8, 8, 32, 8, 8, (5.0,), ("lora",), (0.7, 0.9), (("top_p", {"p": 0.9}), ("naive", {})), tried=(0.5, 1.0))
#: For many processes on one GPU and few minutes.
SHORT = Size(
    200, 256, 128, 64, 1000, ratios=(), initialisations=(), tried=(0.125, 0.25, 0.5, 1.0), every_form_at=(3.0, 7.0)
)
FULL = Size(
    820,
    256,
    256,
    128,
    4000,
    64,
    initialisations=(
        ("naive", {}),
        *(("top_p", {"p": p}) for p in (0.85, 0.9, 0.95)),
    ),
)


class Bench:
    """The data, and one run of any row.

    Args:
        model: folder of a causal language model with its tokenizer.
        train, held_out: files of rows; some of the second, never evaluated on, are the public ones.
        column: of the rows' texts.
    """

    def __init__(self, model: Path, train: Path, held_out: Path, size: Size, column: str = "ref"):
        self.folder, self.size, self.column = model, size, column
        tokenizer = load_pretrained(hf.AutoTokenizer, model)
        self.collator = Collator(
            tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        )
        self.train = self._examples(tokenizer, train)
        rest = self._examples(tokenizer, held_out).items
        if len(rest) < size.public + size.held_out or len(self.train) < size.batch_size:
            raise ValueError(
                f"{held_out} needs {size.public + size.held_out} rows and {train} {size.batch_size} for this size"
            )
        chosen = rest[:: max(1, len(rest) // (size.public + size.held_out))]
        self.public = [
            suite.placed(self.collator(chosen[i : min(i + 32, size.public)])) for i in range(0, size.public, 32)
        ]
        self.held_out = Examples(chosen[size.public : size.public + size.held_out], 0)
        self.multiplier = cache(self._multiplier)
        self.rates = dict(LEARNING_RATES)

    def _examples(self, tokenizer: Any, path: Path) -> Examples:
        return causal_examples(tokenizer, read_rows(str(path)).column(self.column, "the texts"), self.size.length)

    def learn_rates(self, rows: Sequence[dict[str, Any]]) -> None:
        """Take the best of the learning rates that these rows tried, where some did."""
        for tuning in self.size.tunings:
            tried = list(suite.those(rows, part="rate", tuning=tuning))
            if tried:
                self.rates[tuning] = min(tried, key=lambda row: row["perplexity"])["learning_rate"]

    @property
    def per_epoch(self) -> int:
        return math.ceil(len(self.train) / self.size.batch_size)

    def model(self, tuning: str, seed: int) -> torch.nn.Module:
        """A fresh model with its trained parameters, in training mode without dropout."""
        torch.manual_seed(seed)
        model: Any = load_pretrained(hf.AutoModelForCausalLM, self.folder)
        if tuning == "bitfit":
            train_biases_only(model)
        elif tuning != "full":
            task: Any = {"task_type": "CAUSAL_LM"}
            lora = peft.LoraConfig(r=4, lora_alpha=32, **task)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*fan_in_fan_out.*")
                model = peft.get_peft_model(model, lora if tuning == "lora" else fastdp.BottleneckConfig(**task))
        return suite.without_dropout(model)

    def method(self, row: dict[str, Any]) -> Method:
        """The method of a row; parameters that start at zero are ranked after two private steps."""
        form = row["form"]
        if form in ("non-private", "dpsgd"):
            return fastdp.NonPrivate() if form == "non-private" else fastdp.DPSGD()
        source: Any = rapft.PublicMap(self.public)
        if form == "noised":
            source = rapft.NoisyMap(*NOISED)
        if form == "paper":
            source = rapft.PrivateSubset(self.size.public / len(self.train))
        return fastdp.RapFT(
            source,
            mode="paper" if form == "paper" else "sound",
            allocation="optimal" if form == "optimal" else "printed",
            irrelevance_ratio=row["irrelevance_ratio"],
            propagation=rapft.Propagation(positive_after_activation=row["positive_after_activation"]),
            initialisation=rapft.Initialisation(row["initialisation"], **row["initialised_by"]),
            map_after=0 if row["tuning"] == "bitfit" else min(2, self.size.steps - 1),
        )

    def _multiplier(self, epsilon: float, noised: bool) -> float:
        size = self.size
        plan = Plan(
            len(self.train), size.batch_size, size.steps, self.per_epoch, "poisson", "add_remove", epsilon, DELTA, None
        )
        return plan.multiplier(rapft.NoisyMap(*NOISED).side(1) if noised else ())

    def run(self, row: dict[str, Any]) -> dict[str, Any]:
        """Train once and evaluate: perplexity, true epsilon, noise multiplier, seconds a step."""
        size = self.size
        model = self.model(row["tuning"], row["seed"])
        private = row["form"] != "non-private"
        rate = row.get("learning_rate", self.rates[row["tuning"]])
        run = suite.private_run(
            model,
            self.train,
            self.collator,
            self.method(row),
            rate=rate,
            batch_size=size.batch_size,
            steps=size.steps,
            weight_decay=1e-2,
            noise_multiplier=self.multiplier(row["epsilon"], row["form"] == "noised") if private else None,
            target_delta=DELTA,
            max_physical_batch_size=size.physical_batch_size,
            # The same batches and noise for all forms of a seed, whose differences are then their own; the data is public.
            unsafe_seed=row["seed"],
        )
        seconds, _ = suite.timed(lambda: list(suite.train(run)))
        quality = evaluate(model, self.held_out, self.collator, size.physical_batch_size, "causal-lm")
        spent = float(fastdp.accounting.epsilon(run.ledger.event(), DELTA)) if private else math.inf
        found = {
            "perplexity": quality.perplexity,
            # A mask from private examples has none, whatever its steps cost.
            "true_epsilon": spent if math.isfinite(spent) and row["form"] != "paper" else "inf",
            "noise_multiplier": run.noise_multiplier,
            "used_learning_rate": rate,
            "steps": size.steps,
            "batch_size": size.batch_size,
            "seconds_per_step": seconds / size.steps,
        }
        if row["form"] == "paper":
            found["fixed_mask_epsilon"] = spent
        run.detach()
        return found

    def _warm(self, model: torch.nn.Module) -> None:
        rapft.warm_up(model, self.public, LEARNING_RATES["lora"])

    def _propagator(self, model: torch.nn.Module, initialisation: rapft.Initialisation) -> rapft.Propagator:
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        return rapft.Propagator(model, trained, initialisation=initialisation)

    def relevance(self, row: dict[str, Any]) -> dict[str, Any]:
        """Mean size of relevance by trained parameter, over the public examples."""
        model = self.model(row["tuning"], 0)
        self._warm(model)
        maps = [self._propagator(model, rapft.Initialisation()).total(batch) for batch in self.public]
        total = {name: torch.stack([m[name] for m in maps]).sum(0) for name in maps[0]}
        return {"relevance": {name: float(values.abs().mean()) / self.size.public for name, values in total.items()}}


def settings(size: Size, seeds: int) -> Iterator[dict[str, Any]]:
    """The rows of perplexity, no setting twice; the first seed of everything comes first."""
    base = {"part": "perplexity", **USUAL}
    rows: list[dict[str, Any]] = []
    for tuning in size.tunings:
        rows.append({**base, "tuning": tuning, "form": "non-private", "epsilon": "inf"})
        for epsilon in size.epsilons:
            rows += [{**base, "tuning": tuning, "form": form, "epsilon": epsilon} for form in ("dpsgd", *FORMS)]
        rows += [{**base, "tuning": tuning, "form": form, "epsilon": MIDDLE} for form in FEWER]
    swept = {**base, "tuning": "lora", "form": "printed", "epsilon": MIDDLE}
    rows += [{**swept, "irrelevance_ratio": ratio} for ratio in size.ratios]
    rows += [{**swept, "initialisation": kind, "initialised_by": by} for kind, by in size.initialisations]
    yield from suite.by_seed(rows, seeds)
    private = [(tuning, form, epsilon) for tuning in size.tunings for epsilon in size.every_form_at for form in FEWER]
    late = [{**base, "tuning": tuning, "form": form, "epsilon": epsilon} for tuning, form, epsilon in private]
    yield from suite.by_seed(late, seeds)


def trials(size: Size, seeds: int) -> Iterator[dict[str, Any]]:
    """DP-SGD at each learning rate that is tried, by a seed that no other row has."""
    for tuning, factor in itertools.product(size.tunings, size.tried):
        row = {"part": "rate", "tuning": tuning, "form": "dpsgd", "epsilon": MIDDLE, "seed": seeds}
        yield {**row, "learning_rate": factor * LEARNING_RATES[tuning]}


def runs(bench: Bench, seeds: int, table: suite.Table) -> Iterator[suite.Run]:
    """Everything that is measured: learning rates, then what takes little time, then the tables with the best rates."""
    yield from suite.each(trials(bench.size, seeds), bench.run)
    bench.learn_rates(table.rows)
    for tuning in bench.size.tunings:
        row: dict[str, Any] = {"part": "relevance", "tuning": tuning}
        yield row, partial(bench.relevance, row)
    yield from suite.each(settings(bench.size, seeds), bench.run)


def plot(rows: Sequence[dict[str, Any]], folder: Path) -> None:
    """Perplexity against epsilon and against the irrelevance ratio, and a heat map of relevance by layer."""
    tunings = [t for t in TUNINGS if any(row.get("tuning") == t for row in rows)]
    with picture(folder / "rapft-epsilon.png", len(tunings), panel=(4.6, 4.8)) as panels:
        for axes, tuning in zip(panels, tunings):
            for form in ("dpsgd", *FORMS):
                epsilons = sorted({r["epsilon"] for r in rows if r.get("form") == form and r["tuning"] == tuning})
                suite.curve(axes, rows, "perplexity", "epsilon", epsilons, form, form=form, tuning=tuning, **USUAL)
            suite.level(axes, rows, "perplexity", "non-private", form="non-private", tuning=tuning)
            axes.set(title=tuning, xlabel="true epsilon", ylabel="perplexity", xticks=epsilons)
    swept = {**USUAL, "form": "printed", "tuning": "lora", "epsilon": MIDDLE}
    del swept["irrelevance_ratio"]
    ratios = sorted({row["irrelevance_ratio"] for row in suite.those(rows, **swept)})
    with picture(folder / "rapft-ratio.png", panel=(6.4, 4.6)) as (axes,):
        suite.curve(axes, rows, "perplexity", "irrelevance_ratio", ratios, "printed shape", **swept)
        suite.level(axes, rows, "perplexity", "DP-SGD", form="dpsgd", tuning="lora", epsilon=MIDDLE)
        axes.set(xlabel="irrelevance ratio", ylabel="perplexity", title=f"LoRA at true epsilon {MIDDLE:g}")
    found = list(suite.those(rows, part="relevance"))
    with picture(folder / "rapft-relevance.png", len(found), panel=(5.9, 4.4)) as panels:
        for axes, row in zip(panels, found):
            _draw_relevance(axes, row)


def _draw_relevance(axes: Any, row: dict[str, Any]) -> None:
    layers: dict[str, dict[int, float]] = {}
    for name, value in row["relevance"].items():
        _, _, after = name.partition(".h.")
        number, _, rest = after.partition(".")
        if number.isdigit():
            layers.setdefault(rest.replace(".default", ""), {})[int(number)] = value
    depth = 1 + max(index for values in layers.values() for index in values)
    grid = [[math.log10(max(values.get(i, 0.0), 1e-12)) for i in range(depth)] for values in layers.values()]
    image = axes.imshow(grid, aspect="auto", cmap="viridis")
    shown = [name.replace("bottleneck_", "").removesuffix(".weight").replace(".bias", " (b)") for name in layers]
    axes.set_yticks(range(len(layers)), shown)
    axes.grid(visible=False)
    axes.set(title=row["tuning"], xlabel="block", xticks=range(depth))
    axes.figure.colorbar(image, ax=axes, label="log10 of mean |relevance|", pad=0.03)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is missing, then draw."""
    parser = suite.parser_of(
        __doc__,
        {"default": Size(), "tiny": TINY, "short": SHORT, "full": FULL},
        model="folder of a small GPT-2",
        train="CSV with a column ref",
        eval="CSV of the same form, held out",
    )
    parser.add_argument("--rates", action="store_true", help="only learning rates")
    parser.add_argument("--forms", nargs="+", help="only perplexity of these forms, of LoRA at the middle epsilon")
    options, size, table = suite.begin(parser, arguments)
    bench = Bench(options.model, options.train, options.eval, size)
    wanted = runs(bench, options.seeds, table)
    if options.rates:
        wanted = suite.each(trials(size, options.seeds), bench.run)
    if options.forms:
        middle = {"tuning": "lora", "epsilon": MIDDLE, **USUAL}
        every = (row for row in settings(size, options.seeds) if row["form"] in options.forms)
        wanted = suite.each((row for row in every if row == {**row, **middle}), bench.run)
    suite.finish(table, wanted, options, plot)


if __name__ == "__main__":
    main()
