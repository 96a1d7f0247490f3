"""Tables of pages, computed from the committed figures.

`python -m bench.pages` writes them again, from the root of a checkout. A test compares the pages with what this module and
`bench.sentences` compute, and looks up every decimal figure of the sentences of `docs/results.md` in both.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from .record import markdown, with_table

RESULTS = Path(__file__).parent / "results"
RESULTS_PAGE = Path("docs/results.md")
Row = dict[str, Any]
Table = tuple[list[str], list[list[str]]]


def figures(name: str, **wanted: Any) -> list[Row]:
    """The rows of a result file in which each of ``wanted`` has the given value; an absent key counts as None."""
    found = json.loads((RESULTS / f"{name}.json").read_text())["figures"]
    rows = found["rows"] if isinstance(found, dict) else found
    return [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]


def spread(values: Iterable[float], digits: int = 1, sign: bool = False) -> str:
    """Mean and standard deviation; of a single value, the value."""
    found = list(values)
    mean = format(statistics.mean(found), f"{'+' * sign}.{digits}f")
    return f"{mean}±{statistics.stdev(found):.{digits}f}" if len(found) > 1 else mean


def points(rows: list[Row], others: list[Row], value: str, scale: float = 100) -> list[float]:
    """Differences of rows that share a seed, first less second, times ``scale``."""
    base = {row["seed"]: row[value] for row in others}
    return [scale * (row[value] - base[row["seed"]]) for row in rows if row["seed"] in base]


def paired(rows: list[Row], others: list[Row], value: str, scale: float = 1, digits: int = 1) -> str:
    """Mean difference of rows that share a seed, and its standard error."""
    found = points(rows, others, value, scale)
    error = statistics.stdev(found) / len(found) ** 0.5
    return f"{statistics.mean(found):+.{digits}f}±{error:.{digits}f}"


def at_true_epsilon(rows: list[Row]) -> list[Row]:
    """The rows themselves. Raises ValueError if one spends more than the epsilon that its column names."""
    for row in rows:
        if row["epsilon"] != "inf" and not 0.99 * row["epsilon"] <= row["true_epsilon"] <= row["epsilon"]:
            raise ValueError(f"a row of epsilon {row['epsilon']} spends {row['true_epsilon']}")
    return rows


def runs() -> Table:
    """Whole data sets, one seed each."""
    titles = {
        "e2e-inf": "E2E, LoRA rank 8, no privacy",
        "e2e-8": "E2E, LoRA rank 8, scale 2",
        "dpsgd-as-rapft": "E2E, LoRA rank 4, scale 8",
        "rapft": "the same, Rap-FT, ellipsoid, noised map",
        "sst2-8": "SST-2, LoRA rank 8",
        "frost": "SST-2, DP-FROST",
        "sap": "SST-2, SAP, Laplace, eta 75",
        "ewft": "SST-2, EW-FT after block 4",
        "ewft-rehearsed": "SST-2, EW-FT after the last block, rehearsed",
    }
    found = {row["run"]: row["figures"] for name in ("finetune", "methods", "local") for row in figures(name)}
    lines = []
    for run, title in titles.items():
        row = found[run]
        measure = "perplexity" if "perplexity" in row["after"] else "accuracy"
        cells = [f"{row[when][measure]:.{1 if measure == 'perplexity' else 3}f}" for when in ("before", "after")]
        spent = f"{float(row['epsilon']):.3f} ({row['delta']:.0e})".replace("e-0", "e-")
        spent = {"e2e-inf": "none", "sap": "metric"}.get(run, spent)
        lines.append([title, str(row["trained_parameters"]), spent, measure, *cells])
    return ["run", "trained", "epsilon (delta)", "measure", "before", "after"], lines


TUNINGS = {"adapter": "adapter", "bitfit": "BitFit", "lora": "LoRA"}
#: Rap-FT's forms that the page shows.
RAPFT_FORMS = {
    "dpsgd": "DP-SGD",
    "printed": "printed shape",
    "optimal": "optimal noise",
    "noised": "printed shape, noised map",
    "paper": "as printed, no epsilon",
}


def rapft_200() -> Table:
    """Rap-FT against DP-SGD by the paper's own rule, 200 steps, at the middle epsilon.

    Each cell has the rows of the first file that holds them: of several seeds, or of one.
    """
    names = ("utility/rapft-200-seeds", "utility/rapft-200")
    lines = []
    for tuning, title in TUNINGS.items():
        line = [title]
        for form in RAPFT_FORMS:
            found = ([rapft_rows(name, tuning, of, 5.0) for of in (form, "dpsgd")] for name in names)
            rows, base = next((pair for pair in found if pair[0]), ([], []))
            line.append(_perplexity_cell(rows, base))
        lines.append(line)
    return ["trained", *RAPFT_FORMS.values()], lines


def rapft_rows(name: str, tuning: str, form: str, epsilon: float) -> list[Row]:
    """Rows of perplexity at the usual ratio and start; those of form ``paper`` have no true epsilon."""
    usual = {"part": "perplexity", "irrelevance_ratio": 0.7, "initialisation": "top_p"}
    rows = figures(name, tuning=tuning, form=form, epsilon=epsilon, **usual)
    return rows if form == "paper" else at_true_epsilon(rows)


#: What attacks find in a model that was tuned on texts with names.
ATTACKS = {"recall": "recall", "precision": "precision", "reconstructed": "reconstructed", "auc": "membership"}


def names() -> Table:
    """Rap-FT's tables V and VI at the middle epsilon: what attacks find, in per cent."""
    forms = {"non-private": "no privacy", "dpsgd": "DP-SGD", "printed": "printed shape"}
    lines = []
    for (tuning, title), form in itertools.product(TUNINGS.items(), forms):
        rows = names_rows(tuning, form, "inf" if form == "non-private" else 5.0)
        cells = [spread(100 * row[value] for row in rows) for value in ATTACKS]
        lines.append([f"{title}, {forms[form]}", spread(row["perplexity"] for row in rows), *cells])
    return ["trained, form", "perplexity", *ATTACKS.values()], lines


