"""kill -9 at random points of many runs: what goes on afterwards is the unbroken run, bit for bit.

    python benchmarks/crash_matrix.py                          # 50 runs of the mini world
    python benchmarks/crash_matrix.py --world=tiny --runs=10   # a random model, seconds a run
    python benchmarks/crash_matrix.py --quick                  # 5 runs of the tiny world, no file written

Each run is killed once to three times at points that chance chooses among those of `crash_child.POINTS` (rollout, scoring, the
two updates, the logs, saving, restoring, evaluation, export), at any of the calls that the run makes there, and up to half a second
later; then the same command goes on to the end. Compared with the unbroken run: every row of metrics.jsonl without its times, every
file of rollouts, every evaluation with its predictions and without its clocks, the checksums of all arrays of the checkpoints, the
exported policy and retriever, byte for byte.

Finished runs are kept in --folder, and the same command goes on after the last of them. Writes benchmarks/results/crash_matrix.json
and prints it as its last line.
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
import time
from collections import Counter
from pathlib import Path

from crash_child import POINTS
from machine import about

from bridge_jax.files import write_text
from bridge_jax.training.metrics import read_metrics

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "tests" / "training"))
import tiny_run  # noqa: E402

RUNS, SEED = 50, 0
LONGEST_DELAY = 0.5  # seconds from a point to the kill
# configs/mini.py's models, passages and questions; few of the last, so that a run takes seconds.
MINI = {
    "train.steps": 3, "train.questions": 8, "train.eval_every": 2, "train.checkpoint_every": 1, "train.log_rollouts_every": 1,
    "data.eval": "mini/one_hop,mini/two_hop", "data.eval_limit": 4, "grpo.minibatch_questions": 8, "grpo.microbatch": 32,
    "rollout.batch_groups": 4, "credit.max_turns": 16, "credit.minibatch": 8,
}  # fmt: skip
TINY = {"train.steps": 6, "train.eval_every": 2, "train.checkpoint_every": 1}


def words(world: str, folder: Path) -> list[str]:
    """The run's command-line words, without its workdir."""
    if world == "mini":
        return [f"--config={ROOT / 'configs' / 'mini.py'}", *(f"--config.{name}={value}" for name, value in MINI.items())]
    path = folder / "world" / "config.py"
    if not path.exists():
        tiny_run.write_world(folder / "world")
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
    for path in workdir.glob("checkpoints/*/position/metadata"):  # the step, and the checksum of every array, optimisers included
        found[str(path.relative_to(workdir))] = path.read_bytes()
    return found


def without_clocks(value):
    if isinstance(value, dict):
        return {k: without_clocks(v) for k, v in value.items() if "second" not in k and "latency" not in k}
    return [without_clocks(part) for part in value] if isinstance(value, list) else value


def differences(expected: dict, found: dict) -> list[str]:
    return sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))


def broken_run(run: list[str], workdir: Path, counts: Counter, chance: random.Random) -> dict:
    """A run that is killed one to three times and then ends -> where it was killed, and what it came to say."""
    kills, note, wanted = [], workdir.with_suffix(".kill"), chance.choice((1, 1, 2, 3))
    while len(kills) < wanted:
        point = chance.choice(sorted(POINTS) if kills else sorted(set(POINTS) - {"restore"}))
        call = chance.randint(1, max(counts[point], 1))
        delay = chance.choice((0.0, chance.uniform(0.0, LONGEST_DELAY)))
        done = child(run, workdir, f"--point={point}", f"--call={call}", f"--delay={delay:.3f}", f"--note={note}")
        if done.returncode == -signal.SIGKILL:
            kills.append(json.loads(note.read_text()))
        elif done.returncode:
            return {"kills": kills, "failed": (point, call, delay, done.returncode, done.stderr[-2000:])}
        elif kills:  # it had fewer such calls to make than the whole run has, and came to its end
            break
        else:
            shutil.rmtree(workdir)
    done = child(run, workdir)
    return {"kills": kills} | ({"failed": (done.returncode, done.stderr[-2000:])} if done.returncode else {})


def unbroken_run(run: list[str], folder: Path) -> tuple[dict, Counter]:
    """-> (its result, how often each point was passed); the run is kept in the folder."""
    counts = folder / "counts.json"
    if not counts.exists():
        shutil.rmtree(folder / "unbroken", ignore_errors=True)
        done = child(run, folder / "unbroken", f"--count={counts}")
        if done.returncode:
            raise SystemExit(f"the unbroken run failed: {done.stderr[-2000:]}")
    if not any(row.get("policy/grad_norm", 0) > 1e-3 for row in read_metrics(folder / "unbroken" / "metrics.jsonl")):
        raise SystemExit("the unbroken run learns nothing: no advantage differs from 0")
    return result(folder / "unbroken"), Counter(json.loads(counts.read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", choices=("mini", "tiny"), default="mini")
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "crash_matrix")
    parser.add_argument("--quick", action="store_true", help="5 runs of the tiny world, no file written")
    args = parser.parse_args()
    world, runs = ("tiny", 5) if args.quick else (args.world, args.runs)
    folder = (args.folder / world).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder / "jax_cache"))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
    if world == "tiny":
        os.environ["BRIDGE_JAX_CACHE"] = str(folder / "cache")
    run = words(world, folder)
    expected, counts = unbroken_run(run, folder)
    rows = []
    for number in range(runs):
        kept, workdir = folder / f"run{number}.json", folder / f"run{number}"
        if not kept.exists():
            shutil.rmtree(workdir, ignore_errors=True)
            began = time.monotonic()
            outcome = broken_run(run, workdir, counts, random.Random(f"{SEED}/{number}"))
            differ = [] if "failed" in outcome else differences(expected, result(workdir))
            row = {"run": number, **outcome, "differs": differ, "seconds": round(time.monotonic() - began, 1)}
            write_text(kept, json.dumps(row) + "\n")
            print(json.dumps(row), file=sys.stderr, flush=True)
            shutil.rmtree(workdir, ignore_errors=True)
        rows.append(json.loads(kept.read_text()))
    kills = [kill for row in rows for kill in row["kills"]]
    wrong = [row["run"] for row in rows if row["differs"] or "failed" in row]
    report = {
        "machine": about(), "seed": SEED, "world": world, "settings": MINI if world == "mini" else TINY, "runs": runs,
        "kills": len(kills), "kills_by_point": dict(Counter(kill["point"] for kill in kills)),
        "kills_fell_in": dict(Counter(kill["fell"] for kill in kills)), "compared": len(expected),
        "runs_that_differ": wrong, "seconds": round(sum(row["seconds"] for row in rows)), "rows": rows,
    }  # fmt: skip
    if not args.quick:
        write_text(ROOT / "benchmarks" / "results" / "crash_matrix.json", json.dumps(report, indent=1) + "\n")
    print(json.dumps({name: value for name, value in report.items() if name != "rows"}))
    if wrong:
        raise SystemExit(f"{len(wrong)} of {runs} runs differ from the unbroken one: {wrong}")


if __name__ == "__main__":
    main()
