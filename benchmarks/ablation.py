"""Every method and every option on one world: at equal GRPO steps, at equal wall clock, in the shape of the paper's table.

    python benchmarks/ablation.py                       # the methods (rows "main"), 3 seeds
    python benchmarks/ablation.py --rows=main,order,rollouts,options --jobs=2
    python benchmarks/ablation.py --quick               # 2 steps, a few questions: does it run?

All rows start from the same models and see the same training questions, step by step; what a row changes is written in `rows_of`.
Nothing is tuned for a row: the config file's settings were picked with `bridge` on the validation splits, and all rows take them
over. Every run is evaluated at its end on all test questions.

Equal wall clock: a row that costs less than `bridge` goes on until it has used the seconds that `bridge` used for its steps
(evaluations and compilation left out), and is evaluated there; a row that costs more is read at the first evaluation on its way
after those seconds, on that evaluation's questions.

Writes results/ablation.json and plots. Finished runs are not run again, so groups of rows can be added one after the other.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import outcomes as reading
import plots
import stats
import training_runs as runs
from machine import about
from outcomes import Outcome
from rich.console import Console
from rich.table import Table

from bridge_jax import config as configuration
from bridge_jax.evaluation import aggregate
from bridge_jax.training.methods import METHODS

NAME = "ablation"


def rows_of(group_size: int) -> dict[str, dict[str, dict[str, object]]]:
    """{group: {row: what it changes}}. A row may stand in several groups; it is run once.

    Args:
      group_size: G of the config file.
    """
    methods = {name: {"method.name": name} for name in METHODS}
    bridge, vt = methods["bridge"], methods["vt_search"]
    # METHOD 11: 0.2 is reported too strong for small models. It looks at what fell since the rollouts: several minibatches.
    several = {"grpo.minibatch_questions": 8}
    guard = several | {"grpo.llds": 0.01}
    return {
        "main": methods | {"search_r1_ppo": methods["search_r1"] | {"policy.algorithm": "ppo"}},
        "order": {name: methods[name] for name in ("vt_search", "rag_then_rl", "rl_then_rag", "bridge")},
        "rollouts": {
            "bridge": bridge,
            "vt_search": vt,
            "vt_search_2g": vt | {"grpo.group_size": 2 * group_size},
            "bridge_2g": bridge | {"grpo.group_size": 2 * group_size},
            "vt_search_4g": vt | {"grpo.group_size": 4 * group_size},
        },
        "options": {
            "bridge": bridge,
            "vt_search": vt,
            "bridge_clamp": bridge | {"credit.clamp_negative": True},
            "bridge_shown_only": bridge | {"credit.shown_only": True},
            "bridge_tau_1": bridge | {"credit.tau": 1.0},
            "bridge_tau_0.2": bridge | {"credit.tau": 0.2},
            "bridge_gamma_0.02": bridge | {"credit.gamma": 0.02},
            "bridge_gamma_0.2": bridge | {"credit.gamma": 0.2},
            "bridge_period_2": bridge | {"credit.period": 2},
            "bridge_dr_grpo": bridge | {"grpo.advantage": "dr_grpo", "grpo.aggregation": "dr_grpo"},
            "bridge_dapo_filter": bridge | {"grpo.filter_zero_advantage": True},
            "bridge_minibatches": bridge | several,
            "vt_search_minibatches": vt | several,
            "bridge_llds": bridge | guard,
            "vt_search_llds": vt | guard,
            "bridge_anchor": bridge | {"credit.anchor": 1.0},
            "bridge_mask": bridge | {"credit.first_hop": "mask"},
            "bridge_next_action": bridge | {"credit.target": "next_action"},
        },
    }


@dataclasses.dataclass
class Row:
    """A row's finished runs, one a seed."""

    name: str
    changes: dict[str, object]
    outcomes: list[Outcome]

    @property
    def finals(self) -> list[dict]:
        return [outcome.final for outcome in self.outcomes]


