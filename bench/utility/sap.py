"""SAP's figures 2 and 4 and tables 2 and 3 at laptop size: MiniLM on a slice of SST-2; and attribute inference.

    python -m bench.utility.sap --model MODEL --sst2 FOLDER --pii FILE --json bench/results/utility/sap.json \\
        --pictures docs/pictures

EP is the paper's empirical privacy: one minus the share of tokens that embedding inversion recovers. UA is the accuracy on
held-out texts that are privatized as the training texts are. Beside eta stands what it guarantees for the median pair of
tokens, in nats, and for how many pairs it guarantees nothing. Part ``service`` trains an adapter and a head of MiniLM's size over
all blocks at a vendor, over the network. Attribute inference attacks what is released of texts with
labelled private spans: the rows of privatized tokens, or hidden rows with noise, pooled; see `attributes`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

from fastdp import TextPrivatizer, audit
from fastdp.methods.sap import CTI, PrivateBottom, count_tokens, split_model
from fastdp.ops.stream import NoiseStream
from fastdp.untrusted import load_pretrained

from ..plots import picture
from . import attributes, denoise, service, suite, tops

#: Forms by mechanism. The exponential mechanism leaves as many tokens unchanged at a fraction of the eta: its odds are over
#: the vocabulary's tokens, where Laplace noise has the whole space to get lost in.
LAPLACE = ("SAP", "CTI paper")
EXPONENTIAL = ("exponential", "CTI prior", "CTI elastic")
#: Told at an epsilon of any two tokens, by cells and epsilon.
QUOTIENT = "CTI quotient"
#: The same, of cells that are cut for their epsilon.
INFORMED = "CTI quotient, informed"
#: Of the vendor's AdamW, for adapters of rank 8 and the head; and an eta at which no token changes.
SERVICE_LEARNING_RATE = 2e-3
CLEAR = 1000.0


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
    hidden_etas: tuple[float, ...] = (60.0, 150.0)
    splits: tuple[int, ...] = (1, 2)
    service_epochs: int = 10
    denoiser_steps: int = 400
    trained_from: int = 4
    epochs: int = 3
    batch_size: int = 32
    learning_rate: float = 2e-4
    attacked: int = 6
    attacked_length: int = 12
    attack_steps: int = 120
    subjects: int = 720
    labels: tuple[int, ...] = (30, 60, 120, 240, 480)


TINY = Size(
    train=32,
    held_out=16,
    length=16,
    counted=100,
    etas=(75.0,),
    exponential_etas=(18.0,),
    quotients=((3, 2.0),),
    informed=((3, 2.0),),
    hidden_etas=(100.0,),
    splits=(1,),
    service_epochs=1,
    denoiser_steps=2,
    epochs=1,
    attacked=1,
    attacked_length=4,
    attack_steps=3,
    subjects=60,
    labels=(20,),
)
FULL = Size(
    train=60614,
    held_out=872,
    length=64,
    counted=60614,
    etas=(45.0, 50.0, 55.0, 60.0, 65.0, 70.0, 80.0, 90.0, 110.0),
    exponential_etas=(8.0, 10.0, 12.0, 14.0, 16.0, 18.0, 20.0, 23.0, 26.0),
    hidden_etas=(30.0, 60.0, 100.0, 150.0, 250.0),
    splits=(1, 2, 3, 4),
    trained_from=0,
    attacked=64,
    attack_steps=400,
    subjects=1500,
)


@dataclass
class Bench:
    """The model and texts of a seed, kept between rows."""

    model: Path
    sst2: Path
    pii: Path
    size: Size

    def __post_init__(self) -> None:
        self.texts, self.subjects = lru_cache(1)(self._texts), lru_cache(1)(self._subjects)

    def _texts(self, seed: int) -> tuple[Any, ...]:
        """Tokenizer, model, training and held-out texts, and counts for CTI of texts that count as public."""
        size, tokenizer = self.size, load_pretrained(AutoTokenizer, self.model)
        model = tops.load(self.model, seed)
        train = tops.read_texts(self.sst2 / "train.tsv", tokenizer, size.length, size.train, seed)
        held_out = tops.read_texts(self.sst2 / "test.tsv", tokenizer, size.length, size.held_out, seed)
        other = tops.read_texts(self.sst2 / "dev.tsv", tokenizer, size.length, size.counted, seed)
        rows = [ids[mask.bool()][1:-1] for ids, mask in zip(other.ids, other.mask)]
        counts = count_tokens(rows, other.labels.tolist(), 2, len(tokenizer))  # type: ignore[arg-type]
        return tokenizer, model, train, held_out, counts

    def _subjects(self, seed: int) -> attributes.Subjects:
        size, tokenizer = self.size, self.texts(seed)[0]
        return attributes.read_subjects(self.pii, tokenizer, size.length, size.subjects, seed)

    def run(self, row: dict[str, Any]) -> dict[str, Any]:
        """One row of a figure or table."""
        return getattr(self, row["part"].replace(" ", "_"))(row)

    def figure_2(self, row: dict[str, Any]) -> dict[str, Any]:
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

    def denoised(self, row: dict[str, Any]) -> dict[str, Any]:
        """EP and UA by eta of split-and-denoise, a linear head of the customer's own above it."""
        size, (tokenizer, model, train, held_out, counts) = self.size, self.texts(row["seed"])
        other = tops.read_texts(self.sst2 / "dev.tsv", tokenizer, size.length, size.counted, row["seed"])
        embedder = denoise.Embedder(model.base_model, NoiseStream())
        if row["eta"] is None:
            known, attacked = (embedder.send(texts, None).returned for texts in (train, held_out))
            return {"UA": audit.attribute_inference(known, train.labels, attacked, held_out.labels).accuracy}
        denoiser = denoise.trained(embedder, other, row["eta"], size.denoiser_steps, row["seed"])
        sent = [embedder.send(texts, row["eta"]) for texts in (train, held_out)]
        found: dict[str, Any] = {}
        for name, states in (("UA", [denoiser(own) for own in sent]), ("noisy_UA", [own.returned for own in sent])):
            found[name] = audit.attribute_inference(states[0], train.labels, states[1], held_out.labels).accuracy
        privatizer = TextPrivatizer(model, eta=row["eta"], tokenizer=tokenizer)
        guessed = sent[0].guessed(embedder.table)
        guessed = torch.nn.functional.pad(guessed, (0, size.length - guessed.shape[1]))
        return {**found, "EP": _recovered(guessed, train).empirical_privacy, **_bounds(privatizer, counts)}

    def service(self, row: dict[str, Any]) -> dict[str, Any]:
        """UA of what a customer trains at a vendor from privatized texts, all of them sent once."""
        tokenizer, model, _, _, counts = self.texts(row["seed"])
        size, seed = self.size, row["seed"]
        kinds = {"train.tsv": size.train, "test.tsv": size.held_out}
        train, held_out = (tops.drawn(self.sst2 / name, count, seed) for name, count in kinds.items())
        found = service.accuracy(
            model,
            tokenizer,
            lambda sent: _privatizer(row, sent, tokenizer, counts),
            train,
            held_out,
            after=row["after"],
            length=size.length,
            epochs=size.service_epochs,
            learning_rate=SERVICE_LEARNING_RATE,
            seed=seed,
        )
        return {"UA": found, **_bounds(_privatizer(row, model, tokenizer, counts), counts)}

    def figure_4(self, row: dict[str, Any]) -> dict[str, Any]:
        """EP by split position, without privatization."""
        _, model, *_ = self.texts(row["seed"])
        bottom, _ = split_model(model, row["after"])
        return {"EP": self._attack(bottom.eval(), row["seed"], None)}

    def table_2(self, row: dict[str, Any]) -> dict[str, Any]:
        """EP and UA by split position and eta, with noise on the hidden rows."""
        _, model, train, held_out, _ = self.texts(row["seed"])
        bottom, top = split_model(model, row["after"])
        private = PrivateBottom(bottom, eta=row["eta"]) if row["eta"] is not None else bottom.eval()
        with torch.no_grad():
            states = [_by_rows(private, t) for t in (train, held_out)]
        utility = self._trained(model, top, states, train, held_out, row["seed"])
        return {"UA": utility, "EP": self._attack(bottom.eval(), row["seed"], row["eta"])}

    def table_3(self, row: dict[str, Any]) -> dict[str, Any]:
        """A frozen embedding, released once, or a trained one, released afresh in every epoch."""
        tokenizer, model, train, held_out, _ = self.texts(row["seed"])
        privatizer = TextPrivatizer(model, eta=row["eta"], tokenizer=tokenizer)
        releases = self.size.epochs if row["trained_embedding"] else 1
        sent = [privatizer(train.ids, attention_mask=train.mask) for _ in range(releases)]
        ever = torch.stack([ids == train.ids for ids in sent]).any(0)
        state = {name: value.clone() for name, value in model.state_dict().items()}
        model.get_input_embeddings().weight.requires_grad_(row["trained_embedding"])
        torch.manual_seed(row["seed"])
        tops.train_top(
            model,
            sent,
            train,
            named="input_ids",
            size=self.size,
            seed=row["seed"],
            slower=4,
            weight_decay=1e-2,
        )
        asked = privatizer(held_out.ids, attention_mask=held_out.mask)
        found = tops.accuracy(model, asked, held_out, "input_ids")
        model.load_state_dict(state)
        model.requires_grad_(True)
        return {"UA": found, "EP": _recovered(torch.where(ever, train.ids, -1), train).empirical_privacy}

    def attribute_inference(self, row: dict[str, Any]) -> dict[str, Any]:
        """What is inferred of the texts of others from their privatized tokens, or from hidden rows with noise."""
        tokenizer, model, _, _, counts = self.texts(row["seed"])
        subjects = self.subjects(row["seed"])
        texts = (subjects.known, subjects.attacked)
        if row["after"]:
            bottom, _ = split_model(model, row["after"])
            private = PrivateBottom(bottom, eta=row["eta"]) if row["eta"] is not None else bottom.eval()
            with torch.no_grad():
                released = [_by_rows(private, t) for t in texts]
        else:
            sent = [t.ids for t in texts]
            if row["form"] != "none":
                privatizer = _privatizer(row, model, tokenizer, counts)
                sent = [privatizer(t.ids, attention_mask=t.mask) for t in texts]
            released = [model.get_input_embeddings().weight.detach()[ids] for ids in sent]
        known, attacked = (audit.pooled(rows, t.mask.bool()) for rows, t in zip(released, texts))
        return attributes.attack(subjects, known, attacked, labels=row.get("labels"))

    #: Figure 3: what the number of texts whose attributes the attacker knows does.
    attributes_by_labels = attribute_inference

    def _utility(self, model: Any, train: tops.Texts, held_out: tops.Texts, seed: int) -> float:
        bottom, top = split_model(model, self.size.trained_from)
        states = [tops.hidden_states(bottom, texts) for texts in (train, held_out)]
        return self._trained(model, top, states, train, held_out, seed)

    def _trained(
        self, model: Any, top: Any, states: list[Tensor], train: tops.Texts, held_out: tops.Texts, seed: int
    ) -> float:
        state = {name: value.clone() for name, value in model.state_dict().items()}
        torch.manual_seed(seed)
        tops.train_top(top, states[:1], train, size=self.size, seed=seed)
        found = tops.accuracy(top, states[1], held_out)
        model.load_state_dict(state)
        return found

    def _attack(self, bottom: Any, seed: int, eta: float | None) -> float:
        """EP against inversion of the bottom's hidden rows, of the first tokens of the longest texts."""
        _, _, _, held_out, _ = self.texts(seed)
        size = self.size
        chosen = held_out.mask.sum(1).argsort(descending=True)[: size.attacked]
        ids = held_out.ids[chosen, 1 : 1 + size.attacked_length]
        with torch.no_grad():
            released = bottom(ids) if eta is None else PrivateBottom(bottom, eta=eta)(ids)
        embeddings = bottom.model.get_input_embeddings()
        guessed = audit.optimised_tokens(
            released, audit.from_embeddings(bottom, embeddings), embeddings.weight, steps=size.attack_steps
        )
        return audit.inversion(guessed, ids).empirical_privacy


