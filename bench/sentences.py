"""What pages say outside their tables, computed from the committed figures: a page must hold each of these sentences."""

from __future__ import annotations

import itertools
import json
import math
import re
import statistics
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy

from fastdp import accounting
from fastdp.methods.ewft import dp_forward, paper, release_once
from fastdp.methods.rapft import effective_noise_multiplier

from .pages import (
    CLIENTS,
    RESULTS,
    RESULTS_PAGE,
    TUNINGS,
    Row,
    Table,
    at_true_epsilon,
    cells,
    clients_rows,
    differences,
    ewft,
    figures,
    frost,
    in_per_cent,
    names_rows,
    paired,
    points,
    rapft_rows,
    rounds_rows,
    spread,
    tokens,
)


def holds(fact: bool, sentence: str) -> str:
    """The sentence. Raises ValueError if the figures do not say so."""
    if not fact:
        raise ValueError(f"the figures do not say '{sentence}': mend the page")
    return sentence


def _in_errors(found: list[float]) -> float:
    return statistics.mean(found) / (statistics.stdev(found) / len(found) ** 0.5)


def _rapft_gaps(name: str, tuning: str, form: str, epsilon: float = 5.0) -> list[float]:
    """What a form costs over DP-SGD of the same seeds, in per cent of perplexity."""
    rows, base = (rapft_rows(name, tuning, of, epsilon) for of in (form, "dpsgd"))
    return differences(rows, base, "perplexity")


def _rapft_rows() -> Iterator[str]:
    long, several = "utility/rapft-200", "utility/rapft-200-seeds"
    forms = ("printed", "optimal", "noised")
    gaps = itertools.starmap(_rapft_gaps, itertools.product((long, several), TUNINGS, forms, (3.0, 5.0, 7.0)))
    means = [statistics.mean(found) for found in gaps if found]
    yield f"mean differences are at most {max(map(abs, means)):.1f}%"
    seeds = [_rapft_gaps(several, tuning, "printed") for tuning in TUNINGS]
    yield holds([*map(len, seeds)] == [3, 4, 4], "three with adapters and four otherwise where a deviation stands")
    adapter, *others = map(_in_errors, seeds)
    yield holds(abs(adapter) < 1, "The printed shape is level with adapters")
    yield holds(all(2 < t < 2.5 for t in others), "With BitFit and LoRA it is behind, by about two standard errors")
    yield f"Differences of single seeds range from {min(map(min, seeds)):+.1f} to {max(map(max, seeds)):+.1f}%"
    shown, needed = (rapft_rows(long, "adapter", form, 5.0)[0]["noise_multiplier"] for form in ("paper", "printed"))
    yield f"{shown / needed:.1f} times the noise that its epsilon needs"
    noised = _rapft_gaps("utility/rapft-16-bitfit", "bitfit", "noised")
    behind = f"BitFit's noised map is behind in all of five seeds, by {in_per_cent(noised).removeprefix('+')}"
    yield holds(len(noised) == 5 and min(noised) > 0, behind)


def _start_rows() -> Iterator[str]:
    rows = at_true_epsilon(figures("utility/rapft-starts"))
    base = [row for row in rows if row["form"] == "dpsgd"]
    starts: dict[str, list[Row]] = {}
    for row in rows:
        if row["form"] == "printed":
            starts.setdefault(row["initialisation"], []).append(row)
    means = [statistics.mean(row["perplexity"] for row in own) for own in starts.values()]
    yield f"{len(starts)} starts of relevance have {min(means):.1f} to {max(means):.1f}"
    yield f"DP-SGD of these seeds {spread(row['perplexity'] for row in base)}"
    gaps = [differences(own, starts["top_p"], "perplexity") for own in starts.values() if own is not starts["top_p"]]
    yield holds(max(map(abs, map(_in_errors, gaps))) < 2, "No start differs from the usual one by two standard errors")


