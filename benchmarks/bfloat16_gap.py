"""How far the sampler's log-probs are from the trainer's over 100 steps, in bfloat16 and in float32, and whether the alarm is kept.

    python benchmarks/bfloat16_gap.py            # two runs of 100 steps of the mini world, minutes; one that is done is kept
    python benchmarks/bfloat16_gap.py --quick    # 3 steps, no file written

The sampler reads a growing cache token by token, the trainer packed rows at once: the same numbers up to rounding, of which
bfloat16 has more. An importance ratio is exp of the difference, so a run warns in every step whose largest difference (in bfloat16
also the mean) is above a limit (`training.alarms.GAP_ALARM`). Measured before the step's first update.

Writes benchmarks/results/bfloat16_gap.json and .png and prints the former without its rows as its last line.
"""

from __future__ import annotations

import argparse
import functools
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import plots
import training_runs as runs

from bridge_jax.files import write_text
from bridge_jax.training.alarms import GAP_ALARM
from bridge_jax.training.metrics import read_metrics

ROOT = Path(__file__).parent.parent
STEPS = 100
SETTINGS = {
    "train.questions": 8, "train.eval_every": 0, "train.checkpoint_every": 10, "train.log_rollouts_every": 0, "data.eval_limit": 20,
    "grpo.minibatch_questions": 8, "rollout.batch_groups": 8, "credit.max_turns": 64, "train.max_skipped_updates": 1,
}  # fmt: skip


def train(settings: dict[str, object], workdir: Path) -> dict[str, list[dict]]:
    """{"rows": the rows of metrics.jsonl of a run}"""
    command = [sys.executable, "-m", "bridge_jax.train", f"--config={ROOT / 'configs' / 'mini.py'}", f"--workdir={workdir}"]
    done = subprocess.run([*command, *(f"--config.{name}={value}" for name, value in settings.items())], cwd=ROOT)
    if done.returncode:
        raise SystemExit(f"the run in {workdir} failed")
    return {"rows": read_metrics(workdir / "metrics.jsonl")}


def column(rows: list[dict], name: str) -> np.ndarray:
    """float [steps]; NaN where the run had no finite number."""
    return np.array([row[name] for row in rows], float)


def summary(rows: list[dict], limits: dict[str, float]) -> dict:
    largest, mean = (column(rows, f"gap/logp_{kind}") for kind in ("max", "mean"))
    within = np.all([column(rows, name) <= limit for name, limit in limits.items()], axis=0)  # NaN is not, as for the alarm
    rewards = [row["reward/mean"] for row in rows]
    return {
        "steps": len(rows), "limits": limits,
        "largest": float(largest.max()), "median_of_largest": float(np.median(largest)),
        "mean": float(mean.mean()),
        "steps_above_the_limit": int((~within).sum()),
        "largest_mean": float(mean.max()), "steps_with_one_token_above_0.02": int((largest > 0.02).sum()),
        "first_ten_largest": float(largest[:10].max()), "last_ten_largest": float(largest[-10:].max()),
        "skipped_updates": sum(row["policy/skipped_updates"] + row["retriever/skipped_updates"] for row in rows),
        "reward_first_ten": float(np.mean(rewards[:10])), "reward_last_ten": float(np.mean(rewards[-10:])),
        "seconds": round(sum(row["time/wall"] for row in rows)),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "bfloat16_gap")
    parser.add_argument("--quick", action="store_true", help="3 steps, no file written")
    args = parser.parse_args()
    steps, folder = (3, args.folder / "quick") if args.quick else (STEPS, args.folder)
    rows, report = {}, {"world": "mini", "settings": SETTINGS}
    for dtype, limits in GAP_ALARM.items():
        workdir = (folder / dtype).absolute()
        settings = SETTINGS | {"policy.compute_dtype": dtype, "train.steps": steps}
        found = runs.measured(workdir, settings, functools.partial(train, settings, workdir / "run"))
        rows[dtype] = found["rows"]
        report[dtype] = {"machine": found["machine"]} | summary(found["rows"], limits)
    print(json.dumps(report))
    if args.quick:
        return
    out = ROOT / "benchmarks" / "results" / "bfloat16_gap"
    curves = {
        f"{kind}, {dtype}": column(found, f"gap/logp_{kind}").tolist() for dtype, found in rows.items() for kind in ("max", "mean")
    }
    limits = {f"alarm, {dtype}: {name[9:]}": [limit] * steps for dtype, each in GAP_ALARM.items() for name, limit in each.items()}
    write_text(out.with_suffix(".json"), json.dumps(report | {"rows": curves}, indent=1) + "\n")
    at = list(range(1, steps + 1))
    panel = {label: (at, values) for label, values in (curves | limits).items()}
    plots.lines(out.with_suffix(".png"), {"sampler against trainer": panel}, "step", "difference of log-probs", logy=True)


if __name__ == "__main__":
    main()
