"""Rap-FT's tables I, II and IV at laptop size: a small GPT-2 on E2E references, at equal true epsilon.

    fastdp bench utility --suite rapft --model MODEL --train train.csv --eval test.csv --json rapft.json

Every private row spends its ``epsilon`` truly, but for those of form ``paper``: they meet it as printed, with a mask from
private examples, so that no epsilon is true of them; ``fixed_mask_epsilon`` says what their steps alone cost. All rows of one
kind of fine-tuning share learning rate, steps and batch size.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import peft
import torch
import transformers as hf

import fastdp
from fastdp.data import Collator, Examples, causal_examples
from fastdp.finetune.evaluation import evaluate
from fastdp.integrations.adapters import train_biases_only
from fastdp.methods import rapft
from fastdp.private.method import Method
from fastdp.tables import read_rows
from fastdp.untrusted import load_pretrained

from . import suite

DELTA = 1e-5
TUNINGS = ("adapter", "bitfit", "lora")
FORMS = ("dpsgd", "printed", "optimal")
#: The noised map of form ``noised``: sigma_R and q_R.
NOISED = (2.0, 0.02)
MIDDLE = 5.0


@dataclass(frozen=True)
class Likeliest(rapft.Initialisation):
    """The paper's top-k start: relevance of the k likeliest tokens of each position."""

    k: int = 1

    def generation(self, logits: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
        probabilities = torch.softmax(logits[counted].float(), -1)
        values, tokens = probabilities.topk(self.k, -1)
        return torch.zeros_like(probabilities).scatter_(-1, tokens, values)


#: Where relevance starts, by a row's word for it; the first is the usual one.
STARTS = {
    "top_p": rapft.Initialisation(p=0.9),
    "naive": rapft.Initialisation(p=1.0),
    **{f"top_p {p}": rapft.Initialisation(p=p) for p in (0.85, 0.95)},
    **{f"top_k {k}": Likeliest(k=k) for k in (2, 5, 10)},
}


@dataclass(frozen=True)
class Size:
    """How much is run. Steps and batch size are few, but are drawn from, and accounted over, all training examples.

    Args:
        fewer: forms that are measured at the middle epsilon alone.
        rates: learning rates by kind of fine-tuning, the best for DP-SGD at epsilon 5 of those tried; the other forms take the
            same.
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
    starts: tuple[str, ...] = ()
    fewer: tuple[str, ...] = ("noised", "paper")
    rates: tuple[float, ...] = (1.2e-2, 4e-2, 1e-2)


#: The middle epsilon alone, for a GPU (`bench/results/utility/rapft-200.json`).
LONG = Size(200, 256, 320, 64, 1000, 64, (5.0,), ratios=(), fewer=("noised",), rates=(6e-3, 4e-2, 5e-3))
SIZES = {
    "default": Size(),
    "long": LONG,
    "faster": replace(LONG, tunings=("bitfit",), rates=(0.0, 8e-2, 0.0)),
    # Every epsilon and form, and table IV.
    "longest": replace(LONG, epsilons=(3.0, 5.0, 7.0), fewer=("noised", "paper")),
    "starts": replace(LONG, tunings=("lora",), starts=tuple(STARTS)),
    # What the noised map does with BitFit in few steps.
    "bitfit": Size(epsilons=(5.0,), tunings=("bitfit",), ratios=(), fewer=("noised",)),
    "tiny": Size(2, 8, 8, 32, 8, 8, (5.0,), ("lora",), (0.7,)),
}


class Bench:
    """The data, and one run of any row.

    Args:
        model: folder of a causal language model with its tokenizer.
        train, held_out: texts; some of the second, never evaluated on, are the public ones.
    """

    def __init__(self, model: Path, train: list[str], held_out: list[str], size: Size):
        self.folder, self.size = model, size
        self.tokenizer = tokenizer = load_pretrained(hf.AutoTokenizer, model)
        self.collator = Collator(
            tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        )
        self.train, rest = (causal_examples(tokenizer, texts, size.length) for texts in (train, held_out))
        needed = size.public + size.held_out
        if len(rest) < needed or len(self.train) < size.batch_size:
            raise ValueError(f"this size needs {size.batch_size} texts to train on and {needed} others")
        chosen = rest.items[:: max(1, len(rest) // needed)]
        public = chosen[: size.public]
        self.public = [suite.placed(self.collator(public[i : i + 32])) for i in range(0, size.public, 32)]
        self.held_out = Examples(chosen[size.public : needed], 0)

    @classmethod
    def of_files(cls, model: Path, train: Path, held_out: Path, size: Size) -> Bench:
        """The bench of two CSV files with a column ``ref``."""
        texts, others = (read_rows(str(path)).column("ref", "the texts") for path in (train, held_out))
        return cls(model, texts, others, size)

    def model(self, tuning: str, seed: int) -> torch.nn.Module:
        """A fresh model with its trained parameters, in training mode without dropout."""
        torch.manual_seed(seed)
        model: Any = load_pretrained(hf.AutoModelForCausalLM, self.folder)
        if tuning == "bitfit":
            train_biases_only(model)
        else:
            task: Any = {"task_type": "CAUSAL_LM"}
            lora = peft.LoraConfig(r=4, lora_alpha=32, **task)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*fan_in_fan_out.*")
                model = peft.get_peft_model(model, lora if tuning == "lora" else fastdp.BottleneckConfig(**task))
        return suite.without_dropout(model)

    def method(self, row: suite.Row) -> Method:
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
            # Equation 7: relevance passes a layer behind an activation by its positive contributions alone.
            propagation=rapft.Propagation(positive_after_activation=True),
            initialisation=STARTS[row["initialisation"]],
            map_after=0 if row["tuning"] == "bitfit" else min(2, self.size.steps - 1),
        )

    def run(self, row: suite.Row) -> suite.Row:
        """Train once and evaluate: perplexity, true epsilon, noise multiplier, seconds a step."""
        size = self.size
        model = self.model(row["tuning"], row["seed"])
        rate = size.rates[TUNINGS.index(row["tuning"])]
        run = suite.private_run(
            model,
            self.train,
            self.collator,
            self.method(row),
            rate=rate,
            batch_size=size.batch_size,
            steps=size.steps,
            weight_decay=1e-2,
            target_epsilon=None if row["form"] == "non-private" else row["epsilon"],
            target_delta=DELTA,
            max_physical_batch_size=size.physical_batch_size,
            # The same batches and noise for all forms of a seed, whose differences are then their own; the data is public.
            unsafe_seed=row["seed"],
        )
        seconds = suite.train(run)
        quality = evaluate(model, self.held_out, self.collator, size.physical_batch_size, "causal-lm")
        spent = suite.spent_epsilon(run, DELTA)
        found = {
            "perplexity": quality.perplexity,
            "true_epsilon": spent,
            "noise_multiplier": run.noise_multiplier,
            "used_learning_rate": rate,
            "steps": size.steps,
            "batch_size": size.batch_size,
            "seconds_per_step": seconds / size.steps,
        }
        if row["form"] == "paper":
            # A mask from private examples has no epsilon, whatever its steps cost.
            found |= {"true_epsilon": "inf", "fixed_mask_epsilon": spent}
        run.detach()
        return found | self.attacked(model)

    def attacked(self, model: torch.nn.Module) -> suite.Row:
        """What attackers find out from the tuned model."""
        return {}


def settings(bench: Bench, seeds: int) -> Iterator[suite.Row]:
    """The rows of perplexity, no setting twice; the first seed of everything comes first."""
    size, base = bench.size, {"part": "perplexity", "irrelevance_ratio": 0.7, "initialisation": "top_p"}
    rows: list[suite.Row] = []
    for tuning in size.tunings:
        own = {**base, "tuning": tuning}
        rows.append({**own, "form": "non-private", "epsilon": "inf"})
        rows += [{**own, "form": form, "epsilon": epsilon} for epsilon in size.epsilons for form in FORMS]
        rows += [{**own, "form": form, "epsilon": MIDDLE} for form in size.fewer]
    swept = {**base, "tuning": "lora", "form": "printed", "epsilon": MIDDLE}
    rows += [{**swept, "irrelevance_ratio": ratio} for ratio in size.ratios]
    rows += [{**swept, "initialisation": start} for start in size.starts]
    return suite.by_seed(rows, seeds)


PATHS = {"model": "folder of a small GPT-2", "train": "CSV with a column ref", "eval": "CSV of the same form, held out"}
#: Measures what is missing, by the arguments of a command line.
main = partial(suite.main, __doc__, SIZES, Bench.of_files, settings, PATHS)