def names_rows(tuning: str, form: str, epsilon: Any) -> list[Row]:
    return at_true_epsilon(figures("utility/rapft-names", tuning=tuning, form=form, epsilon=epsilon))


def _perplexity_cell(rows: list[Row], base: list[Row]) -> str:
    """Perplexity, and its mean difference from the base form's at the same seeds."""
    cell = spread(row["perplexity"] for row in rows) if rows else ""
    if not rows or not base or rows[0]["form"] == base[0]["form"]:
        return cell
    return f"{cell} ({in_per_cent(differences(rows, base, 'perplexity'))})"


def differences(rows: list[Row], others: list[Row], value: str) -> list[float]:
    """Relative differences of rows that share a seed, first over second, in per cent."""
    base = {row["seed"]: row[value] for row in others}
    return [100 * (row[value] / base[row["seed"]] - 1) for row in rows if row["seed"] in base]


def in_per_cent(found: list[float]) -> str:
    """Mean and, of several, its standard error."""
    error = f"±{statistics.stdev(found) / len(found) ** 0.5:.1f}" if len(found) > 1 else ""
    return f"{statistics.mean(found):+.1f}{error}%"


def _lora_line(
    title: str, form: str, files: tuple[str, ...], base: str | None = None, against: tuple[str, ...] = ()
) -> list[str]:
    """A line of `lora`: a form's rows of some files, less those of form ``base`` in the files ``against``, or the same."""
    cells = []
    for epsilon in (1.0, 3.0, 8.0):
        here, there = (
            [row for name in names for row in figures(f"utility/{name}", part="perplexity", form=of, epsilon=epsilon)]
            for names, of in ((files, form), (against or files, base))
        )
        cell = spread(row["perplexity"] for row in at_true_epsilon(here)) if here else ""
        pairs = len({row["seed"] for row in here} & {row["seed"] for row in there})
        cells.append(f"{cell} ({paired(here, there, 'perplexity')}, {pairs})" if here and base else cell)
    return [title, *cells]


