"""A curve in one line of text: `▁▂▅▇█`, for the panel of a run under way and for its end."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

BLOCKS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """The lowest value is lowest; more values than `width` are averaged in equal parts."""
    if not values:
        return ""
    if len(values) > width:
        values = averaged(values, width)
    low, high = min(values), max(values)
    if high == low:
        return BLOCKS[0] * len(values)
    return "".join(BLOCKS[round((value - low) / (high - low) * (len(BLOCKS) - 1))] for value in values)


def averaged(values: Sequence[float], width: int) -> list[float]:
    """The means of `width` equal parts."""
    edges = [round(i * len(values) / width) for i in range(width + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
