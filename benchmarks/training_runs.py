"""Many training runs, a few at a time, each on its own cores: what the benchmarks of methods are made of.

    execute([Run("bridge/seed0", "configs/mini.py", {"method.name": "bridge", "train.seed": 0}), ...], jobs=2)

A run is `python -m bridge_jax.train` in <root>/<name>, then one evaluation of its last checkpoint on whole test sets. A run that
is finished is not run again, an interrupted one goes on, and a run whose `train.steps` grew goes on to the new end. Programs
compiled by one serve the others. A run that fails costs only itself.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from arguments import at_least, config_file
from machine import about

from bridge_jax import config as configuration
from bridge_jax.files import write_text
from bridge_jax.training import methods

HOME = Path(__file__).parent.parent
RESULTS = HOME / "benchmarks" / "results"
PAUSE = 60.0  # seconds between two progress lines
SPLIT = "test"  # settings were picked on "validation"


@dataclasses.dataclass(frozen=True)
class Run:
    """One training run.

    name: its folder under the root, "<row>/seed<n>". overrides: {"group.field": value} on top of the config file. limit: questions
    a set in the evaluation at its end, 0 = all. (The evaluations on the way have `data.eval_limit`.)
    """

    name: str
    config: str
    overrides: Mapping[str, object]
    limit: int = 0

    def words(self) -> list[str]:
        """Everything that defines the run, as command-line words."""
        fields = {"data.eval_split": SPLIT, **self.overrides}
        return [f"--config={self.config}", *(f"--config.{name}={text_of(value)}" for name, value in sorted(fields.items()))]

    @functools.cached_property
    def total(self) -> int:
        """Steps of the loop, all stages."""
        overrides, _ = configuration.split_overrides(self.words())
        return methods.total_steps(configuration.load(HOME / self.config, overrides))

    def commands(self, workdir: Path) -> list[list[str]]:
        """What the interpreter is called with, one after the other."""
        train = ["-m", "bridge_jax.train", *self.words(), f"--workdir={workdir}"]
        evaluate = ["-m", "bridge_jax.evaluate", f"--workdir={workdir}", "--checkpoint=latest"]
        return [train, [*evaluate, f"--split={SPLIT}", f"--limit={self.limit}"]]


def text_of(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


# ---------------------------------------------------------------------------------------------------------------- running


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def execute(runs: Sequence[Run], root: Path, jobs: int = 1, say: Callable[[str], None] = say) -> list[str]:
    """Run what is not finished, `jobs` at a time.

    Returns:
      One line for each run that failed (all others are done).
    """
    if len({run.name for run in runs}) < len(runs):
        raise ValueError("two runs have the same name")
    waiting = [run for run in runs if not finished(run, root)]
    if len(waiting) < len(runs):
        say(f"{len(runs) - len(waiting)} of {len(runs)} runs are finished already")
    cores = shares(jobs)
    active: dict[int, _Job] = {}
    progress, failures = _Progress(waiting, root), []
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated; the same command goes on"))
    try:
        while waiting or active:
            for slot in range(jobs):
                if slot not in active and waiting:
                    active[slot] = _Job(waiting.pop(0), root, cores[slot])
            time.sleep(0.5)
            for slot, job in list(active.items()):
                outcome = job.poll()
                if outcome is not None:
                    del active[slot]
                    if outcome:
                        failures.append(outcome)
                    say(progress.line(f"{job.run.name}: {outcome or 'done'}"))
            if progress.due():
                say(progress.line(", ".join(job.run.name for job in active.values())))
    finally:
        for job in active.values():
            job.stop()
        signal.signal(signal.SIGTERM, before)
    return failures


class _Job:
    """A run being run: its commands one after another, output to <root>/logs."""

    def __init__(self, run: Run, root: Path, cores: Sequence[int]):
        self.run, self.root, self.cores = run, root, cores
        self.workdir = root / run.name
        self.log = root / "logs" / f"{run.name.replace('/', '-')}.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._begin = time.monotonic()
        self._left = run.commands(self.workdir)
        self._start()

    def _start(self) -> None:
        command = [sys.executable, *self._left[0]]
        with self.log.open("a", encoding="utf-8") as file:
            file.write(f"$ {' '.join(command)}\n")
            file.flush()
            variables = {"OMP_NUM_THREADS": str(max(len(self.cores), 1))} | environment(self.root)
            self._process = subprocess.Popen(command, cwd=HOME, env=variables, stdout=file, stderr=file)
        if self.cores and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(self._process.pid, self.cores)  # before it has threads; XLA's pools then have as many as cores

    def poll(self) -> str | None:
        """None while running, "" when done, else why it failed."""
        code = self._process.poll()
        if code is None:
            return None
        if code:
            return f"{self.run.name}: `{' '.join(self._left[0][:2])}` ended with {code}: {last_line(self.log)} ({self.log})"
        self._left.pop(0)
        if self._left:
            self._start()
            return None
        return _mark_finished(self.run, self.root, time.monotonic() - self._begin)

    def stop(self) -> None:
        """The run can go on later, from its last whole checkpoint."""
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def shares(jobs: int) -> list[list[int]]:
    """The cores this process may use, dealt out to `jobs`; with more jobs than cores several share one."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    each, rest = divmod(len(cores), jobs)
    if not each:
        return [[cores[job % len(cores)]] for job in range(jobs)]
    ends = np.cumsum([each + (job < rest) for job in range(jobs)])
    return [cores[end - each - (job < rest) : end] for job, end in enumerate(ends)]