def lora() -> Table:
    """Private LoRA and all weights, with and without public text."""
    renewed, eight = "warmed, axes of single examples, renewed", "warmed, axes of single examples, renewed from eight"
    e2e, words = ("lora", "lora-8"), ("lora-wikitext2",)
    lines = [
        _lora_line("E2E, LoRA: DP-SGD", "DP-SGD", ("lora",)),
        _lora_line("public pass first", "warmed", ("lora",), "DP-SGD"),
        _lora_line("public pass, axes made anew", renewed, e2e, "warmed"),
        _lora_line("the same, of eight texts", eight, ("lora-few",), "warmed", e2e),
        _lora_line("E2E, all weights: DP-SGD", "DP-SGD", ("lora-full",)),
        _lora_line("all weights, public pass", "warmed", ("lora-full",), "DP-SGD"),
        _lora_line("all weights, axes made anew", renewed, ("lora-full",), "warmed"),
        _lora_line("WikiText-2, LoRA: public pass", "warmed", words),
        _lora_line("WikiText-2, axes made anew", renewed, words, "warmed"),
    ]
    return ["form", "epsilon 1", "epsilon 3", "epsilon 8"], lines


def frost() -> Table:
    """DP-FROST against full, LoRA and adapter fine-tuning; differences from full of the same seeds."""

    def rows(name: str, form: str, epsilon: Any) -> list[Row]:
        found = figures(f"utility/{name}", part="accuracy", form=form, epsilon=epsilon)
        # Of DP-FROST's variants, the default.
        default = {"magnitude": "MGNA", "selection_steps": 5, "selections": 1, "selection_rate": 0.01}
        if form == "frost":
            found = [row for row in found if all(row.get(key) == value for key, value in default.items())]
        return at_true_epsilon(found)

    forms = {
        "full": ("frost", "full"),
        "random partitions": ("frost", "random"),
        "largest values": ("frost-rates", "values"),
        "DP-FROST": ("frost", "frost"),
        "LoRA": ("frost", "lora"),
        "adapter": ("frost", "adapter"),
    }
    clear = spread((100 * row["accuracy"] for row in rows("frost", "non-private", "inf")), 2)
    lines = [["full, no privacy", clear, clear, clear]]
    for title, (name, form) in forms.items():
        cells = []
        for epsilon in (0.5, 2.0, 8.0):
            found = rows(name, form, epsilon)
            base = rows("frost", "full", epsilon)
            gap = "" if form == "full" else f" ({paired(found, base, 'accuracy', 100, 2)})"
            cells.append(spread((100 * row["accuracy"] for row in found), 2) + gap)
        lines.append([title, *cells])
    return ["method", "epsilon 0.5", "epsilon 2", "epsilon 8"], lines


def ewft() -> Table:
    """EW-FT at the printed and at the true epsilon, and codes."""

    def cell(name: str, value: str = "accuracy", **wanted: Any) -> str:
        rows = [row for row in figures(name, length=16, step_distance=2.0, **wanted) if value in row]
        rows = [row for row in rows if row["autoencoder"] in ([], [64])]
        if not rows:
            return ""
        true = statistics.mean(row["true_epsilon"] for row in rows)
        accuracy = spread(100 * row[value] for row in rows)
        return accuracy if abs(true - rows[0]["epsilon"]) < 0.01 else f"{accuracy}, truly {true:.1f}"

    main, pure = "utility/ewft", "utility/ewft-pure"
    sources: list[tuple[str, Callable[[float], str]]] = [
        ("EW-FT as printed, after block 6", lambda e: cell(main, mechanism="EW-FT", form="paper", layer=6, epsilon=e)),
        ("the same, after block 5", lambda e: cell(main, mechanism="EW-FT", form="paper", layer=5, epsilon=e)),
        ("released once, after block 6", lambda e: cell(main, form="once", bottom="public", layer=6, epsilon=e)),
        ("the same, after block 5", lambda e: cell(main, form="once", bottom="public", layer=5, epsilon=e)),
        ("EW-FT, sound", lambda e: cell(main, mechanism="EW-FT", form="sound", layer=6, epsilon=e)),
        (
            "DP-Forward, sound",
            lambda e: cell(pure if e < 8 else main, mechanism="DP-Forward", form="sound", layer=6, epsilon=e),
        ),
        ("two codes, delta 0", lambda e: cell(pure, form="pure", epsilon=e)),
        ("the same, public texts alone", lambda e: cell(pure, "accuracy_by_public_text_alone", form="pure", epsilon=e)),
    ]
    lines = [[title, *(source(epsilon) for epsilon in (1.0, 2.0, 4.0, 8.0))] for title, source in sources]
    clear = spread(100 * row["accuracy"] for row in figures(main, mechanism="non-private", length=16))
    lines.append(["no privacy", *[clear] * 4])
    return ["what leaves", "epsilon 1", "epsilon 2", "epsilon 4", "epsilon 8"], lines


