"""Every method and every option on one world: at equal GRPO steps, at equal wall clock, in the shape of the paper's table.

    python benchmarks/ablation.py                       # the methods (rows "main"), 3 seeds
    python benchmarks/ablation.py --rows=main,order,rollouts,options --jobs=2
    python benchmarks/ablation.py --rows=order --seeds=5    # more seeds of some rows; the others keep theirs
    python benchmarks/ablation.py --quick               # 2 steps, a few questions: does it run?

All rows start from the same models and see the same training questions, step by step; what a row changes is written in `rows.py`.
Nothing is tuned for a row: the config file's settings were picked with `bridge` on the validation splits, and all rows take them
over. Every run is evaluated at its end on all test questions.

Equal wall clock: the budget is what the steps of `bridge` take (evaluations and compilation left out), by the seconds a step that
`method_cost.py` measured on an idle machine, run it first. A row that costs less than `bridge` goes on until it has used them,
and is evaluated there; a row that costs more, and one in stages, is read at the first evaluation on its way after those seconds,
on that evaluation's questions.

A row has as many seeds as are finished, and a difference is over the seeds that both rows have. Row `start` is the initial models
with the config's number of searches (search_r1 may search more often). Writes results/ablation.json and plots. Finished runs are
not run again, so groups of rows can be added one after the other.
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
from arguments import some_of
from machine import about
from outcomes import Outcome
from rich.console import Console
from rich.table import Table
from rows import BASELINES, rows_of
from step_costs import StepCosts

from bridge_jax import config as configuration
from bridge_jax.errors import main_guard
from bridge_jax.evaluation import aggregate

NAME = "ablation"
USUAL_SEEDS, MOST_SEEDS = 3, 10


@dataclasses.dataclass
class Row:
    """A row's finished runs, one a seed."""

    name: str
    changes: dict[str, object]
    outcomes: list[Outcome]

    @property
    def finals(self) -> list[dict]:
        return [outcome.final for outcome in self.outcomes]


@main_guard
def main() -> None:
    parser = runs.parser(__doc__, seeds=USUAL_SEEDS)
    parser.add_argument(
        "--rows",
        type=some_of(rows_of(1)),
        default="main",
        help="groups of rows: main,comparators,order,rollouts,options (default main)",
    )
    parser.add_argument("--read", action="store_true", help="run nothing: the tables of the rows whose runs are finished")
    args = parser.parse_args()
    table = rows_of(configuration.load(runs.HOME / args.config).grpo.group_size)
    wanted = args.rows.split(",")
    root, shared = runs.root_of(args, NAME), base(args)
    # bridge and vt_search first: the differences of all others are to them.
    chosen = {"bridge": {}, "vt_search": {}} | {name: changes for group in wanted for name, changes in table[group].items()}
    wanted_runs = [run for name in chosen for run in runs_of(name, chosen[name], args, shared)]
    failures = [] if args.read else runs.execute(wanted_runs, root, args.jobs)

    known, costs = known_rows(args), StepCosts.read(args.config)
    rows = load(known, args, shared, root)
    if "bridge" not in rows or "vt_search" not in rows:
        runs.conclude([*failures, "bridge or vt_search is missing: no table"])
    result = {
        "machine": about(),
        "config": args.config,
        "seeds": {name: len(row.outcomes) for name, row in rows.items()},
        "steps": rows["bridge"].outcomes[0].run.total,
        "groups": {group: [name for name in table[group] if name in rows] for group in table},
        "changes": {name: row.changes for name, row in rows.items()},
    }
    before = start(rows["bridge"].outcomes[0])  # one for all: every row and seed starts from the same models
    result["table"] = {"start": line("start", [before] * len(rows["bridge"].outcomes), rows)}
    result["table"] |= {name: line(name, row.finals, rows, costs) for name, row in rows.items()}
    result["order"] = order(rows)
    result["equal_wall_clock"], failed = equal_wall_clock(rows, args, root, costs)
    result["curves"] = {name: curve(row, costs) for name, row in rows.items()}
    path = runs.save(NAME, result, args)
    show(result)
    plot(result, path.parent)
    print(json.dumps({key: value for key, value in result.items() if key != "curves"}))
    runs.conclude([*failures, *failed])


def known_rows(args: argparse.Namespace) -> dict[str, dict[str, object]]:
    """{row: what it changes}, of all groups."""
    table = rows_of(configuration.load(runs.HOME / args.config).grpo.group_size)
    return {name: changes for group in table.values() for name, changes in group.items()}


def base(args: argparse.Namespace) -> dict[str, object]:
    """20 steps: in 30, every row whose retriever learns online has found nearly every passage, and they could not be told apart."""
    every = {"train__eval_every": 5, "train__log_rollouts_every": 5, "train__checkpoint_every": 5}
    return runs.base(args, train__steps=20, data__eval_limit=60, train__keep=1, **every)


def runs_of(name: str, changes: Mapping, args: argparse.Namespace, shared: Mapping, seeds: int = 0) -> list[runs.Run]:
    """The runs of a row; seeds: as in `runs.seeded`."""
    return runs.seeded(name, args, {**shared, "method.name": name, **changes}, seeds)


