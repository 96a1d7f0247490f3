"""SAP's figures 2 and 4 at laptop size: MiniLM on a slice of SST-2.

    fastdp bench utility --suite sap --model MODEL --sst2 FOLDER --json sap.json

EP is the paper's empirical privacy: one minus the share of tokens that embedding inversion recovers. UA is the accuracy on
held-out texts that are privatized as the training texts are. Beside eta stands what it guarantees for the median pair of
tokens, in nats, and for how many pairs it guarantees nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

from fastdp import TextPrivatizer, audit
from fastdp.methods.sap import CTI, count_tokens, split_model
from fastdp.untrusted import load_pretrained

from . import suite, tops

#: Forms by mechanism. The exponential mechanism leaves as many tokens unchanged at a fraction of the eta: its odds are over
#: the vocabulary's tokens, where Laplace noise has the whole space to get lost in.
LAPLACE = ("SAP", "CTI paper")
EXPONENTIAL = ("exponential", "CTI prior")
#: Told at an epsilon of any two tokens, by cells and epsilon.
QUOTIENT = "CTI quotient"
#: The same, of cells that are cut for their epsilon.
INFORMED = "CTI quotient, informed"


@dataclass(frozen=True)
class Size:
    """How much is run."""

    train: int = 256
    held_out: int = 300
    length: int = 32
    counted: int = 4000
    etas: tuple[float, ...] = (50.0, 65.0, 80.0, 100.0)
    exponential_etas: tuple[float, ...] = (11.0, 14.0, 17.0, 21.0)
    quotients: tuple[tuple[int, float], ...] = ((3, 2.0), (5, 2.0), (5, 3.0), (5, 4.0))
    informed: tuple[tuple[int, float], ...] = ((3, 3.0), (3, 4.0), (5, 6.0))
    trained_from: int = 4
    epochs: int = 3
    batch_size: int = 32
    learning_rate: float = 2e-4
    attacked: int = 6
    attacked_length: int = 12
    attack_steps: int = 120


SIZES = {
    "default": Size(),
    # The rows of the page's table, of more texts.
    "more": Size(
        train=2048,
        held_out=872,
        etas=(50.0, 80.0, 100.0),
        exponential_etas=(14.0, 17.0, 21.0),
        quotients=((5, 3.0),),
        informed=((3, 4.0), (5, 6.0)),
    ),
    # E2E's meanings and references, matched or not.
    "pairs": Size(
        train=1024,
        held_out=872,
        length=96,
        etas=(80.0, 100.0),
        exponential_etas=(14.0, 17.0, 21.0),
        quotients=((5, 3.0),),
        informed=((3, 4.0), (5, 6.0)),
    ),
    "tiny": Size(
        train=32,
        held_out=16,
        length=16,
        counted=100,
        etas=(75.0,),
        exponential_etas=(18.0,),
        quotients=((3, 2.0),),
        informed=((3, 2.0),),
        epochs=1,
        attacked=1,
        attacked_length=4,
        attack_steps=3,
    ),
}


class Bench:
    """The model and texts of a seed, kept between rows."""

    def __init__(self, model: Path, sst2: Path, size: Size):
        self.model, self.sst2, self.size = model, sst2, size
        self.texts = lru_cache(1)(self._texts)

    def _texts(self, seed: int) -> tuple[Any, ...]:
        """Tokenizer, model, training and held-out texts, and counts for CTI of texts that count as public."""
        size, tokenizer = self.size, load_pretrained(AutoTokenizer, self.model)
        model = tops.load(self.model, seed)
        train, held_out, other = (
            tops.read_texts(next(self.sst2.glob(f"{part}.*")), tokenizer, size.length, count, seed)
            for part, count in (("train", size.train), ("test", size.held_out), ("dev", size.counted))
        )
        rows = [ids[mask.bool()][1:-1] for ids, mask in zip(other.ids, other.mask)]
        counts = count_tokens(rows, other.labels.tolist(), 2, len(tokenizer))  # type: ignore[arg-type]
        return tokenizer, model, train, held_out, counts

    def run(self, row: suite.Row) -> suite.Row:
        return self.figure_2(row) if row["part"] == "figure 2" else self.figure_4(row)

    def figure_2(self, row: suite.Row) -> suite.Row:
        """Tokens privatized at the embedding: EP and UA by eta, with and without CTI."""
        tokenizer, model, train, held_out, counts = self.texts(row["seed"])
        if row["form"] == "none":
            return {"UA": self._utility(model, train, held_out, row["seed"])}
        privatizer = _privatizer(row, model, tokenizer, counts)
        # A customer knows the labels of its training texts; in inference there are none.
        labels = train.labels if privatizer.cti is not None else None
        sent = train.with_ids(privatizer(train.ids, labels=labels, attention_mask=train.mask))
        asked = held_out.with_ids(privatizer(held_out.ids, attention_mask=held_out.mask))
        shown = privatizer.displacement()
        # What leaves of the quotient stands for a cell: the attacker guesses the token of most weight given it.
        guessed = _likeliest(privatizer, counts)[sent.ids] if row["form"] in (QUOTIENT, INFORMED) else sent.ids
        return {
            "UA": self._utility(model, sent, asked, row["seed"]),
            "EP": _recovered(guessed, train).empirical_privacy,
            "unchanged_of_vocabulary": shown.unchanged,
            "mean_displacement": shown.mean_displacement,
            **_bounds(privatizer, counts),
        }

    def figure_4(self, row: suite.Row) -> suite.Row:
        """EP by split position, without privatization."""
        _, model, *_ = self.texts(row["seed"])
        bottom, _ = split_model(model, row["after"])
        return {"EP": self._attack(bottom.eval(), row["seed"])}

    def _utility(self, model: Any, train: tops.Texts, held_out: tops.Texts, seed: int) -> float:
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        bottom, top = split_model(model.to(suite.device()), self.size.trained_from)
        train, held_out = train.to(suite.device()), held_out.to(suite.device())
        states = [tops.hidden_states(bottom, texts) for texts in (train, held_out)]
        torch.manual_seed(seed)
        tops.train_top(top, states[0], train, size=self.size, seed=seed)
        found = tops.accuracy(top, states[1], held_out)
        model.to("cpu").load_state_dict(weights)
        return found

    def _attack(self, bottom: Any, seed: int) -> float:
        """EP against inversion of the bottom's hidden rows, of the first tokens of the longest texts."""
        _, _, _, held_out, _ = self.texts(seed)
        size = self.size
        chosen = held_out.mask.sum(1).argsort(descending=True)[: size.attacked]
        ids = held_out.ids[chosen, 1 : 1 + size.attacked_length]
        with torch.no_grad():
            released = bottom(ids)
        embeddings = bottom.model.get_input_embeddings()
        guessed = audit.optimised_tokens(
            released, audit.from_embeddings(bottom, embeddings), embeddings.weight, steps=size.attack_steps
        )
        return audit.inversion(guessed, ids).empirical_privacy


