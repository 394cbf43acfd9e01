"""Types of command-line arguments: argparse says in one line which of them is wrong, before anything is run."""

from __future__ import annotations

import argparse
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

HOME = Path(__file__).parent.parent  # where the scripts run what they start


def at_least(least: int) -> Callable[[str], int]:
    def whole_number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{value}: must be at least {least}")
        return value

    return whole_number


def above_zero(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{value}: must be above 0")
    return value


def whole_numbers(text: str) -> list[int]:
    """`1,8,16`, all above 0."""
    return [at_least(1)(part) for part in text.split(",")]


def some_of(known: Iterable[str]) -> Callable[[str], str]:
    """Names with commas, given back as they are."""

    def names(text: str) -> str:
        if unknown := [name for name in text.split(",") if name not in known]:
            raise argparse.ArgumentTypeError(f"there is no {', '.join(map(repr, unknown))}; there are {', '.join(known)}")
        return text

    known = tuple(known)
    return names


def config_file(text: str) -> str:
    if not (HOME / text).is_file():
        raise argparse.ArgumentTypeError(f"{HOME / text} does not exist")
    return text


def interpreter(text: str) -> str:
    found = shutil.which(text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text} is no program: give the python that the peers are installed in")
    return os.path.abspath(found)  # of a virtual environment's: a link that is followed leads out of it


def file_name(text: str) -> str:
    if not re.fullmatch(r"\w[\w.-]*", text):
        raise argparse.ArgumentTypeError(f"{text!r}: letters, digits, '.', '-' and '_' make a name")
    return text
