"""Text from passages, models and servers on a person's terminal."""

from __future__ import annotations

import re

# Control characters but for tab and line break, and what changes the direction of what follows.
_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u061c\u202a-\u202e\u2066-\u2069]")


def visible(text: str) -> str:
    """`text` with a replacement character for each that would steer a terminal: no colours, titles, clipboards, reversed words."""
    return _STEERING.sub("\ufffd", text.replace("\r", " "))
