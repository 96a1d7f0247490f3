"""EW-FT's tables 3, 6 and 7 at laptop size: MiniLM on a slice of SST-2, at the printed epsilon and at the true one.

    fastdp bench utility --suite ewft --model MODEL --sst2 FOLDER --public FILE --json ewft.json

The lower blocks (`Size.frozen`) are frozen in every row and computed once. What is trained below the noise differs by row:

- ``bottom: private``: the blocks between learn from the private texts, below the noise, as in the paper. No guarantee.
- ``bottom: public``: they learn, under the same clip and noise, from other labelled texts that count as public, and are then
  frozen; the blocks above the noise go on to learn from the private texts.
- ``bottom: pretrained``: nothing below the noise learns.

`paper` rows add the noise that the paper prints for its own 67,349 examples; ``true_epsilon`` is what these releases really
cost. `sound` and `once` rows spend the printed epsilon, truly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

import fastdp
from fastdp.methods import ewft
from fastdp.methods.sap import split_model
from fastdp.untrusted import load_pretrained

from . import suite, tops

DELTA = 1e-5
PAPER: dict[str, Any] = {"dataset_size": 67349, "batch_size": 32, "epochs": 3}


@dataclass(frozen=True)
class Size:
    """How much is run."""

    train: int = 2048
    public: int = 2048
    unlabelled: int = 512
    held_out: int = 872
    length: int = 16
    frozen: int = 4
    layers: tuple[int, ...] = (4, 5, 6)
    epochs: int = 3
    batch_size: int = 32
    learning_rate: float = 2e-4
    autoencoder_passes: int = 4


SIZES = {
    "default": Size(),
    "tiny": Size(train=32, public=32, unlabelled=32, held_out=16, layers=(5, 6), autoencoder_passes=1),
    # The paper's length, and the rows of the page's table.
    "long": Size(length=64, layers=(6,)),
}
#: Codes without a delta, by their number: two learn from labels, the others from what varies most.
PURE = {"codebook 2": 2, "codebook 16": 16}
#: Dimensions of the paper's autoencoders, from the outermost.
AUTOENCODERS = ([4], [64], [256], [64, 4], [256, 64, 4])


@cache
def schedule(form: str, epsilon: float, distance: float) -> ewft.NoiseSchedule:
    """The noise of a row: falling as printed (std C sigma) for the paper's data set, or sound."""
    if form == "once":
        return ewft.release_once(epsilon, DELTA)
    if form == "sound":
        return ewft.dp_forward(PAPER["epochs"], epsilon, DELTA)
    printed = fastdp.accounting.epoch_weighted_schedule(epsilon=epsilon, delta=DELTA, step_distance=distance, **PAPER)
    return ewft.paper(tuple(printed), epsilon, DELTA, "C")


@dataclass(frozen=True)
class Part:
    """Texts and their hidden states [N, T, d] after the frozen blocks."""

    texts: tops.Texts
    states: Tensor

    def batches(self) -> list[dict[str, Tensor]]:
        """Inputs of the model above, without labels."""
        pairs = zip(self.states.split(32), self.texts.mask.split(32))
        return [{"inputs_embeds": states, "attention_mask": mask} for states, mask in pairs]


