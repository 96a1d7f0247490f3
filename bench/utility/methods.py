"""Forms of a method compared at equal true epsilon: one run of `fastdp finetune` for each form, epsilon and seed.

    fastdp bench utility --suite rapft --model MODEL --train train.csv --eval test.csv --public public.csv --json rapft.json

A form is what a settings file of `examples/` says. The forms of a suite share data, batch size and passes; learning rates are
those that did best for a form in the committed results, or the suite's. Seeds are of new weights: every run draws batches and
noise of its own.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fastdp.data import read_rows
from fastdp.files import write_rows
from fastdp.finetune import finetune
from fastdp.finetune.config import load_config

from . import suite

Settings = dict[str, Any]
#: Stands for the file of public examples.
PUBLIC = "PUBLIC"
E2E: Settings = {
    **{"text_column": "ref", "max_length": 64, "lora_r": 4, "lora_alpha": 32},
    **{"learning_rate": 1e-2, "epochs": 1},
}
SST2: Settings = {
    **{"task": "classification", "text_column": "sentence", "label_column": "label", "labels": ["0", "1"]},
    **{"max_length": 32, "learning_rate": 1e-3, "epochs": 1},
}


@dataclass(frozen=True)
class Suite:
    """Forms of a method and what they are compared with.

    Args:
        columns: of the data, which are read.
        shared: settings of all forms.
        forms: settings of each form by name, from which the suite's epsilons are taken too if they are not there.
        epsilons: of forms without their own.
    """

    columns: tuple[str, ...]
    shared: Settings
    forms: Mapping[str, Settings]
    epsilons: tuple[float, ...] = ()


def _method(name: str, learning_rate: float | None = None, /, **options: Any) -> Settings:
    """The settings of a form with a method and its options."""
    rate = {} if learning_rate is None else {"learning_rate": learning_rate}
    return {"method": name, "method_options": options, **rate}


#: What gives no privacy, beside which the others are read.
CLEAR: Settings = {"epsilon": math.inf}
#: LoRA's B starts at zero, and a zero has no relevance: the map comes after two private steps.
_rapft = partial(_method, "rapft", irrelevance_ratio=0.7, map_after=2, initialisation={"kind": "top_p", "p": 0.9})
_MAP = {"kind": "public", "data": PUBLIC, "examples": 64}
_NOISY = {"kind": "noisy", "noise_multiplier": 2.0, "sample_rate": 0.02}
_frost = partial(_method, "frost", 2e-2, selection_rate=0.01)
_LAYER: Settings = {"layer": 6, "autoencoder": None, "rehearsal": {"public": PUBLIC}}
SUITES = {
    "rapft": Suite(
        ("ref",),
        E2E,
        {
            "non-private": CLEAR,
            "DP-SGD": {},
            "printed shape": _rapft(source=_MAP, allocation="printed"),
            "optimal noise": _rapft(source=_MAP, allocation="optimal"),
            "printed shape, noised map": _rapft(source=_NOISY, allocation="printed"),
            "as printed": _rapft(source={"kind": "private"}, allocation="printed", mode="paper"),
        },
        (3.0, 5.0, 7.0),
    ),
    "frost": Suite(
        ("sentence", "label"),
        {**SST2, "peft": "full", "max_length": 16},
        {
            "non-private": {**CLEAR, "learning_rate": 3e-4},
            "full": {"learning_rate": 5e-3},
            "LoRA": {"peft": "lora", "learning_rate": 5e-3},
            "adapter": {"peft": "bottleneck", "learning_rate": 4e-2},
            "random partitions": _frost(choose_by="random"),
            "largest values": _method("frost", 4e-2, choose_by="values", granularity="parameters"),
            "DP-FROST": _frost(),
            "selected by MG": _frost(magnitude="MG"),
            "selected at once": _frost(selection_steps=1),
            "selected twice": _frost(select_every=16),
            "soft freezing": _method(
                "frost", 1e-2, unfreezing_ratio=1.0, axes_power=0.25, selection_steps=1, budget_ratio=0.98
            ),
        },
        (0.5, 2.0, 8.0),
    ),
    "ewft": Suite(
        ("sentence", "label"),
        {**SST2, "max_length": 20, "epochs": 3},
        {
            "non-private": CLEAR,
            "as printed": _method("ewft", layer=6, noise="paper_epoch_weighted", public=PUBLIC),
            "released once": _method("ewft", noise="release_once", **_LAYER),
            "DP-Forward": _method("ewft", noise="dp_forward", **_LAYER),
            "two codes": _method("ewft", layer=6, noise="codebook", rehearsal=_LAYER["rehearsal"]),
        },
        (2.0, 4.0, 8.0),
    ),
    # Eta and a token's epsilon stand in the forms.
    "sap": Suite(
        ("sentence", "label"),
        SST2,
        {
            "no privacy": CLEAR,
            **{f"Laplace, eta {eta}": _method("sap", eta=eta, mechanism="laplace") for eta in (50, 80, 100)},
            **{f"exponential, eta {eta}": _method("sap", eta=eta, mechanism="exponential") for eta in (14, 17, 21)},
            **{
                f"prior, eta {eta}": _method("sap", eta=eta, cti={"form": "prior", "public": PUBLIC})
                for eta in (14, 17, 21)
            },
            **{
                f"quotient, {cells} cells cut for {epsilon}": _method(
                    "sap",
                    epsilon=epsilon,
                    cti={"form": "quotient", "cells": cells, "told_at": epsilon, "public": PUBLIC},
                )
                for cells, epsilon in ((3, 4), (5, 6))
            },
        },
        (math.nan,),
    ),
}


@dataclass(frozen=True)
class Size:
    """How many rows are read, all if there is no number, and the batch size."""

    train: int | None = 8192
    eval: int | None = 1024
    public: int | None = 2048
    batch_size: int = 256


SIZES = {"default": Size(), "tiny": Size(256, 32, 64, 64), "full": Size(None, None)}


def settings(chosen: Suite, seeds: int) -> Iterator[suite.Row]:
    """The forms at each epsilon; the first seed of everything comes first."""
    rows: list[suite.Row] = []
    for form, own in chosen.forms.items():
        budgets = (own["epsilon"],) if "epsilon" in own else chosen.epsilons
        rows += [{"form": form, "epsilon": str(epsilon)} for epsilon in budgets]
    return suite.by_seed(rows, seeds)


def with_public(value: Any, path: Path) -> Any:
    """Settings with the path of the public examples where it belongs."""
    if isinstance(value, dict):
        return {name: with_public(inner, path) for name, inner in value.items()}
    return str(path) if value == PUBLIC else value


def run(chosen: Suite, shared: Settings, public: Path, row: suite.Row) -> suite.Row:
    """Fine-tune once: quality before and after, and what it cost."""
    own = chosen.forms[row["form"]]
    epsilon = None if row["epsilon"] == "nan" else float(row["epsilon"])
    with tempfile.TemporaryDirectory() as folder:
        output = str(Path(folder) / "run")
        given = {**chosen.shared, **shared, **own, "epsilon": epsilon, "seed": row["seed"], "output": output}
        found = finetune(load_config(None, with_public(given, public)))
    assert found.before is not None
    assert found.after is not None
    return {
        "before": found.before.as_dict(),
        "after": found.after.as_dict(),
        "true_epsilon": found.epsilon if math.isfinite(found.epsilon) else "inf",
        "privacy": found.privacy,
        "trained_parameters": found.trained_parameters,
        "steps": found.steps,
        "seconds_per_step": found.seconds_per_step,
    }


def main(name: str, arguments: Sequence[str] | None = None) -> None:
    """Measure what is missing of a suite."""
    parser = suite.parser_of(
        __doc__,
        SIZES,
        model="folder of a model",
        train="training data",
        eval="held-out data of the same form",
        public="public data of the same form",
    )
    options, size = suite.begin(parser, arguments)
    chosen = SUITES[name]
    # Benchmarks are public as a whole, and their files share phrases.
    shared: Settings = {"model": str(options.model), "batch_size": size.batch_size, "public_overlap": 10**9}
    with tempfile.TemporaryDirectory() as folder:
        files = {part: Path(folder) / f"{part}.jsonl" for part in ("train", "eval", "public")}
        for part, path in files.items():
            table, count = read_rows(getattr(options, part)), getattr(size, part)
            columns = [table.column(column, column)[:count] for column in chosen.columns]
            write_rows(path, [dict(zip(chosen.columns, row)) for row in zip(*columns)])
        shared |= {"train": str(files["train"]), "eval": str(files["eval"]), "schedule": "linear"}
        suite.finish(options, settings(chosen, options.seeds), partial(run, chosen, shared, files["public"]))
