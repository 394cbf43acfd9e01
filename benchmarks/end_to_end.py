"""A whole run with real weights, and what it showed: warm start, training, evaluation before and after.

    python benchmarks/end_to_end.py                                  # configs/pocket.py as it is
    python benchmarks/end_to_end.py --name=qwen-0.5b --config.policy.model=qwen2.5-coder-0.5b-instruct --config.policy.warmstart=
    python benchmarks/end_to_end.py --quick                          # a few questions, two steps

Runs the two README commands in runs/<name> (finished parts are not run again), then writes benchmarks/results/<name>.json and
<name>.metrics.jsonl, and prints the summary as its last line.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

from arguments import config_file, file_name
from machine import about

from bridge_jax.errors import main_guard

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
QUICK = [
    "--config.index.limit=600", "--config.data.eval_limit=4", "--config.train.steps=2", "--config.warmstart.questions=8",
    "--config.train.questions=2", "--config.grpo.minibatch_questions=2", "--config.rollout.batch_groups=2",
]  # fmt: skip


def run(module: str, arguments: list[str]) -> tuple[list[str], float]:
    command = [sys.executable, "-m", f"bridge_jax.{module}", *arguments]
    shown = ["python", *command[1:]]
    print("$", *shown, file=sys.stderr, flush=True)
    begin = time.monotonic()
    if code := subprocess.run(command, cwd=ROOT).returncode:
        raise SystemExit(code)  # it has said why
    return shown, time.monotonic() - begin


def evaluation(path: Path) -> dict:
    result = json.loads(path.read_text(encoding="utf-8"))
    return {"step": result["step"], "seconds": result["seconds"], **result["datasets"]}


@main_guard
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=config_file, default="configs/pocket.py")
    parser.add_argument("--name", type=file_name, default="pocket", help="of the run folder and of the result files")
    parser.add_argument("--quick", action="store_true", help="a few questions and two steps: does it run?")
    args, overrides = parser.parse_known_args()
    if args.quick:
        args.name, overrides = f"{args.name}-quick", [*QUICK, *overrides]
    workdir = ROOT / "runs" / args.name
    arguments = [f"--config={args.config}", f"--workdir={workdir.relative_to(ROOT)}", *overrides]
    warmed = "--config.policy.warmstart=" not in overrides
    commands, seconds = [], {}
    for module in ("warmstart", "train") if warmed else ("train",):
        command, seconds[module] = run(module, arguments)
        commands.append(" ".join(command))

    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    evaluations = sorted((workdir / "eval").glob("step_??????.json"))
    warm = [json.loads(line) for line in (workdir / "warmstart_metrics.jsonl").read_text().splitlines()] if warmed else []
    heldout = [row["heldout/loss"] for row in warm if "heldout/loss" in row]
    times = {name: sum(row.get(name, 0.0) for row in rows) / len(rows) for name in sorted(rows[0]) if name.startswith("time/")}
    summary = {
        "commands": commands,
        "machine": about(),
        "seed": 0,
        "seconds": seconds,
        "warmstart": {"steps": sum("loss" in row for row in warm), "heldout_loss": heldout},
        "steps": len(rows),
        "before": evaluation(evaluations[0]),
        "after": evaluation(evaluations[-1]),
        "mean_step_seconds": times,
        "policy_grad_norm": [row["policy/grad_norm"] for row in rows],
        "policy_kl": [row["policy/kl"] for row in rows],
        "retriever_drift": [row.get("retriever/drift") for row in rows],
        "reward": [row["reward/mean"] for row in rows],
        "recall@3": [row.get("retrieval/recall@3") for row in rows],
        "gap_logp_max": max(row["gap/logp_max"] for row in rows),
        "prefill_ratio": max(row["rollout/prefill_ratio"] for row in rows),
        "all_finite": all(value is not None for row in rows for value in row.values()),
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{args.name}.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    shutil.copy(workdir / "metrics.jsonl", RESULTS / f"{args.name}.metrics.jsonl")
    print(json.dumps(summary))


if __name__ == "__main__":
    sys.exit(main())
