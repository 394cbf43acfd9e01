"""Agentic-R in two processes against one, over gloo on this machine's CPU: a round, and a step of the agent by GRPO and by PPO.

    python benchmarks/agentic_processes.py      # minutes on 2 cores

The mini world's policy and encoder, 500 of its passages (as in agentic_kill.py). In each layout the round is played, judged by the
policy's likelihood, its encoder trained, the corpus indexed again, and the agent trained for a step. Compared: the rows of every
stage, the loss of each step of the encoder's training (its negatives are those of all processes: one that knew its own alone would
have another loss), the rollouts and metrics of the agent's step. Writes results/agentic_processes.json, and
exits with 1 where rows differ.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import agentic_kill
from machine import about
from multi_process import ROOT, Bench

from bridge_jax.files import write_text

SETTINGS = agentic_kill.OVERRIDES | {"agentic.rounds": 1, "train.steps": 1, "agentic.min_local": 0}
STAGES = ("trajectories", "candidates", "local", "global", "pairs")


class World(Bench):
    def __init__(self, folder: Path):
        self.folder, self.config = folder, ROOT / "configs" / "mini.py"
        self.settings = {name.replace(".", "__"): value for name, value in (SETTINGS | agentic_kill.write_world(folder)).items()}


def rows(bench: World, run: str, file: str) -> list[dict]:
    """Of a file of the run's round, without inner products: another layout rounds them otherwise."""
    text = (bench.folder / run / "agentic_r" / "round_1" / file).read_text(encoding="utf-8")
    return [json.loads(line, object_hook=_without_floats) for line in text.splitlines()]


def _without_floats(row: dict) -> dict:
    scores = row.get("scores") or [0]
    return {name: value for name, value in row.items() if name != "scores" or isinstance(scores[0], int)}


def compared(bench: World, name: str, **fields) -> dict:
    """Two processes of two devices each against one process of four."""
    alone, two, fields = f"{name}_alone", f"{name}_two", bench.settings | fields
    seconds = {"alone": bench.run(alone, 1, 4, **fields), "two": bench.run(two, 2, 2, **fields)}
    losses = [[row["loss"] for row in rows(bench, run, "encoder_training/metrics.jsonl")] for run in (alone, two)]
    same_steps = len(losses[0]) == len(losses[1])  # else other pairs were trained on, which `same_rows` says
    return bench.compared(two, alone) | {
        "seconds": seconds,
        "pairs": len(rows(bench, two, "pairs.jsonl")),
        "same_rows": {stage: rows(bench, alone, f"{stage}.jsonl") == rows(bench, two, f"{stage}.jsonl") for stage in STAGES},
        "encoder_losses": losses[0],
        "largest_difference_of_a_loss": max(abs(a - b) / a for a, b in zip(*losses, strict=True)) if same_steps else None,
    }


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    folder = Path(tempfile.mkdtemp(prefix="agentic-processes-"))
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder / "jax_cache"))
    bench = World(folder)
    try:
        result = {"machine": about(), "settings": SETTINGS, "grpo": compared(bench, "grpo")}
        result["ppo"] = compared(bench, "ppo", policy__algorithm="ppo")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    write_text(ROOT / "benchmarks" / "results" / "agentic_processes.json", json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    if differ := [f"{name}: {stage}" for name in ("grpo", "ppo") for stage, same in result[name]["same_rows"].items() if not same]:
        raise SystemExit(f"not the same: {', '.join(differ)}")


if __name__ == "__main__":
    sys.exit(main())
