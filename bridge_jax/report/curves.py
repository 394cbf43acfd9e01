"""Curves over a run's steps: as inline SVG for the page, as a line of blocks for a terminal."""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Mapping, Sequence

Point = tuple[float, float]  # (step, value)
BLOCKS = "▁▂▃▄▅▆▇█"
WIDTH, HEIGHT = 340, 150  # of a chart, in px
LEFT, RIGHT, TOP, BOTTOM = 46, 8, 10, 22  # its margins


def series(rows: Sequence[Mapping], name: str) -> list[Point]:
    """A metric over the steps; steps that lack it, or have no number there, are left out."""
    return [(row["step"], float(row[name])) for row in rows if isinstance(row.get(name), int | float) and math.isfinite(row[name])]


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """`▁▂▅▇█`, the lowest value lowest; more values than `width` are averaged in equal parts."""
    if not values:
        return ""
    if len(values) > width:
        edges = [round(i * len(values) / width) for i in range(width + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(values), max(values)
    if high == low:
        return BLOCKS[0] * len(values)
    return "".join(BLOCKS[round((value - low) / (high - low) * (len(BLOCKS) - 1))] for value in values)


def chart(title: str, lines: Mapping[str, Sequence[Point]]) -> str:
    """An SVG chart with one labelled line a key; "" where there is no point at all. All text is escaped."""
    lines = {label: points for label, points in lines.items() if points}
    if not lines:
        return ""
    points = [point for found in lines.values() for point in found]
    x0, x1 = _span([x for x, _ in points])
    y0, y1 = _span([y for _, y in points])

    def place(point: Point) -> tuple[float, float]:
        x = LEFT + (point[0] - x0) / (x1 - x0) * (WIDTH - LEFT - RIGHT)
        return x, HEIGHT - BOTTOM - (point[1] - y0) / (y1 - y0) * (HEIGHT - TOP - BOTTOM)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(title)}">']
    for value in (y0, (y0 + y1) / 2, y1):
        y = place((x0, value))[1]
        parts.append(f'<line class="grid" x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 4}" y="{y + 3:.1f}" text-anchor="end">{value:.3g}</text>')
    for value, anchor in ((x0, "start"), (x1, "end")):
        parts.append(f'<text x="{place((value, y0))[0]:.1f}" y="{HEIGHT - 6}" text-anchor="{anchor}">{value:.4g}</text>')
    for number, found in enumerate(lines.values()):
        drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(place, found))
        parts.append(f'<polyline class="c{number}" points="{drawn}"/>')
        x, y = place(found[-1])
        parts.append(f'<circle class="c{number}" cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>')
    parts.append("</svg>")
    labels = [f'<span class="c{number}">{html.escape(label)}</span>' for number, label in enumerate(lines)]
    key = "".join(labels) if len(labels) > 1 else ""
    return f"<figure><figcaption>{html.escape(title)} {key}</figcaption>{''.join(parts)}</figure>"


def _span(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 0.5, high + 0.5)