def cells() -> Table:
    """SAP's cells against the exponential mechanism: a naive Bayes head on five sets of labels."""
    forms: dict[str, dict[str, Any]] = {
        "in the clear": {"form": "clear"},
        "exponential, eta 14": {"form": "exponential", "eta": 14.0},
        "exponential, eta 17": {"form": "exponential", "eta": 17.0},
        "5 cells of equal mass": {"form": "quotient", "cells": 5, "epsilon": 3.0},
        "3 cells cut for 3": {"form": "informed", "cells": 3, "epsilon": 3.0},
        "5 cells cut for 6": {"form": "informed", "cells": 5, "epsilon": 6.0},
    }
    data = ("pure", "pure-family", "pure-rating", "pure-price", "pure-area")

    def rows(name: str, form: Row) -> list[Row]:
        files = [name, "pure-informed"] if name == "pure" else [name]
        return [row for file in files for row in figures(f"utility/{file}", part="tokens", **form)]

    lines = []
    for title, form in forms.items():
        found = [rows(name, form) for name in data]
        nats, hidden = found[0][0].get("nats"), [row["empirical_privacy"] for row in found[0] if "nats" in row]
        told = "" if nats is None else f"{statistics.mean(row['nats'] for row in found[0]):.0f}"
        privacy = f"{100 * statistics.mean(hidden):.0f}" if hidden else ""
        lines.append([title, told, privacy, *(spread(100 * row["accuracy"] for row in each) for each in found)])
    six = [rows(name, forms["5 cells cut for 6"]) for name in data]
    for eta in (14, 17):
        gaps = [
            paired(each, rows(name, forms[f"exponential, eta {eta}"]), "accuracy", 100) for name, each in zip(data, six)
        ]
        lines.append([f"5 cells cut for 6, less eta {eta}", "", "", *gaps])
    return ["form", "nats", "EP", "SST-2", "family", "rating", "price", "area"], lines


