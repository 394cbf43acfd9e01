"""Evaluate a run: `python -m bridge_jax.evaluate --workdir=runs/pocket [--datasets=hotpotqa,musique] [--limit=100]`.

Greedy decoding with the checkpoint's policy and retriever; prints a table and writes `<workdir>/eval/<name>.json` with
every prediction.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ml_collections import ConfigDict
from rich.console import Console

from bridge_jax import config as configuration
from bridge_jax import distributed
from bridge_jax.errors import UserError, main_guard
from bridge_jax.evaluation import cli
from bridge_jax.evaluation.run import evaluate_sets, load_sets
from bridge_jax.evaluation.table import results_table


@main_guard
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bridge_jax.evaluate",
        description="Answer the evaluation questions greedily and score them: em, f1, sub_em, recall by passage id, searches.",
        epilog="Examples:\n"
        "  python -m bridge_jax.evaluate --workdir=runs/pocket\n"
        "  python -m bridge_jax.evaluate --config=configs/pocket.py --workdir=runs/pocket --datasets=hotpotqa,musique --limit=50\n"
        "  python -m bridge_jax.evaluate --workdir=runs/pocket --checkpoint=start      (before RL: the warm-started policy)",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    cli.add_flags(parser)
    distributed.add_flags(parser)
    parser.add_argument("--datasets", default="", metavar="A,B", help="sets, files or embedded/<set> (default: config.data.eval)")
    parser.add_argument("--limit", type=int, metavar="N", help="questions a source; 0 = all (default: config.data.eval_limit)")
    parser.add_argument("--split", help="split of each source (default: config.data.eval_split)")
    args, config = cli.parse(parser, argv)
    if args.limit is not None and args.limit < 0:
        raise UserError(f"--limit={args.limit}: must be at least 0")
    split = config.data.eval_split if args.split is None else args.split
    limit = config.data.eval_limit if args.limit is None else args.limit
    sets = load_sets(config, tuple(name.strip() for name in args.datasets.split(",") if name.strip()), split, limit)
    with distributed.processes(args.distributed, args.heartbeat):
        evaluate(args, config, sets, split, limit)
    return 0


def evaluate(args: argparse.Namespace, config: ConfigDict, sets: Mapping, split: str, limit: int) -> None:
    """Every process answers its share of the questions; the main one writes and prints."""
    from bridge_jax.training.session import open_session  # late: bad flags and missing questions are told before models are loaded

    session = distributed.together(lambda: open_session(config, args.workdir, args.checkpoint))
    result = evaluate_sets(
        session.assets, session.policy_variables, sets, retriever_lora=session.retriever_lora, seed=config.train.seed
    )
    if not distributed.is_main():
        return
    settings = {
        "step": session.step,
        "checkpoint": args.checkpoint,
        "split": split,
        "limit": limit,
        "config": {name: list(v) if isinstance(v, tuple) else v for name, v in configuration.flatten(config).items()},
    }
    path = write(args.workdir, session.step, split, limit, {**settings, **result})
    console = Console()
    console.print(results_table(result, title=f"{args.checkpoint} checkpoint, step {session.step}, greedy"))
    console.print(f"predictions and metrics: {path}", markup=False, highlight=False, soft_wrap=True)


def write(workdir: Path, step: int, split: str, limit: int, result: Mapping) -> Path:
    """Write an evaluation to a new file of `<workdir>/eval`; one that is there stays as it is."""
    sets = "+".join(name.replace("/", "-") for name in result["datasets"])
    name = f"step_{step:06d}_{sets}_{split or 'default'}_{limit or 'all'}"
    folder = Path(workdir) / "eval"
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(result, ensure_ascii=False, indent=1)
    number = 1
    while True:
        path = folder / (f"{name}.json" if number == 1 else f"{name}_{number}.json")
        try:
            with path.open("x", encoding="utf-8") as file:  # "x": fails where a file is, even one written a moment ago
                file.write(text + "\n")
            return path
        except FileExistsError:
            number += 1


if __name__ == "__main__":
    sys.exit(main())
