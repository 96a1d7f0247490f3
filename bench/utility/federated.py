"""Federated selective DP: the paper's figures 3 and 4, and what the detector finds.

Perplexity by round without privacy, with private tokens perturbed, and with every token perturbed, at several epsilons and
numbers of clients, on WikiText-2 and on texts with labelled private spans; ``typed`` perturbs private tokens by type. Of the
second data perplexity is also taken of the tokens outside the labelled spans, since nobody should learn the others. The
rounds use the clients' and the server's own code (`Site`, `Aggregator`) in one process.
"""

from __future__ import annotations

import itertools
import json
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fastdp.data import Examples
from fastdp.federated import Aggregator, FederatedConfig, UpdateBounds
from fastdp.federated.adapter import AdaptedModel
from fastdp.federated.site import Site
from fastdp.files import write_rows
from fastdp.methods.selective import (
    PrivacyPolicy,
    RuleDetector,
    measure_detector,
    read_labelled_spans,
    token_mask,
)

from .. import record
from ..plots import picture, plain_log
from . import suite

SCHEMES = ("none", "selective", "all")
#: Of ``typed``, on the second data set.
TYPED_EPSILONS = (2.0, 4.0, 8.0)
#: What is drawn from an answered type, and whether that is learned; the other schemes learn it, as the paper does.
WAYS: tuple[dict[str, Any], ...] = tuple(
    {"replacement": replacement, "learned": learned}
    for replacement, learned in (("uniform", True), ("model", False), ("uniform", False), ("model", True))
)
DATA = ("wikitext2", "pii_spans")


@dataclass(frozen=True)
class Size:
    """How much is run.

    Args:
        laws: mechanisms that are compared over the epsilons, and nothing else of the paper's figures.
        kept: whether replacement by type is compared with private words that are kept and not learned, and with nothing else.
    """

    texts: int = 360
    held_out: int = 120
    rounds: int = 4
    epsilons: tuple[float, ...] = (0.1, 1.0, 8.0, 32.0)
    clients: int = 4
    more_clients: tuple[int, ...] = (2, 16)
    laws: tuple[str, ...] = ()
    kept: bool = False
    learning_rate: float = 2e-3


SMALL = Size(texts=180, held_out=60, rounds=3, clients=2, more_clients=())
TINY = Size(texts=24, held_out=8, rounds=2, epsilons=(1.0,), clients=2, more_clients=())
#: For many processes on one GPU and few minutes: the four mechanisms of figure 4, and the fair baseline by number of clients.
SHORT = Size(
    texts=800,
    held_out=240,
    rounds=6,
    epsilons=(8.0, 16.0, 32.0),
    laws=("local", "metric", "partition", "paper"),
    kept=True,
)
FULL = Size(texts=2_000, held_out=600, rounds=20, epsilons=(0.1, 1.0, 4.0, 8.0, 16.0, 32.0, 64.0))