def tokens() -> Table:
    """SAP's forms: MiniLM on 256 texts and on more, in one process and through the split service, and what is inferred."""
    laplace = [("SAP, Laplace", "SAP", {"eta": eta}) for eta in (50.0, 80.0, 100.0)]
    paper = [("CTI as printed", "CTI paper", {"eta": 80.0})]
    exponential = [("exponential", "exponential", {"eta": eta}) for eta in (14.0, 17.0, 21.0)]
    prior = [("prior (default)", "CTI prior", {"eta": eta}) for eta in (14.0, 17.0, 21.0)]
    equal = [("quotient, equal mass", "CTI quotient", {"cells": 5, "epsilon": 3.0})]
    cut = [("quotient, cut", "CTI quotient, informed", {"cells": n, "epsilon": e}) for n, e in ((3, 4.0), (5, 6.0))]
    lines = []
    for title, form, wanted in (("no privacy", "none", {}), *laplace, *paper, *exponential, *prior, *equal, *cut):
        rows, attacks = (
            [figures(f"utility/{name}", part=part, form=form, **wanted) for name in names]
            for part, names in (("figure 2", ("sap", "sap-quotient")), ("attribute inference", ("sap-more", "sap")))
        )
        judged, attacked = (next((each for each in found if each), []) for found in (rows, attacks))
        service, more, pairs = (
            figures(f"utility/{name}", form=form, **wanted) for name in ("sap-service", "sap-2048", "sap-pairs")
        )
        bounds = [row for row in judged or service if "median_bound" in row]
        nats = f"{float(bounds[0]['median_bound']):.0f}" if bounds else ""
        values = (
            *((judged, "EP"), (judged, "UA"), (more, "UA"), (pairs, "UA")),
            *((service, "UA"), (attacked, "person_accuracy")),
        )
        lines.append(
            [
                ", ".join([title, *(f"{key} {value:g}" for key, value in wanted.items())]),
                "no bound" if bounds and bounds[0]["pairs_without_bound"] > 0.5 else nats,
                *(
                    spread(100 * row[key] for row in found) if found and key in found[0] else ""
                    for found, key in values
                ),
            ]
        )
    return ["form", "nats", "EP", "accuracy", "2,048 texts", "pairs", "through the service", "person inferred"], lines


def rounds() -> Table:
    """Federated: held-out perplexity after four rounds of four clients."""
    budgets = (0.1, 1.0, 8.0)
    lines = []
    for data, title in (("wikitext2", "WikiText-2"), ("pii_spans", "names")):
        for scheme, perturbed in (("selective", "private tokens"), ("all", "every token")):
            found = [rounds_rows(data, "none", None), *(rounds_rows(data, scheme, epsilon) for epsilon in budgets)]
            cells = [spread(row["last"] for row in rows) for rows in found]
            lines.append([f"{title}, {perturbed}", *cells])
    return ["texts, what is perturbed", "no privacy", *(f"epsilon {epsilon:g}" for epsilon in budgets)], lines


def rounds_rows(data: str, scheme: str, epsilon: float | None) -> list[Row]:
    """Rows of four clients, with the last perplexity; the first file has the first seed."""
    wanted = {"data": data, "scheme": scheme, "epsilon": epsilon, "clients": 4}
    rows = [row for name in ("rounds", "rounds-seeds") for row in figures(f"federated/{name}", **wanted)]
    return [{**row, "last": row["perplexities"][-1]} for row in rows]


CLIENTS = (2, 4, 16)


def typed() -> Table:
    """Federated, by number of clients: perplexity of the tokens outside labelled private spans."""
    lines = []
    for clients in CLIENTS:
        plain, ours, kept = (clients_rows(clients, scheme) for scheme in ("none", "typed", "selective"))
        cells = [spread(row["others"] for row in rows) for rows in (plain, kept, ours)]
        lines.append([str(clients), *cells, in_per_cent(differences(ours, kept, "others"))])
    return ["clients", "kept, learned", "kept, not learned", "`typed`, not learned", "over kept, not learned"], lines


def clients_rows(clients: int, scheme: str) -> list[Row]:
    rows = figures("utility/federated-clients", clients=clients, scheme=scheme)
    return [{**row, "others": row["perplexities_of_others"][-1]} for row in rows]


def steps(machine: str) -> dict[tuple[str, str], Row]:
    """Rows of steps by case and implementation; without times where an implementation failed."""
    return {(row["case"], row["implementation"]): row for row in figures(f"{machine}/step")}


#: The rows of README's table, by case.
CPU_CASES = {
    "gpt2-6x512-lora": "GPT-2, LoRA",
    "gpt2-6x512-full": "GPT-2, full (tied)",
    "llama-6x512-lora": "Llama, LoRA",
    "llama-6x512-full": "Llama, full",
    "bert-6x384-full": "BERT, full",
    "bert-6x384-bitfit": "BERT, BitFit",
    "vit-6x384-full": "ViT, full",
}
#: Opacus was not run there.
GPU_CASES = {
    "llama-8b-lora-half": "Llama 8B, LoRA",
    "llama-1b-long-2": "Llama 1B, 2 x 4,096",
    "llama-1b-full": "Llama 1B, 4 x 1,024",
    "llama-1b-full-checkpointed": "the same, checkpointed",
    "gemma3-1b-full": "Gemma-3 1B",
    "gpt2-124m-full": "GPT-2 124M",
    "bert-base-full": "BERT base",
}
SYSTEMS = {"fastdp": "fastdp", "opacus-hooks": "Opacus, hooks", "opacus-ghost": "Opacus, ghost"}


