"""A run stopped by SIGTERM, and killed with -9 inside a step, goes on to the same metrics and final parameters, bit for bit."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny_run

from bridge_jax.errors import INTERRUPTED
from bridge_jax.training.metrics import read_metrics

CRASH_CHILD = Path(__file__).parents[2] / "benchmarks" / "crash_child.py"


def command(world, workdir, *overrides):
    return [sys.executable, "-m", "bridge_jax.train", f"--config={world / 'config.py'}", f"--workdir={workdir}", *overrides]


def results(workdir):
    return tiny_run.results(read_metrics(workdir / "metrics.jsonl"))


def final_bytes(workdir):
    files = ["policy/model.safetensors", "retriever/adapter_model.safetensors", "rollouts/step_000006.jsonl"]
    return {name: (workdir / name).read_bytes() for name in files}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    tiny_run.write_world(folder)
    return folder


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    return os.environ | {"BRIDGE_JAX_CACHE": str(tmp_path_factory.mktemp("cache"))}


@pytest.fixture(scope="module")
def unbroken(world, environment, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("runs") / "unbroken"
    done = subprocess.run(command(world, workdir), capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return workdir


def stop_when(process, ready, how):
    deadline = time.monotonic() + 120
    while not ready():
        assert process.poll() is None and time.monotonic() < deadline, "the run ended before it could be stopped"
        time.sleep(0.002)
    process.send_signal(how)
    process.wait()


def test_unbroken_run_is_whole(unbroken):
    rows = results(unbroken)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert sum(row["credit/turns"] for row in rows) > 0, "the test world must search, or it tests nothing"
    assert rows[-1]["retriever/drift"] > 0
    assert sum(row["policy/grad_norm"] for row in rows) > 0, "the test world must reward a rollout, or the policy never moves"
    assert {p.name for p in (unbroken / "eval").iterdir()} == {"step_000000.json", "step_000003.json", "step_000006.json"}
    lines = (unbroken / "rollouts" / "step_000006.jsonl").read_text().split("\n")[:-1]
    assert len(lines) == 8 and all(json.loads(line)["reason"] for line in lines)


def test_stopped_between_and_killed_during_steps(world, environment, unbroken, tmp_path):
    workdir = tmp_path / "killed"
    metrics, inside = workdir / "metrics.jsonl", workdir / "rollouts" / "step_000005.jsonl"
    process = subprocess.Popen(command(world, workdir), env=environment, stderr=subprocess.PIPE, text=True)
    stop_when(process, lambda: len(read_metrics(metrics)) >= 1, signal.SIGTERM)
    said, steps = process.stderr.read(), len(read_metrics(metrics))
    assert process.returncode == 0, said
    assert f"stopped by SIGTERM, saved after step {steps}: the same command goes on from there" in said
    assert 1 <= steps < 5 and (workdir / "checkpoints" / str(steps)).is_dir()

    process = subprocess.Popen(command(world, workdir), env=environment, stderr=subprocess.DEVNULL)
    stop_when(process, inside.exists, signal.SIGKILL)  # inside step 5: its rollouts are written, its metrics are not
    done = subprocess.run(command(world, workdir), capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "going on after step" in done.stderr
    assert results(workdir) == results(unbroken)
    assert final_bytes(workdir) == final_bytes(unbroken)


def test_ended_at_points_of_a_step(world, environment, unbroken, tmp_path):
    """The short form of benchmarks/crash_matrix.py: Ctrl-C is one line, and the run goes on as if nothing had been."""
    workdir = tmp_path / "ended"
    for point, how, code in (("scoring", "INT", 130), ("retriever step", "KILL", -signal.SIGKILL)):
        child = [sys.executable, str(CRASH_CHILD), f"--point={point}", "--call=2", f"--signal={how}", "--"]
        done = subprocess.run([*child, *command(world, workdir)[3:]], capture_output=True, text=True, env=environment)
        assert done.returncode == code and "Traceback" not in done.stderr, done.stderr
        assert how == "KILL" or done.stderr.strip().splitlines()[-1] == INTERRUPTED
    assert subprocess.run(command(world, workdir), capture_output=True, env=environment).returncode == 0
    assert results(workdir) == results(unbroken)
    assert final_bytes(workdir) == final_bytes(unbroken)


def test_rerun_of_a_finished_run_changes_nothing(world, environment, unbroken):
    before = final_bytes(unbroken), (unbroken / "metrics.jsonl").read_bytes()
    done = subprocess.run(command(world, unbroken), capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert (final_bytes(unbroken), (unbroken / "metrics.jsonl").read_bytes()) == before


def test_another_configuration_is_refused(world, environment, unbroken):
    before = (unbroken / "config.json").read_bytes()
    done = subprocess.run(command(world, unbroken, "--config.credit.gamma=0.5"), capture_output=True, text=True, env=environment)
    assert done.returncode == 2 and done.stderr.strip().count("\n") == 0
    assert "credit.gamma was 1.0, now 0.5" in done.stderr
    assert (unbroken / "config.json").read_bytes() == before
