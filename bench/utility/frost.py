"""DP-FROST's tables 1, 3, 4 and 6 at laptop size: a small encoder on SST-2, at equal true epsilon.

    fastdp bench utility --suite frost --model MODEL --train train.tsv --eval dev.tsv --json frost.json

Every private row spends its ``epsilon`` truly (PLD), selection included. At laptop size the lower blocks of the encoder are
frozen for every method and computed once, which leaves time for the batch sizes that private training needs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import peft
import torch
from torch.utils.data import Dataset
from transformers import AutoTokenizer

import fastdp
from fastdp.methods.sap import split_model
from fastdp.private.method import Method
from fastdp.untrusted import load_pretrained

from . import suite, tops

RATIO = 0.25**2
#: The best at the middle epsilon of those tried, between worse ones (`bench/results/utility/frost*.json`). Like the paper's own
#: choice of them, that is not accounted for.
LEARNING_RATES = {**{"non-private": 3e-4, "full": 5e-3, "random": 2e-2, "lora": 5e-3, "adapter": 4e-2}, "frost": 2e-2}
PEFT = ("lora", "adapter")


@dataclass(frozen=True)
class Size:
    """How much is run.

    Args:
        train: training examples.
        frozen: lowest blocks, which no method trains; at least 1.
        rates: selection rates that are compared; the first is the usual one.
        repeats: numbers of selections that are compared.
        forms: private methods that DP-FROST is compared with.
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
    forms: tuple[str, ...] = ("full", "random", *PEFT)


SIZES = {
    "default": Size(),
    # The rows of the page's table.
    "usual": Size(rates=(0.01,), repeats=()),
    # E2E's meanings and references, matched or not.
    "pairs": Size(4672, length=96, rates=(0.01,), repeats=()),
    # The same, in minutes of a processor.
    "few-pairs": Size(*(2048, 15, 256, 96, 4, 800, (8.0,), (0.01,), (), ("full", "random"))),
    "tiny": Size(300, 2, 16, 12, 4, 24, (2.0,), (0.02,), (2,)),
}


PATHS = {
    "model": "folder of all-MiniLM-L6-v2 or another encoder",
    "train": "TSV with the columns sentence and label, or CSV of E2E",
    "eval": "file of the same form, held out",
}


class Rows(Dataset):
    """Hidden states of texts after the frozen blocks; an example is its index until it is collated."""

    def __init__(self, texts: tops.Texts, hidden: torch.Tensor):
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
        return {
            "inputs_embeds": self.hidden[rows, :width].float(),
            "attention_mask": self.texts.mask[rows, :width],
            "labels": self.texts.labels[rows],
        }


