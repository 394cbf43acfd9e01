"""Credit audit over training: what share of the credited searches had no advantage, and did the posterior find the passage?

    python benchmarks/credit_audit.py [--seeds=3] [--jobs=2]    # ablation.py's rows bridge and decoupled_rl; finished runs are read
    python benchmarks/credit_audit.py --quick

The paper: 85.26 % of audited turns had zero advantage; there p was nearly uniform, and w put 88 % of its mass on the favoured
document. Measured on logged rollouts (every fifth step; `logged_steps` in the result): all turns, by turn, by answer type (yes/no
apart), by hop; those of zero and of negative advantage apart; the first and the last third of the logged steps. Writes
results/credit_audit.json and a plot over the steps.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import ablation
import numpy as np
import plots
import stats
import training_runs as runs
from arguments import some_of
from audit_rows import rows_of
from machine import about
from outcomes import Outcome
from rows import rows_of as all_rows

from bridge_jax.errors import main_guard
from bridge_jax.training.credit_audit import MEASURES, summarise

NAME = "credit_audit"
ROWS = ("bridge", "decoupled_rl")
OVER_STEPS = {  # metric: what it is, a mean over the credited turns of a step
    "credit/zero_advantage_turns": "share with zero advantage",
    "credit/p_entropy": "entropy of p",
    "credit/weight_max": "largest w",
    "credit/weight_max_p": "largest p",
}


@main_guard
def main() -> None:
    parser = runs.parser(__doc__, seeds=3)
    rows = some_of(sorted({name for group in all_rows(1).values() for name in group}))
    parser.add_argument("--rows", type=rows, default=",".join(ROWS), help=f"rows of ablation.py (default {','.join(ROWS)})")
    parser.add_argument("--read", action="store_true", help="run nothing: the plot of the result that is there")
    args = parser.parse_args()
    if args.read:
        return plot(json.loads((runs.RESULTS / f"{NAME}.json").read_text(encoding="utf-8")), runs.RESULTS)
    root, shared = runs.root_of(args, ablation.NAME), ablation.base(args)
    known = ablation.known_rows(args)
    wanted = {name: ablation.runs_of(name, known[name], args, shared) for name in args.rows.split(",")}
    failures = runs.execute([run for found in wanted.values() for run in found], root, args.jobs)
    result = {"machine": about(), "config": args.config, "seeds": args.seeds, "rows": {}}
    for name, row in wanted.items():
        if all(runs.finished(run, root) for run in row):
            result["rows"][name] = audited([Outcome(run, root) for run in row])
    path = runs.save(NAME, result, args)
    plot(result, path.parent)
    print(json.dumps(result))
    runs.conclude(failures)


def plot(result: dict, folder: Path) -> None:
    panels = {
        title: {name: (found["curves"]["step"], found["curves"][metric]) for name, found in result["rows"].items()}
        for metric, title in OVER_STEPS.items()
    }
    plots.lines(folder / f"{NAME}.png", panels, "step", f"mean over credited turns, {result['seeds']} seeds")


def audited(outcomes: Sequence[Outcome]) -> dict:
    """One row of the result: groups of `credit_audit.summarise`, each measure's mean, lowest and highest over seeds."""
    by_seed = [rows_of(outcome.rollout_rows()) for outcome in outcomes]
    steps = sorted({row["step"] for rows in by_seed for row in rows})
    third = max(len(steps) // 3, 1)
    parts = {
        "whole_run": lambda row: True,
        "early": lambda row: row["step"] <= steps[third - 1],
        "late": lambda row: row["step"] >= steps[-third],
        "zero_advantage": lambda row: row["zero_advantage"] == 1,
        "negative_advantage": lambda row: row["advantage"] < 0,
        "zero_advantage_late": lambda row: row["zero_advantage"] == 1 and row["step"] >= steps[-third],
    }
    result = {part: over_seeds([summarise([r for r in rows if wanted(r)]) for rows in by_seed]) for part, wanted in parts.items()}
    result["candidates"] = max(len(turn["documents"]) for row in outcomes[0].rollout_rows() for turn in row["turns"])
    result["logged_steps"] = steps
    result["curves"] = {"step": [row["step"] for row in outcomes[0].metrics]}
    for metric in OVER_STEPS:
        values = [[np.nan if row.get(metric) is None else row[metric] for row in outcome.metrics] for outcome in outcomes]
        result["curves"][metric] = [float(value) for value in np.mean(values, axis=0)]
    return result


def over_seeds(summaries: Sequence[dict]) -> dict[str, dict]:
    """{group: {"turns": in all seeds, measure: {"mean", "min", "max"}}}, of groups that every seed has."""
    result = {}
    for group in [group for group in summaries[0] if all(group in summary for summary in summaries)]:
        found = [summary[group] for summary in summaries]
        result[group] = {"turns": sum(values["turns"] for values in found)}
        for measure in MEASURES:
            if all(measure in values for values in found):
                result[group][measure] = stats.spread([values[measure] for values in found])
    return result


if __name__ == "__main__":
    sys.exit(main())
