"""Runs over batch size, learning rate, rank and bound at two budgets: what the rules of `fastdp plan` are fitted on.

    python -m fastdp.bench.settings --data shared/data --model shared/models/gpt2-mini --json bench/results/settings.json
    python -m fastdp.bench.settings --fit bench/results/settings.json

The second fits the rules to what the first found. With ``--only pii_spans`` (or ``wikitext2``) a grid of 12 points is run on
data that the rules were not fitted to, and then what the plan suggests for as many passes; it ends with exit code 1 where
`BAR` does not allow that.

Small runs on purpose: they say which settings suit a noise-to-signal ratio, not how good a model gets. Each is a
run of `fastdp finetune` on the first examples of a data set, judged on held-out ones; a file with rows is gone on with.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fastdp.data import read_rows
from fastdp.files import write_rows
from fastdp.finetune import finetune
from fastdp.finetune.config import FinetuneConfig
from fastdp.finetune.plan import plan

from .utility.suite import Table, each, measure

#: What a data set's run has in common; (train, eval) below the data folder.
DATA: dict[str, tuple[tuple[str, str], dict[str, Any]]] = {
    "e2e": (
        ("e2e/train.csv", "e2e/test.csv"),
        {"prompt_column": "mr", "target_column": "ref", "max_length": 64},
    ),
    "sst2": (
        ("sst2/train.tsv", "sst2/dev.tsv"),
        {
            "task": "classification",
            "text_column": "sentence",
            "label_column": "label",
            "labels": ["0", "1"],
            "max_length": 32,
        },
    ),
    # Nothing is fitted on this one: it tells whether the rules carry over.
    "wikitext2": (("wikitext2/train.txt", "wikitext2/valid.txt"), {"max_length": 64}),
    # Nor on this, which was first run when the rules stood: one file, whose last fifth judges.
    "pii_spans": (("pii_spans/synth_dataset_v2.json",) * 2, {"text_column": "full_text", "max_length": 64}),
}
FITTED = ("e2e", "sst2")
EXAMPLES, JUDGES, EPOCHS, DELTA = 384, 96, 3, 1e-4
PARTS = ("train", "eval")
#: How much worse than the best of the grid the suggested settings may be, in perplexity.
BAR = 1.1
EPSILONS = (8.0, 2.0)
BATCHES = (16, 64, 192)
RATES = (1e-3, 4e-3, 1.6e-2, 6.4e-2)
MIDDLE = {"batch_size": 64, "learning_rate": 4e-3, "lora_r": 8, "max_grad_norm": 1.0}


def grid(only: str | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Data set and settings of every run; the coarse grid of all before the finer questions of any."""
    names, epsilons = (FITTED, EPSILONS) if only is None else ((only,), EPSILONS[:1])
    for epsilon, batch, rate, name in itertools.product(epsilons, BATCHES, RATES, names):
        yield name, {**MIDDLE, "epsilon": epsilon, "batch_size": batch, "learning_rate": rate}
    if only is not None:
        return
    for epsilon, (setting, value), name in itertools.product(
        EPSILONS, (("lora_r", 2), ("lora_r", 32), ("max_grad_norm", 0.1), ("max_grad_norm", 10.0)), names
    ):
        yield name, {**MIDDLE, "epsilon": epsilon, setting: value}


def suggested(name: str, model: str) -> dict[str, Any]:
    """What the plan says for as many examples and passes as the grid has."""
    common = DATA[name][1]
    config = FinetuneConfig(model=model, epsilon=EPSILONS[0], delta=DELTA, physical_batch_size=32, **common)
    found = plan(config, EXAMPLES, common["max_length"], passes=EPOCHS).config
    return {setting: getattr(found, setting) for setting in MIDDLE} | {"epsilon": EPSILONS[0]}


def run(row: dict[str, Any], model: str, data: Path, folder: Path) -> dict[str, Any]:
    """Of the run with a row's settings: what it was judged, noise multiplier and steps."""
    paths, common = DATA[row["data"]]
    settings = {setting: row[setting] for setting in (*MIDDLE, "epsilon")}
    files = [excerpt(data / path, count, folder, part) for path, count, part in zip(paths, (EXAMPLES, JUDGES), PARTS)]
    config = FinetuneConfig(
        model=model,
        train=str(files[0]),
        eval=str(files[1]),
        output=str(folder / "run"),
        delta=DELTA,
        epochs=float(EPOCHS),
        schedule="linear",
        physical_batch_size=32,
        samples=0,
        **common,
        **(settings | {"lora_alpha": 2.0 * settings["lora_r"]}),
    )
    result = finetune(config)
    assert result.before is not None
    assert result.after is not None
    return {
        "noise_multiplier": result.noise_multiplier,
        "steps": result.steps,
        "trained_parameters": result.trained_parameters,
        "loss_before": result.before.loss,
        "loss": result.after.loss,
        result.after.figure[0]: result.after.figure[1],
    }