class Bench:
    """Texts and hidden states of a seed, kept between rows."""

    def __init__(self, model: Path, sst2: Path, unlabelled: Path, size: Size):
        self.model, self.sst2, self.unlabelled, self.size = model, sst2, unlabelled, size
        self.parts = lru_cache(1)(self._parts)

    def _parts(self, seed: int) -> dict[str, Any]:
        """The model and, by name, the texts."""
        tokenizer, model, size = load_pretrained(AutoTokenizer, self.model), tops.load(self.model, seed), self.size
        device = suite.device()
        texts = {
            "train": tops.read_texts(self.sst2 / "train.tsv", tokenizer, size.length, size.train, seed),
            "public": tops.read_texts(self.sst2 / "dev.tsv", tokenizer, size.length, size.public, seed),
            "held_out": tops.read_texts(self.sst2 / "test.tsv", tokenizer, size.length, size.held_out, seed),
            "unlabelled": tops.read_public(self.unlabelled, tokenizer, size.length, size.unlabelled),
        }
        bottom, _ = split_model(model.to(device), size.frozen)
        placed = {name: each.to(device) for name, each in texts.items()}
        parts = {name: Part(each, tops.hidden_states(bottom, each)) for name, each in placed.items()}
        return {"model": model, **parts}

    def run(self, row: suite.Row) -> suite.Row:
        parts = self.parts(row["seed"])
        state = {name: value.clone() for name, value in parts["model"].state_dict().items()}
        torch.manual_seed(row["seed"])
        _, top = split_model(parts["model"], self.size.frozen)
        try:
            if row["form"] == "none":
                self._train(top, parts["train"], row["seed"])
                return {"accuracy": self._accuracy(top, row["seed"])}
            return self._at_a_pure_epsilon(top, row) if row["form"] == "pure" else self._with_noise(top, row)
        finally:
            # The top shares its weights with the model, which the next row starts from again.
            parts["model"].load_state_dict(state)
            parts["model"].requires_grad_(True)

    def _accuracy(self, top: torch.nn.Module, seed: int) -> float:
        held_out = self.parts(seed)["held_out"]
        return tops.accuracy(top, held_out.states, held_out.texts)

    def _at_a_pure_epsilon(self, top: torch.nn.Module, row: suite.Row) -> suite.Row:
        """What one code tells; first by public texts alone, then with what the private ones add."""
        seed, labelled = row["seed"], row["bottom"] == "public"
        parts = self.parts(seed)
        public = parts["public"]
        if labelled:
            self._train(top, public, seed)
        told = ewft.codebook(PURE[row["mechanism"]], row["epsilon"])
        length, records = self.size.length, self.size.train
        private = ewft.PureEWFT(top, layer=row["layer"], mechanism=told, sequence_length=length, dataset_size=records)
        labels = public.texts.labels.cpu().split(32)
        named = [batch | {"labels": own} for batch, own in zip(public.batches(), labels)]
        private.learn(named, labels=labelled)
        before = self._accuracy(top, seed) if labelled else None
        self._train(top, parts["train"], seed, private)
        found = {"accuracy": self._accuracy(top, seed), "true_epsilon": row["epsilon"]}
        private.remove()
        return {**found, "accuracy_by_public_text_alone": before}

    def _with_noise(self, top: torch.nn.Module, row: suite.Row) -> suite.Row:
        parts, autoencoder = self.parts(row["seed"]), None
        noise = schedule(row["form"], row["epsilon"], row["step_distance"])
        if row["bottom"] == "public":
            # Not by `ewft.rehearse`: here each epoch's own noise, and the loop that all three kinds of bottom share.
            levels = noise.ratios * (self.size.epochs if noise.reuse else 1)
            rehearsal = ewft.paper(levels, row["epsilon"], DELTA, "C")
            tuning = self._attach(top, rehearsal, row, None, len(parts["public"].texts.labels), trained=True)
            self._train(top, parts["public"], row["seed"], tuning)
            tuning.remove()
            autoencoder = tuning.autoencoder
            if autoencoder is not None:
                autoencoder.trained_on = "public"
        trained = row["bottom"] == "private"
        private = self._attach(top, noise, row, autoencoder, self.size.train, trained=trained)
        self._train(top, parts["train"], row["seed"], private)
        found = {"accuracy": self._accuracy(top, row["seed"]), "true_epsilon": noise.epsilon()}
        private.remove()
        return {**found, "noise_std_over_max_norm": list(noise.ratios)}

    def _attach(
        self,
        top: torch.nn.Module,
        noise: ewft.NoiseSchedule,
        row: suite.Row,
        autoencoder: Any,
        records: int,
        *,
        trained: bool,
    ) -> fastdp.EWFT:
        """EW-FT on a model; its autoencoder, unless there is one, learns from the unlabelled texts."""
        private = fastdp.EWFT(
            top,
            layer=row["layer"],
            noise=noise,
            sequence_length=self.size.length,
            dataset_size=records,
            autoencoder=autoencoder or row["autoencoder"] or None,
            bottom="trained" if trained else "frozen",
        )
        if private.autoencoder is not None and private.autoencoder.trained_on is None:
            unlabelled = self.parts(row["seed"])["unlabelled"]
            private.train_autoencoder(unlabelled.batches() * self.size.autoencoder_passes)
        return private

    def _train(self, top: torch.nn.Module, part: Part, seed: int, private: Any = None) -> None:
        tops.train_top(
            top,
            part.states,
            part.texts,
            size=self.size,
            seed=seed,
            extra=() if private is None else private.trained_parameters(),
            begin_epoch=None if private is None else private.set_epoch,
            ids=private is not None,
        )


def settings(bench: Bench, seeds: int) -> Iterator[suite.Row]:
    """One row each, no setting twice; the first seed of everything comes first."""
    size = bench.size
    last, budgets = size.layers[-1], (2.0, 4.0, 8.0)
    base: suite.Row = {"layer": last, "length": size.length, "epsilon": 8.0, "step_distance": 2.0, "autoencoder": [64]}
    paper = {**base, "form": "paper", "bottom": "private", "mechanism": "EW-FT"}
    once = {**base, "form": "once", "bottom": "public", "mechanism": "release once"}
    forward = {**base, "form": "sound", "bottom": "public", "mechanism": "DP-Forward", "autoencoder": []}
    pure = {**base, "form": "pure", "autoencoder": []}
    rows = [{**form, "layer": layer} for layer in size.layers for form in (paper, once)]
    rows += [{**form, "epsilon": epsilon} for epsilon in budgets for form in (paper, once, forward)]
    # What no epsilon that anybody prints would buy; and what the pretrained layers alone would, without public labels.
    rows += [{**once, "epsilon": epsilon} for epsilon in (100.0, 1000.0)]
    rows += [{**once, "epsilon": epsilon, "bottom": "pretrained"} for epsilon in (8.0, 1000.0)]
    for epsilon in (1.0, *budgets):
        rows.append({**pure, "epsilon": epsilon, "bottom": "public", "mechanism": "codebook 2"})
        rows.append({**pure, "epsilon": epsilon, "bottom": "pretrained", "mechanism": "codebook 16"})
    rows.append({**base, "form": "none", "bottom": "private", "mechanism": "non-private"})
    # Tables 4 and 5.
    for epsilon in budgets:
        rows += [{**form, "epsilon": epsilon, "autoencoder": own} for own in AUTOENCODERS for form in (paper, once)]
        rows += [{**paper, "epsilon": epsilon, "step_distance": distance} for distance in (1.0, 3.0, 4.0)]
    return suite.by_seed(rows, seeds)


PATHS = {
    "model": "folder of all-MiniLM-L6-v2 or another encoder",
    "sst2": "folder with train.tsv and test.tsv",
    "public": "plain text for the autoencoders",
}
#: Measures what is missing, by the arguments of a command line.
main = partial(suite.main, __doc__, SIZES, Bench, settings, PATHS)
