"""Credit for the first hop: the paper's, none, or through the next action (METHOD 12), with and without an anchor.

    python benchmarks/first_hop.py                                   # 30 % and 100 % two-hop questions, 5 seeds: 40 runs
    python benchmarks/first_hop.py --worlds=mixed --variants=next_action_zero,paper_anchor,mask_anchor --seeds=3
    python benchmarks/first_hop.py --quick

On the first hop of a two-hop question the needed passage does not contain the answer, so l_d cannot see it. Compared at equal
steps, with the same training questions: the paper's credit, `credit.first_hop = mask` (no credit on turns that are followed by a
search), and `credit.target = next_action`. Measured: whether the gold passage is the argmax of p, l and w on training turns of the
last third (by hop and turn), recall@3 by hop on two-hop test questions, EM. In the mixed world the runs are those of ablation.py;
finished ones are read, and a variant of which some of the seeds are missing is shown with the others.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import ablation
import numpy as np
import outcomes as reading
import plots
import stats
import training_runs as runs
from arguments import some_of
from audit_rows import rows_of
from credit_audit import over_seeds
from machine import about
from outcomes import Outcome

from bridge_jax.errors import main_guard
from bridge_jax.evaluation import aggregate
from bridge_jax.training.credit_audit import summarise

NAME = "first_hop"
VARIANTS = {
    "vt_search": {"method.name": "vt_search"},
    "paper": {},
    "mask": {"credit.first_hop": "mask"},
    "next_action": {"credit.target": "next_action"},
    "next_action_zero": {"credit.target": "next_action", "credit.no_span": "zero"},
    "both": {"credit.target": "both"},
    "paper_anchor": {"credit.anchor": 1.0},
    "mask_anchor": {"credit.first_hop": "mask", "credit.anchor": 1.0},
    "next_action_anchor": {"credit.target": "next_action", "credit.anchor": 1.0},
    "next_action_zero_anchor": {"credit.target": "next_action", "credit.no_span": "zero", "credit.anchor": 1.0},
}
DEFAULT = ("vt_search", "paper", "mask", "next_action")
# "mixed": as the config file has it, 30 % two-hop questions in configs/mini.py.
WORLDS = {"mixed": {}, "two_hop_only": {"data.train": ("mini/two_hop",), "data.weights": ()}}
IN_ABLATION = {"vt_search": "vt_search", "paper": "bridge", "paper_anchor": "bridge_anchor"}  # others: bridge_<variant>
TWO_HOP = ("two_hop", "two_hop_ood")


@main_guard
def main() -> None:
    parser = runs.parser(__doc__, seeds=5)
    parser.add_argument("--worlds", type=some_of(WORLDS), default=",".join(WORLDS), help=f"of {', '.join(WORLDS)} (default both)")
    parser.add_argument("--read", action="store_true", help="run nothing: the tables of what is finished")
    shown = f"of {', '.join(VARIANTS)} (default {', '.join(DEFAULT)})"
    parser.add_argument("--variants", type=some_of(VARIANTS), default=",".join(DEFAULT), help=shown)
    args = parser.parse_args()
    root = runs.root_of(args, ablation.NAME)
    chosen = [(world, variant) for world in args.worlds.split(",") for variant in args.variants.split(",")]
    # Seed by seed: an interrupted measurement has whole comparisons of fewer seeds.
    queue = sorted((run for pair in chosen for run in runs_of(*pair, args)), key=lambda run: run.overrides["train.seed"])
    failures = [] if args.read else runs.execute(queue, root, args.jobs)

    result = {"machine": about(), "config": args.config, "worlds": {}}
    for world in WORLDS:
        rows = {}
        for variant in VARIANTS:
            done = runs.finished_seeds(runs_of(world, variant, args), root)
            if len(done) >= min(args.seeds, ablation.USUAL_SEEDS):
                rows[variant] = [Outcome(run, root) for run in done]
        if rows:
            result["worlds"][world] = compared(rows)
    path = runs.save(NAME, result, args)
    plot(result, path.parent)
    print(json.dumps(result))
    runs.conclude(failures)


def plot(result: dict, folder: Path) -> None:
    for world, found in result["worlds"].items():
        bars = {variant: row["recall@3_by_hop"]["hop1"] for variant, row in found.items()}
        plots.bars(folder / f"{NAME}_{world}_recall.png", bars, "first hop: recall@3 on two-hop test questions (95 %)")
        bars = {variant: row["em"]["two_hop"] for variant, row in found.items()}
        plots.bars(folder / f"{NAME}_{world}_em.png", bars, "exact match on two-hop test questions (95 %)")


def runs_of(world: str, variant: str, args) -> list[runs.Run]:
    row = IN_ABLATION.get(variant, f"bridge_{variant}")
    changes = {"method.name": "bridge", **VARIANTS[variant], **WORLDS[world]}
    return runs.seeded(row if world == "mixed" else f"{world}/{row}", args, {**ablation.base(args), **changes})


def compared(rows: dict[str, Sequence[Outcome]]) -> dict[str, dict]:
    """{variant: what it reached, and its differences to `paper` and `mask`}."""
    tables = {variant: reading.scores([outcome.final for outcome in found]) for variant, found in rows.items()}
    recalls = {variant: by_hop([outcome.final for outcome in found]) for variant, found in rows.items()}
    result = {}
    for variant, found in rows.items():
        ours, groups = tables[variant], aggregate.groups(list(tables[variant]))
        groups["two_hop"] = [name for name in TWO_HOP if name in ours]
        late = [[row for row in rows_of(outcome.rollout_rows()) if row["step"] > outcome.run.total * 2 / 3] for outcome in found]
        row = result[variant] = {
            "seeds": len(found),
            "em": {group: stats.estimate(ours, sets) for group, sets in groups.items()},
            "recall@3_by_hop": {hop: stats.estimate(table, list(table)) for hop, table in recalls[variant].items()},
            "training_turns": over_seeds([summarise(rows) for rows in late]),
        }
        for other in ("paper", "mask"):
            if other in rows and other != variant:
                row[f"minus_{other}"] = {
                    "em": {group: stats.difference(ours, tables[other], sets) for group, sets in groups.items()},
                    "recall@3_by_hop": {
                        hop: stats.difference(table, recalls[other][hop], list(table)) for hop, table in recalls[variant].items()
                    },
                }
    return result


def by_hop(evaluations: Sequence[dict]) -> dict[str, dict[str, np.ndarray]]:
    """{"hop1", "hop2"}: {set: [seeds, questions]}, whether that hop's gold passage is in the top 3 of some search."""
    sets = [name for name in TWO_HOP if name in evaluations[0]["predictions"]]

    def table(hop: int) -> dict[str, np.ndarray]:
        rows = {name: [found["predictions"][name] for found in evaluations] for name in sets}
        return {name: np.asarray([[float(_found(row, hop)) for row in of] for of in by_seed]) for name, by_seed in rows.items()}

    return {"hop1": table(0), "hop2": table(1)}


def _found(row: dict, hop: int) -> bool:
    return any(row["gold_passage_ids"][hop] in turn["ids"][:3] for turn in row["turns"])


if __name__ == "__main__":
    sys.exit(main())
