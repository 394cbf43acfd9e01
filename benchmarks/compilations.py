"""In which steps of a run programs are compiled, from the metrics of finished runs of `ablation.py`.

    python benchmarks/compilations.py        # runs nothing; the runs lie in runs/ablation, or --root

Rollouts, document scoring and updates compile a program for every new shape; shapes come from few values. `by_row`, means over
seeds: programs of the first step and of all later ones, steps after the first with a new program (of rollouts, scoring, updates),
and the last such step of any seed. `whole_runs` counts seeds that one process ran from start to end; others are left out, since a
process that goes on compiles again. A program that lies in JAX's persistent cache counts, and is loaded instead.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence

import ablation
import numpy as np
import training_runs as runs
from machine import about
from outcomes import Outcome

from bridge_jax.errors import main_guard

NAME = "compilations"
TOTALS = {"scoring": "compilations/score", "updates": "compilations/update"}  # of the process so far
ROLLOUTS = "rollout/compilations"  # of the step


@main_guard
def main() -> None:
    args = runs.parser(__doc__, seeds=ablation.USUAL_SEEDS).parse_args()
    root, shared = runs.root_of(args, ablation.NAME), ablation.base(args)
    rows = ablation.load(ablation.known_rows(args), args, shared, root)
    by_row = {name: summary(row.outcomes) for name, row in rows.items()}
    result = {"machine": about(), "config": args.config, "by_row": {name: found for name, found in by_row.items() if found}}
    runs.save(NAME, result, args)
    print(json.dumps(result))


def summary(outcomes: Sequence[Outcome]) -> dict:
    tables = [table for outcome in outcomes if (table := new_programs(outcome.metrics)) is not None]
    if not tables:
        return {}
    later = [{part: counts[1:] for part, counts in table.items()} for table in tables]
    whole = [np.sum(list(table.values()), 0) for table in tables]
    return {
        "whole_runs": len(tables),
        "steps": len(whole[0]),
        "programs_of_first_step": float(np.mean([counts[0] for counts in whole])),
        "programs_of_later_steps": float(np.mean([counts[1:].sum() for counts in whole])),
        "later_steps_with_new": {part: float(np.mean([(t[part] > 0).sum() for t in later])) for part in later[0]},
        "later_steps_with_any": float(np.mean([(counts[1:] > 0).sum() for counts in whole])),
        "last_step": max(int(np.flatnonzero(counts)[-1]) + 1 for counts in whole),
    }


def new_programs(metrics: Sequence[Mapping]) -> dict[str, np.ndarray] | None:
    """{part: programs compiled in each step}; None where a process went on with what another one had begun."""
    totals = {part: np.asarray([0, *(row.get(name, 0) for row in metrics)]) for part, name in TOTALS.items()}
    found = {part: np.diff(total) for part, total in totals.items()}
    if any((counts < 0).any() for counts in found.values()):
        return None
    return {"rollouts": np.asarray([row.get(ROLLOUTS, 0) for row in metrics]), **found}


if __name__ == "__main__":
    sys.exit(main())