def _by_rows(bottom: Any, texts: tops.Texts) -> Tensor:
    return torch.cat([bottom(ids, mask) for ids, mask in zip(texts.ids.split(64), texts.mask.split(64))])


def _privatizer(row: dict[str, Any], model: Any, tokenizer: Any, counts: Tensor) -> TextPrivatizer:
    if row["form"] in (QUOTIENT, INFORMED):
        told_at = row["epsilon"] if row["form"] == INFORMED else None
        told = CTI.from_counts(counts, source="public", form="quotient", cells=row["cells"], told_at=told_at)
        return TextPrivatizer(model, epsilon=row["epsilon"], tokenizer=tokenizer, cti=told)
    mechanism = "laplace" if row["form"] in LAPLACE else "exponential"
    cti = _cti(row["form"], counts)
    return TextPrivatizer(model, eta=row["eta"], tokenizer=tokenizer, mechanism=mechanism, cti=cti)


def _cti(form: str, counts: Tensor) -> CTI | None:
    if not form.startswith("CTI "):
        return None
    return CTI.from_counts(counts, source="public", form=form.removeprefix("CTI "))


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


def told_forms(size: Size) -> list[tuple[str, int, float]]:
    """Forms that tell cells, with their number and epsilon."""
    return [(form, *own) for form, told in ((QUOTIENT, size.quotients), (INFORMED, size.informed)) for own in told]