class Bench:
    """Texts in files, as clients read them, and runs over them."""

    def __init__(self, model: Path, wikitext: Path, pii: Path, size: Size, folder: Path) -> None:
        self.model, self.size, self.folder = model, size, folder
        # The model was pretrained on WikiText's train part: clients hold its validation part instead.
        lines = {
            "wikitext2": (_paragraphs(wikitext / "valid.txt"), _paragraphs(wikitext / "test.txt")),
            "pii_spans": _halves(read_labelled_spans(pii)[0]),
        }
        self.spans = dict(zip(*read_labelled_spans(pii)))
        for data, (train, held_out) in lines.items():
            for part, texts in (("train", train[: size.texts]), ("eval", held_out[: size.held_out])):
                write_rows(folder / f"{data}.{part}.jsonl", ({"text": text} for text in texts))

    def config(self, row: dict[str, Any], output: Path) -> FederatedConfig:
        """The settings of a row's run."""
        return FederatedConfig(
            model=str(self.model),
            train=str(self.folder / f"{row['data']}.train.jsonl"),
            eval=str(self.folder / f"{row['data']}.eval.jsonl"),
            output=str(output),
            rounds=self.size.rounds,
            learning_rate=self.size.learning_rate,
            perturbation="selective" if row["scheme"] == "typed" else row["scheme"],
            mechanism="typed" if row["scheme"] == "typed" else row.get("mechanism", "local"),
            replacement=row.get("replacement", "uniform"),
            learn_replaced=row.get("learned", True),
            epsilon=row["epsilon"] or 1.0,
            seed=row["seed"],
        )

    def run(self, row: dict[str, Any]) -> dict[str, Any]:
        """Perplexity before the first round and after each, and what was perturbed."""
        with tempfile.TemporaryDirectory() as output, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = self.config(row, Path(output))
            adapted = AdaptedModel.load(config)
            texts = adapted.texts(config.eval)
            held_out = adapted.examples(adapted.encode(texts))
            others = self._others(adapted, texts, held_out) if row["data"] == "pii_spans" else None
            sites = [Site.of_partition(adapted, index, row["clients"]) for index in range(row["clients"])]
            cards = [json.loads((site.folder / "card.json").read_text()) for site in sites if row["scheme"] != "none"]
            perplexities = [adapted.quality(held_out).perplexity]
            of_others = [] if others is None else [adapted.quality(others).perplexity]
            adapter = adapted.adapter
            for number in range(1, config.rounds + 1):
                aggregator = Aggregator(adapter, UpdateBounds(config.max_update_norm, config.max_examples))
                for site in sites:
                    adapted.adapter = adapter
                    fitted = site.fit(number)
                    aggregator.add(adapted.layout.to_json(), adapted.layout.pack(adapted.adapter), fitted.examples)
                adapter = adapted.adapter = aggregator.mean()
                perplexities.append(adapted.quality(held_out).perplexity)
            tokens = sum(card["tokens"]["all"] for card in cards)
            return {
                "perplexities": perplexities,
                "perplexities_of_others": [
                    *of_others,
                    *([] if others is None else [adapted.quality(others).perplexity]),
                ],
                "private_share": sum(card["tokens"]["private"] for card in cards) / tokens if tokens else 0.0,
                "largest_epsilon_of_a_text": max((c["budget"]["of_a_text"] for c in cards), default=None),
            }

    def _others(self, adapted: AdaptedModel, texts: Sequence[str], examples: Examples) -> Examples:
        """The same examples, of which tokens in labelled spans, found by a detector or not, are read but not judged."""
        exact = PrivacyPolicy(whole_words=False)
        encoded = adapted.tokenizer(list(texts), add_special_tokens=False, return_offsets_mapping=True)
        items = []
        for text, offsets, item in zip(texts, encoded["offset_mapping"], examples.items):
            private = token_mask(offsets, exact.private(text, self.spans[text]))
            begun = len(item["input_ids"]) and item["input_ids"][0] == adapted.tokenizer.bos_token_id
            marks = ([False] if begun else []) + private
            hidden = marks[: len(item["labels"])] + [False] * (len(item["labels"]) - len(marks))
            labels = [-100 if own else label for own, label in zip(hidden, item["labels"])]
            items.append({**item, "labels": labels})
        return Examples(items, examples.truncated)


def settings(size: Size, seeds: int) -> Iterator[dict[str, Any]]:
    """Rows to measure, the paper's figures first."""
    if size.laws or size.kept:
        yield from suite.by_seed([*_kept(size), *_laws(size)], seeds)
        return
    for seed in range(seeds):
        for data in DATA:
            for scheme in SCHEMES:
                for epsilon in size.epsilons if scheme != "none" else (None,):
                    row = {"data": data, "scheme": scheme, "epsilon": epsilon, "clients": size.clients}
                    yield {**row, "rounds": size.rounds, "seed": seed}
        for clients in (size.clients, *size.more_clients):
            for epsilon, way in itertools.product(TYPED_EPSILONS, WAYS):
                row = {"data": "pii_spans", "scheme": "typed", "epsilon": epsilon, "clients": clients, **way}
                yield {**row, "rounds": size.rounds, "seed": seed}
        for clients in size.more_clients:
            row = {"data": "pii_spans", "scheme": "selective", "epsilon": 8.0, "clients": clients}
            yield {**row, "rounds": size.rounds, "seed": seed}


def _kept(size: Size) -> Iterator[dict[str, Any]]:
    """Private words as they are, kept and not learned, and replaced by type and not learned, by number of clients.

    At epsilon 64 a token practically no word is replaced: that is what keeps them.
    """
    for clients in sorted({size.clients, *size.more_clients}) if size.kept else ():
        base = {"data": "pii_spans", "clients": clients, "rounds": size.rounds, "texts": size.texts}
        yield {**base, "scheme": "none", "epsilon": None}
        yield {**base, "scheme": "selective", "epsilon": 64.0, "learned": False}
        yield {**base, "scheme": "typed", "epsilon": 8.0, **WAYS[1]}


def _laws(size: Size) -> Iterator[dict[str, Any]]:
    """Figure 4: each mechanism, learned as in the paper, at each epsilon."""
    base = {"data": "pii_spans", "clients": size.clients, "rounds": size.rounds, "texts": size.texts}
    for epsilon, law in itertools.product(size.epsilons, size.laws):
        yield {**base, "scheme": "selective", "mechanism": law, "epsilon": epsilon, "learned": True}