def _names_rows() -> Iterator[str]:
    cells = [
        [names_rows(tuning, form, epsilon) for form in ("printed", "dpsgd")]
        for tuning, epsilon in itertools.product(TUNINGS, (3.0, 5.0, 7.0))
    ]
    counts = [len(ours) for ours, _ in cells]
    yield holds(counts == [3, 3, 2, 3, 3, 2, 3, 3, 3], "two seeds at epsilon 7 with adapters and BitFit")
    values = ("reconstructed", "auc")
    told = [[100 * statistics.mean(row[v] for row in rows) for pair in cells for rows in pair] for v in values]
    edges = [f"{edge(found):.1f}" for found in told for edge in (min, max)]
    yield "attacks on private models reconstruct {} to {}, and membership has {} to {}".format(*edges)
    gaps = [abs(statistics.mean(points(ours, base, value))) for ours, base in cells for value in values]
    yield f"The two private forms differ by at most {max(gaps):.1f} points in either"
    costs = [statistics.mean(differences(ours, base, "perplexity")) for ours, base in cells]
    yield f"the printed shape's mean perplexity is {min(costs):.1f} to {max(costs):.1f}% higher"
    rows = [row for pair in cells for own in pair for row in own]
    (chance,) = {row["chance"] for row in rows}
    yield f"guessing has {100 * chance:.1f}"
    named = [row["named"] for row in rows]
    yield f"{min(named)} to {max(named)} names a private model"


def _federated_rows() -> Iterator[str]:
    costs = {
        (data, scheme): [
            differences(rounds_rows(data, scheme, epsilon), rounds_rows(data, "none", None), "last")
            for epsilon in (0.1, 1.0, 8.0)
        ]
        for data in ("wikitext2", "pii_spans")
        for scheme in ("selective", "all")
    }
    words, names = (in_per_cent(costs[data, "selective"][-1]) for data in ("wikitext2", "pii_spans"))
    without = {sum(gap < 0 for gap in gaps) for gaps in costs["wikitext2", "selective"]}
    yield holds(without == {1}, "where one seed of three shows no cost")
    yield f"At epsilon 8 private tokens cost {words} on WikiText-2"
    yield f"and {names} on texts with names"
    least = min(gap for (_, scheme), own in costs.items() if scheme == "all" for gaps in own for gap in gaps)
    yield f"Perturbing all raises perplexity {math.floor(1 + least / 100)}-fold or more"
    over = _client_gaps("typed", "selective")
    means = [statistics.mean(found) for found in over]
    yield f"Over it replacing costs {min(means):.1f} to {max(means):.1f}%"
    yield f"perplexity {min(means):.1f} to {max(means):.1f}% above the same run with the words kept"
    yield holds(min(map(min, over)) > 0, "at each seed more than nothing")
    yield holds(min(map(min, _client_gaps("none", "selective"))) > 0, "To learn them costs more")


def _client_gaps(scheme: str, base: str) -> list[list[float]]:
    """What a scheme costs over another, in per cent of perplexity, by number of clients and seed."""
    return [differences(clients_rows(n, scheme), clients_rows(n, base), "others") for n in CLIENTS]


def _numbers(table: Table) -> dict[str, list[list[float]]]:
    """By the title of a row, the numbers of each further cell."""
    return {line[0]: [[*map(float, re.findall(r"[-+]?\d+\.?\d*", cell))] for cell in line[1:]] for line in table[1]}


def _best_digits(form: str, epsilon: float) -> str:
    """Accuracy in per cent at the learning rate of the highest mean."""
    rates: dict[float, list[float]] = {}
    for row in figures("utility/frost-digits", form=form, epsilon=epsilon):
        rates.setdefault(row["learning_rate"], []).append(100 * row["accuracy"])
    return spread(max(rates.values(), key=statistics.mean))


