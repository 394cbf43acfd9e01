"""Kill -9 at random points of many runs: every one goes on to what the unbroken run gives, bit for bit.

    python benchmarks/crash_matrix.py                 # 50 runs of the mini world, 4 steps each; about an hour on 2 cores
    python benchmarks/crash_matrix.py --world=tiny    # random models of two layers: ten minutes
    python benchmarks/crash_matrix.py --quick         # 5 runs of the tiny world

A run is killed one to three times, each time at a point drawn by chance (benchmarks/crash_child.py lists them) and some chance time
after it, then goes on undisturbed. Compared with the unbroken run: every row of metrics.jsonl but for clocks and compilations,
every rollout file, every evaluation, and the exported policy and retriever, byte for byte.

Writes benchmarks/results/crash_matrix.json and prints it as its last line.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from crash_child import POINTS
from machine import about

from bridge_jax.training.metrics import read_metrics

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "tests" / "training"))
import tiny_run  # noqa: E402

RUNS, SEED = 50, 0
LONGEST_DELAY = 0.5  # seconds from a point to the kill
MINI = {
    "train.steps": 4, "train.questions": 8, "train.eval_every": 2, "train.checkpoint_every": 1, "data.eval_limit": 8,
    "grpo.minibatch_questions": 8, "rollout.batch_groups": 8,
}  # fmt: skip
TINY = {"train.steps": 6, "train.eval_every": 2, "train.checkpoint_every": 1}


def words(world: str, folder: Path) -> list[str]:
    """The run's command-line words, without its workdir."""
    if world == "mini":
        return [f"--config={ROOT / 'configs' / 'mini.py'}", *(f"--config.{name}={value}" for name, value in MINI.items())]
    path = tiny_run.write_world(folder / "world")
    return [f"--config={path}", *(f"--config.{name}={value}" for name, value in TINY.items())]


def child(run: list[str], workdir: Path, *kill: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "benchmarks" / "crash_child.py"), *kill, "--", *run, f"--workdir={workdir}"]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


def result(workdir: Path) -> dict[str, object]:
    """Everything that the unbroken run must share: {name: what it holds}."""
    rows = tiny_run.results(read_metrics(workdir / "metrics.jsonl"))
    found: dict[str, object] = {f"metrics of step {row['step']}": row for row in rows}
    files = [*workdir.glob("rollouts/*.jsonl"), *workdir.glob("policy/*.safetensors"), *workdir.glob("retriever/*.safetensors")]
    found |= {str(path.relative_to(workdir)): path.read_bytes() for path in files}
    for path in workdir.glob("eval/*.json"):
        found[path.name] = without_clocks(json.loads(path.read_text()))
    return found


def without_clocks(value):
    if isinstance(value, dict):
        return {k: without_clocks(v) for k, v in value.items() if "second" not in k and "latency" not in k}
    return [without_clocks(part) for part in value] if isinstance(value, list) else value


def differences(expected: dict, found: dict) -> list[str]:
    return sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))


def broken_run(run: list[str], workdir: Path, counts: Counter, chance: random.Random) -> dict:
    """A run that is killed one to three times and then ends -> where it was killed, and what it came to say."""
    kills = []
    for _ in range(chance.choice((1, 1, 2, 3))):
        point = chance.choice(sorted(POINTS))
        call = chance.randint(1, max(counts[point], 1))
        delay = chance.choice((0.0, chance.uniform(0.0, LONGEST_DELAY)))
        done = child(run, workdir, f"--point={point}", f"--call={call}", f"--delay={delay:.3f}")
        if done.returncode not in (0, -signal.SIGKILL):
            return {"kills": kills, "failed": (point, call, delay, done.returncode, done.stderr[-2000:])}
        if done.returncode:
            kills.append([point, call, round(delay, 3)])
    done = child(run, workdir)
    return {"kills": kills} | ({"failed": (done.returncode, done.stderr[-2000:])} if done.returncode else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", choices=("mini", "tiny"), default="mini")
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--quick", action="store_true", help="5 runs of the tiny world, no file written")
    args = parser.parse_args()
    world, runs = ("tiny", 5) if args.quick else (args.world, args.runs)
    folder, chance = Path(tempfile.mkdtemp(prefix="crash-")), random.Random(SEED)
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder / "jax_cache"))
    if world == "tiny":
        os.environ["BRIDGE_JAX_CACHE"] = str(folder / "cache")
    began = time.monotonic()
    try:
        run = words(world, folder)
        done = child(run, folder / "unbroken", f"--count={folder / 'counts.json'}")
        if done.returncode:
            raise SystemExit(f"the unbroken run failed: {done.stderr[-2000:]}")
        expected, counts = result(folder / "unbroken"), Counter(json.loads((folder / "counts.json").read_text()))
        tried, wrong = Counter(), []
        for number in range(runs):
            workdir = folder / f"run{number}"
            outcome = broken_run(run, workdir, counts, chance)
            tried.update(point for point, _, _ in outcome["kills"])
            differ = [] if "failed" in outcome else differences(expected, result(workdir))
            if differ or "failed" in outcome:
                wrong.append(outcome | {"differs": differ})
            print(f"[{number + 1}/{runs}, {time.monotonic() - began:.0f} s] {outcome} {differ}", file=sys.stderr, flush=True)
            shutil.rmtree(workdir, ignore_errors=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    report = {
        "machine": about(), "seed": SEED, "world": world, "runs": runs, "kills": sum(tried.values()), "kills_by_point": dict(tried),
        "compared": len(expected), "runs_that_differ": len(wrong), "wrong": wrong, "seconds": round(time.monotonic() - began),
    }  # fmt: skip
    if not args.quick:
        path = ROOT / "benchmarks" / "results" / "crash_matrix.json"
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report))
    if wrong:
        raise SystemExit(f"{len(wrong)} of {runs} runs differ from the unbroken one")


if __name__ == "__main__":
    main()
