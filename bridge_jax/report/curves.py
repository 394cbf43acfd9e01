"""Curves over a run's steps, as inline SVG."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence

from bridge_jax.training.sparkline import averaged

Point = tuple[float, float]  # (step, value)
WIDTH, HEIGHT = 340, 150  # of a chart, in px
LEFT, RIGHT, TOP, BOTTOM = 46, 8, 10, 22  # its margins
COLOURS = 8


def series(rows: Sequence[Mapping], name: str) -> list[Point]:
    """A metric over the steps; steps that lack it, or have no number there, are left out."""
    return [(row["step"], float(row[name])) for row in rows if isinstance(row.get(name), int | float) and math.isfinite(row[name])]


def chart(title: str, lines: Mapping[str, Sequence[Point]], most: int = 400) -> str:
    """An SVG chart with one labelled line a key; "" where there is no point at all. All text is escaped.

    The page's script reads each line's values from `data-values` and writes those of one step into <output>. A line of more than
    `most` points is thinned to the means of equal parts: the frame is not wider than that.
    """
    several = len(lines) > 1
    colours = {label: f"c{number % COLOURS}" for number, label in enumerate(lines)}  # of a run the same in every chart
    lines = {label: _thinned(points, most) for label, points in lines.items() if points}
    if not lines:
        return ""
    points = [point for found in lines.values() for point in found]
    x0, x1 = _span([x for x, _ in points])
    y0, y1 = _span([y for _, y in points])

    def place(point: Point) -> tuple[float, float]:
        x = LEFT + (point[0] - x0) / (x1 - x0) * (WIDTH - LEFT - RIGHT)
        return x, HEIGHT - BOTTOM - (point[1] - y0) / (y1 - y0) * (HEIGHT - TOP - BOTTOM)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" tabindex="0" aria-label="{html.escape(_spoken(title, lines))}">']
    for value in (y0, (y0 + y1) / 2, y1):
        y = place((x0, value))[1]
        parts.append(f'<line class="grid" x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 4}" y="{y + 3:.1f}" text-anchor="end">{_tick(value, max(abs(y0), abs(y1)))}</text>')
    for value, anchor in ((x0, "start"), (x1, "end")):
        parts.append(f'<text x="{place((value, y0))[0]:.1f}" y="{HEIGHT - 6}" text-anchor="{anchor}">{value:.5g}</text>')
    parts.append(f'<line class="cursor" x1="{LEFT}" y1="{TOP}" x2="{LEFT}" y2="{HEIGHT - BOTTOM}"/>')
    for label, found in lines.items():
        drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(place, found))
        values = " ".join(f"{step:.7g}:{value:.4g}" for step, value in found)
        parts.append(
            f'<polyline class="{colours[label]}" points="{drawn}" data-label="{html.escape(label)}" data-values="{values}"/>'
        )
        x, y = place(found[-1])
        parts.append(f'<circle class="{colours[label]}" cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>')
    parts.append("</svg>")
    labels = [f'<li class="{colours[label]}">{html.escape(label)}</li>' for label in lines]
    key = f'<ul class="key">{"".join(labels)}</ul>' if several else ""
    return f"<figure><figcaption>{html.escape(title)}</figcaption>{key}{''.join(parts)}<output></output></figure>"


def _tick(value: float, largest: float) -> str:
    """At most 7 characters, which is what the margin holds."""
    text = "0" if abs(value) < largest / 1e4 else f"{value:.3g}"
    return f"{value:.0e}" if len(text) > 7 else text


def _thinned(points: Sequence[Point], most: int) -> list[Point]:
    if len(points) <= most:
        return list(points)
    return list(zip(averaged([x for x, _ in points], most), averaged([y for _, y in points], most), strict=True))


def _spoken(title: str, lines: Mapping[str, Sequence[Point]]) -> str:
    """For those who do not see the line: from where to where."""
    ends = [f"{label} from {points[0][1]:.3g} to {points[-1][1]:.3g}" for label, points in lines.items()]
    return f"{title}: {'; '.join(ends[:4])}, steps {_steps(lines)}. Arrow keys read single steps."


def _steps(lines: Mapping[str, Sequence[Point]]) -> str:
    steps = [step for points in lines.values() for step, _ in points]
    return f"{min(steps):.7g} to {max(steps):.7g}"


def _span(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 0.5, high + 0.5)
