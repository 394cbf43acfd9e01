"""Corpora by name: the ones that come with the package, and files."""

from __future__ import annotations

import os
from pathlib import Path

from bridge_jax.data import embedded, mini
from bridge_jax.data.cache import cache_dir
from bridge_jax.files import local_copy

SHIPPED = {"embedded": embedded, "mini": mini}  # each has corpus_path, questions_path and SETS


def corpus_path(name: str | os.PathLike) -> Path:
    """The jsonl file of a corpus: a shipped one by its name, anything else is a path (of a gs:// one, a local copy)."""
    return SHIPPED[name].corpus_path() if name in SHIPPED else local_copy(name, cache_dir())