def main() -> None:
    parser = runs.parser(__doc__, seeds=3)
    parser.add_argument("--rows", default="main", help="groups of rows, with commas: main, order, rollouts, options (default main)")
    parser.add_argument("--wall-clock", action=argparse.BooleanOptionalAction, default=True, help="the table at equal wall clock")
    parser.add_argument("--read", action="store_true", help="run nothing: the tables of the rows whose runs are finished")
    args = parser.parse_args()
    table = rows_of(configuration.load(runs.HOME / args.config).grpo.group_size)
    wanted = args.rows.split(",")
    if unknown := set(wanted) - set(table):
        parser.error(f"--rows={args.rows}: no group {', '.join(sorted(unknown))}; there are {', '.join(table)}")
    root, shared = runs.root_of(args, NAME), base(args)
    # bridge and vt_search first: the differences of all others are to them.
    chosen = {"bridge": {}, "vt_search": {}} | {name: changes for group in wanted for name, changes in table[group].items()}
    wanted_runs = [run for name in chosen for run in runs_of(name, chosen[name], args, shared)]
    failures = [] if args.read else runs.execute(wanted_runs, root, args.jobs)

    known = known_rows(args)
    rows = load(known, args, shared, root)
    result = {
        "machine": about(),
        "config": args.config,
        "seeds": args.seeds,
        "steps": rows["bridge"].outcomes[0].run.total if "bridge" in rows else 0,
        "groups": {group: [name for name in table[group] if name in rows] for group in table},
        "changes": {name: row.changes for name, row in rows.items()},
    }
    if "bridge" not in rows or "vt_search" not in rows:
        runs.conclude([*failures, "bridge or vt_search is missing: no table"])
    before = start(rows["bridge"].outcomes[0])  # one for all: every row and seed starts from the same models
    result["table"] = {"start": line([before] * args.seeds, rows, rows["bridge"].outcomes)}
    result["table"] |= {name: line(row.finals, rows, row.outcomes) for name, row in rows.items()}
    result["order"] = order(rows)
    if args.wall_clock and "main" in wanted and not args.read:
        more, failed = equal_wall_clock(rows, args, shared, root)
        failures += failed
        result["equal_wall_clock"] = more
    else:
        result["equal_wall_clock"] = _old(args).get("equal_wall_clock", {})
    result["curves"] = {name: curve(row) for name, row in load(known, args, shared, root).items()}  # read again: some went on
    path = runs.save(NAME, result, args)
    show(result)
    plot(result, path.parent)
    print(json.dumps({key: value for key, value in result.items() if key != "curves"}))
    runs.conclude(failures)


def known_rows(args: argparse.Namespace) -> dict[str, dict[str, object]]:
    """{row: what it changes}, of all groups."""
    table = rows_of(configuration.load(runs.HOME / args.config).grpo.group_size)
    return {name: changes for group in table.values() for name, changes in group.items()}


def base(args: argparse.Namespace) -> dict[str, object]:
    """20 steps: in 30, every row whose retriever learns online has found nearly every passage, and they could not be told apart."""
    every = {"train__eval_every": 5, "train__log_rollouts_every": 5, "train__checkpoint_every": 5}
    return runs.base(args, train__steps=20, data__eval_limit=60, train__keep=1, **every)


def runs_of(name: str, changes: Mapping[str, object], args: argparse.Namespace, shared: Mapping[str, object]) -> list[runs.Run]:
    return runs.seeded(name, args, {**shared, "method.name": name, **changes})


def load(known: Mapping[str, dict], args: argparse.Namespace, shared: Mapping[str, object], root: Path) -> dict[str, Row]:
    """The rows whose runs are all finished."""
    rows = {}
    for name, changes in known.items():
        wanted = runs_of(name, changes, args, shared)
        if all(runs.finished(run, root) for run in wanted):
            rows[name] = Row(name, changes, [Outcome(run, root) for run in wanted])
    return rows


def start(outcome: Outcome) -> dict:
    """The evaluation before the first step, on as many questions as the one at the end."""
    limit = outcome.run.limit
    pattern = f"step_000000_*_{runs.SPLIT}_{limit or 'all'}.json"
    if not list((outcome.workdir / "eval").glob(pattern)):
        flags = [f"--workdir={outcome.workdir}", "--checkpoint=start", f"--split={runs.SPLIT}", f"--limit={limit}"]
        subprocess.run([sys.executable, "-m", "bridge_jax.evaluate", *flags], cwd=runs.HOME, stdout=sys.stderr, check=True)
    [path] = (outcome.workdir / "eval").glob(pattern)
    return json.loads(path.read_text(encoding="utf-8"))