class Bench:
    """The data, and one run of any row.

    Args:
        model: folder of an encoder with its tokenizer.
        train, held_out: TSV files with the columns ``sentence`` and ``label``, 0 or 1.
    """

    def __init__(self, model: Path, train: Path, held_out: Path, size: Size):
        self.folder, self.size = model, size
        tokenizer = load_pretrained(AutoTokenizer, model)
        self.train, self.held_out = (
            self._rows(tops.read_texts(path, tokenizer, size.length, count, seed=0))
            for path, count in ((train, size.train), (held_out, size.held_out))
        )
        if len(self.held_out) < size.held_out:
            raise ValueError(f"{held_out} needs {size.held_out} rows for this size of the benchmark")
        self.delta = 1 / (2 * len(self.train))

    def _rows(self, texts: tops.Texts) -> Rows:
        # Half precision: the states of all examples stay in memory.
        return Rows(texts, tops.hidden_states(self._bottom, texts).half())

    @cached_property
    def _bottom(self) -> Any:
        return split_model(tops.load(self.folder, 0).to(suite.device()), self.size.frozen)[0]

    def model(self, form: str, seed: int) -> torch.nn.Module:
        """A fresh model above the frozen blocks, in training mode without dropout, which would differ between the methods."""
        model: Any = split_model(tops.load(self.folder, seed), self.size.frozen)[1]
        model.get_input_embeddings().requires_grad_(False)
        if form in PEFT:
            task: Any = {"task_type": "SEQ_CLS"}
            lora = peft.LoraConfig(r=8, lora_alpha=16, target_modules=["query", "key", "value", "dense"], **task)
            model = peft.get_peft_model(model, lora if form == "lora" else fastdp.BottleneckConfig(**task))
        return suite.without_dropout(model)

    def method(self, row: suite.Row) -> Method:
        form, size = row["form"], self.size
        if form == "non-private":
            return fastdp.NonPrivate()
        if form in ("full", *PEFT):
            return fastdp.DPSGD()
        if form == "random":
            return fastdp.DPFrost(unfreezing_ratio=RATIO, choose_by="random", seed=row["seed"])
        every = math.ceil(size.steps / row["selections"]) if row["selections"] > 1 else None
        return fastdp.DPFrost(
            unfreezing_ratio=RATIO,
            selection_steps=row["selection_steps"],
            selection_rate=row["selection_rate"],
            select_every=every,
        )

    def start(self, model: torch.nn.Module, row: suite.Row) -> fastdp.Private:
        """The private run of a row, not begun."""
        data = self.train
        return suite.private_run(
            model,
            data,
            data.collate,
            self.method(row),
            rate=LEARNING_RATES[row["form"]],
            batch_size=self.size.batch_size,
            steps=self.size.steps,
            target_epsilon=None if row["form"] == "non-private" else row["epsilon"],
            target_delta=self.delta,
            max_physical_batch_size=64 if suite.device().type == "cpu" else 640,
            # The same batches and noise for all forms of a seed, whose differences are then their own; the data is public.
            unsafe_seed=row["seed"],
        )

    def run(self, row: suite.Row) -> suite.Row:
        model = self.model(row["form"], row["seed"])
        names = {name: p for name, p in model.named_parameters() if p.requires_grad}
        run = self.start(model, row)
        begin = time.perf_counter()
        run.prepare()
        selection = time.perf_counter() - begin
        training = suite.train(run)
        rows, device = self.held_out, suite.device()
        found: suite.Row = {
            "accuracy": tops.accuracy(model, rows.hidden.float().to(device), rows.texts.to(device)),
            "true_epsilon": suite.spent_epsilon(run, self.delta),
            "noise_multiplier": run.noise_multiplier,
            "used_learning_rate": LEARNING_RATES[row["form"]],
            "trained_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
            "selection_seconds": selection,
            "training_seconds": training,
        }
        if row["form"] == "frost":
            assert isinstance(run.method, fastdp.DPFrost)
            found["selected"] = run.method.chosen(names, run.outcome)
        run.detach()
        return found


def settings(bench: Bench, seeds: int) -> Iterator[suite.Row]:
    """The rows of accuracy, no setting twice; the first seed of everything comes first."""
    size, base = bench.size, {"part": "accuracy"}
    frost: suite.Row = {**base, "form": "frost", "magnitude": "MGNA", "selection_steps": 5, "selections": 1}
    frost["selection_rate"] = size.rates[0]
    rows: list[suite.Row] = [{**base, "form": "non-private", "epsilon": "inf"}]
    for epsilon in size.epsilons:
        rows += [{**base, "form": form, "epsilon": epsilon} for form in size.forms]
        rows.append({**frost, "epsilon": epsilon})
    # Tables 3, 4 and 6 at the middle epsilon: at the least nothing is learned in so few steps.
    frost["epsilon"] = size.epsilons[len(size.epsilons) // 2]
    if size.repeats:
        rows += [{**frost, "selection_steps": n} for n in (1, 5)]
    rows += [{**frost, "selections": repeats} for repeats in size.repeats]
    rows += [{**frost, "selection_rate": rate} for rate in size.rates]
    return suite.by_seed(rows, seeds)


#: Measures what is missing, by the arguments of a command line.
main = partial(suite.main, __doc__, SIZES, Bench, settings, PATHS)
