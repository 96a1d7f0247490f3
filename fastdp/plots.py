"""Figures of a run as PNG files: held-out curves that were released with noise, and the perplexity of a federation.

A perplexity carries no noise, so its file is readable by its owner alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

import fastdp.files as files

_SIZE = (6.4, 3.6)
_DPI = 150
_INK, _ACCENT = "#1b3a57", "#c4572b"


def released_over_steps(rows: Sequence[dict[str, Any]], path: str | Path) -> None:
    """Held-out curves that were released with noise, which may be shown.

    Args:
        rows: the rows of `metrics.jsonl`; those without "released" are left out.
        path: the PNG to write.
    """
    points = [(row["step"], row["released"]) for row in rows if "released" in row]
    steps = [step for step, _ in points]
    dots: dict[str, Any] = {"marker": "o", "markersize": 3}
    with _axes(path, "Held out, released with noise (may be shown)", "loss (nats)", public=True) as axes:
        axes.plot(steps, [found["held_out_loss"] for _, found in points], color=_INK, label="loss", **dots)
        if any("held_out_accuracy" in found for _, found in points):
            beside = axes.twinx()
            beside.set_ylabel("accuracy")
            shares = [found["held_out_accuracy"] for _, found in points]
            beside.plot(steps, shares, color=_ACCENT, label="accuracy", **dots | {"marker": "s"})
            beside.legend(frameon=False, loc="upper right")
        axes.legend(frameon=False, loc="upper left")


def perplexity_over_rounds(rows: Sequence[dict[str, Any]], path: str | Path) -> None:
    """Held-out perplexity of a federated run.

    Args:
        rows: the rows of `rounds.jsonl`; those without "perplexity" are left out.
        path: the PNG to write.
    """
    points = [(row["round"], row["perplexity"]) for row in rows if row["perplexity"] is not None]
    with _axes(path, "Held-out perplexity", "perplexity", "round") as axes:
        if points:
            axes.plot(*zip(*points), color=_INK, marker="o", markersize=3, linewidth=1.8)


@contextmanager
def _axes(path: str | Path, title: str, ylabel: str, xlabel: str = "step", *, public: bool = False) -> Iterator[Any]:
    # A Figure of its own rather than pyplot: no display, no global state, safe beside a notebook's own figures.
    figure = Figure(figsize=_SIZE, layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, fontsize=10, loc="left")
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    yield axes
    with files.atomic_path(path, public=public) as aside:
        figure.savefig(aside, dpi=_DPI, format="png")