def line(finals: Sequence[dict], rows: Mapping[str, Row], outcomes: Sequence[Outcome]) -> dict:
    """A row of the table: EM by set and group, `low`/`high` of the multi-hop average, differences to bridge and vt_search.

    `finals`: one evaluation a seed; where it is on fewer questions than the others', the difference is over those.
    """
    ids = reading.question_ids(finals[0])
    ours, groups = reading.scores(finals), aggregate.groups(list(ids))
    of = {group: stats.estimate(ours, sets) for group, sets in groups.items()}
    recall = reading.scores(finals, "recall@3")
    result = {
        "multi_hop_em": of["multi_hop"]["mean"],
        "overall_em": of["overall"]["mean"],
        "low": of["multi_hop"]["low"],
        "high": of["multi_hop"]["high"],
        "em": of,
        "em_by_set": {name: float(values.mean()) for name, values in ours.items()},
        "em_by_seed": {group: stats.seed_means(ours, sets) for group, sets in groups.items()},
        "recall@3": {group: stats.mean(recall, sets) for group, sets in groups.items()},
        "questions": {name: len(found) for name, found in ids.items()},
    }
    for other in ("bridge", "vt_search"):
        theirs = reading.scores(rows[other].finals, only=ids)
        result[f"minus_{other}"] = {group: stats.difference(ours, theirs, sets) for group, sets in groups.items()}
    result["seconds"] = stats.spread([outcome.seconds(final["step"]) for outcome, final in zip(outcomes, finals, strict=True)])
    result["step_seconds"] = stats.spread([float(np.median(outcome.step_seconds)) for outcome in outcomes])
    result["loop_steps"] = [final["step"] for final in finals]
    last = outcomes[0].metrics[finals[0]["step"] - 1] if finals[0]["step"] else {}
    for name in ("count/policy_updates", "count/retriever_updates", "count/rollouts"):
        result[name.removeprefix("count/")] = last.get(name, 0)
    return result


def order(rows: Mapping[str, Row]) -> dict:
    """RAG-then-RL minus RL-then-RAG, by group of sets."""
    if not {"rag_then_rl", "rl_then_rag"} <= set(rows):
        return {}
    first, last = (reading.scores(rows[name].finals) for name in ("rag_then_rl", "rl_then_rag"))
    groups = aggregate.groups(list(first))
    return {"rag_then_rl_minus_rl_then_rag": {group: stats.difference(first, last, sets) for group, sets in groups.items()}}


def equal_wall_clock(
    rows: Mapping[str, Row], args: argparse.Namespace, shared: Mapping[str, object], root: Path
) -> tuple[dict, list[str]]:
    """{row: as `line`, at the seconds that bridge used}, and the failures of the runs that this took."""
    budgets = [outcome.seconds(outcome.run.total) for outcome in rows["bridge"].outcomes]
    longer: dict[str, list[runs.Run]] = {}
    names = [name for name in rows_of(1)["main"] | rows_of(1)["rollouts"] if name in rows and name != "bridge"]
    for name in names:
        row = rows[name]
        one_stage = len(METHODS[row.changes.get("method.name", name)].stages) == 1
        cheaper = all(o.seconds(o.run.total) < budget for o, budget in zip(row.outcomes, budgets, strict=True))
        if one_stage and cheaper:
            longer[name] = [_longer(outcome, budget) for outcome, budget in zip(row.outcomes, budgets, strict=True)]
    failures = runs.execute([run for found in longer.values() for run in found], root, args.jobs)
    result = {"bridge": line(rows["bridge"].finals, rows, rows["bridge"].outcomes)}
    for name in names:
        if name in longer:
            if all(runs.finished(run, root) for run in longer[name]):
                outcomes = [Outcome(run, root) for run in longer[name]]
                result[name] = line([outcome.final for outcome in outcomes], rows, outcomes)
        else:
            outcomes = rows[name].outcomes
            crossed = [outcome.at(crossing(outcome, budget)) for outcome, budget in zip(outcomes, budgets, strict=True)]
            result[name] = line(crossed, rows, outcomes)
    return result, failures


