"""DP-SGD, DP-ZO and private votes on SST-2 at equal epsilon: the last layer of MiniLM (770 numbers), on computed hidden states.

    fastdp bench utility --suite zeroth --model MODEL --train train.tsv --eval dev.tsv --public FILE --json zeroth.json

DP-SGD steps by AdamW. DP-ZO steps by SGD, four times as often, in batches of a quarter. Votes choose and label public texts, by
which the layer then learns without noise, at the rate of DP-SGD. Rates of both did best at epsilon 8 on other texts.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import AutoTokenizer

import fastdp
from fastdp.accounting import calibrate, dpsgd
from fastdp.methods.votes import evolve
from fastdp.untrusted import load_pretrained

from . import frost, suite, tops

SIZES = {
    "default": frost.Size(8000, 200, 256, frozen=6, epsilons=(2.0, 8.0)),
    "tiny": frost.Size(300, 3, 32, 12, 6, 24, (8.0,)),
}
#: Of each form its steps over those of the size, and its learning rate.
FORMS = {"non-private": (1, 1e-1), "dpsgd": (1, 1e-1), "dpzo": (4, 0.3), "votes": (1, 1e-1)}
#: The median slope of untrained weights.
MAX_SLOPE = 1.0
ROUNDS = 3


class Bench(frost.Bench):
    """The data, and one run of any row; ``public`` is a file of the form of ``train``, whose labels are not read."""

    def __init__(self, model: Path, train: Path, held_out: Path, public: Path, size: frost.Size):
        super().__init__(model, train, held_out, size)
        self.tokenizer = load_pretrained(AutoTokenizer, model)
        self.records = tops.drawn(train, size.train, 0)
        # As many candidates of a label as a quarter of its records.
        self.public = tops.drawn(public, size.train // 2, 0)[0]
        self.embeddings = self._embed(self.public)
        self.vectors = dict(zip(self.public, self.embeddings.split(1)))
        self.multiplier = cache(self._multiplier)

    def _multiplier(self, epsilon: float, steps: int, batch_size: int) -> float:
        rate = batch_size / len(self.train)
        return calibrate(lambda noise: dpsgd(noise, rate, steps), epsilon=epsilon, delta=self.delta)

    def _encoded(self, texts: list[str], labels: list[int]) -> frost.Rows:
        return self._rows(tops.encode(texts, self.tokenizer, self.size.length, labels))

    def _embed(self, texts: list[str]) -> torch.Tensor:
        rows = self._encoded(texts, [0] * len(texts))
        assert rows.hidden is not None
        mask = rows.texts.mask[..., None].float()
        return torch.nn.functional.normalize((rows.hidden.float() * mask).sum(1) / mask.sum(1), dim=1)

    def _vector(self, text: str) -> torch.Tensor:
        """Of a private text alone, once."""
        if text not in self.vectors:
            self.vectors[text] = self._embed([text])
        return self.vectors[text]

    def run(self, row: suite.Row) -> suite.Row:
        """Train and evaluate once."""
        model: Any = self.model("full", row["seed"])
        trained = list(model.requires_grad_(False).classifier.requires_grad_(True).parameters())
        data, found = self._voted(row) if row["form"] == "votes" else (self.train, {})
        return found | self._trained(model, trained, data, row)

    def _trained(self, model: Any, trained: list[Any], data: frost.Rows, row: suite.Row) -> suite.Row:
        times, rate = FORMS[row["form"]]
        zeroth, private = row["form"] == "dpzo", row["form"] in ("dpsgd", "dpzo")
        optimizer = torch.optim.SGD(trained, lr=rate) if zeroth else torch.optim.AdamW(trained, rate, weight_decay=0.0)
        steps, size = self.size.steps * times, self.size.batch_size // times
        method: Any = fastdp.DPZO(max_slope=MAX_SLOPE, seed=row["seed"]) if zeroth else fastdp.DPSGD()
        run = fastdp.make_private(
            model,
            optimizer,
            DataLoader(data, batch_size=size, collate_fn=partial(_first_tokens, data)),
            method=method if private else fastdp.NonPrivate(),
            noise_multiplier=self.multiplier(row["epsilon"], steps, size) if private else None,
            target_delta=self.delta,
            epochs=(steps - 0.5) / math.ceil(len(data) / size),
            shapes={"lengths": [3], "pad": {"inputs_embeds": 0.0, "attention_mask": 0}} if zeroth else None,
            # The data is public.
            unsafe_seed=row["seed"],
        )
        seconds = suite.train(run)
        spent = {"true_epsilon": suite.spent_epsilon(run, self.delta), "noise_multiplier": run.noise_multiplier}
        run.detach()
        return {
            "accuracy": self._accuracy(model, self.held_out),
            **({} if row["form"] == "votes" else spent),
            **{"used_learning_rate": rate, "steps": steps, "batch_size": size, "texts": len(self.train)},
            **{"trained_parameters": sum(p.numel() for p in trained), "training_seconds": seconds},
        }

    def _voted(self, row: suite.Row) -> tuple[frost.Rows, suite.Row]:
        """Public texts with the label of those that voted for them."""
        draw, texts, labels = random.Random(row["seed"]), *self.records
        place = {text: index for index, text in enumerate(self.public)}

        def vary(label: str, kept: list[str]) -> list[str]:
            near = (self.embeddings[[place[text] for text in kept]] @ self.embeddings.T).topk(6, 1).indices[:, 1:]
            return [self.public[draw.choice(own)] for own in near.tolist()]

        votes = fastdp.PrivateVotes(
            texts,
            lambda given: torch.cat([self._vector(text) for text in given]),
            rounds=ROUNDS,
            target_epsilon=row["epsilon"],
            target_delta=self.delta,
            labels=[str(label) for label in labels],
            unsafe_seed=row["seed"],
        )
        count = len(self.public) // 8
        kept = evolve(votes, lambda label, k: draw.sample(self.public, k), vary, count, seed=row["seed"])
        spent = float(fastdp.accounting.epsilon(votes.ledger.event(), self.delta))
        votes.close()
        rows = self._encoded([text for own in kept.values() for text in own], [int(n) for n in kept for _ in kept[n]])
        return rows, {"true_epsilon": spent, "noise_multiplier": votes.noise_multiplier, "rows": len(rows)}


def _first_tokens(data: frost.Rows, indices: list[int]) -> dict[str, torch.Tensor]:
    """All that the head reads of a batch."""
    batch = data.collate(indices)
    return {**batch, **{name: batch[name][:, :2] for name in ("inputs_embeds", "attention_mask")}}


def settings(bench: Bench, seeds: int) -> Iterator[suite.Row]:
    """One row each; the first seed of everything comes first."""
    rows: list[suite.Row] = [{"part": "accuracy", "form": "non-private", "epsilon": "inf"}]
    rows += [
        {"part": "accuracy", "form": form, "epsilon": epsilon}
        for epsilon in bench.size.epsilons
        for form in FORMS
        if form != "non-private"
    ]
    return suite.by_seed(rows, seeds)


PATHS = {**frost.PATHS, "public": "TSV of the same form, whose labels are not read"}
#: Measures what is missing, by the arguments of a command line.
main = partial(suite.main, __doc__, SIZES, Bench, settings, PATHS, seeds=5)
