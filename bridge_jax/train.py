"""Train: `python -m bridge_jax.train --config=configs/pocket.py --workdir=runs/pocket [--config.credit.gamma=0.1 ...]`."""

from __future__ import annotations

import argparse
import functools
import logging
from collections.abc import Sequence
from pathlib import Path

from ml_collections import ConfigDict
from rich.console import Console

from bridge_jax import config as configuration
from bridge_jax import distributed
from bridge_jax.errors import UserError, main_guard
from bridge_jax.evaluation.table import comparison_table
from bridge_jax.files import as_path
from bridge_jax.report import page
from bridge_jax.training.workdir import refuse_unusable

log = logging.getLogger(__name__)


@main_guard
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bridge_jax.train",
        description="Train a search policy together with its retriever. Interrupted? The same command goes on where it stopped.",
        epilog="Examples:\n"
        "  python -m bridge_jax.train --config=configs/pocket.py --workdir=runs/pocket\n"
        "  python -m bridge_jax.train --config=configs/pocket.py --workdir=runs/vt --config.method.name=vt_search\n"
        "  python -m bridge_jax.train --config=configs/pocket.py --workdir=runs/tau --config.credit.tau=0.1\n"
        "Every field that --config.group.field=value can set is in bridge_jax/config.py, with its default and a comment.\n"
        f"Methods (config.method.name): {', '.join(configuration.METHODS)}.\n"
        "The workdir gets config.json, metrics.jsonl, rollouts/, checkpoints/, eval/, report.html (curves, anew after every\n"
        "evaluation; at the end with a browser of the rollouts), and at the end policy/ and retriever/.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    configuration.add_config_flag(parser)
    distributed.add_flags(parser)
    parser.add_argument("--workdir", required=True, type=as_path, metavar="FOLDER", help="the run's folder; made when missing")
    args, config = configuration.parse_args(parser, argv)
    if not args.distributed:  # of several processes the main one alone writes
        refuse_unusable(args.workdir)
    with distributed.processes(args.distributed, args.heartbeat):
        train(config, args.workdir)
    return 0


def train(config: ConfigDict, workdir: Path) -> Path:
    """What the command does, for callers that have a configuration."""
    keep_programs(workdir)
    from bridge_jax.evaluation.run import evaluate_sets, evaluation_engine, load_sets  # late: --help need not wait for them
    from bridge_jax.training import loop

    sets = load_sets(config)
    engine = functools.lru_cache(1)(evaluation_engine)  # one for all evaluations with a retriever: it compiles once

    def evaluate(assets, policy_variables, retriever_lora):
        return evaluate_sets(
            assets, policy_variables, sets, retriever_lora=retriever_lora, seed=config.train.seed, engine=engine(assets)
        )

    if loop.run(config, workdir, evaluate, functools.partial(report_so_far, workdir)) and distributed.is_main():
        finish(config, workdir)
    return workdir


def keep_programs(workdir: Path) -> None:
    """Compiled programs are kept in the workdir, for the run to go on quickly, unless jax has been told another place."""
    import jax

    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(workdir / "jax_cache"))


def report_so_far(workdir: Path) -> None:
    """The page without rollouts, after each evaluation: milliseconds. A run does not stop because it cannot be written."""
    try:
        page.write_report(workdir, light=True)
    except (UserError, OSError) as error:
        log.warning("the report was not written (%s): python -m bridge_jax.report --workdir=%s writes it later", error, workdir)


def finish(config: ConfigDict, workdir: Path) -> None:
    """What a finished run shows: its evaluations before and after, its curves, and where its report lies."""
    console = Console()
    found = page.evaluations(workdir)
    if len(found) > 1:
        title = f"{config.method.name}: greedy evaluation before and after {found[-1]['step']} steps"
        console.print(comparison_table(found[0], found[-1], ("start", f"step {found[-1]['step']}"), title))
    console.print(page.terminal_curves(workdir), markup=False, highlight=False)
    console.print(f"report: {page.write_report(workdir)} (open it in a browser)", markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    raise SystemExit(main())
