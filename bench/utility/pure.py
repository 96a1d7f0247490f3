"""What a few public symbols tell at a pure epsilon, beside the mechanisms that they replace: SST-2, in minutes.

    fastdp bench utility --suite pure --model MODEL --sst2 FOLDER --json bench/results/utility/pure.json

Part ``tokens``: a naive Bayes head of public texts reads privatized held-out texts, and an attacker guesses their tokens. The
quotient's head knows the channel, and its attacker is the best there is for single tokens, by public frequencies. Of the
exponential mechanism only tokens that stayed count as recovered, which flatters it.

Part ``texts``: of each text one summary leaves, of the states that pretrained layers have for it: a code by randomised response,
a direction by PrivUnit, or the same direction with Gaussian noise at (epsilon, 1e-5). Encoders learn from public texts, with
their labels or without; a linear head learns from the releases of private texts with their labels, and reads those of held-out
texts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

from fastdp import TextPrivatizer
from fastdp.data import read_rows
from fastdp.methods import ewft
from fastdp.methods.ewft.pooled import learn, pooled
from fastdp.methods.sap import CTI, count_tokens
from fastdp.ops.noise import standard_normals
from fastdp.ops.stream import NoiseStream
from fastdp.untrusted import load_pretrained

from . import suite, tops

#: Cells and epsilon of the quotient; eta of the exponential mechanism.
QUOTIENTS = ((3, 1.0), (3, 2.0), (5, 2.0), (5, 3.0), (5, 4.0))
#: The same of cells that are cut for their epsilon.
INFORMED = ((3, 2.0), (3, 3.0), (5, 3.0), (3, 4.0), (5, 4.0), (5, 6.0))
ETAS = (11.0, 14.0, 17.0)
#: Whether the encoder learns from labels, the mechanism, and its codes or directions.
TEXTS = (
    *((True, "codebook", number) for number in (2, 4)),
    *((True, mechanism, 2) for mechanism in ("PrivUnit", "Gaussian")),
    (True, "Gaussian", 1),
    *((False, "codebook", number) for number in (8, 16, 64)),
    *((False, mechanism, 16) for mechanism in ("PrivUnit", "Gaussian")),
)
EPSILONS = (1.0, 2.0, 4.0, 8.0)
DELTA = 1e-5


@dataclass(frozen=True)
class Size:
    """How much is run."""

    public: int = 6735
    held_out: int = 872
    #: Of part ``texts``: private ones, public ones, and tokens of each.
    private: int = 2048
    encoded: int = 2048
    length: int = 24


TINY = Size(400, 60, 80, 120, 8)


@dataclass
class Bench:
    """The model's table and the texts, read once."""

    model: Path
    sst2: Path
    size: Size

    def __post_init__(self) -> None:
        self.states = lru_cache(1)(self._states)

    @cached_property
    def tokenizer(self) -> Any:
        """The model's."""
        return load_pretrained(AutoTokenizer, self.model)

    @cached_property
    def table(self) -> Tensor:
        """The model's token embeddings [V, d]."""
        made = load_pretrained(AutoModel, self.model)
        return made.get_input_embeddings().weight.detach()[: len(self.tokenizer)]

    def _texts_of(self, name: str, count: int) -> tuple[list[Tensor], Tensor]:
        """Ids of each text, and the labels, of the first ``count`` lines of a file."""
        rows = read_rows(self.sst2 / name)
        ids = self.tokenizer(rows.column("sentence", "text")[:count], add_special_tokens=False)["input_ids"]
        labels = torch.tensor([int(label) for label in rows.column("label", "label")[:count]])
        return [torch.tensor(own, dtype=torch.int64) for own in ids], labels

    @cached_property
    def held_out(self) -> tuple[list[Tensor], Tensor]:
        """Ids and labels of the texts that are read privatized."""
        return self._texts_of("test.tsv", self.size.held_out)

    @cached_property
    def counts(self) -> Tensor:
        """Occurrences of each token in the public texts of each class."""
        texts, labels = self._texts_of("dev.tsv", self.size.public)
        return count_tokens(texts, labels.tolist(), 2, len(self.tokenizer))  # type: ignore[arg-type]

    def _states(self, seed: int) -> list[tuple[Tensor, Tensor]]:
        """Pooled states of public, private and held-out texts, and their labels."""
        size, model = self.size, load_pretrained(AutoModel, self.model).eval()
        found = []
        for name, count in (("dev.tsv", size.encoded), ("train.tsv", size.private), ("test.tsv", size.held_out)):
            texts = tops.read_texts(self.sst2 / name, self.tokenizer, size.length, count, seed)
            parts = zip(texts.ids.split(64), texts.mask.split(64))
            with torch.no_grad():
                made = [pooled(model(input_ids=i, attention_mask=m).last_hidden_state, m) for i, m in parts]
            found.append((torch.cat(made), texts.labels))
        return found

    def run(self, row: dict[str, Any]) -> dict[str, Any]:
        """One row of either part."""
        return self._texts(row) if row["part"] == "texts" else self._tokens(row)

    def _texts(self, row: dict[str, Any]) -> dict[str, Any]:
        """Accuracy with a head of the private texts' releases, and of a code what public labels alone say."""
        (public, known), (private, labels), (held_out, asked) = self.states(row["seed"])
        given = [known] if row["labels"] else None
        number, epsilon = row["number"], row["epsilon"]
        if row["mechanism"] == "clear":
            return {"accuracy": _linear(private, labels, held_out, asked)}
        if row["mechanism"] == "codebook":
            told: Any = ewft.codebook(number, epsilon)
        else:
            # The Gaussian release is of the same summary.
            told = ewft.privunit(epsilon, max(2, number))
        encoder, learned = learn(told, [public], given)
        stream = NoiseStream.unsafe_reproducible(row["seed"])

        def sent(states: Tensor) -> Tensor:
            code = told.encode(encoder, learned, states)
            if row["mechanism"] == "codebook":
                return torch.nn.functional.one_hot(told.release(code, stream), number).double()
            if row["mechanism"] == "PrivUnit":
                return told.release(code, stream)
            # Of the width that is asked for, a clip that nearly all reach (a sign, in one dimension), and noise for twice that.
            (ratio,), short = ewft.release_once(epsilon, DELTA).ratios, code[:, :number]
            clip = float(told.encode(encoder, learned, public)[:, :number].norm(dim=1).mean()) / 4
            short = short * (clip / short.norm(dim=1, keepdim=True)).clamp(max=1)
            return short + ratio * clip * standard_normals(stream.take(), short.numel()).view(short.shape)

        found = {"accuracy": _linear(sent(private), labels, sent(held_out), asked)}
        if row["labels"]:
            # The same releases of held-out texts, read by a head of public ones that were not told at all.
            codes = told.encode(encoder, learned, public)
            plain = torch.nn.functional.one_hot(codes, number).double() if row["mechanism"] == "codebook" else codes
            read = sent(held_out)
            found["accuracy_by_public_text_alone"] = _linear(plain[:, : read.shape[1]], known, read, asked)
        return found

    def _tokens(self, row: dict[str, Any]) -> dict[str, Any]:
        """One row: accuracy, share of tokens that the attacker gets wrong, nats between the median pair of tokens."""
        counts, (texts, labels) = self.counts, self.held_out
        flat = torch.cat(texts)
        document = torch.arange(len(texts)).repeat_interleave(torch.tensor([len(own) for own in texts]))
        head = ((counts + 1) / (counts + 1).sum(1, keepdim=True)).log()
        if row["form"] == "clear":
            return {"accuracy": _accuracy(head[:, flat], document, labels)}
        if row["form"] in ("quotient", "informed"):
            told_at = row["epsilon"] if row["form"] == "informed" else None
            cti = CTI.from_counts(counts, source="public", form="quotient", cells=row["cells"], told_at=told_at)
            private = TextPrivatizer(
                self.table, epsilon=row["epsilon"], cti=cti, tokenizer=self.tokenizer, unsafe_seed=row["seed"]
            )
            sent = private(flat)
            laws = torch.stack([private.log_probabilities(int(token)) for token in _one_of_each(cti.cells)]).exp()
            # Of each class, how often a token lies in a cell, and from there how often it is released.
            shares = torch.stack([torch.bincount(cti.cells, weights=own, minlength=row["cells"]) for own in counts])  # type: ignore[arg-type]
            head = (shares / shares.sum(1, keepdim=True) @ laws).log()
            mass = counts.sum(0)
            likeliest = torch.stack([(mass * (cti.cells == cell)).argmax() for cell in range(row["cells"])])
            weights = laws[:, sent] * mass[likeliest][:, None]
            guessed, nats = likeliest[weights.argmax(0)], row["epsilon"]
        else:
            private = TextPrivatizer(
                self.table, eta=row["eta"], mechanism="exponential", tokenizer=self.tokenizer, unsafe_seed=row["seed"]
            )
            sent = guessed = private(flat)
            drawn = flat[torch.randint(len(flat), (600,), generator=torch.Generator().manual_seed(row["seed"]))].view(
                2, -1
            )
            nats = float(torch.tensor([private.bound(int(a), int(b)) for a, b in drawn.T]).median())
        return {
            "accuracy": _accuracy(head[:, sent], document, labels),
            "empirical_privacy": float((guessed != flat).double().mean()),
            "nats": nats,
        }