def _frost_rows() -> Iterator[str]:
    rows = _numbers(frost())
    ahead = all(full[0] > ours[0] for full, ours in zip(rows["full"], rows["DP-FROST"]))
    yield holds(ahead, "Full fine-tuning is ahead of DP-FROST at each epsilon")
    close = [rows["random partitions"][0], rows["largest values"][2]]
    yield holds(
        all(error < -gap < 1.25 * error for *_, gap, error in close),
        "Its lead over random partitions at epsilon 0.5, and over the largest values at 8, is about one standard error",
    )
    default = {"magnitude": "MGNA", "selection_steps": 5, "selections": 1, "selection_rate": 0.01}
    variants: dict[tuple[Any, ...], list[Row]] = {}
    for row in figures("utility/frost", part="accuracy", form="frost", epsilon=2.0):
        variants.setdefault(tuple(row[key] for key in default), []).append(row)
    usual = variants.pop(tuple(default.values()))
    gaps = [_in_errors(differences(own, usual, "accuracy")) for own in variants.values()]
    yield holds(max(map(abs, gaps)) < 2, "differ from the default by less than two standard errors")
    gaps, chosen = [], set()
    for epsilon in (0.5, 2.0, 8.0):
        ours = figures("utility/frost", part="accuracy", form="frost", epsilon=epsilon, **default)
        drawn = figures("utility/frost", part="accuracy", form="random", epsilon=epsilon)
        gaps.append(_in_errors(differences(ours, drawn, "accuracy")))
        chosen |= {tuple(sorted(row["selected"])) for row in ours}
    yield holds(max(map(abs, gaps)) < 2, "DP-FROST is level with random partitions")
    yield holds(len(chosen) == 1, "At this size its selection finds the same partitions at every epsilon")
    best = [_best_digits(form, epsilon) for form in ("full", "frost") for epsilon in (2.0, 8.0)]
    yield "At epsilon 2 and 8 full has {} and {}, DP-FROST {} and {}".format(*best)
    full, ours = (at_true_epsilon(figures("utility/frost-pairs", form=form, epsilon=8.0)) for form in ("full", "frost"))
    told = (spread(100 * row["accuracy"] for row in rows) for rows in (full, ours))
    yield "Full has {} and DP-FROST {} ({})".format(*told, paired(ours, full, "accuracy", 100))
    forms = {"full": "full", "random": "random", "adapter": "adapters", "frost": "DP-FROST", "lora": "LoRA"}
    files = "utility/frost-pairs-h100", "utility/frost-pairs-epyc"
    more = {form: at_true_epsilon([row for f in files for row in figures(f, form=form)]) for form in forms}
    least = {form: [row for row in own if row["epsilon"] == 0.5] for form, own in more.items()}
    told = (f"{title} {spread(100 * row['accuracy'] for row in least[form])}" for form, title in forms.items())
    yield ", ".join(told)
    yield f"DP-FROST less full is {paired(least['frost'], least['full'], 'accuracy', 100)}"
    behind = []
    for epsilon in (2.0, 8.0):
        own, base = ([row for row in more[form] if row["epsilon"] == epsilon] for form in ("frost", "full"))
        behind.append(paired(own, base, "accuracy", 100))
    yield f"at 2 and 8 {' and '.join(behind)}"