def settings(size: Size, seeds: int) -> Iterator[dict[str, Any]]:
    """One row each; the first seed of everything comes first."""
    for seed in range(seeds):
        for part in ("figure 2", "attribute inference"):
            place = {"after": 0} if part == "attribute inference" else {}
            yield {"part": part, "form": "none", "eta": None, "seed": seed, **place}
            for forms, etas in ((LAPLACE, size.etas), (EXPONENTIAL, size.exponential_etas)):
                for eta in etas:
                    for form in forms:
                        yield {"part": part, "form": form, "eta": eta, "seed": seed, **place}
            for form, cells, epsilon in told_forms(size):
                told = {"eta": None, "cells": cells, "epsilon": epsilon}
                yield {"part": part, "form": form, **told, "seed": seed, **place}
        for after in (0, *size.splits[-1:]):
            yield {"part": "service", "form": "exponential", "eta": CLEAR, "seed": seed, "after": after}
            for eta in size.exponential_etas:
                yield {"part": "service", "form": "CTI prior", "eta": eta, "seed": seed, "after": after}
            for form, cells, epsilon in told_forms(size):
                told = {"eta": None, "cells": cells, "epsilon": epsilon}
                yield {"part": "service", "form": form, **told, "seed": seed, "after": after}
        for labels in size.labels:
            own = {"part": "attributes by labels", "labels": labels, "seed": seed, "after": 0}
            yield {**own, "form": "none", "eta": None}
            yield from ({**own, "form": "exponential", "eta": eta} for eta in size.exponential_etas[1:3])
        for denoised_eta in (*size.etas, None):
            yield {"part": "denoised", "eta": denoised_eta, "seed": seed}
        for after in range(5):
            yield {"part": "figure 4", "after": after, "seed": seed}
        for eta in size.etas[2:3] or size.etas:
            for trained in (False, True):
                yield {"part": "table 3", "eta": eta, "trained_embedding": trained, "seed": seed}
        for after in size.splits:
            for hidden_eta in (*size.hidden_etas, None):
                for part in ("table 2", "attribute inference"):
                    yield {"part": part, "after": after, "eta": hidden_eta, "seed": seed}


