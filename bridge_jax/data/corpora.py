"""Corpora by name: the ones that come with the package, and files."""

from __future__ import annotations

import os
from pathlib import Path

from bridge_jax.data import embedded, mini

SHIPPED = {"embedded": embedded, "mini": mini}  # each has corpus_path, questions_path and SETS


def corpus_path(name: str | os.PathLike) -> Path:
    """The jsonl file of a corpus: a shipped one by its name, anything else is a path."""
    return SHIPPED[name].corpus_path() if name in SHIPPED else Path(name)