def _linear(states: Tensor, labels: Tensor, held_out: Tensor, asked: Tensor) -> float:
    """Accuracy of a ridge regression of the classes, as good as any other of so few numbers."""
    centre, scale = states.mean(0), states.std() + 1e-12
    ours, theirs = ((own - centre) / scale for own in (states, held_out))
    wanted = torch.where(labels == 1, 1.0, -1.0).double()
    gram = ours.T @ ours / len(ours) + 1e-2 * torch.eye(ours.shape[1], dtype=torch.float64)
    weights = torch.linalg.solve(gram, ours.T @ (wanted - wanted.mean()) / len(ours))
    return float(((theirs @ weights + wanted.mean() > 0) == (asked == 1)).double().mean())


def _accuracy(scores: Tensor, document: Tensor, labels: Tensor) -> float:
    """Of the class with the larger sum of log likelihoods, [2, tokens], over a text's tokens."""
    summed = torch.zeros(len(labels), 2, dtype=torch.float64).index_add_(0, document, scores.T.double())
    return float((summed.argmax(1) == labels).double().mean())


def _one_of_each(cells: Tensor | None) -> list[int]:
    assert cells is not None
    return [int((cells == cell).nonzero()[0]) for cell in range(int(cells.max()) + 1)]


def settings(seeds: int) -> Iterator[dict[str, Any]]:
    """One row each; the first seed of everything comes first."""
    for seed in range(seeds):
        if not seed:
            yield {"part": "tokens", "form": "clear", "seed": seed}
        for form, pairs in (("quotient", QUOTIENTS), ("informed", INFORMED)):
            for cells, epsilon in pairs:
                yield {"part": "tokens", "form": form, "cells": cells, "epsilon": epsilon, "seed": seed}
        for eta in ETAS:
            yield {"part": "tokens", "form": "exponential", "eta": eta, "seed": seed}
    for seed in range(seeds):
        for labels, mechanism, number in ((True, "clear", 0), *TEXTS):
            for epsilon in EPSILONS if number else EPSILONS[:1]:
                told = {"labels": labels, "mechanism": mechanism, "number": number, "epsilon": epsilon}
                yield {"part": "texts", **told, "seed": seed}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is missing."""
    parser = suite.parser_of(
        __doc__,
        {"default": Size(), "tiny": TINY},
        model="folder of all-MiniLM-L6-v2 or another encoder",
        sst2="folder with train.tsv, dev.tsv and test.tsv",
    )
    options, size, table = suite.begin(parser, arguments)
    bench = Bench(options.model, options.sst2, size)
    suite.measure(table, suite.each(settings(options.seeds), bench.run), options.minutes)


if __name__ == "__main__":
    main()