def load(known: Mapping[str, dict], args: argparse.Namespace, shared: Mapping[str, object], root: Path) -> dict[str, Row]:
    """The rows of which at least `args.seeds` runs, or the usual number, are finished, with all that are."""
    least, rows = min(args.seeds, USUAL_SEEDS), {}
    for name, changes in known.items():
        done = runs.finished_seeds(runs_of(name, changes, args, shared, max(args.seeds, MOST_SEEDS)), root)
        if len(done) >= least:
            rows[name] = Row(name, changes, [Outcome(run, root) for run in done])
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


def line(name: str, finals: Sequence[dict], rows: Mapping[str, Row], costs: StepCosts | None = None) -> dict:
    """A row of the table: EM by set and group, `low`/`high` of the multi-hop average, differences to other rows.

    Args:
      finals: one evaluation a seed, the first seeds of the row; a difference is over the questions that both have.
      costs: None leaves the seconds out.
    """
    ids = reading.question_ids(finals[0])
    ours, groups = reading.scores(finals), aggregate.groups(list(ids))
    of = {group: stats.estimate(ours, sets) for group, sets in groups.items()}
    recall = reading.scores(finals, "recall@3")
    result = {
        "seeds": len(finals),
        "multi_hop_em": of["multi_hop"]["mean"],
        "overall_em": of["overall"]["mean"],
        "low": of["multi_hop"]["low"],
        "high": of["multi_hop"]["high"],
        "em": of,
        "em_by_set": {name: float(values.mean()) for name, values in ours.items()},
        "em_by_seed": {group: stats.seed_means(ours, sets) for group, sets in groups.items()},
        "recall@3": {group: stats.mean(recall, sets) for group, sets in groups.items()},
        "recall@3_by_seed": {group: stats.seed_means(recall, sets) for group, sets in groups.items()},
        "questions": {name: len(found) for name, found in ids.items()},
    }
    for other in dict.fromkeys(("bridge", "vt_search", BASELINES.get(name, "bridge"))):
        if other in rows:
            theirs = reading.question_ids(rows[other].finals[0])
            both = {name: [i for i in found if i in set(theirs[name])] for name, found in ids.items()}
            pair = reading.scores(finals, only=both), reading.scores(rows[other].finals, only=both)
            result[f"minus_{other}"] = {group: stats.difference(*pair, sets) for group, sets in groups.items()}
    result["loop_steps"] = [final["step"] for final in finals]
    if name in rows:
        outcomes = rows[name].outcomes
        last = outcomes[0].metrics[finals[0]["step"] - 1] if 0 < finals[0]["step"] <= len(outcomes[0].metrics) else {}
        for count in ("count/policy_updates", "count/retriever_updates", "count/rollouts"):
            result[count.removeprefix("count/")] = last.get(count, 0)
        result["drift_by_seed"] = [outcome.metrics[-1].get("retriever/drift") for outcome in outcomes]
        if costs is not None and (a_step := costs.of(name)):
            result["step_seconds"] = a_step
            result["seconds"] = float(np.mean([costs.until(name, outcomes[0].run, final["step"]) for final in finals]))
    return result


def order(rows: Mapping[str, Row]) -> dict:
    """RAG-then-RL minus RL-then-RAG, by group of sets."""
    if not {"rag_then_rl", "rl_then_rag"} <= set(rows):
        return {}
    first, last = (reading.scores(rows[name].finals) for name in ("rag_then_rl", "rl_then_rag"))
    groups = aggregate.groups(list(first))
    return {"rag_then_rl_minus_rl_then_rag": {group: stats.difference(first, last, sets) for group, sets in groups.items()}}


def equal_wall_clock(rows: Mapping[str, Row], args: argparse.Namespace, root: Path, costs: StepCosts) -> tuple[dict, list[str]]:
    """{row: as `line`, at the seconds that bridge used}, and the failures of the runs that this took."""
    bridge = rows["bridge"].outcomes[0].run
    budget = costs.until("bridge", bridge, bridge.total)
    if budget is None:
        return {}, [] if args.quick else ["no table at equal wall clock: run benchmarks/method_cost.py first, on an idle machine"]
    groups = rows_of(1)
    names = [name for name in groups["main"] | groups["rollouts"] if name in rows and name != "bridge" and costs.of(name)]
    longer = {name: longer_runs(rows[name], budget, costs) for name in names if cheaper(rows[name], budget, costs)}
    wanted = [run for found in longer.values() for run in found]
    failures = [] if args.read else runs.execute(wanted, root, args.jobs)
    result = {"bridge": line("bridge", rows["bridge"].finals, rows, costs)}
    for name in names:
        if name not in longer:
            finals = [crossing(name, outcome, budget, costs) for outcome in rows[name].outcomes]
            result[name] = line(name, finals, rows, costs)
        elif all(runs.finished(run, root) for run in longer[name]):
            outcomes = [Outcome(run, root) for run in longer[name]]
            also = {**rows, name: dataclasses.replace(rows[name], outcomes=outcomes)}
            result[name] = line(name, [outcome.final for outcome in outcomes], also, costs)
    return result, failures


