"""Two processes of four devices each, over gloo: the numbers of one; one of them dies, the other ends, and one device goes on.

(`benchmarks/multi_process.py` has more than fits here.)
"""

import json
import os
import signal
import time

import pytest
import several_processes
import tiny_run

from bridge_jax import config as configuration
from bridge_jax import preemption
from bridge_jax.files import write_text
from bridge_jax.training import loop
from bridge_jax.training.metrics import read_metrics

STEPS = 4
# Besides, what follows the layout, and what is a difference of rounding errors.
OTHER_LAYOUT = ("memory/", "gap/", "rollout/padding_ratio", "policy/packing_fill")


def rollouts(workdir, step):
    """Of every rollout of a step, what it wrote, read, searched and earned."""
    rows = [json.loads(line) for line in (workdir / "rollouts" / f"step_{step:06d}.jsonl").read_text().splitlines()]
    return [(row["id"], row["sample"], row["trace"], row["reward"], [turn["query"] for turn in row["turns"]]) for row in rows]


# Short texts, one search: few lengths, hence few programs to compile, three times over.
SMALL = {
    "train__steps": STEPS, "train__questions": 5, "train__eval_every": 0, "train__checkpoint_every": 2,
    "grpo__minibatch_questions": 5, "grpo__group_size": 8, "grpo__microbatch": 40, "credit__minibatch": 8,
    "rollout__max_searches": 1, "rollout__max_prompt_tokens": 64, "rollout__max_new_tokens": 16,
    "rollout__max_observation_tokens": 32, "rollout__max_response_tokens": 64,
    "policy__trainable": "full", "grpo__kl_coef": 0.0, "grpo__lr": 1e-5,
}  # fmt: skip


def not_evaluated(*_):
    return {"averages": {"overall": {"em": 0.0}}}


def stopped(*_):
    """An evaluation in which SIGTERM comes."""
    os.kill(os.getpid(), signal.SIGTERM)
    while True:
        preemption.check()
        time.sleep(0.01)


def test_two_processes_then_one_equal_one(tmp_path, monkeypatch):
    monkeypatch.setenv("BRIDGE_JAX_CACHE", str(tmp_path / "cache"))
    path = tiny_run.write_world(tmp_path / "world", **SMALL)
    config, alone, workdir = configuration.load(path), tmp_path / "alone", tmp_path / "two"
    assert loop.run(config, alone, not_evaluated)
    write_text(workdir / "eval" / "step_000000.json", "{}")  # saves an evaluation, and its programs

    command = ["bridge_jax.train", f"--config={path}", f"--workdir={workdir}", "--heartbeat=5"]
    pair = several_processes.start(command, 2, 4)
    deadline = time.monotonic() + 240
    while len(read_metrics(workdir / "metrics.jsonl")) < 3:
        assert all(process.poll() is None for process in pair) and time.monotonic() < deadline, several_processes.finish(pair, 10)
        time.sleep(0.02)
    pair[1].send_signal(signal.SIGKILL)
    (code, said), _ = several_processes.finish(pair, 60)
    assert code != 0 and ("lost contact with another process" in said or "another task died" in said), said[-3000:]
    assert "rematerialization" not in said
    three = [rollouts(workdir, step) for step in (1, 2, 3)]  # the third is played again by the run that goes on

    assert not loop.run(config, workdir, stopped)  # in the evaluation after the last step, which the next start makes up for
    assert read_metrics(workdir / "metrics.jsonl")[-1]["eval/em"] is None
    assert loop.run(config, workdir, not_evaluated)
    one, two = (read_metrics(folder / "metrics.jsonl") for folder in (alone, workdir))
    assert [row["step"] for row in two] == list(range(1, STEPS + 1))
    assert sum(row["credit/turns"] for row in one) > 0 and sum(row["policy/grad_norm"] for row in one) > 0
    assert three == [rollouts(alone, step) for step in (1, 2, 3)]
    for step, (a, b) in enumerate(zip(one, two, strict=True), 1):
        assert rollouts(alone, step) == rollouts(workdir, step)
        for name in a:
            if not name.startswith((*tiny_run.NOT_THE_RUN, *OTHER_LAYOUT)):
                assert b[name] == pytest.approx(a[name], rel=1e-3, abs=1e-4), (step, name)