def _ewft_rows() -> Iterator[str]:
    attacked = [
        row["person_accuracy"] - row["person_majority"]
        for row in figures("utility/ewft", length=16, attacked=True)
        if row["form"] != "none" and row["epsilon"] <= 8
    ]
    yield holds(max(attacked) <= 0, "the Gaussian codes of the table do not")
    rows = _numbers(ewft())
    printed = [cell[0] for cell in rows["EW-FT as printed, after block 6"] if cell]
    yield holds(
        rows["no privacy"][0][0] - min(printed) < 2, "As printed, accuracy is at most 2 points below no privacy's"
    )
    ours, clear = (figures("utility/ewft-64", form=form, epsilon=8.0)[0] for form in ("paper", "none"))
    found, without = (100 * row["accuracy"] for row in (ours, clear))
    yield f"it has {found:.1f} at a true epsilon of {ours['true_epsilon']:.1f}; {without:.1f} without privacy"
    once = [100 * figures("utility/ewft-64", form="once", epsilon=epsilon)[0]["accuracy"] for epsilon in (8.0, 2.0)]
    yield "Released once, with public layers, it has {:.1f} at epsilon 8 and {:.1f} at 2".format(*once)
    forward = [at_true_epsilon(figures("utility/ewft-64-h100", form="sound", epsilon=e)) for e in (2.0, 4.0, 8.0)]
    told = [spread(100 * row["accuracy"] for row in own) for own in forward]
    yield "DP-Forward, sound, has {}, {} and {} at epsilon 2, 4 and 8".format(*told)
    codes = figures("utility/ewft-64-h100", mechanism="codebook 2", epsilon=1.0)
    told = [spread(100 * row[value] for row in codes) for value in ("accuracy", "accuracy_by_public_text_alone")]
    yield "two codes {} at epsilon 1, {} by public texts alone".format(*told)
    sound = [rows[name] for name in rows if "sound" in name or "once" in name]
    ahead = all(rows["two codes, delta 0"][i][0] > row[i][0] for row in sound for i in (1, 2, 3) if row[i])
    yield holds(ahead, "Two codes are ahead of every sound Gaussian row at epsilon 2, 4 and 8")
    released = rows["released once, after block 6"]
    others = [row for name, row in rows.items() if "sound" in name]
    leads = [(own[0] - row[i][0]) / own[1] for row in others for i, own in enumerate(released) if own and row[i]]
    yield holds(min(leads) > 0.5 and max(leads) < 1.6, "its lead over other sound schedules is about one deviation")


def _cell_rows() -> Iterator[str]:
    *_, to_22, to_26 = _numbers(cells()).values()
    first, family, rating, price, area = to_22[2:]
    ahead = min(gap for gap, _ in (first, family, rating, area)) > 0
    yield holds(ahead, "On SST-2, family, rating and area, 6 nats tell as much as 22, or more")
    yield holds(price[0] < 0 and to_26[5][0] < -5, "On price they tell less than 22 nats, and much less than 26")


def _token_rows() -> Iterator[str]:
    rows = _numbers(tokens())
    # By rising EP, nats and accuracy of the exponential mechanism, read between its etas.
    hidden, nats, right = zip(*((ep[0], bound[0], ua[0]) for bound, ep, ua, *_ in _titled(rows, "exponential")[::-1]))
    laplace = [row for row in _titled(rows, "SAP, Laplace") if row[1][0] <= max(hidden)]
    share = [numpy.interp(ep[0], hidden, nats) / bound[0] for bound, ep, *_ in laplace]
    yield holds(min(share) > 0.18 and max(share) < 0.22, "needs about a fifth of the nats of Laplace noise")
    ahead = all(numpy.interp(ep[0], hidden, right) >= ua[0] for _, ep, ua, *_ in laplace)
    yield holds(ahead, "at the same accuracy or a better one")
    _, ep, ua, *_ = rows["quotient, equal mass, cells 5, epsilon 3"]
    close = rows["prior (default), eta 17"][2][0] - ua[0] < ua[1] and ep[0] > 90
    yield holds(close, "The quotient reaches the accuracy of 29 nats with 3 to 6, and hides nine tokens in ten")
    splits = [row for name in ("sap", "sap-splits") for row in figures(f"utility/{name}", part="figure 4")]
    missed = {n: [100 * row["EP"] for row in splits if row["after"] == n] for n in range(1, 7)}
    most = max(statistics.mean(missed[n]) for n in range(1, 5))
    yield f"inversion misses at most {most:.1f}% of tokens after one to four blocks without noise"
    yield f"{spread(missed[5])}% after five, and {spread(missed[6])}% after six"


def _titled(rows: dict[str, list[list[float]]], title: str) -> list[list[list[float]]]:
    return [cells for name, cells in rows.items() if name.startswith(title)]