def readme() -> Table:
    """Time and memory of a private step over those of an ordinary one."""
    cpu, h200 = steps("cpu-epyc"), steps("gpu")

    def cell(row: Row, absent: str = "") -> str:
        return f"{row['ratio_time']:.2f},\u00a0{row['ratio_memory']:.2f}" if "ratio_time" in row else absent

    lines = []
    for case, title in GPU_CASES.items():
        ours, recorded = h200[case, "fastdp-fused"], h200.get((case, "non-private-captured"), {})
        over = f"{ours['seconds'] / recorded['seconds']:.2f}" if "seconds" in recorded else ""
        lines.append([f"H200, {title}", cell(ours), over, "", ""])
    for case, title in CPU_CASES.items():
        first, *others = (cell(cpu.get((case, system), {}), "fails") for system in SYSTEMS)
        lines.append([f"CPU, {title}", first, "", *others])
    return ["time, memory", "fastdp", "over graphs", "Opacus, hooks", "Opacus, ghost"], lines


def gpu() -> Table:
    """Steps of H200s, recorded where that is faster, over torch's fused AdamW run eagerly and over torch's recorded ones."""
    titles = {
        "bert-base-full": "BERT base, 32 x 128",
        "bert-base-masked": "the same with a mask of ones",
        "gpt2-124m-full": "GPT-2 124M, 8 x 1,024",
        "llama-1b-full": "Llama 1B, 4 x 1,024",
        "llama-1b-tied": "the same, tied",
        "llama-1b-full-checkpointed": "the same, checkpointed",
        "llama-1b-full-checkpointed-16x2048": "Llama 1B, 16 x 2,048, checkpointed",
        "llama-1b-long-2": "Llama 1B, 2 x 4,096",
        "llama-1b-lora-checkpointed-12x512": "Llama 1B, LoRA, checkpointed, 12 x 512",
        "gemma3-1b-full": "Gemma-3 1B, 8 x 512",
        "llama-8b-lora-half": "Llama 8B, LoRA in bfloat16, 4 x 2,048",
    }
    found, lines = steps("gpu"), []
    for case, title in titles.items():
        plain, ours = found[case, "non-private-fused"], found[case, "fastdp-fused"]
        torchs, eager = found.get((case, "non-private-captured"), {}), found.get((case, "fastdp-eager"), {})
        over = f"{ours['seconds'] / torchs['seconds']:.2f}" if "seconds" in torchs else ""
        line = [title, f"{1e3 * plain['seconds']:,.0f}", f"{1e3 * ours['seconds']:,.0f}", f"{ours['ratio_time']:.2f}"]
        line += [f"{ours['ratio_memory']:.2f}", over, f"{eager['ratio_time']:.2f}" if eager else ""]
        lines.append(line)
    return ["step", "plain, ms", "private, ms", "time", "memory", "over graphs", "eager"], lines


def simulated() -> Table:
    """Cases that were simulated on an H100, private over plain."""
    lines = []
    for file in sorted((RESULTS / "simulated").glob("*h100*.json")):
        passes = ", two passes" if file.stem.endswith("two-passes") else ""
        for row in figures(f"simulated/{file.stem}", step="private"):
            ratios = [f"{row[f'ratio_{name}']:.3f}" for name in ("seconds", "captured", "launches", "memory")]
            lines.append([f"{row['case']}{passes}", *ratios])
    return ["simulated H100, private over plain", "time", "captured", "launches", "peak memory"], lines