def _privatizer(row: suite.Row, model: Any, tokenizer: Any, counts: Tensor) -> TextPrivatizer:
    if row["form"] in (QUOTIENT, INFORMED):
        told_at = row["epsilon"] if row["form"] == INFORMED else None
        told = CTI.from_counts(counts, source="public", form="quotient", cells=row["cells"], told_at=told_at)
        return TextPrivatizer(model, epsilon=row["epsilon"], tokenizer=tokenizer, cti=told)
    mechanism, cti = "laplace" if row["form"] in LAPLACE else "exponential", None
    if row["form"].startswith("CTI "):
        cti = CTI.from_counts(counts, source="public", form=row["form"].removeprefix("CTI "))
    return TextPrivatizer(model, eta=row["eta"], tokenizer=tokenizer, mechanism=mechanism, cti=cti)


def _likeliest(privatizer: TextPrivatizer, counts: Tensor) -> Tensor:
    """By released token, the token that public counts and the law make likeliest; itself where it is never released."""
    mass = counts.sum(0).double().clamp_min(1e-9)
    guessed, most = torch.arange(len(mass)), torch.full((len(mass),), -math.inf, dtype=torch.float64)
    # Tokens of a cell share a law, so that the one that occurs most speaks for all.
    assert privatizer.cti is not None
    assert privatizer.cti.cells is not None
    for cell in privatizer.cti.cells.unique().tolist():
        token = int(mass.masked_fill(privatizer.cti.cells != cell, -1.0).argmax())
        weight = privatizer.log_probabilities(token) + mass[token].log()
        guessed = torch.where(weight > most, token, guessed)
        most = torch.maximum(weight, most)
    return guessed


def _recovered(guessed: Tensor, texts: tops.Texts) -> audit.InversionResult:
    """Over the tokens of texts proper: special tokens and padding hide nothing."""
    inner = texts.mask.bool() & (texts.ids != texts.ids[:, :1])
    last = texts.mask.sum(1) - 1
    inner[torch.arange(len(last)), last] = False
    return audit.inversion(guessed, texts.ids, inner)


def _bounds(privatizer: TextPrivatizer, counts: Tensor, pairs: int = 300) -> dict[str, Any]:
    """The median bound of pairs of tokens that occur, in nats, and the share of pairs without any."""
    occurring = (counts.sum(0) > 0).nonzero().flatten()
    drawn = torch.randint(0, len(occurring), (pairs, 2), generator=torch.Generator().manual_seed(0))
    bounds = sorted(privatizer.bound(a, b) for a, b in occurring[drawn].tolist() if a != b)
    middle = bounds[len(bounds) // 2]
    return {
        "median_bound": middle if math.isfinite(middle) else "inf",
        "pairs_without_bound": sum(map(math.isinf, bounds)) / len(bounds),
    }


def settings(bench: Bench, seeds: int) -> Iterator[suite.Row]:
    """One row each; the first seed of everything comes first."""
    size = bench.size
    rows: list[suite.Row] = [{"part": "figure 2", "form": "none", "eta": None}]
    for forms, etas in ((LAPLACE, size.etas), (EXPONENTIAL, size.exponential_etas)):
        rows += [{"part": "figure 2", "form": form, "eta": eta} for eta in etas for form in forms]
    for form, told in ((QUOTIENT, size.quotients), (INFORMED, size.informed)):
        common = {"part": "figure 2", "form": form, "eta": None}
        rows += [{**common, "cells": cells, "epsilon": epsilon} for cells, epsilon in told]
    rows += [{"part": "figure 4", "after": after} for after in range(7)]
    return suite.by_seed(rows, seeds)


PATHS = {
    "model": "folder of all-MiniLM-L6-v2 or another encoder",
    "sst2": "folder with train, dev and test, TSV files of SST-2 or CSV files of E2E",
}
#: Measures what is missing, by the arguments of a command line.
main = partial(suite.main, __doc__, SIZES, Bench, settings, PATHS)
