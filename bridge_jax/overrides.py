"""Overrides on the command line, `--config.group.field=value`: taken out of the arguments, and their text read."""

from __future__ import annotations

import ast
import math
from collections.abc import Sequence

from bridge_jax.errors import UserError


def split_overrides(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """-> (overrides "group.field=value", the other arguments). Taken out before argparse, which trips over values with spaces."""
    overrides, rest, words = [], [], iter(argv)
    for word in words:
        if not word.startswith("--config."):
            rest.append(word)
        elif "=" in word:
            overrides.append(word.removeprefix("--config."))
        else:
            value = next(words, None)
            if value is None:
                raise UserError(f"{word} has no value: write {word}=VALUE")
            overrides.append(f"{word.removeprefix('--config.')}={value}")
    return overrides, rest


def parse_value(text: str, like: object) -> object:
    """The value that `text` means for a field whose default is `like`; of the wrong type when it means none."""
    if isinstance(like, str):
        return text
    if isinstance(like, tuple) and not text.startswith(("(", "[")):
        return tuple(_scalar(part.strip()) for part in text.split(",") if part.strip())
    value = _scalar(text)
    if isinstance(like, bool) and isinstance(value, str) and value.lower() in ("true", "false"):
        value = value.lower() == "true"
    if isinstance(like, tuple) and isinstance(value, list | tuple):
        return tuple(value)
    if isinstance(like, float) and type(value) is int:
        return float(value) if abs(value) < 1 << 1023 else math.inf if value > 0 else -math.inf
    return value


def _scalar(text: str) -> object:
    try:
        return ast.literal_eval(text)
    # The last four: what is nested too deep, no key, or too large beside a float.
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError, OverflowError):
        return text