def synthesis() -> Table:
    """What synthetic rows teach a classifier on SST-2; two seeds, whose near-copies are counted apart."""
    titles = {"full": "all weights", "lora": "LoRA"}
    sources = [("private rows", "", figures("utility/synthesis", source="private"))]
    for (tuning, title), epsilon in itertools.product(titles.items(), (8.0, 2.0)):
        rows = at_true_epsilon(figures("utility/synthesis", source="synthetic", tuning=tuning, epsilon=epsilon))
        sources.append((f"synthetic, {title}", f"{epsilon:g}", rows))
    sources.append(("the model before tuning", "", figures("utility/synthesis", source="public model")))
    lines = []
    for title, budget, rows in sources:
        accuracy = spread(100 * row["accuracy"] for row in rows)
        known = [row for row in rows if "words" in row]
        words = f"{statistics.mean(row['words'] for row in known):.0f}" if known else ""
        lines.append([title, budget, accuracy, words, ", ".join(str(row["near_copies"]) for row in known)])
    return ["rows to learn from", "epsilon", "accuracy", "words a row", "near-copies of 4,000"], lines


def zeroth() -> Table:
    """DP-ZO beside DP-SGD: the last layer of MiniLM on SST-2; the last line is of pairs of one seed."""
    rows = at_true_epsilon(figures("utility/zeroth", part="accuracy"))
    epsilons = sorted({row["epsilon"] for row in rows})
    found = {
        form: [[row for row in rows if row["form"] == form and row["epsilon"] == epsilon] for epsilon in epsilons]
        for form in ("dpsgd", "dpzo")
    }
    lines = []
    for form, title in (("dpsgd", "DP-SGD"), ("dpzo", "DP-ZO")):
        first = found[form][0][0]
        accuracies = [spread(100 * row["accuracy"] for row in own) for own in found[form]]
        lines.append([title, str(first["steps"]), str(first["batch_size"]), *accuracies])
    gaps = [paired(ours, base, "accuracy", 100) for ours, base in zip(found["dpzo"], found["dpsgd"])]
    lines.append(["difference", "", "", *gaps])
    return ["accuracy, %", "steps", "batch", *(f"epsilon {epsilon:g}" for epsilon in epsilons)], lines


def shapes() -> Table:
    """How far one record's length moves the others' sum, the largest of all models; the last row is a card's sentence."""
    lines = []
    for texts, equal, layers in (("different", False, 12), ("equal", True, 2), ("equal", True, 12)):
        found = {
            dtype: figures("cpu/shapes", equal=equal, layers=layers, dtype=dtype) for dtype in ("float32", "bfloat16")
        }
        own = [rounded_up(max(row["own shapes"] for row in rows)) for rows in found.values()]
        lines.append([f"{texts} texts, {layers} layers", *own])
    return ["GPT-2 and Llama, width 128: one of 65 texts gets longer", "float32", "bfloat16"], lines


def rounded_up(value: float) -> str:
    """Two digits of a number above 0, no less than it."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return f"{math.ceil(value / unit) * unit:.2g}"


FUNCTIONS = (runs, lora, rapft_200, names, frost, ewft, cells, tokens, rounds, typed)
TABLES: dict[Path, dict[str, Callable[[], Table]]] = {
    Path("README.md"): {"table": readme},
    RESULTS_PAGE: {function.__name__: function for function in FUNCTIONS},
    Path("docs/kernels.md"): {"gpu": gpu, "simulated": simulated},
    Path("docs/clipping.md"): {"shapes": shapes},
    Path("docs/finetune.md"): {"synthesis": synthesis},
    Path("docs/zeroth.md"): {"zeroth": zeroth},
}


def tables(page: Path) -> dict[str, str]:
    return {name: "\n".join(markdown(*function())) for name, function in TABLES[page].items()}


def written(page: Path, text: str) -> str:
    """The page's text with its tables computed again. Raises ValueError if a table has no place in it."""
    for name, table in tables(page).items():
        text = with_table(text, table, name)
    return text


if __name__ == "__main__":
    for page in TABLES:
        page.write_text(written(page, page.read_text()))
