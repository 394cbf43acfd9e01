"""A run on a disk that is too small: one line says so, and once there is room the same command ends as if nothing had been.

    python benchmarks/full_disk.py              # Linux, root (it mounts small memory disks): minutes
    python benchmarks/full_disk.py --sizes=3    # fewer sizes

The tiny world of the tests (`tests/training/tiny_run.py`) with every checkpoint kept, its workdir on a memory disk of N bytes: once
too small to begin (`workdir.PROBE`), then N evenly from there to what the whole run takes, so that the disk gets full in a
checkpoint, in the logs or in the export. Required of each: exit code 2, a last line that names the workdir or a path below and says
that it cannot be written, no traceback. Then the disk is made larger and the same command runs again: it goes on from the newest
whole checkpoint, and what it leaves equals the run that never lacked room, as in `crash_matrix.py`.

Writes benchmarks/results/full_disk.json and prints it as its last line.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from arguments import at_least
from crash_matrix import ROOT, child, differences, result, words
from machine import about

from bridge_jax.files import write_text
from bridge_jax.training.checkpoints import newest
from bridge_jax.training.metrics import read_metrics
from bridge_jax.training.workdir import PROBE

ROOM = "64m"
STEPS = 20


@contextlib.contextmanager
def disk(folder: Path, size: int) -> Iterator[None]:
    """A memory disk of `size` bytes at `folder`."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)
        folder.rmdir()


def one(run: list[str], workdir: Path, size: int, expected: dict) -> dict:
    """A run on a disk of that size, then on a larger one -> what was seen, and what is wrong with it."""
    with disk(workdir, size):
        first = child(run, workdir)
        said = first.stderr.strip().splitlines()
        kept = newest(workdir / "checkpoints")
        row = {
            "bytes": size,
            "exit_code": first.returncode,
            "checkpoint_left": kept,
            "said": said[-1].replace(str(workdir), "WORKDIR") if said else "",
        }
        wrong = []
        if first.returncode != 2 or not re.match(
            r"error: (--workdir=WORKDIR: )?WORKDIR/?\S* cannot be written \(No space left on device\)", row["said"]
        ):
            wrong.append("not the one line that is promised, with exit code 2")
        if "Traceback" in first.stderr:
            wrong.append("a traceback")
        row["steps_written"] = max((each["step"] for each in read_metrics(workdir / "metrics.jsonl")), default=0)
        subprocess.run(["mount", "-o", f"remount,size={ROOM}", str(workdir)], check=True)
        second = child(run, workdir)
        if second.returncode:
            wrong.append(f"it does not go on: {second.stderr[-500:]}")
        else:
            if kept and f"going on after step {kept}" not in second.stderr:
                wrong.append(f"it does not go on after step {kept}")
            wrong += differences(expected, result(workdir))
    return row | {"wrong": wrong}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=at_least(1), default=10)
    args = parser.parse_args()
    if sys.platform != "linux" or os.geteuid():
        raise SystemExit("full_disk.py mounts memory disks: run it as root on Linux")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leaves no disk mounted
    folder = Path(tempfile.mkdtemp(prefix="full-disk-"))
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder / "jax_cache"))
    os.environ["BRIDGE_JAX_CACHE"] = str(folder / "cache")
    try:
        run = [*words("tiny", folder), f"--config.train.steps={STEPS}", f"--config.train.keep={STEPS}"]
        with disk(folder / "unbroken", 2**26):
            done = child(run, folder / "unbroken")
            if done.returncode:
                raise SystemExit(f"the run with room failed: {done.stderr[-2000:]}")
            expected = result(folder / "unbroken")
            needed = shutil.disk_usage(folder / "unbroken").used
        rows, least = [], PROBE + 2**16
        for number in range(args.sizes):
            size = least + (needed - least) * (number - 0.5) / (args.sizes - 1) if number else PROBE / 2
            size = round(size / 4096) * 4096
            rows.append(one(run, folder / f"disk{number}", size, expected))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    wrong = [row["bytes"] for row in rows if row["wrong"]]
    report = {"machine": about(), "world": "tiny", "bytes_needed": needed, "runs_that_are_wrong": wrong, "rows": rows}
    write_text(ROOT / "benchmarks" / "results" / "full_disk.json", json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))
    if wrong:
        raise SystemExit(f"{len(wrong)} of {len(rows)} runs do not keep the promise")


if __name__ == "__main__":
    main()