def cheaper(row: Row, budget: float, costs: StepCosts) -> bool:
    """Whether the row may go on: it has one stage and seconds left."""
    run = row.outcomes[0].run
    return len(costs.of(row.name)) == 1 and costs.until(row.name, run, run.total) < budget


def longer_runs(row: Row, budget: float, costs: StepCosts) -> list[runs.Run]:
    """The row's runs with as many steps as fit into `budget` seconds, the last one begun in time included."""
    steps = math.ceil(budget / costs.of(row.name)[0] - 1e-9)
    return [dataclasses.replace(o.run, overrides={**o.run.overrides, "train.steps": steps}) for o in row.outcomes]


def crossing(name: str, outcome: Outcome, budget: float, costs: StepCosts) -> dict:
    """The first evaluation at or after `budget` seconds; the one at the end where that is the run's last step."""
    evaluated = outcome.on_the_way()
    step = next((step for step in evaluated if costs.until(name, outcome.run, step) >= budget), evaluated[-1])
    return outcome.final if step == outcome.run.total else outcome.at(step)


def curve(row: Row, costs: StepCosts) -> dict:
    """EM on the way, means over seeds: steps, seconds (where they were measured), EM by group of sets, questions a set."""
    steps = sorted(set.intersection(*(set(outcome.on_the_way()) for outcome in row.outcomes)))
    found = {"steps": steps}
    if costs.of(row.name):
        found["seconds"] = [costs.until(row.name, row.outcomes[0].run, step) for step in steps]
    for step in steps:
        table = reading.scores([outcome.at(step) for outcome in row.outcomes])
        found["questions"] = {name: values.shape[1] for name, values in table.items()}
        for group, sets in aggregate.groups(list(table)).items():
            found.setdefault(group, []).append(stats.mean(table, sets))
    return found


# ------------------------------------------------------------------------------------------------------------- showing


def show(result: Mapping) -> None:
    console = Console(stderr=True, width=160)
    for title, table in (("equal GRPO steps", result["table"]), ("equal wall clock", result["equal_wall_clock"])):
        if table:
            console.print(paper_table(table, f"EM at {title} (95 %: multi-hop average)"))
    for group, found in result["order"].get("rag_then_rl_minus_rl_then_rag", {}).items():
        console.print(f"rag_then_rl - rl_then_rag, {group}: {points(found)}")


def paper_table(table: Mapping[str, dict], title: str) -> Table:
    """Single-hop columns, multi-hop columns, averages."""
    sets = list(next(iter(table.values()))["em_by_set"])
    groups = aggregate.groups(sets)
    columns = [*groups.get("single_hop", []), *groups.get("multi_hop", [])]
    shown = Table(title=title, box=None, padding=(0, 2, 0, 0), title_justify="left")
    shown.add_column("row")
    for name in ("seeds", *columns, "multi-hop avg", "95 %", "average", "- bridge (multi-hop)", "s/step"):
        shown.add_column(name, justify="right")
    for name, row in sorted(table.items(), key=lambda item: item[1]["multi_hop_em"]):
        cells = [str(row["seeds"]), *(f"{100 * row['em_by_set'][column]:.1f}" for column in columns)]
        cells += [f"{100 * row['multi_hop_em']:.1f}", f"{100 * row['low']:.1f}-{100 * row['high']:.1f}"]
        cells += [f"{100 * row['overall_em']:.1f}", points(row["minus_bridge"]["multi_hop"])]
        cells.append(" + ".join(f"{cost:.1f}" for cost in row.get("step_seconds", ())) or "-")
        shown.add_row(name, *cells)
    return shown


def points(found: Mapping[str, float]) -> str:
    """A difference of EM in points: `+1.2 (-0.3 to +2.9)`."""
    return f"{100 * found['mean']:+.1f} ({100 * found['low']:+.1f} to {100 * found['high']:+.1f})"


def plot(result: Mapping, folder: Path) -> None:
    main_rows = [name for name in result["groups"]["main"] if name in result["curves"]]
    for x, label in (("seconds", "seconds of training"), ("steps", "loop steps")):
        curves = {name: result["curves"][name] for name in main_rows if x in result["curves"][name]}
        if not curves:
            continue
        groups = ("multi_hop", "single_hop")
        lines = {group.replace("_", "-"): {name: (row[x], row[group]) for name, row in curves.items()} for group in groups}
        counts = sorted({count for row in curves.values() for count in row["questions"].values()})
        asked = f"exact match, {' or '.join(map(str, counts))} questions a set and seed"
        plots.lines(folder / f"{NAME}_{x}.png", lines, label, asked)
    for group in ("main", "rollouts", "options"):
        names = [name for name in result["groups"][group] if name in result["table"]]
        bars = {name: result["table"][name]["em"]["multi_hop"] for name in names}
        if len(bars) > 2:
            plots.bars(folder / f"{NAME}_{group}.png", bars, "multi-hop exact match (95 %)")


if __name__ == "__main__":
    sys.exit(main())