def detector_quality(pii: Path) -> dict[str, Any]:
    """Precision and recall of the rule detector by entity."""
    texts, labels = read_labelled_spans(pii)
    return measure_detector(RuleDetector(), texts, labels, corpus=pii.name).as_dict()


def plot(rows: Sequence[dict[str, Any]], folder: Path) -> None:
    """Figure 3 (schemes) and figure 4 (epsilons) for both data sets, as one picture."""
    with picture(folder / "federated.png", len(DATA), 2, panel=(5.8, 4.4)) as panels:
        _plot_schemes(rows, panels)


def _plot_schemes(rows: Sequence[dict[str, Any]], panels: Sequence[Any]) -> None:
    for column, data in enumerate(DATA):
        own = [row for row in rows if row["data"] == data]
        base = [row for row in own if row["scheme"] == "none"]
        most = max((row["clients"] for row in base), default=0)
        shown = [row for row in own if row["clients"] == most]
        for row in _mean_over_seeds([r for r in shown if r["epsilon"] in (None, 1.0)]):
            name = {"none": "no privacy", "selective": "private tokens", "all": "every token"}[row["scheme"]]
            panels[column].plot(row["perplexities"], label=name)
        panels[column].set_title(f"{data}: schemes at epsilon 1, {most} clients")
        for row in _mean_over_seeds([r for r in shown if r["scheme"] == "selective"]):
            panels[len(DATA) + column].plot(row["perplexities"], label=f"epsilon {row['epsilon']:g}")
        panels[len(DATA) + column].set_title(f"{data}: private tokens by epsilon")
    for axes in panels:
        axes.set(xlabel="round", ylabel="held-out perplexity", yscale="log")
        axes.xaxis.get_major_locator().set_params(integer=True)
        plain_log(axes.yaxis)


def plot_detector(quality: dict[str, Any], folder: Path) -> None:
    """Recall and precision by entity."""
    names = sorted(quality["by_entity"], key=lambda name: quality["by_entity"][name]["recall"] or 0)
    places = np.arange(len(names))
    with picture(folder / "federated_detector.png", panel=(7.6, 6.6)) as (axes,):
        for shift, key, colour in ((-0.2, "recall", "#1b3a57"), (0.2, "precision", "#c4572b")):
            values = [quality["by_entity"][name][key] or 0.0 for name in names]
            axes.barh(places + shift, values, height=0.4, label=key, color=colour)
        axes.set_yticks(places, [f"{name} ({quality['by_entity'][name]['labelled']})" for name in names])
        axes.set_title(f"Rule detector on {quality['corpus']}")
        axes.set_xlabel("share (entities of a kind, with their number)")
        axes.grid(axis="y", visible=False)


def _mean_over_seeds(rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    groups: dict[tuple[Any, Any], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["scheme"], row["epsilon"]), []).append(row)
    for own in groups.values():
        yield {**own[0], "perplexities": np.mean([row["perplexities"] for row in own], axis=0).tolist()}


def _paragraphs(path: Path) -> list[str]:
    lines = (line.strip() for line in path.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if len(line) > 200 and not line.startswith("=")]


def _halves(texts: list[str]) -> tuple[list[str], list[str]]:
    """Train and held-out texts; those made from one template fall on both sides, as in the data set itself."""
    usable = [text for text in texts if len(text) > 60]
    return [t for i, t in enumerate(usable) if i % 4], [t for i, t in enumerate(usable) if not i % 4]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is missing, then draw."""
    sizes = {"default": Size(), "small": SMALL, "tiny": TINY, "short": SHORT, "full": FULL}
    parser = suite.parser_of(__doc__, sizes, seeds=1, pii="labelled spans, such as synth_dataset_v2.json")
    parser.epilog = "What the detector finds is written beside --json."
    parser.add_argument("--model", type=Path, help="folder of a causal model, such as gpt2-mini")
    parser.add_argument("--wikitext", type=Path, help="folder with valid.txt and test.txt")
    parser.add_argument("--detector", action="store_true", help="only what the detector finds")
    options, size, table = suite.begin(parser, arguments)
    if options.detector:
        found = detector_quality(options.pii)
        print(json.dumps(found), flush=True)
        if options.json is not None:
            record.write(options.json.parent / "detector.json", found)
        if options.pictures:
            plot_detector(found, options.pictures)
        return
    if options.model is None or options.wikitext is None:
        parser.error("the rounds need --model and --wikitext")
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(options.model, options.wikitext, options.pii, size, Path(folder))
        suite.finish(table, suite.each(settings(size, options.seeds), bench.run), options, plot)


if __name__ == "__main__":
    main()
