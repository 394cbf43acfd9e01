"""Several processes on this machine's CPU, over gloo: the same run in other layouts, SIGTERM, and a process that dies.

    python benchmarks/multi_process.py            # a few minutes on 2 cores
    python benchmarks/multi_process.py --quick    # alone and layouts

The models are random and small (tests/training/tiny_run.py).

    alone      1 process  x 4 devices, never interrupted: what the others are compared with
    layouts    2 processes x 4 devices for three BRIDGE steps, then 1 process x 4 devices from the checkpoint on
    sigterm    2 processes x 4 devices; one of them gets SIGTERM in the middle of a step, then both go on
    lost       2 processes x 4 devices; one of them is killed with -9 in the middle of a step (lost_main: process 0)
    sharded    1 process  x 8 devices with fsdp = 4 and tensor = 2, rollouts tensor-parallel by 2

Writes benchmarks/results/multi_process.json and prints it as its last line: for every row in how many steps all rollouts are the
same text with the same searches, the largest difference of the metrics that are the run's (no clock's, no layout's) in those
steps, and seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from machine import about

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "tests" / "training"))
import tiny_run  # noqa: E402

STEPS, CHECKPOINT = 6, 3
HEARTBEAT = 10
SETTINGS = {
    "train__steps": STEPS,
    "train__checkpoint_every": CHECKPOINT,
    "train__questions": 5,
    "train__eval_every": 0,
    "grpo__minibatch_questions": 5,
    "grpo__group_size": 8,
    "grpo__microbatch": 40,
    "credit__minibatch": 8,
}
# Besides, what follows the layout, and what is a difference of rounding errors.
NOT_THE_RUN = (*tiny_run.NOT_THE_RUN, "memory/", "gap/", "rollout/padding_ratio", "policy/packing_fill")


class Bench:
    """The runs, each in a folder of its own below one."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.config = tiny_run.write_world(folder / "world", **SETTINGS)

    def start(self, name: str, processes: int, devices: int, **fields) -> list[subprocess.Popen]:
        """The run `name`, begun or gone on with; fields override the configuration, group__field."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [sys.executable, "-m", "bridge_jax.train", f"--config={self.config}", f"--workdir={self.folder / name}"]
        command += [f"--config.{field.replace('__', '.')}={value}" for field, value in fields.items()]
        command += ["--distributed", f"--heartbeat={HEARTBEAT}"] if processes > 1 else []
        running = []
        for number in range(processes):
            environment = {
                "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
                "JAX_PLATFORMS": "cpu",
                "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
                "JAX_NUM_PROCESSES": str(processes),
                "JAX_PROCESS_ID": str(number),
                "PYTHONPATH": str(ROOT),
                "BRIDGE_JAX_CACHE": str(self.folder / "cache"),
            }
            with open(self.folder / f"{name}.{number}.log", "w") as log:
                running.append(subprocess.Popen(command, cwd=ROOT, env=os.environ | environment, stdout=log, stderr=log))
        return running

    def ended(self, running: list[subprocess.Popen], within: float = 3600) -> list[int]:
        """The exit codes."""
        deadline = time.monotonic() + within
        try:
            return [process.wait(max(1.0, deadline - time.monotonic())) for process in running]
        finally:
            for process in running:
                if process.poll() is None:
                    process.kill()

    def run(self, name: str, processes: int, devices: int, **fields) -> float:
        """To its end -> seconds."""
        began = time.monotonic()
        codes = self.ended(self.start(name, processes, devices, **fields))
        if any(codes):
            raise SystemExit(f"{name}: exit codes {codes}\n{(self.folder / f'{name}.0.log').read_text()[-3000:]}")
        return time.monotonic() - began

    def inside_step(self, name: str, running: list[subprocess.Popen], step: int) -> None:
        """Wait until the rollouts of `step` are under way."""
        while len(self.rows(name)) < step - 1:
            if any(process.poll() is not None for process in running):
                raise SystemExit(f"{name} ended early\n{(self.folder / f'{name}.0.log').read_text()[-3000:]}")
            time.sleep(0.02)
        time.sleep(0.3)

    def rows(self, name: str) -> list[dict]:
        path = self.folder / name / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def rollouts(self, name: str, step: int) -> list:
        path = self.folder / name / "rollouts" / f"step_{step:06d}.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        return [(row["id"], row["sample"], row["trace"], [turn["query"] for turn in row["turns"]]) for row in rows]

    def compared(self, name: str, alone: str = "alone") -> dict:
        """A finished run against another one of the same settings; no difference where no step has the same rollouts."""
        theirs, own = self.rows(alone), self.rows(name)
        same = [self.rollouts(alone, row["step"]) == self.rollouts(name, row["step"]) for row in theirs]
        pairs = [(a, b) for equal, a, b in zip(same, theirs, own, strict=True) if equal]  # another rollout has other numbers
        differences = {
            field: max(abs(a[field] - b[field]) / max(abs(a[field]), 1e-2) for a, b in pairs if field in a)
            for field, value in (pairs[0][0] if pairs else {}).items()
            if not field.startswith(NOT_THE_RUN) and isinstance(value, int | float)
        }
        worst = max(differences.items(), key=lambda item: item[1], default=None)
        return {"steps_with_the_same_rollouts": sum(same), "largest_relative_difference": worst and list(worst)}


def measure(bench: Bench, quick: bool) -> dict:
    result: dict = {"alone": {"seconds": bench.run("alone", 1, 4)}}

    seconds = bench.run("layouts", 2, 4, train__steps=CHECKPOINT)
    last = bench.rows("layouts")[-1]
    seconds += bench.run("layouts", 1, 4)
    shares = {name: last[name] for name in sorted(last) if name.startswith("goodput/") or name in ("time/wait", "time/publish")}
    result["layouts"] = bench.compared("layouts") | {"seconds": seconds, "step_3_of_two_processes": shares}

    if quick:
        return result

    pair = bench.start("sigterm", 2, 4)
    bench.inside_step("sigterm", pair, 3)
    seconds = timed(lambda: (pair[1].send_signal(signal.SIGTERM), bench.ended(pair)))
    codes, stopped = [process.returncode for process in pair], len(bench.rows("sigterm"))
    said = (bench.folder / "sigterm.0.log").read_text().strip().splitlines()[-1]
    bench.run("sigterm", 2, 4)
    result["sigterm"] = {"exit_codes": codes, "seconds_to_the_end_of_both": seconds, "stopped_after_step": stopped, "said": said}
    result["sigterm"] |= bench.compared("sigterm")

    for victim, name in ((1, "lost"), (0, "lost_main")):
        result[name] = lost(bench, name, victim)

    result["sharded"] = {
        "seconds": bench.run("sharded", 1, 8, mesh__fsdp=4, mesh__tensor=2, mesh__rollout_tensor=2)
    } | bench.compared("sharded")
    return result


def lost(bench: Bench, name: str, victim: int) -> dict:
    """One of two processes is killed; what becomes of the other."""
    pair = bench.start(name, 2, 4)
    bench.inside_step(name, pair, 2)
    other = pair[1 - victim]
    seconds = timed(lambda: (pair[victim].kill(), bench.ended(pair)))
    text = (bench.folder / f"{name}.{1 - victim}.log").read_text()
    said = [line for line in text.splitlines() if "lost contact with another process" in line or "another task died" in line]
    return {"exit_code": other.returncode, "seconds_to_the_end_of_the_other": seconds, "said": said[-1:]}


def timed(work: Callable[[], object]) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="multi-process-"))
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder / "jax_cache"))
    try:
        result = {"machine": about(), "heartbeat": HEARTBEAT, "settings": SETTINGS, **measure(Bench(folder), args.quick)}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if not args.quick:
        path = ROOT / "benchmarks" / "results" / "multi_process.json"
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
