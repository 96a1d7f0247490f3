"""One page about one run, or several side by side: what was promised and bought, how it went, and what was trained.

Everything is read from what `fastdp finetune` left in the output folders; nothing is loaded or computed anew.
"""

from __future__ import annotations

import json
import math
import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, StrictUndefined, TemplateError
from markupsafe import Markup

from fastdp.accounting import verify
from fastdp.accounting.claim import two_decimals, without_article
from fastdp.finetune.charts import Line, chart, running_mean, style
from fastdp.finetune.config import ConfigError
from fastdp.finetune.reporter import duration, memory
from fastdp.untrusted import PAGE_POLICY, check_values, escape_html, parse_json, parse_yaml, quote, read_text

#: Settings that every comparison shows; others appear where the runs differ.
_ALWAYS = ("task", "peft", "method", "epochs", "batch_size", "learning_rate", "max_length")
#: Most bytes of a run's file that are read: a row of metrics takes two hundred.
_MAX_BYTES = 1 << 26
#: Quality measures, the first of which that a run has is shown; in the order of `Quality.figure`.
_FIGURES = {
    "perplexity": "lower is better",
    "rmse": "lower is better",
    "f1": "higher is better",
    "accuracy": "higher is better",
}
_LIGHT = ("#1f6fb5", "#c2410c", "#15803d", "#7c3aed", "#a16207", "#be185d")
_DARK = ("#6cb2f0", "#fb923c", "#5fd38d", "#b79bff", "#e2c044", "#f48fb8")


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
        path = next((path for path in (folder / "card.json", folder / "statement.json") if os.path.lexists(path)), None)
        card = None if path is None else _read_file(path, _json, None)
        if isinstance(card, dict) and not (found := verify(card)):
            card = {"guarantee": "none", "why_no_guarantee": [f"its card does not hold, {found.reason}"]}
        return cls(
            name,
            folder,
            _read_file(folder / "config.yaml", parse_yaml, {}),
            _read_file(folder / "metrics.jsonl", lambda text: list(map(_json, text.splitlines())), []),
            _read_file(folder / "result.json", _json, None),
            card,
            _read_file(folder / "samples.json", _json, {}),
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
        """(step, running mean of the loss)."""
        means = running_mean([loss for _, loss in self.losses], max(1, len(self.losses) // 20))
        return [(step, mean) for (step, _), mean in zip(self.losses, means)]

    @cached_property
    def by_epsilon(self) -> list[tuple[float, float]]:
        """(epsilon, loss as a running mean)."""
        means = dict(self.smooth)
        return [(epsilon, means[step]) for step, epsilon in self.spent if step in means]

    def at(self, epsilon: float) -> tuple[float, float]:
        """Step and running mean of the loss at which ``epsilon`` was spent, interpolated between the recorded steps."""
        steps, spent = np.transpose(self.spent)
        step = float(np.interp(epsilon, spent, steps))
        steps, losses = np.transpose(self.smooth)
        return step, float(np.interp(step, steps, losses))

    def quality(self, when: str) -> tuple[str, float] | None:
        """The figure of the task ``before`` or ``after`` training."""
        found = (self.result or {}).get(when) or {}
        return next(((name, found[name]) for name in _FIGURES if name in found), None)

    @cached_property
    def promise(self) -> tuple[str, str]:
        """The guarantee, in a few words and in a sentence."""
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

    def facts(self, public: bool) -> Iterator[tuple[str, str | Markup]]:
        """Name and value of each fact of the page; those that no guarantee covers only where it is not ``public``."""
        result, before, after = self.result or {}, self.quality("before"), self.quality("after")
        if after is not None and not public:
            was = "" if before is None else f"{before[1]:.4g} \u2192 "
            yield f"held-out {after[0]}", Markup(f"{was}<b>{after[1]:.4g}</b> ({_FIGURES[after[0]]}; unprotected)")
        if result.get("trained_parameters") is not None:
            yield "trained", f"{result['trained_parameters']:,} parameters".replace(",", "\u202f")
        yield "steps", f"{result.get('steps', len(self.rows)):d}"
        if (each := result.get("seconds_per_step")) and not public:
            whole, peak = duration(each * result["steps"]), memory(result["peak_bytes"])
            yield "time", f"{whole}, {each:.2f} s a step, peak {peak}"
        if result.get("noise_multiplier"):
            yield "noise multiplier", f"{result['noise_multiplier']:.4f}"

    @property
    def notes(self) -> list[str]:
        """What its user was told of the data."""
        return list(dict.fromkeys((self.result or {}).get("notes", ())))

    @property
    def command(self) -> str:
        """The command that verifies the run, or resumes it."""
        name = shlex.quote(self.name)
        return f"fastdp verify {name}" if self.card is not None else f"fastdp finetune --resume --output {name}"


def build_report(folders: Sequence[Path], *, public: bool = False) -> str:
    """The page, as HTML that needs nothing besides itself.

    Args:
        folders: outputs of runs, at least one.
        public: leave out all that no guarantee covers: losses, times, held-out figures, notes about the data, and records.

    Raises:
        ConfigError: for a folder without a run.
    """
    runs = [Record.read(folder, name) for folder, name in zip(folders, _names(folders))]
    template = Environment(
        autoescape=True, finalize=_plain_text, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    ).from_string(resources.files(__package__).joinpath("report.html").read_text(encoding="utf-8"))
    try:
        samples = [(index, *_samples(run, public)) for index, run in enumerate(runs)]
        return template.render(
            **{
                "runs": runs,
                "several": len(runs) > 1,
                "public": public,
                "style": style,
                "light": _LIGHT,
                "dark": _DARK,
            },
            title="Report of a run" if len(runs) == 1 else f"Report of {len(runs)} runs",
            names=", ".join(run.name for run in runs),
            policy=Markup(PAGE_POLICY),
            charts=list(_charts(runs, public)),
            equal=_compare_at_equal_epsilon(runs, public),
            settings=list(_settings(runs)),
            notes=[(index, run.notes) for index, run in enumerate(runs) if run.notes],
            samples=[entry for entry in samples if any(entry[1:])],
            answers=any(answered for _, _, answered in samples),
        )
    except (KeyError, TypeError, AttributeError, IndexError, ValueError, ArithmeticError, TemplateError) as error:
        raise ConfigError(
            f"a file of {' or '.join(run.name for run in runs)} holds other values than fastdp finetune writes: {quote(error)}"
        ) from None


def _plain_text(value: Any) -> Markup:
    """Escape a value for the page, unless it is HTML already."""
    return value if isinstance(value, Markup) else Markup(escape_html(value))


def _names(folders: Sequence[Path]) -> list[str]:
    """Distinct names: the last parts of each path, as few as tell all of them apart."""
    parts = [folder.resolve().parts for folder in folders]
    if len(set(parts)) < len(parts):
        raise ConfigError("a run is named twice: name each once")
    length = 1
    while len({part[-length:] for part in parts}) < len(parts):
        length += 1
    return ["/".join(part[-length:]) for part in parts]


def _read_file(path: Path, parse: Callable[[str], Any], missing: Any) -> Any:
    """What ``parse`` makes of a file, or ``missing`` if there is none. Raises ConfigError for one that cannot be read."""
    try:
        if not os.path.lexists(path):
            return missing
        text = read_text(path, _MAX_BYTES)
        check_values(text)
        return parse(text)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError:
        raise ConfigError(f"{path} is damaged: it does not hold what fastdp finetune writes there") from None


def _json(text: str) -> Any:
    # A run that made no step has no seconds a step: Python writes NaN.
    return parse_json(text, constants=True)


def _charts(runs: Sequence[Record], public: bool) -> Iterator[tuple[str, str, Markup]]:
    """Heading, a sentence and the drawing of each chart."""

    def drawn(lines: Sequence[Line], up: str, **options: Any) -> Markup:
        return Markup(chart(lines, "step", up, whole=True, **options))

    spent = [Line(run.name, run.spent, limit=run.target) for run in runs]
    if any(line.points for line in spent):
        yield "Privacy spent", "Dotted: the budget.", drawn(spent, "epsilon spent", from_zero=True)
    for name, unit in (("held_out_loss", "loss (nats)"), ("held_out_accuracy", "accuracy")):
        lines = [Line(run.name, run.held_out_curve(name)) for run in runs]
        if any(line.points for line in lines):
            about = "May be shown: the guarantee covers it."
            yield f"Held out, released with noise: {unit}", about, drawn(lines, unit)
    if not public:
        unit = "squared error" if runs[0].config.get("task") == "regression" else "loss (nats)"
        about = "Unprotected. Faint: each step; strong: running mean."
        yield "Training loss", about, drawn([Line(run.name, run.smooth, run.losses) for run in runs], unit)


def _compare_at_equal_epsilon(runs: Sequence[Record], public: bool) -> str | dict[str, Any] | None:
    """Losses at the largest epsilon that all private runs have spent, or why they do not compare; None if nothing is shown."""
    private = [(index, run) for index, run in enumerate(runs) if run.by_epsilon and run.target is not None]
    if len(private) < 2:
        return None
    terms = {
        (
            run.config.get("delta"),
            run.config.get("task"),
            *((run.card or {}).get(name) for name in ("unit", "adjacency")),
        )
        for _, run in private
    }
    if len(terms) > 1:
        return "These runs differ in delta, task, unit or adjacency: neither their epsilons nor their losses compare."
    if public:
        return None
    common = min(run.spent[-1][1] for _, run in private)
    rows = []
    for index, run in private:
        (step, loss), after = run.at(common), run.quality("after")
        quality = "" if after is None else f"{after[0]} {after[1]:.4g}"
        rows.append((index, (f"{step:.0f}", f"{loss:.4f}", f"{run.spent[-1][1]:.2f}", quality)))
    lines = [Line(run.name, run.by_epsilon if run.target is not None else ()) for run in runs]
    drawn = Markup(chart(lines, "epsilon spent", "loss (running mean)"))
    return {"epsilon": f"{common:.2f}", "chart": drawn, "rows": rows}


def _settings(runs: Sequence[Record]) -> Iterator[tuple[str, list[str], bool]]:
    """Name of each setting to show, its value in each run, and whether these differ."""

    def value(run: Record, name: str) -> Any:
        found = run.config.get(name)
        return Path(str(found)).name if name in ("model", "train", "eval") and found else found

    for name in dict.fromkeys(name for run in runs for name in run.config if name not in ("output", "device")):
        values = [value(run, name) for run in runs]
        differs = any(other != values[0] for other in values)
        if name in ("model", *_ALWAYS) or differs or (len(runs) == 1 and values[0] is not None):
            yield name, [_cell_text(each) for each in values], differs
    models: list[dict[str, Any]] = [(run.card or {}).get("model", {}) for run in runs]
    if any("trained_parameters" in model for model in models):
        yield "trained parameters", [_cell_text(model.get("trained_parameters")) for model in models], False


def _cell_text(value: Any) -> str:
    if value is None:
        return "\u2013"
    if isinstance(value, float):
        return f"{value:g}"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, (dict, list)) else str(value)


def _samples(run: Record, public: bool) -> tuple[Sequence[str], Sequence[dict[str, str]]]:
    """Texts of the model's own, and held-out examples with its answers, that the page may show."""
    # What a model without a guarantee writes may be a record.
    own = () if public and not run.guaranteed else run.samples.get("own", ())
    return own, () if public else run.samples.get("unprotected", ())
