"""What a person's terminal is told: text from passages, models and servers; times; what is left of a long loop."""

from __future__ import annotations

import re
import time

# Control characters but for tab and line break, and what changes the direction of what follows.
_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u061c\u202a-\u202e\u2066-\u2069]")


def visible(text: str) -> str:
    """`text` with a replacement character for each that would steer a terminal: no colours, titles, clipboards, reversed words."""
    return _STEERING.sub("\ufffd", text.replace("\r", " "))


def clock(seconds: float) -> str:
    """h:mm:ss, "-" for what is no number."""
    if seconds != seconds:
        return "-"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}"


class Remaining:
    """Of a loop of `total` units that begins at `done`: as the ones so far took on average, evaluations and saves included, without
    the first step, which compiles."""

    def __init__(self, total: int, done: int):
        self._total, self._done = total, done
        self._first: tuple[float, int] | None = None  # when the first step had ended, and at which unit

    def step(self, done: int) -> None:
        """The loop is at `done`."""
        self._done = done
        self._first = self._first or (time.monotonic(), done)

    def __str__(self) -> str:
        if self._first is None:
            return "first step: programs are compiled"
        began, seen = self._first
        left, measured = self._total - self._done, self._done - seen
        if left and not measured:
            return "ETA after the next step"
        return f"ETA {clock((time.monotonic() - began) / max(measured, 1) * left)}"
