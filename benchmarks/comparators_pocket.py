"""One step of every comparator with real weights: SmolLM2-135M and MiniLM (configs/pocket.py), at sizes of a few minutes a method.

    python benchmarks/comparators_pocket.py --warmstart=runs/pocket/warmstart     # `make pocket` or README's warm start made it
    python benchmarks/comparators_pocket.py --only=replug,search_r1 ...           # some of them; the others' results are kept

What runs is what `python -m bridge_jax.train` runs; the sizes are too small for anything to be learnt. Questions are those of the
embedded HotpotQA set that are answered by yes, no or something they name: of these such a policy gets some right, without which
most of the methods have nothing to do. Each method is a process of its own and is saved when it is done, with its machine and
settings; one that is stopped begins anew. The first step compiles everything (within the phases). Writes
results/comparators_pocket.json and prints the table of docs/comparators.md.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import training_runs as runs
from arguments import some_of

from bridge_jax.data.qa import load_questions
from bridge_jax.errors import UserError, main_guard
from bridge_jax.files import write_text
from bridge_jax.training.metrics import read_metrics

NAME = "comparators_pocket"
SMALL = {
    "index.limit": 600, "train.steps": 1, "train.questions": 2, "train.log_rollouts_every": 1, "data.eval_limit": 2,
    "rollout.batch_groups": 2, "grpo.minibatch_questions": 2, "grpo.group_size": 4, "grpo.microbatch": 4,
    "credit.max_turns": 8, "credit.minibatch": 8, "credit.turns_per_batch": 2,
}  # fmt: skip
METHODS: dict[str, dict[str, object]] = {
    "agentic_r": {
        "agentic.rounds": 1, "agentic.questions": 5, "agentic.candidates": 5, "agentic.max_searches": 2, "agentic.negatives": 4,
        "agentic.batch": 4, "agentic.microbatch": 2, "agentic.epochs": 1, "agentic.min_local": 0,
    },
    "search_r1": {"grpo.group_size": 5, "grpo.minibatch_questions": 1, "grpo.microbatch": 1},
    "search_r1_ppo": {
        "method.name": "search_r1", "policy.algorithm": "ppo", "grpo.group_size": 1, "train.questions": 8,
        "grpo.minibatch_questions": 4, "grpo.microbatch": 1,
    },
    "r1_searcher": {"train.steps": 2},
    "simple_deep_searcher": {
        "policy.trainable": "full", "train.questions": 6, "grpo.minibatch_questions": 6, "selection.per_question": 2,
        "warmstart.batch": 4, "warmstart.microbatch": 1,
    },
    "replug": {},
    "replug_pdist": {},
}  # fmt: skip
# Of a step's row; what begins with one of these is kept.
KEPT = ("time/", "agentic/", "selection/", "sft/", "reward/", "count/", "retriever/", "ppo/", "policy/", "rollout/searches")
PHASES = {
    "rollouts": ("time/rollout",),
    "scoring": ("time/score",),
    "retriever": ("time/retriever",),
    "policy": ("time/policy",),
    "episodes and judge": ("time/agentic/trajectories", "time/agentic/local", "time/agentic/global"),
    "encoder and index": ("time/agentic/encoder_training", "time/agentic/index"),
}


@main_guard
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--warmstart", type=Path, default=runs.HOME / "runs" / "pocket" / "warmstart", help="the policy to begin with"
    )
    parser.add_argument("--only", type=some_of(METHODS), default=",".join(METHODS), help="methods, with commas (default: all)")
    parser.add_argument("--root", type=Path, help="where the runs lie (default runs/comparators_pocket)")
    args = parser.parse_args()
    root = (args.root or runs.HOME / "runs" / NAME).absolute()
    shared = pocket(root, args.warmstart)
    path = runs.RESULTS / f"{NAME}.json"
    result = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"methods": {}}
    for name in args.only.split(","):
        overrides = shared | {"method.name": name} | METHODS[name]
        result["methods"][name] = runs.measured(root / name, overrides, functools.partial(measure, root, name, overrides))
        methods = {each: result["methods"][each] for each in METHODS if each in result["methods"]}
        # A file's own machine and settings are of older measurements, which lack theirs.
        result = {} if all("machine" in found for found in methods.values()) else result
        result |= {"methods": methods}
        write_text(path, json.dumps(result, indent=1) + "\n")
    print(table(result["methods"]))


def pocket(root: Path, warmstart: Path) -> dict[str, object]:
    """Overrides of configs/pocket.py for a small run from `warmstart`; writes the questions.

    Raises:
      UserError: there is no warm-started policy.
    """
    if not (warmstart / "config.json").exists():
        raise UserError(
            f"--warmstart={warmstart}: no policy there; python -m bridge_jax.warmstart --config=configs/pocket.py makes one"
        )
    root.mkdir(parents=True, exist_ok=True)
    questions = root / "questions.jsonl"
    if not questions.exists():
        rows = [
            {"id": q.id, "question": q.question, "golden_answers": list(q.golds)}
            for q in load_questions("embedded/hotpotqa", "train")
            if q.golds[0].lower() in ("yes", "no") or q.golds[0] in q.question
        ]
        write_text(questions, "".join(json.dumps(row) + "\n" for row in rows))
    return SMALL | {"policy.warmstart": str(warmstart.absolute()), "data.train": str(questions)}


def command(workdir: Path, overrides: dict[str, object]) -> list[str]:
    words = [f"--config.{field}={value}" for field, value in overrides.items()]
    return [sys.executable, "-m", "bridge_jax.train", "--config=configs/pocket.py", f"--workdir={workdir}", *words]


def measure(root: Path, name: str, overrides: dict[str, object]) -> dict:
    """A run of a method: seconds, peak memory, the metrics of each step."""
    workdir, log = root / name, root / f"{name}.log"
    began = time.monotonic()
    with log.open("a") as out:
        process = subprocess.Popen(command(workdir, overrides), cwd=runs.HOME, env=runs.environment(root), stdout=out, stderr=out)
    _, status, used = os.wait4(process.pid, 0)
    if status:
        return {"failed": runs.last_line(log)}
    steps = [
        {key: value for key, value in row.items() if key.startswith(KEPT) and isinstance(value, int | float)}
        for row in read_metrics(workdir / "metrics.jsonl")
    ]
    return {"seconds": time.monotonic() - began, "peak_bytes": used.ru_maxrss * 1024, "changes": METHODS[name], "steps": steps}


def table(methods: dict[str, dict]) -> str:
    """Seconds by phase over the steps of each method, as Markdown."""
    lines = [f"| | {' | '.join(PHASES)} | whole run | peak memory | |", "|---" * (len(PHASES) + 4) + "|"]
    for name, found in methods.items():
        if "failed" in found:
            lines.append(f"| `{name}` | failed: {found['failed']} |")
            continue
        seconds = [sum(step.get(key, 0.0) for step in found["steps"] for key in keys) for keys in PHASES.values()]
        shown = " | ".join(f"{each:.0f}" if each >= 0.5 else "-" for each in seconds)
        lines.append(
            f"| `{name}` | {shown} | {found['seconds']:.0f} | {found['peak_bytes'] / 2**30:.1f} GiB | {facts(found['steps'])} |"
        )
    return "\n".join(lines)


def facts(steps: list[dict]) -> str:
    """What shows that the step did its work."""
    first, last = steps[0], steps[-1]
    if "agentic/pairs/rows" in first:
        searches, completions, right, kept, calls = (
            first[f"agentic/{name}"]
            for name in ("candidates/rows", "global/completions", "global/right", "pairs/rows", "local/judge_calls")
        )
        before, after = (first[f"agentic/encoder_training/{name}"] for name in ("loss_first", "loss_last_epoch"))
        return (
            f"{searches} searches, {completions} completions ({right} right), {kept} teach; "
            f"InfoNCE {before:.2f}, then {after:.2f}; judge calls {calls}"
        )
    if "selection/kept" in first:
        loss = last["sft/heldout_before"], last["sft/heldout_after"]
        return (
            f"{first['selection/kept']} of {last['count/rollouts']} rollouts kept; held-out loss {loss[0]:.2f}, then {loss[1]:.2f}"
        )
    if "retriever/distil_kl" in first:
        return f"KL {first['retriever/distil_kl']:.2f}, reward {first['reward/mean']:.2f}"
    rewards = ", ".join(f"{step['reward/mean']:.2f}" for step in steps)
    gradients = ", ".join(f"{step['policy/grad_norm']:.3f}" for step in steps)
    return f"reward {rewards}; gradient of the policy {gradients}"


if __name__ == "__main__":
    main()