def programs(root: Path) -> Path:
    """Compiled programs, for all runs and scripts whose roots lie side by side."""
    return root.parent / "jax_cache"


def share_programs(root: Path) -> None:
    """The same for this process."""
    import jax

    jax.config.update("jax_compilation_cache_dir", str(programs(root)))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def environment(root: Path) -> dict[str, str]:
    """The same for a process that this one starts."""
    kept = {"JAX_COMPILATION_CACHE_DIR": str(programs(root)), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2"}
    return kept | os.environ


class _Progress:
    def __init__(self, runs: Sequence[Run], root: Path):
        self._runs, self._root = list(runs), root
        self._total = sum(run.total for run in runs)
        self._before = self._steps()
        self._begin = self._last = time.monotonic()

    def _steps(self) -> int:
        return sum(min(lines(self._root / run.name / "metrics.jsonl"), run.total) for run in self._runs)

    def due(self) -> bool:
        return time.monotonic() - self._last > PAUSE

    def line(self, text: str) -> str:
        """`[ 120/ 900 steps, 0:31:10 passed, ETA 3:20:00] text`"""
        self._last = time.monotonic()
        passed, steps = self._last - self._begin, self._steps()
        new = steps - self._before  # below 0 while interrupted runs do again what lies behind their last checkpoint
        eta = clock(passed / new * (self._total - steps)) if new > 0 else "?"
        return f"[{steps}/{self._total} steps, {clock(passed)} passed, ETA {eta}] {text}"


def clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def last_line(path: Path) -> str:
    """Of a log, without what surrounds it, cut; "" where there is none."""
    found = path.read_text(encoding="utf-8", errors="replace").strip().splitlines() if path.exists() else []
    return found[-1][:400] if found else ""


# ------------------------------------------------------------------------------------------------------- finished runs


def _marker(run: Run, root: Path) -> Path:
    return root / run.name / "finished.json"


def _definition(run: Run) -> list[str]:
    return [word for word in run.words() if not word.startswith(("--config.train.steps=", "--config.train.log_rollouts_every="))]


def finished(run: Run, root: Path) -> bool:
    """Whether the run is done to its last step, evaluation included.

    Raises:
      SystemExit: the folder holds a finished run of other settings.
    """
    path = _marker(run, root)
    if not path.exists():
        return False
    done = json.loads(path.read_text(encoding="utf-8"))
    if done["definition"] != _definition(run):
        changed = sorted(set(done["definition"]) ^ set(_definition(run)))
        raise SystemExit(f"{root / run.name} holds another run ({' '.join(changed)}): delete it, or use another --root")
    return _key(run) in done["evaluations"]


def finished_seeds(row: Sequence[Run], root: Path) -> list[Run]:
    """The runs of a row, seed by seed, up to the first that is not finished."""
    return list(itertools.takewhile(lambda run: finished(run, root), row))


def evaluation_of(run: Run, root: Path) -> str:
    """File name of a finished run's evaluation, in its eval/."""
    return json.loads(_marker(run, root).read_text(encoding="utf-8"))["evaluations"][_key(run)]["file"]


def _key(run: Run) -> str:
    return f"{run.total} {run.limit}"


def _mark_finished(run: Run, root: Path, seconds: float) -> str:
    """Note the evaluation that was just written; "" or what is wrong."""
    pattern = f"step_{run.total:06d}_*_{SPLIT}_{run.limit or 'all'}*.json"
    written = sorted((root / run.name / "eval").glob(pattern), key=lambda path: path.stat().st_mtime)
    if not written:
        return f"{run.name}: no evaluation eval/{pattern}"
    path = _marker(run, root)
    old = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"evaluations": {}}
    evaluations = old["evaluations"] | {_key(run): {"file": written[-1].name, "process_seconds": seconds}}
    write_text(path, json.dumps({"definition": _definition(run), "evaluations": evaluations}, indent=1) + "\n")
    return ""