def plot(rows: Sequence[dict[str, Any]], folder: Path) -> None:
    """EP against UA of every form, EP by split position, and attributes inferred against tokens recovered."""
    with picture(folder / "sap.png", 3, panel=(5.0, 4.9)) as (trade, split, inferred):
        _plot_trade(rows, trade)
        positions = sorted({row["after"] for row in rows if row["part"] == "figure 4"})
        split.plot(positions, [suite.mean_of(rows, "EP", part="figure 4", after=k) for k in positions])
        split.set(
            xlabel="blocks in the bottom", ylabel="empirical privacy", title="Recovered without noise", xticks=positions
        )
        _plot_attributes(rows, inferred)


def _plot_trade(rows: Sequence[dict[str, Any]], axes: Any) -> None:
    for form in LAPLACE + EXPONENTIAL:
        etas = sorted({row["eta"] for row in rows if row.get("form") == form})
        points = [
            [suite.mean_of(rows, value, part="figure 2", form=form, eta=eta) for value in ("EP", "UA")] for eta in etas
        ]
        known = [point for point in points if None not in point]
        if known:
            axes.plot(*zip(*known), label=form + (" (no bound)" if form == "CTI paper" else ""))
    told = sorted({(row["cells"], row["epsilon"]) for row in rows if row.get("form") == QUOTIENT})
    for cells, epsilon in told:
        own = {"form": QUOTIENT, "cells": cells, "epsilon": epsilon}
        point = [suite.mean_of(rows, value, part="figure 2", **own) for value in ("EP", "UA")]
        axes.plot(*point, "*", label=f"quotient, {cells} cells, epsilon {epsilon:g}")
    axes.set(xlabel="empirical privacy", ylabel="accuracy", title="SAP at the embedding, by eta")