def _longer(outcome: Outcome, budget: float) -> runs.Run:
    """The run with as many steps as fit into `budget` seconds, the last one begun in time included."""
    steps = outcome.run.total + math.ceil((budget - outcome.seconds(outcome.run.total)) / float(np.median(outcome.step_seconds)))
    return dataclasses.replace(outcome.run, overrides={**outcome.run.overrides, "train.steps": steps})


def crossing(outcome: Outcome, budget: float) -> int:
    """The first evaluated step at or after `budget` seconds; the last one where the run ends before."""
    evaluated = outcome.on_the_way()
    return next((step for step in evaluated if outcome.seconds(step) >= budget), evaluated[-1])


def curve(row: Row) -> dict:
    """EM on the way, means over seeds: steps, seconds, EM by group of sets. Steps beyond the table's: `equal_wall_clock`."""
    steps = sorted(set.intersection(*(set(outcome.on_the_way()) for outcome in row.outcomes)))
    found = {"steps": steps, "seconds": [float(np.mean([o.seconds(step) for o in row.outcomes])) for step in steps]}
    for step in steps:
        table = reading.scores([outcome.at(step) for outcome in row.outcomes])
        for group, sets in aggregate.groups(list(table)).items():
            found.setdefault(group, []).append(stats.mean(table, sets))
    return found


def _old(args: argparse.Namespace) -> dict:
    path = runs.RESULTS / f"{NAME}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() and not args.quick else {}


# ------------------------------------------------------------------------------------------------------------- showing


def show(result: Mapping) -> None:
    console = Console(stderr=True, width=160)
    for title, table in (("equal GRPO steps", result["table"]), ("equal wall clock", result["equal_wall_clock"])):
        if table:
            console.print(paper_table(table, f"EM at {title}, {result['seeds']} seeds (95 %: multi-hop average)"))
    for group, found in result["order"].get("rag_then_rl_minus_rl_then_rag", {}).items():
        console.print(f"rag_then_rl - rl_then_rag, {group}: {points(found)}")


def paper_table(table: Mapping[str, dict], title: str) -> Table:
    """Single-hop columns, multi-hop columns, averages."""
    sets = list(next(iter(table.values()))["em_by_set"])
    groups = aggregate.groups(sets)
    columns = [*groups.get("single_hop", []), *groups.get("multi_hop", [])]
    shown = Table(title=title, box=None, padding=(0, 2, 0, 0), title_justify="left")
    shown.add_column("row")
    for name in (*columns, "multi-hop avg", "95 %", "average", "- bridge (multi-hop)", "s/step"):
        shown.add_column(name, justify="right")
    for name, row in sorted(table.items(), key=lambda item: item[1]["multi_hop_em"]):
        cells = [f"{100 * row['em_by_set'][column]:.1f}" for column in columns]
        cells += [f"{100 * row['multi_hop_em']:.1f}", f"{100 * row['low']:.1f}-{100 * row['high']:.1f}"]
        cells += [f"{100 * row['overall_em']:.1f}", points(row["minus_bridge"]["multi_hop"]), f"{row['step_seconds']['mean']:.1f}"]
        shown.add_row(name, *cells)
    return shown


def points(found: Mapping[str, float]) -> str:
    """A difference of EM in points: `+1.2 (-0.3 to +2.9)`."""
    return f"{100 * found['mean']:+.1f} ({100 * found['low']:+.1f} to {100 * found['high']:+.1f})"


def plot(result: Mapping, folder: Path) -> None:
    main_rows = [name for name in result["groups"]["main"] if name in result["curves"]]
    for x, label in (("seconds", "seconds of training"), ("steps", "loop steps")):
        lines = {
            group: {name: (result["curves"][name][x], result["curves"][name][group]) for name in main_rows}
            for group in ("multi_hop", "single_hop")
        }
        plots.lines(folder / f"{NAME}_{x}.png", lines, label, "exact match")
    for group in ("main", "rollouts", "options"):
        names = [name for name in result["groups"][group] if name in result["table"]]
        bars = {name: result["table"][name]["em"]["multi_hop"] for name in names}
        if len(bars) > 2:
            plots.bars(folder / f"{NAME}_{group}.png", bars, "multi-hop exact match (95 %)")


if __name__ == "__main__":
    main()