# ---------------------------------------------------------------------------------------------------- measured once


def measured(folder: Path, settings: Mapping[str, object], measure: Callable[[], dict]) -> dict:
    """What `measure()` finds, with the machine and the settings; kept in `folder`, and not measured again.

    What a measurement that was stopped left in the folder is deleted: the times and the memory are those of one process. Not kept
    is what has "failed".

    Raises:
      SystemExit: the folder holds a measurement with other settings.
    """
    path = folder / "measured.json"
    shown = {name: text_of(value).replace(f"{HOME}/", "") for name, value in settings.items()}
    if path.exists():
        found = json.loads(path.read_text(encoding="utf-8"))
        theirs = found.get("settings", {})
        if theirs != shown:
            changed = sorted(name for name in theirs.keys() | shown.keys() if theirs.get(name) != shown.get(name))
            raise SystemExit(f"{folder} was measured with another {', '.join(changed)}: delete it, or measure in another folder")
        return found
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    say(f"{time.strftime('%H:%M:%S')} {folder.name}")
    found = {"machine": about(), "settings": shown} | measure()
    if "failed" not in found:
        write_text(path, json.dumps(found, indent=1) + "\n")
    return found


# ---------------------------------------------------------------------------------------------------- what scripts share


def parser(description: str, seeds: int, config: str = "configs/mini.py") -> argparse.ArgumentParser:
    """Flags of every script that trains: --quick --config --seeds --steps --jobs --root --limit."""
    shown = argparse.RawDescriptionHelpFormatter
    made = argparse.ArgumentParser(description=description, formatter_class=shown, allow_abbrev=False)
    made.add_argument("--quick", action="store_true", help="two steps, a few questions: does it run? (results lie with the runs)")
    made.add_argument("--config", type=config_file, default=config)
    made.add_argument("--seeds", type=at_least(1), default=seeds, help=f"number of training seeds (default {seeds})")
    made.add_argument("--steps", type=at_least(0), default=0, help="GRPO steps (default: the config file's)")
    made.add_argument("--jobs", type=at_least(1), default=1, help="runs at a time, each on its share of the cores (default 1)")
    made.add_argument("--root", type=Path, help="where the runs lie (default runs/<the script's name>)")
    made.add_argument("--limit", type=at_least(0), default=0, help="questions a set in the evaluation at the end (default: all)")
    return made


QUICK = {
    "train.steps": 2, "train.questions": 16, "grpo.minibatch_questions": 8, "grpo.microbatch": 8, "rollout.batch_groups": 8,
    "credit.max_turns": 16, "credit.minibatch": 16, "credit.turns_per_batch": 8, "data.eval_limit": 4, "train.eval_every": 1,
    "train.checkpoint_every": 1, "train.log_rollouts_every": 1,
}  # fmt: skip


def base(args: argparse.Namespace, **fields: object) -> dict[str, object]:
    """Overrides that all runs of a script share: its own `fields` (written group__field), then --steps, then --quick."""
    given = {name.replace("__", "."): value for name, value in fields.items()}
    if args.steps:
        given["train.steps"] = args.steps
    return given | (QUICK if args.quick else {})


def seeded(row: str, args: argparse.Namespace, overrides: Mapping[str, object], seeds: int = 0) -> list[Run]:
    """The runs of a row, one a seed: of `seeds`, or (0) of --seeds."""
    limit = 8 if args.quick else args.limit
    return [Run(f"{row}/seed{seed}", args.config, {**overrides, "train.seed": seed}, limit) for seed in range(seeds or args.seeds)]


def root_of(args: argparse.Namespace, name: str) -> Path:
    return (args.root or HOME / "runs" / (f"{name}-quick" if args.quick else name)).absolute()


def save(name: str, result: dict, args: argparse.Namespace) -> Path:
    """`results/<name>.json`; a --quick result goes beside the runs, it measures nothing."""
    folder = root_of(args, name) if args.quick else RESULTS
    path = folder / f"{name}.json"
    write_text(path, json.dumps(result, indent=1) + "\n")
    return path


def conclude(failures: Sequence[str]) -> None:
    """Exit with 1 when runs failed, after everything that could be saved is."""
    if failures:
        raise SystemExit("\n".join(["failed runs:", *failures]))