def _plot_attributes(rows: Sequence[dict[str, Any]], axes: Any) -> None:
    """Accuracy of the attribute attack by EP against inversion at the same eta; dotted: the most frequent value's share."""
    rows = [row for row in rows if row["part"] in ("figure 2", "attribute inference")]
    for color, name in zip(("tab:blue", "tab:orange", "tab:green"), attributes.ATTRIBUTES):
        for form, style in (("SAP", "-"), ("exponential", "--")):
            etas = sorted({row["eta"] for row in rows if row.get("form") == form})
            points = [(0.0, suite.mean_of(rows, f"{name}_accuracy", form="none"))]
            for eta in etas:
                recovered = suite.mean_of(rows, "EP", part="figure 2", form=form, eta=eta)
                points.append((recovered, suite.mean_of(rows, f"{name}_accuracy", form=form, eta=eta)))  # type: ignore[arg-type]
            known = sorted(point for point in points if None not in point)  # type: ignore[type-var]
            if known:
                axes.plot(*zip(*known), style, color=color, marker="o", label=f"{name}, {form}")
        chance = suite.mean_of(rows, f"{name}_majority", form="none")
        if chance is not None:
            axes.axhline(chance, color=color, linestyle=":")
    axes.set(
        xlabel="empirical privacy against inversion",
        ylabel="attack accuracy",
        title="Attributes inferred (dotted: guessing)",
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is missing, then draw."""
    parser = suite.parser_of(
        __doc__,
        {"default": Size(), "tiny": TINY, "full": FULL},
        model="folder of all-MiniLM-L6-v2 or another encoder",
        sst2="folder with train.tsv, dev.tsv and test.tsv",
        pii="labelled spans, such as synth_dataset_v2.json",
    )
    parser.add_argument("--only", default="", help="only parts and forms whose names hold this")
    options, size, table = suite.begin(parser, arguments)
    bench = Bench(options.model, options.sst2, options.pii, size)
    wanted = (row for row in settings(size, options.seeds) if options.only in f"{row['part']} {row.get('form')}")
    suite.finish(table, suite.each(wanted, bench.run), options, plot)


if __name__ == "__main__":
    main()
