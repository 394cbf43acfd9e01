"""kill -9 at random points of many runs: what goes on afterwards is the unbroken run, bit for bit.

    python benchmarks/crash_matrix.py                          # 50 runs of the mini world
    python benchmarks/crash_matrix.py --world=tiny --runs=10   # a random model, seconds a run
    python benchmarks/crash_matrix.py --each-point             # one kill and one Ctrl-C in each of the points
    python benchmarks/crash_matrix.py --quick                  # 5 runs of the tiny world, no file written

Each run is killed once to three times at points that chance chooses among those of `crash_child.POINTS` (rollout, scoring, the
two updates, the logs, saving, restoring, evaluation, export), at any of the calls that the run makes there, and up to half a second
later; then the same command goes on to the end. Compared with the unbroken run: every row of metrics.jsonl without its times, every
file of rollouts, every evaluation with its predictions and without its clocks, the checksums of all arrays of the checkpoints, the
exported policy and retriever, byte for byte.

With --each-point nothing is left to chance: a run for each point and signal, hit where that point begins. Of Ctrl-C there must be
one line and exit code 130.

Finished runs are kept in --folder, for the same commit, and the same command goes on after the last of them. Writes its part of
benchmarks/results/crash_matrix.json ("random", "each_point") and prints it as its last line; exit code 1 where a run differs.
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

from arguments import at_least
from crash_child import POINTS
from machine import about, commit

from bridge_jax.errors import INTERRUPTED
from bridge_jax.files import write_text
from bridge_jax.training.metrics import read_metrics

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "tests" / "training"))
import tiny_run  # noqa: E402

RUNS, SEED = 50, 0
EACH = [(point, how) for point in POINTS for how in ("KILL", "INT")]
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


def random_run(number: int, run: list[str], workdir: Path, counts: Counter) -> dict:
    """A run that is killed one to three times and then ends -> where it was killed, and what it came to say."""
    chance = random.Random(f"{SEED}/{number}")
    kills, note, wanted = [], workdir.with_suffix(".kill"), chance.choice((1, 1, 2, 3))
    while len(kills) < wanted:
        point = chance.choice(sorted(POINTS) if kills else sorted(set(POINTS) - {"restore"}))
        call = chance.randint(1, max(counts[point], 1))
        delay = chance.choice((0.0, chance.uniform(0.0, LONGEST_DELAY)))
        note.unlink(missing_ok=True)
        done = child(run, workdir, f"--point={point}", f"--call={call}", f"--delay={delay:.3f}", f"--note={note}")
        if done.returncode == -signal.SIGKILL and note.exists():
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


def point_run(number: int, run: list[str], workdir: Path, counts: Counter) -> dict:
    """A run that is hit once, at the first line of a point, in the middle of the calls that are made there, and then ends."""
    point, how = EACH[number]
    kills, note = [], workdir.with_suffix(".kill")
    hits = [("save", "KILL", 2)] if point == "restore" else []  # nothing is restored before the first save
    for where, sign, call in [*hits, (point, how, 1 if hits else (counts[point] + 1) // 2)]:
        note.unlink(missing_ok=True)
        done = child(run, workdir, f"--point={where}", f"--call={call}", f"--signal={sign}", f"--note={note}")
        kills.append(json.loads(note.read_text()) | {"signal": sign} if note.exists() else None)
        if sign == "KILL" and done.returncode != -signal.SIGKILL:
            return {"kills": kills, "failed": (where, sign, done.returncode, done.stderr[-2000:])}
        said = done.stderr.strip().splitlines() or [""]
        if sign == "INT" and (done.returncode != 130 or said[-1] != INTERRUPTED or "Traceback" in done.stderr):
            return {"kills": kills, "failed": (where, sign, done.returncode, done.stderr[-2000:])}
    done = child(run, workdir)
    return {"kills": kills} | ({"failed": (done.returncode, done.stderr[-2000:])} if done.returncode else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", choices=("mini", "tiny"), default="mini")
    parser.add_argument("--runs", type=at_least(1), default=RUNS)
    parser.add_argument("--each-point", action="store_true", help="a kill and a Ctrl-C at each point, none by chance")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "crash_matrix")
    parser.add_argument("--quick", action="store_true", help="5 runs of the tiny world, no file written")
    args = parser.parse_args()
    if args.quick:
        with tempfile.TemporaryDirectory() as folder:
            report = measured("tiny", len(EACH) if args.each_point else 5, args.each_point, Path(folder), Path(folder) / "cache")
    else:
        folder = (args.folder / args.world).absolute()
        runs = len(EACH) if args.each_point else args.runs
        report = measured(args.world, runs, args.each_point, folder / commit(), folder / "jax_cache")
        path = ROOT / "benchmarks" / "results" / "crash_matrix.json"
        before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        write_text(path, json.dumps(before | {"each_point" if args.each_point else "random": report}, indent=1) + "\n")
    print(json.dumps({name: value for name, value in report.items() if name != "rows"}))
    if wrong := report["runs_that_differ"]:
        raise SystemExit(f"{len(wrong)} of {report['runs']} runs differ from the unbroken one: {wrong}")


def measured(world: str, runs: int, each_point: bool, folder: Path, programs: Path) -> dict:
    """programs: where compiled ones are kept."""
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(programs))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
    if world == "tiny":
        os.environ["BRIDGE_JAX_CACHE"] = str(folder / "cache")
    run = words(world, folder)
    expected, counts = unbroken_run(run, folder)
    rows, kind, broken = [], *(("point", point_run) if each_point else ("run", random_run))
    for number in range(runs):
        kept, workdir = folder / f"{kind}{number}.json", folder / f"{kind}{number}"
        if not kept.exists():
            shutil.rmtree(workdir, ignore_errors=True)
            began = time.monotonic()
            outcome = broken(number, run, workdir, counts)
            differ = [] if "failed" in outcome else differences(expected, result(workdir))
            row = {"run": number, **outcome, "differs": differ, "seconds": round(time.monotonic() - began, 1)}
            write_text(kept, json.dumps(row) + "\n")
            print(json.dumps(row), file=sys.stderr, flush=True)
            shutil.rmtree(workdir, ignore_errors=True)
        rows.append(json.loads(kept.read_text()))
    kills = [kill for row in rows for kill in row["kills"] if kill]
    return {
        "machine": about(), "seed": SEED, "world": world, "settings": MINI if world == "mini" else TINY, "runs": runs,
        "kills": len(kills), "kills_by_point": dict(Counter(kill["point"] for kill in kills)),
        "kills_fell_in": dict(Counter(kill["fell"] for kill in kills)), "compared": len(expected),
        "runs_that_differ": [row["run"] for row in rows if row["differs"] or "failed" in row],
        "seconds": round(sum(row["seconds"] for row in rows)), "rows": rows,
    }  # fmt: skip


if __name__ == "__main__":
    main()