def figure(row: dict[str, Any]) -> float:
    """The logarithm of what a run is judged by, perplexity or the share of wrong labels: differences of it are relative."""
    return math.log(1 - row["accuracy"]) if "accuracy" in row else math.log(row["perplexity"])


def fit(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The rules under which these runs are, on average, least above the best that was found beside them.

    Returns:
        ``rate`` where the whole run's noise is as large as its signal, and the ``power`` of that ratio by which it falls;
        ``least_steps``; ``bound``; and ``rank``.
    """

    def best(setting: str) -> Any:
        """The value that is least above the best beside it, on average, each at the best rate that it was tried with.

        The usual value was tried with more rates than others: another one is taken where it is better all the same.
        """
        groups: dict[Any, dict[Any, float]] = defaultdict(dict)
        for row in rows:
            if all(row[name] == value for name, value in MIDDLE.items() if name not in (setting, "learning_rate")):
                group, value = groups[row["data"], row["epsilon"]], row[setting]
                group[value] = min(group.get(value, math.inf), figure(row))
        values = set.union(*map(set, groups.values()))
        whole = [group for group in groups.values() if group.keys() == values]
        return min(sorted(values), key=lambda value: np.mean([group[value] - min(group.values()) for group in whole]))

    curves: dict[Any, dict[int, list[tuple[float, float, float]]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if all(row[name] == MIDDLE[name] for name in ("lora_r", "max_grad_norm")):
            ratio = row["noise_multiplier"] * row["trained_parameters"] ** 0.5 / row["batch_size"] / row["steps"] ** 0.5
            point = math.log(row["learning_rate"]), figure(row), ratio
            curves[row["data"], row["epsilon"]][row["steps"]].append(point)
    # Straight lines between the rates that were tried: a smooth curve is bent away by the runs that diverged.
    lines, excess = [], defaultdict(list)
    for by_steps in curves.values():
        for points in by_steps.values():
            rates, judged, ratios = zip(*points)
            if len(rates) == len(RATES):
                lines.append((ratios[0], *zip(*sorted(zip(rates, judged)))))
        lows = {steps: min(judged for _, judged, _ in points) for steps, points in by_steps.items()}
        for steps, low in lows.items():
            excess[steps].append(low - min(lows.values()))

    def judged_by(rule: tuple[float, float]) -> float:
        rate, power = rule
        return float(np.mean([np.interp(math.log(rate * ratio**-power), xs, ys) for ratio, xs, ys in lines]))

    rate, power = min(
        itertools.product(np.geomspace(RATES[0], RATES[-1], 49), (0.0, 0.25, 0.5, 0.75, 1.0)), key=judged_by
    )
    return {
        "rate": float(f"{rate:.2g}"),
        "power": power,
        "least_steps": min(excess, key=lambda steps: np.mean(excess[steps])),
        "bound": best("max_grad_norm"),
        "rank": best("lora_r"),
    }


def excerpt(path: Path, count: int, folder: Path, part: str = PARTS[0]) -> Path:
    """Examples of a data set, or of one part of a file that holds both, written to a file of their own."""
    if path.suffix == ".json":
        rows = json.loads(path.read_text(encoding="utf-8"))
        cut = len(rows) * 4 // 5
        rows = rows[:cut] if part == PARTS[0] else rows[cut:]
    else:
        rows = read_rows(path).rows
    # Spread over the file, which may be sorted; long enough that a model has something to learn from.
    usable = [row for row in rows if len(str(next(iter(row.values())))) > 20]
    chosen = usable[:: max(1, len(usable) // count)][:count]
    written = folder / f"{path.parent.name}-{path.stem}-{part}.jsonl"
    write_rows(written, chosen)
    return written


def main() -> None:
    """Run what is missing, writing each row as it comes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with e2e/, sst2/, wikitext2/ and pii_spans/")
    parser.add_argument("--model")
    parser.add_argument("--only", choices=tuple(DATA), help="one data set (by default those that rules are fitted on)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--fit", type=Path, help="say the rules that fit the runs of this file, and run nothing")
    arguments = parser.parse_args()
    if arguments.fit:
        print(json.dumps(fit(json.loads(arguments.fit.read_text())["figures"])))
        return
    if None in (arguments.data, arguments.model, arguments.json):
        parser.error("give --data, --model and --json, or --fit")
    table = Table(arguments.json)

    def tried(row: dict[str, Any]) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            return run(row, arguments.model, arguments.data, Path(folder))

    def measured(*rows: dict[str, Any]) -> list[dict[str, Any]]:
        measure(table, each(rows, tried))
        return [found for row in rows if (found := table.of(row))]

    found = measured(*({"data": name, **settings} for name, settings in grid(arguments.only)))
    if arguments.only and arguments.only not in FITTED:
        chosen = suggested(arguments.only, arguments.model)
        [ours] = measured({"data": arguments.only, **chosen, "suggested": True})
        ratio = ours["perplexity"] / min(row["perplexity"] for row in found)
        print(f"suggested: {ratio:.3f} of the best of {len(found)} points; the bar is {BAR}")
        raise SystemExit(int(ratio > BAR))


if __name__ == "__main__":
    main()
