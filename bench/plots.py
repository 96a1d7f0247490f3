"""Committed results for the eye: a roofline of the ops, the planner's predictions against measurements, a table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def roofline(results: Path, picture: Path) -> None:
    """Arithmetic intensity against achieved rate for each op in ``results``, under the two measured ceilings."""
    found = json.loads(results.read_text())
    floor, *rows = found["figures"]
    bandwidth, matmul = floor["copy_bytes_per_second"], floor["matmul_flops_per_second"]
    figure, (axes, bars) = plt.subplots(1, 2, figsize=(13, 5.5), layout="constrained")
    intensities = [10 ** (x / 10) for x in range(-10, 41)]
    axes.plot(intensities, [min(matmul, bandwidth * i) / 1e9 for i in intensities], color="black", label="ceiling")
    multiplying = [row for row in rows if row.get("flops_per_second", 0) > 0]
    for index, row in enumerate(multiplying):
        intensity = row["flops_per_second"] / row["bytes_per_second"]
        # Ten colours, then the next marker.
        axes.plot(intensity, row["flops_per_second"] / 1e9, "os^"[index // 10 % 3], label=row["op"])
    axes.set(xscale="log", yscale="log", xlabel="operations a byte (least possible traffic)", ylabel="GFLOP/s")
    axes.set_title("Ops that multiply matrices")
    axes.legend(fontsize=8)
    timed = [row for row in rows if "share_of_floor" in row]
    bars.barh([row["op"] for row in timed], [row["share_of_floor"] for row in timed], color="tab:blue")
    bars.axvline(1.0, color="black", linewidth=1)
    bars.invert_yaxis()
    bars.set_xlabel("share of the floor: 1 is the measured matmul rate or copy bandwidth")
    environment = found["environment"]
    figure.suptitle(f"{environment['device']}, {environment['threads']} threads, {environment['instruction_set']}")
    _save(figure, picture)


def planner(results: Path, picture: Path) -> None:
    """Predicted against measured seconds of every shape and route."""
    found: dict[str, Any] = json.loads(results.read_text())
    rows = found["figures"]["rows"]
    figure, axes = plt.subplots(figsize=(6.5, 6), layout="constrained")
    for route, marker in (("gram", "o"), ("direct", "s"), ("instantiate", "^")):
        own = [row for row in rows if row["route"] == route]
        axes.plot([r["predicted"] for r in own], [r["measured"] for r in own], marker, label=route)
    chosen = [row for row in rows if row["chosen"]]
    axes.plot(
        [r["predicted"] for r in chosen],
        [r["measured"] for r in chosen],
        "o",
        markersize=13,
        fillstyle="none",
        color="black",
        label="chosen",
    )
    ends = [min(r["predicted"] for r in rows), max(r["predicted"] for r in rows)]
    axes.plot(ends, ends, color="grey", linewidth=1)
    axes.set(xscale="log", yscale="log", xlabel="predicted seconds", ylabel="measured seconds")
    axes.legend()
    figure.suptitle(f"{found['environment']['device']}, {found['environment']['threads']} threads")
    _save(figure, picture)


_TABLE = ("<!-- table: begin -->", "<!-- table: end -->")


def table(results: Path) -> str:
    """The microbenchmarks in ``results`` as Markdown, a line an op."""
    found: dict[str, Any] = json.loads(results.read_text())
    environment = found["environment"]
    lines = [
        f"{environment['device']}, {environment['threads']} threads, {environment['instruction_set']}, "
        f"torch {environment['versions']['torch']}.",
        "",
        "| op | size | seconds | share of the floor | memory beside inputs | speed over |",
        "|---|---|---|---|---|---|",
    ]
    for row in found["figures"][1:]:
        if "failed" in row:
            lines.append(f"| `{row['op']}` | {row['size']} | {row['failed']} | | | |")
            continue
        others = "; ".join(f"{k.removeprefix('speedup over ')} {v:.2f}x" for k, v in row.items() if "speedup" in k)
        taken = row.get("first_peak_bytes")
        memory = "not told" if taken is None else f"{taken / 1e6:.1f} MB"
        cells = (f"`{row['op']}`", row["size"], f"{row['seconds']:.4g}", f"{row['share_of_floor']:.2f}", memory, others)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def insert(document: Path, text: str) -> None:
    """Put ``text`` between the document's two marks of a table.

    Raises:
        ValueError: the document has no such marks.
    """
    begin, end = _TABLE
    before, found, rest = document.read_text().partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"{document} has no lines '{begin}' and '{end}': put them where the table belongs")
    document.write_text(f"{before}{begin}\n{text}\n{end}{after}")


def _save(figure: Any, picture: Path) -> None:
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=110)
    plt.close(figure)
