"""The worker's side of a comparison (`compare.py` is the other): one process, one engine, one case.

    stdin   {"folder": ..., ...}      the job, one JSON line         stdout   {"versions": ..., ...}    ready, warmed up
            measure                   as often as wanted                      {"seconds": ..., "peak_bytes": ...}
            (end of file)             the process ends

Imports nothing of bridge_jax: this runs in the interpreter that the peer is installed in.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib.metadata
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

STATUS = Path("/proc/self/status")


class Memory:
    """Resident bytes above those of the interpreter and the libraries, which `imported` notes."""

    def __init__(self):
        self._base = 0

    def imported(self) -> None:
        """To be called after the imports, before a model is loaded."""
        self._base = _resident("VmRSS")

    def forget(self) -> None:
        """Peaks count from here on (Linux): what compilation took is left out."""
        gc.collect()
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL("libc.so.6").malloc_trim(0)
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")

    def peak(self) -> int:
        return _resident("VmHWM") - self._base


def _resident(field: str) -> int:
    if not STATUS.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def available_bytes() -> int:
    """Memory the machine can still give."""
    path = Path("/proc/meminfo")
    if not path.exists():
        return sys.maxsize
    line = next(line for line in path.read_text().splitlines() if line.startswith("MemAvailable:"))
    return int(line.split()[1]) * 1024


def versions(names: Iterable[str]) -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in names}


def serve(setup: Callable[[dict, Memory], tuple[Callable[[], object], dict]]) -> None:
    """setup(job, memory) -> (what is timed, the rest of the ready line).

    `setup` runs what is timed once, so that everything is compiled; what is timed returns when its result is there.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print must not mix with the answers
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # where memory runs out, it is this process's fault

    def answer(content: dict) -> None:
        answers.write(json.dumps(content) + "\n")
        answers.flush()

    memory = Memory()
    try:
        timed, ready = setup(json.loads(sys.stdin.readline()), memory)
    except ModuleNotFoundError as error:
        answer({"missing": error.name})
        return
    memory.forget()
    answer(ready)
    for _ in sys.stdin:
        begin = time.perf_counter()
        timed()
        answer({"seconds": time.perf_counter() - begin, "peak_bytes": memory.peak()})
