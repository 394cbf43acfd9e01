"""What a method costs: a bridge step over a vt_search step, one retriever state against two, and a step of every other row.

    python benchmarks/method_cost.py            # configs/mini.py, whole steps of bridge, vt_search, two_state and others in turn
    python benchmarks/method_cost.py --quick

Each measurement is a process that trains a few steps of one method from the start, on all cores this script may use; the methods
take turns, so that a slow minute of the machine falls on all of them. The first steps are left out, and later ones in which a
program was compiled. Time:
medians over steps of the whole step, and of the phases of an update (scoring, retriever, policy). Memory, twice: *compiled* is
what XLA plans for the largest program of an update (arguments, results and temporaries, aliased buffers once) plus the arrays
that lie beside it; *measured* is the growth of the process's peak resident memory from before the first step, compiling included
(an accelerator's own peak where it reports one). Keys: bridge_over_vt_search, one_state_memory_saving, one_state_time_saving (1 -
one / two); step_seconds, of the other rows as well (one process each), which `ablation.py` reads for its table at equal wall clock.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import training_runs as runs
from arguments import at_least
from machine import about
from rows import rows_of

from bridge_jax import config as configuration
from bridge_jax.errors import main_guard

NAME = "method_cost"
METHODS = ("bridge", "vt_search", "two_state")
# Measured once, for their seconds a step. The first steps of rag_then_rl train the retriever alone.
OTHERS = ("retriever_stage", "drop", "search_r1", "search_r1_ppo", "vt_search_2g", "bridge_2g", "vt_search_4g")
SKIPPED = 2  # steps
COMPILED = ("compilations/update", "compilations/score", "rollout/compilations")  # the last one counts a step's, the others all
# The update of a step in which the retriever learns: what METHOD 6 calls "per retriever update".
UPDATE = ("time/score", "time/retriever", "time/correction", "time/policy")


@main_guard
def main() -> None:
    parser = runs.parser(__doc__, seeds=1)
    parser.add_argument("--rounds", type=at_least(1), default=3, help="processes a method (default 3)")
    parser.add_argument("--worker", help="internal: measure this method in this process")
    args = parser.parse_args()
    steps = args.steps or (3 if args.quick else 6)
    args.steps = steps
    overrides = runs.base(args) | {"train.steps": steps}
    if args.worker:
        print(json.dumps(worker(args.config, {**overrides, **changes(args.worker, args.config)}, steps)))
        return
    root = runs.root_of(args, NAME)
    environment = runs.environment(root)
    found: dict[str, list[dict]] = {name: [] for name in (*METHODS, *OTHERS)}
    for number in range(1 if args.quick else args.rounds):
        for name in found if number == 0 and not args.quick else METHODS:
            command = [sys.executable, __file__, f"--worker={name}", f"--config={args.config}", f"--steps={steps}"]
            command += ["--quick"] if args.quick else []
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
            if done.returncode:
                raise SystemExit(f"measuring {name} ended with {done.returncode}, see above")
            found[name].append(json.loads(done.stdout.splitlines()[-1]))
            runs.say(f"round {number + 1}, {name}: {statistics.median(found[name][-1]['time/step']):.2f} s a step")
    measured = {name: processes for name, processes in found.items() if processes}
    result = compared(measured) | {"machine": about(), "config": args.config, "steps": steps, "processes": measured}
    runs.save(NAME, result, args)
    print(json.dumps({key: value for key, value in result.items() if key != "processes"}))


def changes(row: str, config: str) -> dict[str, object]:
    """What the row sets on top of the config file."""
    if row == "retriever_stage":
        return {"method.name": "rag_then_rl"}
    groups = rows_of(configuration.load(runs.HOME / config).grpo.group_size)
    known = groups["main"] | groups["rollouts"]
    return {"method.name": row, **known[row]}


def compared(found: dict[str, Sequence[dict]]) -> dict:
    """The ratios, from the processes of each method."""

    def seconds(name: str, phases: Sequence[str]) -> float:
        of_runs = [[run[phase] for phase in phases if phase in run] for run in found[name]]
        return statistics.median(sum(step) for run in of_runs for step in zip(*run, strict=True))

    def memory(name: str, kind: str) -> float:
        return statistics.median(run[kind] for run in found[name])

    update = {name: seconds(name, UPDATE) for name in METHODS}
    steps = {name: seconds(name, ("time/step",)) for name in found}
    rounds = [
        statistics.median(bridge["time/step"]) / statistics.median(vt["time/step"])
        for bridge, vt in zip(found["bridge"], found["vt_search"], strict=True)
    ]
    return {
        "bridge_over_vt_search": statistics.median(rounds),  # of processes that ran one after the other
        "bridge_over_vt_search_by_round": rounds,
        "one_state_memory_saving": 1 - memory("bridge", "compiled_bytes") / memory("two_state", "compiled_bytes"),
        "one_state_measured_memory_saving": 1 - memory("bridge", "measured_bytes") / memory("two_state", "measured_bytes"),
        "one_state_time_saving": 1 - update["bridge"] / update["two_state"],
        "step_seconds": steps,
        "update_seconds": update,
        "phase_seconds": {
            name: {phase: seconds(name, (phase,)) for phase in found[name][0] if phase.startswith("time/")} for name in METHODS
        },
        "compiled_bytes": {name: memory(name, "compiled_bytes") for name in METHODS},
        "measured_bytes": {name: memory(name, "measured_bytes") for name in METHODS},
        "programs": {name: found[name][0]["programs"] for name in METHODS},
    }


# -------------------------------------------------------------------------------------------------------- one measurement


def worker(config_file: str, overrides: dict[str, object], steps: int) -> dict:
    """{"time/..": [seconds of each measured step], "compiled_bytes", "measured_bytes", "programs": {name: bytes}}"""
    import jax

    from bridge_jax.data.stream import QuestionStream
    from bridge_jax.objectives import scoring, two_state
    from bridge_jax.training.assets import load_assets
    from bridge_jax.training.loop import Loop, training_mixture
    from bridge_jax.training.metrics import RunLog
    from bridge_jax.training.state import Learner

    config = configuration.load(runs.HOME / config_file, [f"{name}={runs.text_of(value)}" for name, value in overrides.items()])
    planned = Planned()
    scoring._score = planned.watch("score", scoring._score)
    two_state._accumulate = planned.watch("correction", two_state._accumulate)
    with tempfile.TemporaryDirectory() as folder:
        assets = load_assets(config, Path(folder))
        learner = Learner(config, assets)
        learner._retriever = planned.watch("retriever", learner._retriever)
        learner._policy = planned.watch("policy", learner._policy)
        stream = QuestionStream(training_mixture(config), config.train.questions, config.train.seed)
        loop = Loop(config, assets, learner, stream, RunLog(Path(folder), 0))
        state, before, rows = learner.init(), peak_bytes(), []
        jax.block_until_ready(state)
        for step in range(1, steps + 1):
            state, metrics = loop.step(step, state)
            jax.block_until_ready(state)
            rows.append(metrics)
        measured = peak_bytes() - before
    kept = usual(rows)
    times = {name: [row[name] for row in kept] for name in rows[-1] if name.startswith("time/")}
    return times | {"compiled_bytes": planned.largest(), "measured_bytes": measured, "programs": planned.bytes}


def usual(rows: Sequence[dict]) -> list[dict]:
    """The steps that show what a step takes: not the first ones, and none in which something was compiled (if others are left)."""

    def compiled(row: dict, before: dict) -> bool:
        total = any(row.get(name, 0) != before.get(name, 0) for name in COMPILED[:-1])
        return total or row.get(COMPILED[-1], 0) > 0

    later = [row for before, row in zip(rows[SKIPPED - 1 :], rows[SKIPPED:]) if not compiled(row, before)]
    return later or list(rows[SKIPPED:])


class Planned:
    """Compiled functions that note, at their first call, what their memory will be."""

    def __init__(self):
        self.bytes: dict[str, int] = {}
        self._seen: set[tuple] = set()

    def watch(self, name: str, compiled):
        import jax

        def call(*args, **keywords):
            # Every new shape is a program: keep the largest.
            shapes = (name, str(jax.tree.map(lambda x: getattr(x, "shape", None), (args[1:], keywords))))
            if shapes not in self._seen:
                self._seen.add(shapes)
                plan = compiled.lower(*args, **keywords).compile().memory_analysis()
                own = plan.argument_size_in_bytes + plan.output_size_in_bytes + plan.temp_size_in_bytes - plan.alias_size_in_bytes
                # What lives beside the program: all arrays but its own arguments.
                beside = sum(x.nbytes for x in jax.live_arrays()) - plan.argument_size_in_bytes
                self.bytes[name] = max(self.bytes.get(name, 0), own + max(beside, 0))
            return compiled(*args, **keywords)

        call._cache_size = compiled._cache_size
        return call

    def largest(self) -> int:
        return max(self.bytes.values())


def peak_bytes() -> int:
    import jax

    stats = jax.devices()[0].memory_stats() or {}
    unit = 1 if sys.platform == "darwin" else 1024
    return stats.get("peak_bytes_in_use") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


if __name__ == "__main__":
    sys.exit(main())
