"""The picture of `docs/architecture.md`: the floors of the house, and the way of one step through it.

`python -m fastdp.bench.picture docs/pictures/architecture.png` draws it again.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

#: Highest first, as `tests/test_floors.py` has them.
FLOORS = (
    ("programs", "cli, commands, finetune, federated, split, audit, quickstart, bench"),
    ("front doors", "entry (make_private), optim, integrations"),
    ("methods", "dpsgd, rapft, frost  |  ewft, sap, selective"),
    ("private", "plan, loader, sampler, preparation, release, stages, run"),
    ("engine  |  accounting", "uses to clipped sums  |  events to epsilon, ledger, claim, card"),
    ("ops, files, tls", "schema and definition; cpu/ and csrc/; kernels/"),
)
#: Text, place of the middle (x, y), colour: grey holds no data, red holds data without noise, green has its noise.
STATIONS: dict[str, tuple[str, float, float, str]] = {
    "data": ("data set", 0.125, 0.90, "data"),
    "sampler": ("Sampler\nunits of a logical batch", 0.42, 0.90, "data"),
    "loader": ("PrivateLoader\nmicrobatch + ticket", 0.78, 0.90, "data"),
    "model": ("model, forward\nlosses by unit", 0.78, 0.68, "data"),
    "backward": ("backward\nuses: factors L, R", 0.42, 0.68, "data"),
    "norms": ("norms by unit and group\nops: gram, direct, instances", 0.42, 0.46, "data"),
    "policy": ("Policy\nscales: bound / norm", 0.125, 0.46, "public"),
    "sums": ("Accumulator\nclipped sums", 0.78, 0.46, "data"),
    "ledger": ("Ledger\nthe event, on disk first", 0.125, 0.24, "public"),
    "release": ("Release\n+ noise, / batch size", 0.52, 0.24, "data"),
    "optimizer": ("optimizer, weights", 0.85, 0.24, "released"),
    "plan": ("Plan\nrate, steps, multiplier", 0.125, 0.68, "public"),
    "card": ("Claim and card\nverify", 0.125, 0.06, "released"),
}
ARROWS = (
    *(("data", "sampler"), ("sampler", "loader"), ("loader", "model"), ("model", "backward"), ("backward", "norms")),
    *(("norms", "sums"), ("policy", "norms"), ("sums", "release"), ("ledger", "release"), ("release", "optimizer")),
    *(("plan", "sampler"), ("plan", "policy"), ("ledger", "card")),
)
COLOURS = {"data": "#f4d6cc", "public": "#e4e7ea", "released": "#cfe8d5"}


def draw(picture: Path) -> None:
    """Write the picture."""
    figure = Figure(figsize=(13.5, 5.6), layout="constrained")
    floors, step = figure.subplots(1, 2, width_ratios=(1, 1.35))
    for axes, title in ((floors, "floors: imports go down only"), (step, "one step")):
        axes.set(xlim=(0, 1), ylim=(0, 1))
        axes.set_title(title, loc="left", fontsize=13)
        axes.axis("off")
    height = 1 / len(FLOORS)
    for index, (name, rooms) in enumerate(FLOORS):
        middle = 1 - (index + 0.5) * height
        _box(floors, 0.5, middle, 0.94, height * 0.78, COLOURS["public"])
        floors.text(0.5, middle + 0.028, name, ha="center", va="center", fontsize=12, weight="bold")
        floors.text(0.5, middle - 0.032, rooms, ha="center", va="center", fontsize=10)
    boxes = {}
    for name, (text, x, y, kind) in STATIONS.items():
        boxes[name] = _box(step, x, y, 0.23 if x < 0.3 else 0.29, 0.115, COLOURS[kind])
        step.text(x, y, text, ha="center", va="center", fontsize=10)
    for start, end in ARROWS:
        # From middle to middle, as far as it lies outside of both boxes.
        ends = {"patchA": boxes[start], "patchB": boxes[end], "shrinkA": 0, "shrinkB": 0}
        step.annotate(
            "", STATIONS[end][1:3], STATIONS[start][1:3], arrowprops={"arrowstyle": "-|>", "color": "#333333", **ends}
        )
    for x, kind, told in (
        (0.36, "data", "private, without noise"),
        (0.64, "public", "public"),
        (0.78, "released", "released"),
    ):
        _box(step, x, 0.045, 0.024, 0.035, COLOURS[kind])
        step.text(x + 0.022, 0.045, told, va="center", fontsize=10)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=110)


def _box(axes: Any, x: float, y: float, width: float, height: float, colour: str) -> Any:
    corner, rounded = (x - width / 2, y - height / 2), "round,pad=0,rounding_size=0.012"
    return axes.add_patch(
        FancyBboxPatch(corner, width, height, boxstyle=rounded, facecolor=colour, edgecolor="#555555")
    )


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
