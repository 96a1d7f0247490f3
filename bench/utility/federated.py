"""Federated selective DP: the paper's figures 3 and 4.

    fastdp bench utility --suite federated --model MODEL --wikitext FOLDER --pii FILE --json rounds.json

Perplexity by round without privacy, with private tokens perturbed, and with every token perturbed, at several epsilons, on
WikiText-2 and on texts with labelled private spans. By number of clients, of the second data: private tokens replaced by type
and not learned (``typed``), and kept and not learned. Of that data perplexity is also taken of the tokens outside the labelled
spans, since nobody should learn the others. The rounds use the clients' and the server's own code in one process.
"""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fastdp.data import Examples
from fastdp.federated import Aggregator, FederatedConfig, UpdateBounds
from fastdp.federated.adapter import AdaptedModel
from fastdp.federated.site import Site
from fastdp.federated.wire import pack_adapter
from fastdp.files import write_rows
from fastdp.methods.selective import PrivacyPolicy, read_labelled_spans, token_mask

from . import suite

DATA = ("wikitext2", "pii_spans")


@dataclass(frozen=True)
class Size:
    """How much is run."""

    texts: int = 360
    held_out: int = 120
    rounds: int = 4
    epsilons: tuple[float, ...] = (0.1, 1.0, 8.0, 32.0)
    clients: int = 4
    more_clients: tuple[int, ...] = (2, 16)
    learning_rate: float = 2e-3


SIZES = {
    "default": Size(),
    # By number of clients.
    "small": Size(texts=180, held_out=60, rounds=3, epsilons=()),
    "tiny": Size(texts=24, held_out=8, rounds=2, epsilons=(1.0,), clients=2, more_clients=()),
}


class Bench:
    """Texts in files, as clients read them, and runs over them."""

    def __init__(self, model: Path, wikitext: Path, pii: Path, size: Size) -> None:
        self.model, self.size, self._kept = model, size, tempfile.TemporaryDirectory()
        self.folder = Path(self._kept.name)
        # The model was pretrained on WikiText's train part: clients hold its validation part instead.
        lines = {
            "wikitext2": (_paragraphs(wikitext / "valid.txt"), _paragraphs(wikitext / "test.txt")),
            "pii_spans": _halves(read_labelled_spans(pii)[0]),
        }
        self.spans = dict(zip(*read_labelled_spans(pii)))
        for data, (train, held_out) in lines.items():
            for part, texts in (("train", train[: size.texts]), ("eval", held_out[: size.held_out])):
                write_rows(self.folder / f"{data}.{part}.jsonl", ({"text": text} for text in texts))

    def config(self, row: suite.Row, output: Path) -> FederatedConfig:
        return FederatedConfig(
            model=str(self.model),
            train=str(self.folder / f"{row['data']}.train.jsonl"),
            eval=str(self.folder / f"{row['data']}.eval.jsonl"),
            output=str(output),
            rounds=self.size.rounds,
            learning_rate=self.size.learning_rate,
            perturbation="selective" if row["scheme"] == "typed" else row["scheme"],
            mechanism="typed" if row["scheme"] == "typed" else "local",
            replacement="model" if row["scheme"] == "typed" else "uniform",
            learn_replaced=row.get("learned", True),
            epsilon=row["epsilon"] or 1.0,
            seed=row["seed"],
        )

    def run(self, row: suite.Row) -> suite.Row:
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
                    aggregator.add(pack_adapter(adapted.adapter), fitted.examples)
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


def settings(bench: Bench, seeds: int) -> Iterator[suite.Row]:
    """Rows to measure, the paper's figures first."""
    size = bench.size
    rows: list[suite.Row] = []
    for data in DATA:
        base = {"data": data, "clients": size.clients, "rounds": size.rounds}
        rows.append({**base, "scheme": "none", "epsilon": None})
        rows += [{**base, "scheme": scheme, "epsilon": e} for scheme in ("selective", "all") for e in size.epsilons]
    for clients in (size.clients, *size.more_clients):
        base = {"data": "pii_spans", "clients": clients, "rounds": size.rounds}
        rows.append({**base, "scheme": "none", "epsilon": None})
        rows.append({**base, "scheme": "typed", "epsilon": 8.0, "replacement": "model", "learned": False})
        # At epsilon 64 a token practically no word is replaced: that is what keeps them.
        rows.append({**base, "scheme": "selective", "epsilon": 64.0, "learned": False})
    return suite.by_seed(rows, seeds)


def _paragraphs(path: Path) -> list[str]:
    lines = (line.strip() for line in path.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if len(line) > 200 and not line.startswith("=")]


def _halves(texts: list[str]) -> tuple[list[str], list[str]]:
    """Train and held-out texts; those made from one template fall on both sides, as in the data set itself."""
    usable = [text for text in texts if len(text) > 60]
    return [t for i, t in enumerate(usable) if i % 4], [t for i, t in enumerate(usable) if not i % 4]


PATHS = {
    "model": "folder of a causal model, such as gpt2-mini",
    "wikitext": "folder with valid.txt and test.txt",
    "pii": "labelled spans, such as synth_dataset_v2.json",
}
#: Measures what is missing, by the arguments of a command line.
main = partial(suite.main, __doc__, SIZES, Bench, settings, PATHS, seeds=1)
