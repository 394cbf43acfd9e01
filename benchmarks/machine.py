"""Where and with what a result was measured."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "transformers", "scann", "numpy")


def about() -> dict:
    """Processor, cores, versions, and the commit (with a + where tracked files differ from it)."""
    return {"cpu": _cpu(), "cores": os.cpu_count(), "python": platform.python_version(), "commit": commit(), **_versions()}


def _cpu() -> str:
    path = Path("/proc/cpuinfo")
    found = [line for line in path.read_text().splitlines() if line.startswith("model name")] if path.exists() else []
    return found[0].partition(":")[2].strip() if found else platform.processor()


def _versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in PACKAGES}


def commit() -> str:
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=Path(__file__).parent, capture_output=True, text=True).stdout.strip()

    return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