def _settings_rows() -> Iterator[str]:
    *tried, planned = figures("settings-pii")
    *first, mended = figures("settings-wikitext2")
    worse = [
        100 * (ours["perplexity"] / min(row["perplexity"] for row in grid[:12]) - 1)
        for grid, ours in ((first, mended), (tried, planned))
    ]
    yield f"Against the best of 12 settings they cost {worse[0]:.1f}% of perplexity on WikiText-2"
    yield f"and {worse[1]:.1f}% on synthetic sentences with names"


def _rapft_page() -> Iterator[str]:
    gaps = [in_per_cent(_rapft_gaps("utility/rapft-200-seeds", tuning, "printed")) for tuning in TUNINGS]
    yield f"perplexity was {gaps[0]} with adapters, {gaps[1]} with BitFit and {gaps[2]} with LoRA"
    sigma, ratios = 0.6, (0.6, 0.7, 0.8, 0.9)
    true = [effective_noise_multiplier(sigma, ratio) for ratio in ratios]
    yield f"| true multiplier | {' | '.join(f'{value:.6g}'.removeprefix('0') for value in true)} |"

    def spent(multiplier: float) -> float:
        return float(accounting.epsilon(accounting.dpsgd(multiplier, 256 / 42000, 821), 1e-5))

    yield f"is stated as epsilon **{spent(sigma):.3f}** and is **{spent(true[1]):.3f}**"
    own, each = spent(sigma * math.sqrt(0.7 * 0.3)), spent(sigma / math.sqrt(2))
    yield f"means epsilon {own:.1f} in the same setting; sigma C for each block means {each:.1f}"
    steps, axes = figures("utility/rapft", part="step"), figures("utility/lora-cost")
    yield holds(all(abs(row["printed_ratio"] - 1) < 0.05 for row in steps), "`printed` or `optimal` | level")
    more = sorted(100 * (row["step_along_axes"] - 1) for row in axes)
    yield f"a step along axes | {more[0]:.1f} to {more[-1]:.1f}% more"
    kinds, made = ("public_map_over_step", "noised_map_over_step"), [row["axes_over_step"] for row in axes]
    maps = [row[kind] for row in figures("utility/rapft-map") for kind in kinds]
    yield f"a map of 64 examples, public or private | {math.floor(min(maps))} to {math.ceil(max(maps))} steps"
    yield f"| {math.floor(min(made))} to {math.ceil(max(made))} steps; a third of a step (LoRA)"


def _ewft_page() -> Iterator[str]:
    def short(values: Iterable[float], digits: int = 3) -> list[str]:
        return [f"{value:.{digits + (value > 0.9995) * (value < 1)}f}".removeprefix("0") for value in values]

    budgets = (1.0, 2.0, 4.0, 8.0)
    *some, last = short(statistics.NormalDist().cdf(1 / release_once(e, 1e-5).ratios[0]) for e in budgets)
    yield f"tells one bit with probability {', '.join(some)} or {last} at epsilon 1, 2, 4 or 8"
    *some, last = short(1 / (1 + math.exp(-e)) for e in budgets)
    yield f"Randomised response tells it with {', '.join(some)} or {last}, and needs no delta"
    for scale in ("2C", "C"):
        schedule = paper([0.461663, 0.415841, 0.370020], 8.0, 1e-5, scale)
        yield f"| {', '.join(short(schedule.ratios))} | {schedule.epsilon():.2f} |"
    (once, *_), (even, *_) = (s.ratios for s in (release_once(8.0, 1e-5), dp_forward(3, 8.0, 1e-5)))
    yield f"| **{once:.3f}** | **8** |"
    yield f"| {even:.3f} each | 8 |"


def _lora_page() -> Iterator[str]:
    first, second = (
        row["figures"]["after"]["perplexity"]
        for name, run in (("finetune", "e2e-8"), ("methods", "dpsgd-as-rapft"))
        for row in figures(name, run=run)
    )
    yield f"such as that from {first:.1f} to {second:.1f} on [E2E]"


