"""Two processes of four devices each, over gloo: the numbers of one; one of them dies, the other ends, and one goes on alone."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import several_processes
import tiny_run

from bridge_jax import train
from bridge_jax.training.metrics import read_metrics

STEPS = 5
# What a clock says, what follows the layout, and what is a difference of rounding errors.
NOT_THE_RUN = ("time/", "goodput/", "compilations/", "rollout/compilations", "rollout/tokens_per_second", "memory/", "gap/")
LAYOUT = ("rollout/padding_ratio", "policy/packing_fill")


def rollouts(workdir, step):
    """Of every rollout of a step, what it wrote, read, searched and earned."""
    rows = [json.loads(line) for line in (workdir / "rollouts" / f"step_{step:06d}.jsonl").read_text().splitlines()]
    return [(row["id"], row["sample"], row["trace"], row["reward"], [turn["query"] for turn in row["turns"]]) for row in rows]


def test_two_processes_then_one_equal_one(tmp_path, monkeypatch):
    monkeypatch.setenv("BRIDGE_JAX_CACHE", str(tmp_path / "cache"))
    world = tiny_run.write_world(tmp_path / "world", train__steps=STEPS, train__questions=5, grpo__minibatch_questions=5,
                                 grpo__group_size=8, grpo__microbatch=40, credit__minibatch=8, train__eval_every=0,
                                 train__checkpoint_every=2)  # fmt: skip
    alone, workdir = tmp_path / "alone", tmp_path / "two"
    assert train.main([f"--config={world}", f"--workdir={alone}"]) == 0

    command = ["bridge_jax.train", f"--config={world}", f"--workdir={workdir}"]
    pair = several_processes.start([*command, "--heartbeat=10"], 2, 4)
    deadline = time.monotonic() + 240
    while len(read_metrics(workdir / "metrics.jsonl")) < 3:
        assert all(process.poll() is None for process in pair) and time.monotonic() < deadline, several_processes.finish(pair, 10)
        time.sleep(0.02)
    pair[1].send_signal(signal.SIGKILL)
    (code, said), _ = several_processes.finish(pair, 60)
    assert code != 0 and ("lost contact with another process" in said or "another task died" in said), said[-3000:]

    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-m", *command], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "going on after step 2" in done.stderr and "rematerialization" not in said + done.stderr

    one, two = (read_metrics(folder / "metrics.jsonl") for folder in (alone, workdir))
    assert [row["step"] for row in two] == list(range(1, STEPS + 1))
    assert sum(row["credit/turns"] for row in one) > 0 and sum(row["policy/grad_norm"] for row in one) > 0
    for step, (a, b) in enumerate(zip(one, two, strict=True), 1):
        assert rollouts(alone, step) == rollouts(workdir, step)
        for name in a:
            if not name.startswith((*NOT_THE_RUN, *LAYOUT)):
                assert b[name] == pytest.approx(a[name], rel=1e-3, abs=1e-4), (step, name)
