"""Agentic-R in two processes against one, over gloo on this machine's CPU: a round, and a step of the agent by GRPO and by PPO.

    python benchmarks/agentic_processes.py      # minutes on 2 cores

The models are random and small (tests/training/tiny_run.py). In each layout the round is played, judged by the policy's likelihood,
its encoder trained, the corpus indexed again, and the agent trained for a step. Compared: the rows of every stage, the loss of each
step of the encoder's training (its negatives are those of all processes: one that knew its own alone would have another loss),
the rollouts and metrics of the agent's step. Writes results/agentic_processes.json.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import tempfile
from pathlib import Path

from machine import about
from multi_process import ROOT, Bench

from bridge_jax.files import write_text

# Short texts and few lengths: few programs to compile, four times over.
SETTINGS = {
    "method__name": "agentic_r", "agentic__rounds": 1, "agentic__questions": 9, "agentic__candidates": 6, "agentic__negatives": 3,
    "agentic__batch": 8, "agentic__microbatch": 4, "agentic__lr": 1e-2, "agentic__temperature": 0.1, "agentic__min_local": 0,
    "agentic__max_searches": 1, "train__steps": 1, "rollout__max_searches": 1, "rollout__max_prompt_tokens": 64,
    "rollout__max_new_tokens": 16, "rollout__max_observation_tokens": 32, "rollout__max_response_tokens": 64,
}  # fmt: skip
STAGES = ("trajectories", "candidates", "local", "global", "pairs")


def rows(bench: Bench, run: str, file: str) -> list[dict]:
    """Of a file of the run's round."""
    text = (bench.folder / run / "agentic_r" / "round_1" / file).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def compared(bench: Bench, name: str, **fields) -> dict:
    """Two processes of two devices each against one process of four."""
    alone, two, fields = f"{name}_alone", f"{name}_two", SETTINGS | fields
    seconds = {"alone": bench.run(alone, 1, 4, **fields), "two": bench.run(two, 2, 2, **fields)}
    losses = [[row["loss"] for row in rows(bench, run, "encoder_training/metrics.jsonl")] for run in (alone, two)]
    return bench.compared(two, alone) | {
        "seconds": seconds,
        "pairs": len(rows(bench, two, "pairs.jsonl")),
        "same_rows": {stage: rows(bench, alone, f"{stage}.jsonl") == rows(bench, two, f"{stage}.jsonl") for stage in STAGES},
        "encoder_losses": losses[0],
        "largest_difference_of_a_loss": max(abs(a - b) / a for a, b in zip(*losses, strict=True)),
        "loss_of_equal_scores": math.log(8 * 4),
    }


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="agentic-processes-"))
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder / "jax_cache"))
    bench = Bench(folder)
    try:
        result = {"machine": about(), "settings": SETTINGS, "grpo": compared(bench, "grpo")}
        result["ppo"] = compared(bench, "ppo", policy__algorithm="ppo")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    write_text(ROOT / "benchmarks" / "results" / "agentic_processes.json", json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    sys.exit(main())
