"""Line charts as SVG that sits in a page and takes its colours from it: classes, and `var(--series-1)` and on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fastdp.untrusted import escape_html as escape

#: Colours of lines that a page defines; further lines take them again with another stroke.
SERIES = 6
_STROKES = ("", "7 4", "2 3")
# In units of the drawing. A phone shows it at about three quarters, where text of 15 is still read.
_WIDTH, _HEIGHT = 480, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 14, 12, 46
_POINTS = 240


@dataclass(frozen=True)
class Line:
    """One line of a chart: points by x, and faint readings behind it."""

    name: str
    points: Sequence[tuple[float, float]]
    readings: Sequence[tuple[float, float]] = ()
    #: A level that it should stay below, drawn across.
    limit: float | None = None


def style(index: int) -> str:
    """Stroke of the line at a place in the order of runs."""
    dashes = _STROKES[index // SERIES % len(_STROKES)]
    return f"stroke:var(--series-{index % SERIES + 1})" + (f";stroke-dasharray:{dashes}" if dashes else "")


def chart(lines: Sequence[Line], across: str, up: str, *, from_zero: bool = False, whole: bool = False) -> str:
    """An SVG of lines; each keeps its place's colour, and one without points leaves no mark.

    Args:
        across, up: what the axes measure, with units.
        from_zero: begin the upright axis at 0.
        whole: count the axis across in whole numbers.
    """
    points = [point for line in lines for point in (*line.points, *line.readings)]
    points += [(point[0], line.limit) for line in lines if line.limit is not None for point in line.points[-1:]]
    points = [point for point in points if all(map(math.isfinite, point))]
    if not points:
        return f'<p class="quiet">nothing to draw yet: no {escape(up)}</p>'
    xs, ys = [x for x, _ in points], [y for _, y in points]
    columns = ticks(min(xs), max(xs), 5, whole=whole)
    rows = ticks(0.0 if from_zero else min(ys), max(ys), 5)
    # Upright the axis ends at a round value, across where the lines end.
    low_x, low_y, high_y = columns[0], rows[0], rows[-1]
    high_x = max(xs) if max(xs) > low_x else columns[-1]

    def at(x: float, y: float) -> tuple[float, float]:
        return (
            _LEFT + (x - low_x) / (high_x - low_x) * (_WIDTH - _LEFT - _RIGHT),
            _HEIGHT - _BOTTOM - (y - low_y) / (high_y - low_y) * (_HEIGHT - _TOP - _BOTTOM),
        )

    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(up)} by {escape(across)}">']
    for y in rows:
        height = at(low_x, y)[1]
        parts.append(f'<path class="grid" d="M{_LEFT} {height:.1f}H{_WIDTH - _RIGHT}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{height + 5:.1f}" text-anchor="end">{_number(y)}</text>')
    for x in (x for x in columns if x <= high_x):
        place = at(x, low_y)[0]
        anchor = "end" if place > _WIDTH - _RIGHT - 12 else "middle"
        parts.append(f'<text x="{place:.1f}" y="{_HEIGHT - _BOTTOM + 20}" text-anchor="{anchor}">{_number(x)}</text>')
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(f'<text class="axis" x="{middle}" y="{_HEIGHT - 6}" text-anchor="middle">{escape(across)}</text>')
    upright = (_HEIGHT - _BOTTOM + _TOP) / 2
    turned = f'transform="rotate(-90 14 {upright})"'
    parts.append(f'<text class="axis" x="14" y="{upright}" text-anchor="middle" {turned}>{escape(up)}</text>')
    for index, line in enumerate(lines):
        if line.limit is not None and low_y <= line.limit <= high_y:
            height = at(low_x, line.limit)[1]
            parts.append(
                f'<path class="limit" style="stroke:var(--series-{index % SERIES + 1})" '
                f'd="M{_LEFT} {height:.1f}H{_WIDTH - _RIGHT}"/>'
            )
        for kind, given in (("reading", line.readings), ("line", line.points)):
            kept = [at(x, y) for x, y in _thinned(given)]
            if not kept:
                continue
            drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in kept)
            parts.append(
                f'<polyline class="{kind}" style="{style(index)}" points="{drawn}"><title>{escape(line.name)}</title></polyline>'
            )
            if len(kept) == 1 and kind == "line":
                x, y = kept[0]
                parts.append(
                    f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" style="fill:var(--series-{index % SERIES + 1})"/>'
                )
    return "".join([*parts, "</svg>"])


def ticks(low: float, high: float, count: int, *, whole: bool = False) -> list[float]:
    """Round values from at most ``low`` to at least ``high``, about ``count`` of them and at least two."""
    span = (high - low) or abs(high) or 1.0
    step = 10.0 ** math.floor(math.log10(span / count))
    step *= next(factor for factor in (1, 2, 5, 10) if span / (step * factor) <= count)
    if whole:
        step = max(1.0, math.ceil(step))
    first = math.floor(low / step + 1e-9)
    last = max(first + 1, math.ceil(high / step - 1e-9))
    return [round(index * step, 12) for index in range(first, last + 1)]


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """The mean of each value and of up to ``window`` - 1 before it."""
    return [sum(values[max(0, end - window) : end]) / (end - max(0, end - window)) for end in range(1, len(values) + 1)]


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    kept = [point for point in points if all(map(math.isfinite, point))]
    if len(kept) <= _POINTS:
        return kept
    return [*(kept[index * len(kept) // _POINTS] for index in range(_POINTS)), kept[-1]]


def _number(value: float) -> str:
    return f"{value:,.0f}".replace(",", "\u202f") if abs(value) >= 1e4 else f"{value:.6g}"
