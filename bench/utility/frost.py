"""DP-FROST's tables 1, 3, 4 and 6 at laptop size: a small encoder on SST-2, at equal true epsilon.

    fastdp bench utility --suite frost --model MODEL --train train.tsv --eval dev.tsv --json frost.json --pictures FOLDER

Every private row spends its ``epsilon`` truly (PLD), selection included. At laptop size the lower blocks of the encoder are
frozen for every method and computed once, which leaves time for the batch sizes that private training needs. Learning rates
are tried first, on held-out examples of their own; like the paper's own choice of them, that is not accounted for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import peft
import torch
import transformers as hf
from torch.utils.data import Dataset

import fastdp
from fastdp.methods.sap import split_model
from fastdp.private.method import Method
from fastdp.private.plan import Budget, Plan
from fastdp.untrusted import load_pretrained

from ..plots import picture
from . import suite, tops

RATIO = 0.25**2
#: Learning rates that are tried before the rest, each once at the middle epsilon, and more of them while the best is at an edge;
#: rows of the other forms take a neighbour's.
TRIED = {
    "full": (2e-3, 5e-3, 1e-2),
    "values": (2e-2, 4e-2, 8e-2),
    "lora": (5e-3, 1e-2, 2e-2),
    "adapter": (1e-2, 2e-2, 4e-2),
    "frost": (5e-3, 1e-2, 2e-2),
    "soft": (2e-3, 5e-3, 1e-2),
    "soft once": (2e-3, 5e-3, 1e-2),
}
SHARED = {"random": "frost", "parameters": "values"}
PLAIN_RATE = 3e-4
#: What a table's rows start from.
FROST: dict[str, Any] = {
    "part": "accuracy",
    "form": "frost",
    "magnitude": "MGNA",
    "selection_steps": 5,
    "selections": 1,
}
PEFT = ("lora", "adapter")
#: Nothing frozen, every partition on its own scale: as far as noise is least for a given norm, and half as far, by one release
#: for a fiftieth of epsilon.
SOFT: dict[str, dict[str, Any]] = {
    "soft": {"axes_power": 0.5},
    "soft once": {"axes_power": 0.25, "selection_steps": 1, "budget_ratio": 0.98},
}


@dataclass(frozen=True)
class Size:
    """How much is run.

    Args:
        train: training examples.
        frozen: blocks, from below, that no method trains.
        rates: selection rates that are compared; the first is the usual one.
    """

    train: int = 20000
    steps: int = 30
    batch_size: int = 512
    length: int = 16
    frozen: int = 4
    held_out: int = 800
    epsilons: tuple[float, ...] = (0.5, 2.0, 8.0)
    rates: tuple[float, ...] = (0.01, 0.003, 0.03)
    repeats: tuple[int, ...] = (2, 4)

    @property
    def compared(self) -> float:
        """The epsilon of tables 3, 4 and 6: the middle one, since at the least nothing is learned in so few steps."""
        return self.epsilons[len(self.epsilons) // 2]


#: For several forms and seeds on one shared processor: what differs is to be read off pairs, not off the accuracy itself.
SMALL = Size(8000, 20, 256)
TINY = Size(300, 2, 16, 12, 4, 24, (2.0,), (0.02, 0.05), (2,))
FULL = Size(60614, 177, 1024, 64, 0, 3300, rates=(0.02, 1.0, 0.1, 0.05, 0.01))


class Rows(Dataset):
    """Texts, or their hidden states after the frozen blocks; an example is its index until it is collated."""

    def __init__(self, texts: tops.Texts, hidden: torch.Tensor | None):
        self.texts, self.hidden = texts, hidden
        #: Tokens of each example, by which the private loader sorts.
        self.lengths = texts.mask.sum(1).tolist()

    def __len__(self) -> int:
        return len(self.texts.labels)

    def __getitem__(self, index: int) -> int:
        return index

    def collate(self, indices: list[int]) -> dict[str, torch.Tensor]:
        """The batch of these examples, as wide as the longest of them."""
        rows, width = torch.tensor(indices), max(self.lengths[i] for i in indices)
        named = (
            {"input_ids": self.texts.ids[rows, :width]}
            if self.hidden is None
            else {"inputs_embeds": self.hidden[rows, :width].float()}
        )
        return {**named, "attention_mask": self.texts.mask[rows, :width], "labels": self.texts.labels[rows]}


class Bench:
    """The data, and one run of any row.

    Args:
        model: folder of an encoder with its tokenizer.
        train, held_out: TSV files with the columns ``sentence`` and ``label``, 0 or 1.
    """

    def __init__(self, model: Path, train: Path, held_out: Path, size: Size):
        self.folder, self.size = model, size
        tokenizer = load_pretrained(hf.AutoTokenizer, model)
        held = tops.read_texts(held_out, tokenizer, size.length, 2 * size.held_out, seed=0)
        if len(held.labels) < 2 * size.held_out:
            raise ValueError(f"{held_out} needs {2 * size.held_out} rows for this size of the benchmark")
        half = size.held_out
        self.train = self._rows(tops.read_texts(train, tokenizer, size.length, size.train, seed=0))
        self.held_out = self._rows(tops.Texts(held.ids[:half], held.mask[:half], held.labels[:half]))
        self.tuned_on = self._rows(tops.Texts(held.ids[half:], held.mask[half:], held.labels[half:]))
        self.delta = 1 / (2 * len(self.train))
        self.rates: dict[str, float] = {}
        self.budget = cache(self._budget)

    def _rows(self, texts: tops.Texts) -> Rows:
        if self.size.frozen == 0:
            return Rows(texts, None)
        bottom, _ = split_model(tops.load(self.folder, 0), self.size.frozen)
        # Half precision: the states of all examples stay in memory.
        return Rows(texts, tops.hidden_states(bottom, texts).half())

    def model(self, form: str, seed: int) -> torch.nn.Module:
        """A fresh model, or what of it lies above the frozen blocks, in training mode without dropout, which would differ
        between the methods.
        """
        model: Any = tops.load(self.folder, seed)
        if self.size.frozen:
            _, model = split_model(model, self.size.frozen)
            model.get_input_embeddings().requires_grad_(False)
        if form in PEFT:
            task: Any = {"task_type": "SEQ_CLS"}
            lora = peft.LoraConfig(r=8, lora_alpha=16, target_modules=["query", "key", "value", "dense"], **task)
            model = peft.get_peft_model(model, lora if form == "lora" else fastdp.BottleneckConfig(**task))
        return suite.without_dropout(model)

    def method(self, row: dict[str, Any], **options: Any) -> Method:
        """The method of a row."""
        form, size = row["form"], self.size
        if form == "non-private":
            return fastdp.NonPrivate()
        if form in ("full", *PEFT):
            return fastdp.DPSGD()
        if form in SOFT:
            soft = {**SOFT[form], **options}
            return fastdp.DPFrost(unfreezing_ratio=1.0, selection_rate=size.rates[0], **soft)
        if form == "random":
            return fastdp.DPFrost(unfreezing_ratio=RATIO, choose_by="random", seed=row["seed"])
        if form == "values":
            return fastdp.DPFrost(unfreezing_ratio=RATIO, choose_by="values", granularity="parameters")
        if form == "parameters":
            options |= {"granularity": "parameters"}
        if row["selections"] > 1:
            options |= {"select_every": math.ceil(size.steps / row["selections"])}
        return fastdp.DPFrost(
            unfreezing_ratio=RATIO,
            magnitude=row["magnitude"],
            selection_steps=row["selection_steps"],
            selection_rate=row["selection_rate"],
            **options,
        )

    def _budget(self, method: Method, epsilon: float) -> Budget:
        """The noise of a method; the same for all seeds, so found once."""
        size, units = self.size, len(self.train)
        per_epoch = math.ceil(units / size.batch_size)
        return method.budget(
            Plan(units, size.batch_size, size.steps, per_epoch, "poisson", "add_remove", epsilon, self.delta, None)
        )

    def start(self, model: torch.nn.Module, row: dict[str, Any]) -> fastdp.Private:
        """The private run of a row, not begun."""
        size = self.size
        options: dict[str, Any] = {}
        method = self.method(row)
        if row["form"] != "non-private":
            plain = replace(method, seed=0) if row["form"] == "random" else method  # type: ignore[type-var]
            budget = self.budget(plain, row["epsilon"])
            options["noise_multiplier"] = budget.noise_multiplier
            if budget.side:
                # The multiplier lies inside the event that the ledger will hold.
                one: Any = budget.side[0].event.one
                method = self.method(row, selection_noise_multiplier=one.event.noise_multiplier)
        data = self.train
        return suite.private_run(
            model,
            data,
            data.collate,
            method,
            rate=self._learning_rate(row),
            batch_size=size.batch_size,
            steps=size.steps,
            target_delta=1 / (2 * len(data)),
            max_physical_batch_size=64,
            # The same batches and noise for all forms of a seed, whose differences are then their own; the data is public.
            unsafe_seed=row["seed"],
            **options,
        )

    def _learning_rate(self, row: dict[str, Any]) -> float:
        form = row["form"]
        if form == "non-private":
            return PLAIN_RATE
        return row.get("learning_rate") or self.rates.get(SHARED.get(form, form), 1e-3)

    def learn_rates(self, rows: Sequence[dict[str, Any]]) -> None:
        """Take for each form the learning rate that did best among the rows that tried some."""
        best: dict[str, float] = {}
        for row in rows:
            if row["part"] == "rate" and row["accuracy"] > best.get(row["form"], 0.0):
                best[row["form"]], self.rates[row["form"]] = row["accuracy"], row["learning_rate"]

    def run(self, row: dict[str, Any]) -> dict[str, Any]:
        """Select, train and evaluate once."""
        model = self.model(row["form"], row["seed"])
        names = {name: p for name, p in model.named_parameters() if p.requires_grad}
        run = self.start(model, row)
        selection, _ = suite.timed(run.prepare)
        training, _ = suite.timed(lambda: list(suite.train(run)))
        held_out = self.tuned_on if row["part"] == "rate" else self.held_out
        private = row["form"] != "non-private"
        true = float(fastdp.accounting.epsilon(run.ledger.event(), self.delta)) if private else math.inf
        found: dict[str, Any] = {
            "accuracy": self._accuracy(model, held_out),
            "true_epsilon": true if math.isfinite(true) else "inf",
            "noise_multiplier": run.noise_multiplier,
            "used_learning_rate": self._learning_rate(row),
            "trained_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
            "selection_seconds": selection,
            "training_seconds": training,
        }
        if row["form"] == "frost":
            assert isinstance(run.method, fastdp.DPFrost)
            found["selected"] = run.method.chosen(names, run.outcome)
        run.detach()
        return found

    @torch.no_grad()
    def _accuracy(self, model: torch.nn.Module, rows: Rows) -> float:
        model.eval()
        right = 0
        for indices in torch.arange(len(rows)).split(64):
            batch = suite.placed(rows.collate(indices.tolist()))
            right += int((model(**batch).logits.argmax(1) == batch["labels"]).sum())
        return right / len(rows)


def settings(size: Size, seeds: int) -> Iterator[dict[str, Any]]:
    """The rows of accuracy, no setting twice; the first seed of everything comes first."""
    usual = size.rates[0]
    frost = {**FROST, "selection_rate": usual}
    rows: list[dict[str, Any]] = [{"part": "accuracy", "form": "non-private", "epsilon": "inf"}]
    for epsilon in size.epsilons:
        forms = ("full", "random", "values", *PEFT, *SOFT)
        rows += [{"part": "accuracy", "form": form, "epsilon": epsilon} for form in forms]
        rows.append({**frost, "epsilon": epsilon})
    rows.append({**frost, "form": "parameters", "selection_steps": 1, "epsilon": size.compared})
    for kind in ("MG", "MGNA"):
        rows += [{**frost, "magnitude": kind, "selection_steps": steps, "epsilon": size.compared} for steps in (1, 5)]
    rows += [{**frost, "selections": repeats, "epsilon": size.compared} for repeats in size.repeats]
    rows += [{**frost, "selection_rate": rate, "epsilon": size.compared} for rate in size.rates]
    return suite.by_seed(rows, seeds)


def runs(bench: Bench, seeds: int, table: suite.Table, forms: Sequence[str] = ()) -> Iterator[suite.Run]:
    """Everything that is measured: times, then learning rates, then the tables with the best of these; or that of some forms."""
    for form, rates in TRIED.items():
        if not forms or form in forms:
            yield from suite.interior(table, rates, partial(_rate, bench, form, seeds), "accuracy", largest=True)
    bench.learn_rates(table.rows)
    yield from suite.each((row for row in settings(bench.size, seeds) if not forms or row["form"] in forms), bench.run)


def _rate(bench: Bench, form: str, seed: int, rate: float) -> suite.Run:
    """A form at a learning rate, on the held-out texts that only rates are chosen by."""
    row: dict[str, Any] = {"part": "rate", "form": form, "epsilon": bench.size.compared, "learning_rate": rate}
    row |= {"seed": seed, **({**FROST, "selection_rate": bench.size.rates[0], **row} if form == "frost" else {})}
    return row, partial(bench.run, row)


def plot(rows: Sequence[dict[str, Any]], folder: Path, size: Size) -> None:
    """Accuracy against epsilon, and which partitions were selected in which iteration."""
    usual = {**FROST, "selection_rate": size.rates[0]}
    with picture(folder / "frost-epsilon.png", panel=(6.8, 5.2), legends=4) as (axes,):
        for form in ("full", "random", "values", *PEFT, "frost"):
            setting = usual if form == "frost" else {"part": "accuracy", "form": form}
            suite.curve(axes, rows, "accuracy", "epsilon", size.epsilons, form, **setting)
        suite.level(axes, rows, "accuracy", "non-private", part="accuracy", form="non-private")
        suite.by_epsilon(axes, size.epsilons, "accuracy")
    _plot_selected(list(suite.those(rows, **usual)), folder)


def _plot_selected(rows: Sequence[dict[str, Any]], folder: Path) -> None:
    if not rows:
        return
    rows = sorted(rows, key=lambda row: (row["epsilon"], row["seed"]))
    names = sorted({name for row in rows for name in row["selected"]})
    grid = [[row["selected"].get(name, math.nan) for row in rows] for name in names]
    last, shown = FROST["selection_steps"], [name.replace("bert.encoder.layer.", "layer ") for name in names]
    with picture(folder / "frost-selected.png", panel=(4.5 + 0.42 * len(rows), 1.4 + 0.34 * len(names))) as (axes,):
        image = axes.imshow(grid, aspect="auto", cmap="viridis", vmin=1, vmax=last)
        axes.set_yticks(range(len(names)), shown)
        axes.set_xticks(range(len(rows)), [f"{row['epsilon']:g}" for row in rows])
        axes.grid(visible=False)
        axes.set(xlabel="epsilon, one column a seed", title="Partitions, by the iteration that selected them")
        axes.figure.colorbar(image, ax=axes, label="iteration", ticks=range(1, last + 1))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is missing, then draw."""
    parser = suite.parser_of(
        __doc__,
        {"default": Size(), "small": SMALL, "tiny": TINY, "full": FULL},
        model="folder of all-MiniLM-L6-v2 or another encoder",
        train="TSV with the columns sentence and label",
        eval="TSV of the same form, held out",
    )
    parser.add_argument("--forms", nargs="+", default=(), help="only the learning rates and the accuracy of these")
    options, size, table = suite.begin(parser, arguments)
    bench = Bench(options.model, options.train, options.eval, size)
    wanted = runs(bench, options.seeds, table, options.forms)
    suite.finish(table, wanted, options, partial(plot, size=size))


if __name__ == "__main__":
    main()
