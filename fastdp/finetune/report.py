"""One page about one run, or several side by side: what was promised and bought, how it went, and what was trained.

Everything is read from what `fastdp finetune` left in the output folders; nothing is loaded or computed anew.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fastdp.accounting.claim import two_decimals, without_article
from fastdp.finetune.charts import SERIES, Line, chart, running_mean, style
from fastdp.finetune.config import ConfigError
from fastdp.finetune.reporter import duration, memory
from fastdp.untrusted import PAGE_POLICY, escape_html as escape, parse_json, parse_yaml, quote, read_text

#: Settings that every comparison shows; others appear where the runs differ.
_ALWAYS = ("task", "peft", "method", "epochs", "batch_size", "learning_rate", "max_length")
#: Most bytes of a file of a run: a row of metrics takes two hundred.
_LARGEST = 1 << 26
#: The figure of a task, in the order of `Quality.figure`.
_FIGURES = {
    "perplexity": "lower is better",
    "rmse": "lower is better",
    "f1": "higher is better",
    "accuracy": "higher is better",
}


@dataclass(frozen=True)
class Record:
    """What one output folder holds; parts that the run has not written yet are None or empty."""

    name: str
    folder: Path
    config: dict[str, Any]
    rows: list[dict[str, Any]]
    result: dict[str, Any] | None
    card: dict[str, Any] | None
    samples: dict[str, Any]

    @classmethod
    def read(cls, folder: Path, name: str) -> Record:
        """Of a run, finished or not.

        Raises:
            ConfigError: for a folder that holds no run, or a file of it that cannot be read.
        """
        if not folder.is_dir():
            raise ConfigError(f"there is no folder {folder}: name the output folder of a run of fastdp finetune")
        if not (folder / "config.yaml").is_file():
            raise ConfigError(f"{folder} holds no run of fastdp finetune: it has no config.yaml")
        card = next((path for path in (folder / "card.json", folder / "statement.json") if path.exists()), None)
        return cls(
            name,
            folder,
            _parsed(folder / "config.yaml", parse_yaml, {}),
            _parsed(folder / "metrics.jsonl", lambda text: list(map(_json, text.splitlines())), []),
            _parsed(folder / "result.json", _json, None),
            None if card is None else _parsed(card, _json, None),
            _parsed(folder / "samples.json", _json, {}),
        )

    @property
    def target(self) -> float | None:
        """The budget, if it is finite."""
        value = self.config.get("epsilon")
        return value if isinstance(value, (int, float)) and math.isfinite(value) else None

    @property
    def guaranteed(self) -> bool:
        """Whether its card promises anything."""
        return self.card is not None and self.card.get("guarantee") != "none"

    @cached_property
    def spent(self) -> list[tuple[float, float]]:
        """(step, epsilon) wherever epsilon is known and finite."""
        return [(row["step"], row["epsilon"]) for row in self.rows if isinstance(row.get("epsilon"), (int, float))]

    def held_out_curve(self, name: str) -> list[tuple[float, float]]:
        """(step, value) of a held-out curve that was released with noise."""
        return [(row["step"], row["released"][name]) for row in self.rows if name in row.get("released", {})]

    @cached_property
    def losses(self) -> list[tuple[float, float]]:
        """(step, loss) of the training data, in nats, or squared units of a number; not protected."""
        return [(row["step"], row["unprotected"]["loss"]) for row in self.rows]

    @cached_property
    def smooth(self) -> list[tuple[float, float]]:
        """The losses as running means."""
        means = running_mean([loss for _, loss in self.losses], max(1, len(self.losses) // 20))
        return [(step, mean) for (step, _), mean in zip(self.losses, means)]

    @cached_property
    def by_epsilon(self) -> list[tuple[float, float]]:
        """(epsilon, loss as a running mean)."""
        means = dict(self.smooth)
        return [(epsilon, means[step]) for step, epsilon in self.spent if step in means]

    def at(self, epsilon: float) -> tuple[float, float]:
        """The step at which so much was spent, between those that epsilon is known of, and the running mean of the loss there."""
        before = max((entry for entry in self.spent if entry[1] <= epsilon), default=self.spent[0])
        after = min((entry for entry in self.spent if entry[1] >= epsilon), default=self.spent[-1])
        share = (epsilon - before[1]) / (after[1] - before[1]) if after[1] > before[1] else 0.0
        step = before[0] + share * (after[0] - before[0])
        return step, min(self.smooth, key=lambda entry: abs(entry[0] - step))[1]

    def quality(self, when: str) -> tuple[str, float] | None:
        """The figure of the task ``before`` or ``after`` training."""
        found = (self.result or {}).get(when) or {}
        return next(((name, found[name]) for name in _FIGURES if name in found), None)

    def promise(self) -> tuple[str, str]:
        """What was bought, in a few words and in a sentence."""
        card, result = self.card, self.result
        delta = self.config.get("delta")
        if card is None:
            now = f"{self.spent[-1][1]:.2f} spent" if self.spent else "no figure yet"
            return now, f"The run is not finished: it has no card. Delta is {delta:g}."
        if card.get("guarantee") == "none" or (result and result.get("epsilon") == "inf" and not result.get("privacy")):
            why = "; ".join(card.get("why_no_guarantee", [])) or "epsilon is infinite"
            return "no guarantee", f"Nothing is promised: {why}."
        if result and result.get("privacy"):
            return str(card.get("guarantee", "local")), str(result["privacy"])
        bound = card["epsilon"]["upper_bound"]
        unit, adjacency = without_article(card.get("unit", "example")), str(card.get("adjacency", "")).replace("_", " ")
        return (
            f"\u03b5 \u2264 {two_decimals(bound)}",
            f"Differential privacy at \u03b4 = {card['epsilon']['delta']:g} for each {unit} ({adjacency}), an upper bound.",
        )


def build_report(folders: Sequence[Path], *, public: bool = False) -> str:
    """The page, as HTML that needs nothing besides itself.

    Args:
        folders: outputs of runs, at least one.
        public: leave out all that no guarantee covers: losses, times, held-out figures, notes about the data, and records.

    Raises:
        ConfigError: for a folder without a run.
    """
    runs = [Record.read(folder, name) for folder, name in zip(folders, _names(folders))]
    try:
        return _page(runs, public)
    except (KeyError, TypeError, AttributeError, IndexError, ValueError, ArithmeticError) as error:
        raise ConfigError(
            f"a file of {' or '.join(run.name for run in runs)} holds other values than fastdp finetune writes: {quote(error)}"
        ) from None


def _page(runs: Sequence[Record], public: bool) -> str:
    title = "Report of a run" if len(runs) == 1 else f"Report of {len(runs)} runs"
    sections = [_promises(runs, public), _charts(runs, public)]
    if len(runs) > 1:
        sections.append(_equal(runs, public))
    sections += [_settings(runs), *([] if public else [_notes(runs)]), _samples(runs, public), _checking(runs)]
    warning = (
        "This page holds nothing that the guarantee does not cover."
        if public
        else "Keep this page with the private data: what is marked <b>unprotected</b> is a function of the records without "
        "noise. <code>fastdp report --public</code> leaves it out."
    )
    return _PAGE.format(
        title=title,
        policy=PAGE_POLICY,
        style=_STYLE,
        names=escape(", ".join(run.name for run in runs)),
        warning=warning,
        body="".join(sections),
    )


def _names(folders: Sequence[Path]) -> list[str]:
    """The shortest ends of their paths that tell them apart."""
    parts = [folder.resolve().parts for folder in folders]
    if len(set(parts)) < len(parts):
        raise ConfigError("a run is named twice: name each once")
    length = 1
    while len({part[-length:] for part in parts}) < len(parts):
        length += 1
    return ["/".join(part[-length:]) for part in parts]


def _parsed(path: Path, parse: Callable[[str], Any], missing: Any) -> Any:
    try:
        return parse(read_text(path, _LARGEST)) if path.exists() else missing
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError:
        raise ConfigError(f"{path} is damaged: it does not hold what fastdp finetune writes there") from None


def _json(text: str) -> Any:
    # A run that made no step has no seconds a step: Python writes NaN.
    return parse_json(text, constants=True)


def _key(index: int) -> str:
    return f'<svg class="key" viewBox="0 0 26 10" aria-hidden="true"><path d="M1 5H25" style="{style(index)}"/></svg>'


def _legend(runs: Sequence[Record]) -> str:
    if len(runs) == 1:
        return ""
    entries = (f"<li>{_key(index)}{escape(run.name)}</li>" for index, run in enumerate(runs))
    return f'<ul class="legend">{"".join(entries)}</ul>'


def _promises(runs: Sequence[Record], public: bool) -> str:
    cards = "".join(_promise(run, index, len(runs), public) for index, run in enumerate(runs))
    return f'<section class="cards">{cards}</section>'


def _promise(run: Record, index: int, count: int, public: bool) -> str:
    short, sentence = run.promise()
    result = run.result or {}
    facts: list[tuple[str, str]] = []
    before, after = run.quality("before"), run.quality("after")
    if after is not None and not public:
        was = "" if before is None else f"{before[1]:.4g} \u2192 "
        facts.append((f"held-out {after[0]}", f"{was}<b>{after[1]:.4g}</b> ({_FIGURES[after[0]]}; unprotected)"))
    if result.get("trained_parameters") is not None:
        facts.append(("trained", f"{result['trained_parameters']:,} parameters".replace(",", "\u202f")))
    facts.append(("steps", f"{result.get('steps', len(run.rows)):d}"))
    if result.get("seconds_per_step") and not public:
        whole = duration(result["seconds_per_step"] * result["steps"])
        facts.append(
            ("time", f"{whole}, {result['seconds_per_step']:.2f} s a step, peak {memory(result['peak_bytes'])}")
        )
    if result.get("noise_multiplier"):
        facts.append(("noise multiplier", f"{result['noise_multiplier']:.4f}"))
    table = "".join(f"<dt>{name}</dt><dd>{value}</dd>" for name, value in facts)
    head = f"{_key(index) if count > 1 else ''}{escape(run.name)}"
    return f'<article><h2>{head}</h2><p class="figure">{escape(short)}</p><p>{escape(sentence)}</p><dl>{table}</dl></article>'


def _charts(runs: Sequence[Record], public: bool) -> str:
    spent = [Line(run.name, run.spent, limit=run.target) for run in runs]
    figures = []
    if any(line.points for line in spent):
        figures.append(
            ("Privacy spent", "Dotted: the budget.", chart(spent, "step", "epsilon spent", from_zero=True, whole=True))
        )
    for name, unit in (("held_out_loss", "loss (nats)"), ("held_out_accuracy", "accuracy")):
        lines = [Line(run.name, run.held_out_curve(name)) for run in runs]
        if any(line.points for line in lines):
            about = "May be shown: the guarantee covers it."
            figures.append((f"Held out, released with noise: {unit}", about, chart(lines, "step", unit, whole=True)))
    if not public:
        lines = [Line(run.name, run.smooth, run.losses) for run in runs]
        unit = "squared error" if runs[0].config.get("task") == "regression" else "loss (nats)"
        about = "Unprotected. Faint: each step; strong: running mean."
        figures.append(("Training loss", about, chart(lines, "step", unit, whole=True)))
    shown = "".join(
        f"<figure><figcaption><h2>{title}</h2><p>{about}</p></figcaption>{drawn}</figure>"
        for title, about, drawn in figures
    )
    return f'<section>{_legend(runs)}<div class="charts">{shown}</div></section>'


def _equal(runs: Sequence[Record], public: bool) -> str:
    """Runs compared at an epsilon that all have spent, which is the only fair place."""
    private = [(index, run) for index, run in enumerate(runs) if run.by_epsilon and run.target is not None]
    if len(private) < 2:
        return ""
    terms = {
        (
            run.config.get("delta"),
            run.config.get("task"),
            *((run.card or {}).get(name) for name in ("unit", "adjacency")),
        )
        for _, run in private
    }
    if len(terms) > 1:
        text = "These runs differ in delta, task, unit or adjacency: neither their epsilons nor their losses compare."
        return f"<section><h2>At equal epsilon</h2><p>{text}</p></section>"
    if public:
        return ""
    common = min(run.spent[-1][1] for _, run in private)
    lines = [Line(run.name, run.by_epsilon if run.target is not None else ()) for run in runs]
    drawn = chart(lines, "epsilon spent", "loss (running mean)")
    rows = []
    for index, run in private:
        step, loss = run.at(common)
        after = run.quality("after")
        quality = "" if after is None else f"{after[0]} {after[1]:.4g}"
        rows.append(
            f"<tr><th>{_key(index)}{escape(run.name)}</th><td>{step:.0f}</td><td>{loss:.4f}</td>"
            f"<td>{run.spent[-1][1]:.2f}</td><td>{quality}</td></tr>"
        )
    names = ("", f"step at epsilon {common:.2f}", "loss there", "epsilon at its end", "held out at its end")
    head = "".join(f"<th>{name}</th>" for name in names)
    return (
        f"<section><h2>At equal epsilon</h2><p>Every private run has spent {common:.2f}. Unprotected, and to choose among runs "
        f'by such figures costs privacy that no card counts.</p><div class="charts"><figure>{drawn}</figure></div>'
        f'<div class="wide below"><table><tr>{head}</tr>{"".join(rows)}</table></div></section>'
    )


def _settings(runs: Sequence[Record]) -> str:
    def value(run: Record, name: str) -> Any:
        found = run.config.get(name)
        return Path(str(found)).name if name in ("model", "train", "eval") and found else found

    def differs(name: str) -> bool:
        return any(value(run, name) != value(runs[0], name) for run in runs)

    names = dict.fromkeys(name for run in runs for name in run.config if name not in ("output", "device"))
    kept = [
        name
        for name in names
        if name in ("model", *_ALWAYS) or differs(name) or (len(runs) == 1 and value(runs[0], name) is not None)
    ]
    rows = []
    for name in kept:
        cells = "".join(f"<td>{escape(_cell_text(value(run, name)))}</td>" for run in runs)
        marked = ' class="differs"' if differs(name) else ""
        rows.append(f"<tr{marked}><th>{escape(name)}</th>{cells}</tr>")
    models: list[dict[str, Any]] = [(run.card or {}).get("model", {}) for run in runs]
    if any("trained_parameters" in model for model in models):
        cells = "".join(f"<td>{escape(_cell_text(model.get('trained_parameters')))}</td>" for model in models)
        rows.append(f"<tr><th>trained parameters</th>{cells}</tr>")
    heads = "".join(f"<th>{escape(run.name)}</th>" for run in runs)
    head = f"<tr><th></th>{heads}</tr>" if len(runs) > 1 else ""
    table = f'<div class="wide"><table>{head}{"".join(rows)}</table></div>'
    if len(runs) == 1:
        return f"<section><details><summary><h2>What was trained, and how</h2></summary>{table}</details></section>"
    about = "What differs is marked; settings that all share and few ask for are left out."
    return f"<section><h2>What was trained, and how</h2><p>{about}</p>{table}</section>"


def _cell_text(value: Any) -> str:
    if value is None:
        return "\u2013"
    if isinstance(value, float):
        return f"{value:g}"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, (dict, list)) else str(value)


def _notes(runs: Sequence[Record]) -> str:
    told = [(run, dict.fromkeys((run.result or {}).get("notes", ()))) for run in runs]
    parts = []
    for run, notes in told:
        if notes:
            head = f"<h3>{escape(run.name)}</h3>" if len(runs) > 1 else ""
            parts.append(f"{head}<ul>{''.join(f'<li>{escape(note)}</li>' for note in notes)}</ul>")
    return f"<section><h2>Notes on the data</h2><p>Unprotected.</p>{''.join(parts)}</section>" if parts else ""


def _samples(runs: Sequence[Record], public: bool) -> str:
    parts = []
    for index, run in enumerate(runs):
        # What a model without a guarantee writes may be a record.
        own = () if public and not run.guaranteed else run.samples.get("own", ())
        shown = [f"<blockquote>{escape(text) or '(nothing)'}</blockquote>" for text in own]
        for entry in () if public else run.samples.get("unprotected", ()):
            shown.append(
                f"<blockquote>{escape(entry['text'])}<dl><dt>right</dt><dd>{escape(entry['right'])}</dd>"
                f"<dt>model</dt><dd>{escape(entry['answer']) or '(nothing)'}</dd></dl></blockquote>"
            )
        if shown:
            head = f"<h3>{_key(index)}{escape(run.name)}</h3>" if len(runs) > 1 else ""
            parts.append(f"<div>{head}{''.join(shown)}</div>")
    if not parts:
        return ""
    unprotected = not public and any(run.samples.get("unprotected") for run in runs)
    about = (
        "Held-out examples, and what the model says. Unprotected: they show records."
        if unprotected
        else "Written by the model from nothing: whatever guarantee the weights have covers them too."
    )
    return f'<section><h2>Samples</h2><p>{about}</p><div class="samples">{"".join(parts)}</div></section>'


def _checking(runs: Sequence[Record]) -> str:
    commands = []
    for run in runs:
        name = shlex.quote(run.name)
        if run.card is None:
            commands.append("fastdp finetune ... --resume   # goes on with " + name)
            continue
        weights = next((name for name in ("adapter", "model") if (run.folder / name).is_dir()), None)
        options = (f" --weights {name}/{weights}" if weights else "") + f" --ledger {name}/ledger.jsonl"
        commands.append(f"fastdp verify {name}/card.json{options}")
    about = "Works the figures out again, from the event on the card:"
    text = escape("\n".join(commands))
    return f"<section><h2>To check it</h2><p>{about}</p><pre>{text}</pre></section>"


_LIGHT = ("#1f6fb5", "#c2410c", "#15803d", "#7c3aed", "#a16207", "#be185d")
_DARK = ("#6cb2f0", "#fb923c", "#5fd38d", "#b79bff", "#e2c044", "#f48fb8")


def _colours(palette: Sequence[str]) -> str:
    assert len(palette) == SERIES
    return "".join(f"--series-{number}:{colour};" for number, colour in enumerate(palette, start=1))


_STYLE = f"""
:root{{--ink:#1c2430;--quiet:#566173;--paper:#f6f7f9;--sheet:#fff;--line:#dbe0e7;--mark:#fff4d6;{_colours(_LIGHT)}}}
@media (prefers-color-scheme:dark){{
:root{{--ink:#e6eaf0;--quiet:#a3adbb;--paper:#12161c;--sheet:#1b2129;--line:#333c48;--mark:#3a3320;{_colours(_DARK)}}}}}
*{{box-sizing:border-box}}
body{{margin:0;background:var(--paper);color:var(--ink);font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}}
main{{max-width:1120px;margin:0 auto;padding:28px 18px 48px}}
h1{{font-size:1.6rem;line-height:1.2;margin:0 0 4px}}
h2{{font-size:1.1rem;margin:0 0 4px}}
h3{{font-size:1rem;margin:14px 0 4px}}
h1,h2,h3,th,dd,td,li,p{{overflow-wrap:anywhere}}
p{{margin:0 0 8px}}
.quiet,figcaption p,header p{{color:var(--quiet)}}
header .warning{{color:var(--ink);background:var(--mark);border-radius:8px;padding:10px 14px;margin:14px 0 0}}
section{{margin:26px 0 0}}
article,figure,.wide,blockquote,pre,details{{background:var(--sheet);border:1px solid var(--line)}}
article,figure,.wide,blockquote,pre,details{{border-radius:10px;padding:16px}}
.cards,.charts,.samples{{display:grid;gap:16px;grid-template-columns:repeat(auto-fit,minmax(min(100%,330px),1fr))}}
.charts{{grid-template-columns:repeat(auto-fill,minmax(min(100%,420px),1fr))}}
figure{{margin:0}}
.figure{{font-size:2rem;font-weight:650;margin:2px 0}}
dl{{display:grid;grid-template-columns:auto 1fr;gap:4px 14px;margin:10px 0 0}}
dt{{color:var(--quiet)}}dd{{margin:0}}
.legend{{list-style:none;display:flex;flex-wrap:wrap;gap:4px 20px;padding:0;margin:0 0 12px}}
.key{{width:26px;height:10px;margin-right:8px;vertical-align:middle}}
.key path{{stroke-width:3;fill:none}}
figure svg{{display:block;width:100%;height:auto}}
figure text{{fill:var(--ink);font-size:15px}}
figure .axis{{fill:var(--quiet)}}
.grid{{stroke:var(--line);fill:none}}
.line{{fill:none;stroke-width:2.4;stroke-linejoin:round}}
.reading{{fill:none;stroke-width:1;opacity:.35}}
.limit{{fill:none;stroke-width:1.6;stroke-dasharray:1 5;stroke-linecap:round}}
.wide{{overflow-x:auto}}.below{{margin-top:16px}}
table{{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}}
th,td{{text-align:left;padding:5px 14px 5px 0;border-bottom:1px solid var(--line);vertical-align:top;min-width:5.5em}}
th{{font-weight:550}}
.differs td{{background:var(--mark);padding-left:8px}}
blockquote{{margin:0 0 10px}}
code{{white-space:nowrap}}
.wide th,.wide td{{overflow-wrap:normal}}
@media (max-width:500px){{figure text{{font-size:20px}}}}
pre{{overflow-x:auto;margin:0;font-size:.9rem}}
summary h2{{display:inline}}details table{{margin-top:10px}}
"""

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">{policy}<meta name="viewport" content="width=device-width,initial-scale=1">
<meta name="color-scheme" content="light dark"><title>{title}: {names}</title><style>{style}</style></head>
<body><main><header><h1>{title}</h1><p>{names}</p><p class="warning">{warning}</p></header>{body}</main></body></html>
"""