def _frost_page() -> Iterator[str]:
    (row,) = figures("utility/frost", part="time")
    yield f"a step, over a LoRA step of as many parameters | {row['step_ratio']:.2f} |"
    yield f"the selection's share of three epochs | {row['selection_share']:.1%} |"


def _finetune_page() -> Iterator[str]:
    found = [100 * row["accuracy"] for row in figures("utility/synthesis", source="synthetic")]
    yield f"A classifier of synthetic rows is right on {min(found):.0f} to {max(found):.0f}%"
    near = [row["near_copies"] for row in figures("utility/synthesis") if "near_copies" in row]
    yield holds(not any(near), "No row is a near-copy")


def _federated_page() -> Iterator[str]:
    files = (RESULTS / "federated" / f"{name}.json" for name in ("overhead", "detector"))
    run, found = (json.loads(file.read_text())["figures"] for file in files)
    (row,) = figures("federated/draws", vocabulary=30522, mechanism="local")
    yield f"a simulated round over its clients' training | {run['round_over_training']:.2f}"
    yield f"tokens drawn a second by `local`, 30,522 x 384 | {round(row['tokens_per_second'], -3):,.0f}"
    yield f"On {found['texts']:,} labelled texts the rules miss {found['span_miss_rate']:.0%} of labelled private spans"
    yield holds(found["by_entity"]["AGE"]["recall"] == 0, "all ages among them")
    costs = [in_per_cent(each) for each in _client_gaps("typed", "selective")]
    yield f"perplexity of the other words | {costs[0]}, {costs[1]} and {costs[2]}"


def _zeroth_page() -> Iterator[str]:
    measured = json.loads((RESULTS / "zeroth.json").read_text())
    zo, sgd = (measured["ratios"][f"{form}_over_inference"] for form in ("dpzo", "dpsgd"))
    yield f"Peak memory, weights included, is {zo:.2f} of a forward pass with a loss; DP-SGD's is {sgd:.2f}"
    first = {row["form"]: row["weights"] + row["first"] for row in measured["rows"]}
    yield f"takes {first['dpzo'] / first['inference']:.2f} of the first forward pass"
    rows = figures("utility/zeroth", part="accuracy")
    texts, numbers, seeds = ({row[key] for row in rows} for key in ("texts", "trained_parameters", "seed"))
    yield f"MiniLM's last layer, {max(numbers)} numbers, on {max(texts):,} texts"
    yield f"{len(seeds)} seeds"
    sgd, zo = ([100 * row["accuracy"] for row in rows if row["form"] == form] for form in ("dpsgd", "dpzo"))
    yield f"DP-ZO is right on {min(zo):.0f} to {max(zo):.0f}%, DP-SGD on {min(sgd):.0f} to {max(sgd):.0f}%"


#: By page, what it says outside its tables and the figures, or the accountant, say too.
SENTENCES: dict[Path, tuple[Callable[[], Iterator[str]], ...]] = {
    RESULTS_PAGE: (
        _rapft_rows,
        _start_rows,
        _names_rows,
        _frost_rows,
        _ewft_rows,
        _cell_rows,
        _token_rows,
        _federated_rows,
        _settings_rows,
    ),
    Path("docs/rapft.md"): (_rapft_page,),
    Path("docs/ewft.md"): (_ewft_page,),
    Path("docs/lora.md"): (_lora_page,),
    Path("docs/finetune.md"): (_finetune_page,),
    Path("docs/frost.md"): (_frost_page,),
    Path("docs/federated.md"): (_federated_page,),
    Path("docs/zeroth.md"): (_zeroth_page,),
}


def sentences(page: Path) -> list[str]:
    """Those of a page. Raises ValueError for one that the figures do not say."""
    return [sentence for part in SENTENCES[page] for sentence in part()]
