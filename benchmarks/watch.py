"""The memory, open files and threads of a process over time, from /proc."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

MB = 1 << 20
KEPT = 200  # samples of a series that a result holds


def status(pid: int | str) -> dict[str, int]:
    """The numbers of /proc/<pid>/status, "RssAnon", "Threads" and the like; sizes in bytes."""
    lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {words[0][:-1]: int(words[1]) << 10 * (words[-1] == "kB") for words in lines if words[1:] and words[1].isdigit()}


def look(pid: int) -> dict | None:
    """Resident memory ("rss", of it "anon" not a file's pages) in MB, open files, threads; None: the process has gone."""
    try:
        found, files = status(pid), len(os.listdir(f"/proc/{pid}/fd"))
        sizes = {name: found[key] / MB for name, key in (("rss", "VmRSS"), ("anon", "RssAnon"))}
    except (OSError, KeyError):
        return None
    return sizes | {"files": files, "threads": found["Threads"]}


def opened(pid: int) -> dict[str, int]:
    """What kinds of files a process has open: socket, pipe, anon_inode, or a path's last part."""
    kinds: Counter = Counter()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            name = os.readlink(link)
            kinds[name.partition(":")[0] if name[:1] != "/" else name.rpartition("/")[2]] += 1
    return dict(kinds)


class Watch:
    """Context manager: looks at a process every `seconds`; `also()` adds fields of its own. samples: dicts with "t" in seconds."""

    def __init__(self, pid: int, seconds: float = 5.0, also: Callable[[], dict] = dict):
        self.pid, self.seconds, self.also = pid, seconds, also
        self.samples: list[dict] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Watch:
        self._began = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *error) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            found = look(self.pid)
            if found is not None:
                self.samples.append({"t": round(time.monotonic() - self._began, 1)} | found | self.also())
            if found is None or self._stop.wait(self.seconds):
                return


def mean(samples: Sequence[dict], name: str) -> float | None:
    values = [sample[name] for sample in samples if sample.get(name) is not None]
    return round(sum(values) / len(values), 1) if values else None


def growth(samples: Sequence[dict], by: str, early: tuple[float, float], late: tuple[float, float], name: str = "anon") -> dict:
    """The mean of `name` where `by` is in [early) and in [late), and their difference."""
    first, last = (mean([s for s in samples if low <= s[by] < high], name) for low, high in (early, late))
    known = first is not None and last is not None
    return {f"at {by}": [early, late], "early": first, "late": last, "growth": round(last - first, 1) if known else None}


def thinned(samples: Sequence[dict], names: Sequence[str]) -> dict[str, list]:
    """Columns of at most KEPT samples."""
    step = -(-len(samples) // KEPT) or 1
    return {name: [round(sample[name], 1) for sample in samples[::step]] for name in names}
