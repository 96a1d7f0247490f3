"""Committed results for the eye: the look of all pictures, README's, the planner's predictions, and the table of ops."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
from cycler import cycler
from matplotlib.figure import Figure
from matplotlib.transforms import ScaledTranslation

from .pages import CPU_CASES, SYSTEMS, figures, steps
from .record import markdown

#: One look for every picture. Lines differ in mark and stroke as well as in colour, so that those which coincide are seen, and
#: by whoever sees no colours; the ground is white on dark pages too.
_LOOK = {
    **{"font.size": 13, "axes.titlesize": 13, "legend.fontsize": 12, "xtick.labelsize": 12, "ytick.labelsize": 12},
    **{"axes.titlelocation": "left", "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False},
    **{"axes.grid": True, "grid.alpha": 0.3, "axes.axisbelow": True, "lines.linewidth": 1.8, "lines.markersize": 6},
    "axes.prop_cycle": cycler(
        color=["#1f6fb5", "#c2410c", "#15803d", "#7c3aed", "#a16207", "#be185d", "#0e7490", "#566173"],
        marker=["o", "s", "^", "D", "v", "P", "X", "*"],
        linestyle=["-", "--", "-.", ":", "-", "--", "-.", ":"],
    ),
}
_PANEL = (4.7, 3.9)


@contextmanager
def picture(path: Path, rows: int = 1, panel: tuple[float, float] = _PANEL, legends: int = 2) -> Iterator[Any]:
    """The axes of a picture, row by row; at the end it is written to ``path``, with each panel's legend below the panel.

    Args:
        panel: width and height of one panel in inches.
        legends: columns of a legend.
    """
    with matplotlib.rc_context(_LOOK):
        figure = Figure(figsize=(panel[0], panel[1] * rows), layout="constrained")
        panels = figure.subplots(rows, squeeze=False).flatten()
        yield panels
        for axes in panels:
            handles, labels = axes.get_legend_handles_labels()
            if labels:
                # Below the axis' label, whatever height is left to the axes.
                below = axes.transAxes + ScaledTranslation(0, -0.58, figure.dpi_scale_trans)
                where: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (-0.02, 0), "bbox_transform": below}
                axes.legend(handles, labels, ncols=legends, columnspacing=1.2, **where)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=110)


def planner(results: Path, picture_path: Path) -> None:
    found: dict[str, Any] = json.loads(results.read_text())
    rows = found["figures"]["rows"]
    with picture(picture_path, panel=(6.4, 6.2), legends=4) as (axes,):
        for route in ("gram", "direct", "instantiate"):
            own = [row for row in rows if row["route"] == route]
            axes.plot([r["predicted"] for r in own], [r["measured"] for r in own], linestyle="", label=route)
        chosen = [row for row in rows if row["chosen"]]
        axes.plot(
            [r["predicted"] for r in chosen],
            [r["measured"] for r in chosen],
            **{"marker": "o", "linestyle": "", "markersize": 13, "fillstyle": "none", "color": "black"},
            label="chosen",
        )
        ends = [min(r["predicted"] for r in rows), max(r["predicted"] for r in rows)]
        axes.plot(ends, ends, color="grey", linewidth=1, marker="", linestyle="-")
        axes.set(xscale="log", yscale="log", xlabel="predicted time (s)", ylabel="measured time (s)")
        axes.set_title(f"{found['environment']['device']}, {found['environment']['threads']} threads")


def perplexities() -> dict[str, float]:
    """Held-out perplexity on E2E: before training, and after training with and without privacy at one setting."""
    rows = {row["run"]: row for row in figures("finetune")}
    private, plain = rows["e2e-8"], rows["e2e-inf"]
    apart = {key for key, value in private["settings"].items() if plain["settings"][key] != value}
    assert apart == {"epsilon", "output"}, apart
    return {
        "before": private["figures"]["before"]["perplexity"],
        "epsilon 8": private["figures"]["after"]["perplexity"],
        "no privacy": plain["figures"]["after"]["perplexity"],
    }


def overview(path: Path) -> None:
    found = steps("cpu-epyc")
    with picture(path, rows=2, panel=(7.2, 3.4), legends=3) as (left, right):
        width = 0.26
        for place, (system, title) in enumerate(SYSTEMS.items()):
            rows = [found.get((case, system), {}).get("ratio_time") for case in CPU_CASES]
            at = [index + (place - 1) * width for index in range(len(rows))]
            left.bar(at, [row or 0 for row in rows], width, label=title)
            for x, row in zip(at, rows):
                if row is None:
                    left.text(x, 0.05, "fails", rotation=90, ha="center", va="bottom", fontsize=9)
        left.axhline(1, color="#566173", linewidth=1)
        left.set_xticks(range(len(CPU_CASES)), [t.replace(", ", "\n") for t in CPU_CASES.values()], fontsize=9)
        left.set_title("Time of a step, over non-private")
        values = perplexities()
        before = values.pop("before")
        bars = right.barh(list(values), list(values.values()), color=["#1f6fb5", "#566173"])
        right.bar_label(bars, fmt="%.0f", padding=4)
        right.set_xlim(0, 1.15 * max(values.values()))
        right.invert_yaxis()
        right.set_title(f"Held-out perplexity on E2E ({before:.0f} before training)")


def table(results: Path) -> str:
    """The microbenchmarks in ``results`` as Markdown, a line an op."""
    found: dict[str, Any] = json.loads(results.read_text())
    environment = found["environment"]
    machine = f"{environment['device']}, {environment['threads']} threads, {environment['instruction_set']}"
    rows = []
    for row in found["figures"][1:]:
        if "failed" in row:
            rows.append([f"`{row['op']}`", row["size"], row["failed"], "", ""])
            continue
        # Torch's plain formula where there is one: the file has the other alternatives.
        speeds = {key.removeprefix("speedup over "): value for key, value in row.items() if "speedup" in key}
        name = "torch" if "torch" in speeds else next(iter(speeds))
        cells = [f"{row['seconds']:.4g}", f"{row['share_of_floor']:.2f}", f"{name} {speeds[name]:.2f}x"]
        rows.append([f"`{row['op']}`", row["size"], *cells])
    head = ["op", "size", "seconds", "share of the floor", "speed over"]
    return "\n".join([f"{machine}, torch {environment['versions']['torch']}.", "", *markdown(head, rows)])
