"""Evaluate a run, a baseline or an endpoint: `python -m bridge_jax.evaluate --workdir=runs/pocket [--datasets=embedded/musique]`.

Greedy decoding; prints a table and writes `<workdir>/eval/<name>.json` with the metrics, everything that affects them, and every
prediction with its trace. Killed, the same command goes on; a changed setting is refused. docs/evaluation.md has more.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence

from rich.console import Console

from bridge_jax import distributed, endpoint
from bridge_jax.errors import UserError, main_guard
from bridge_jax.evaluation import cli
from bridge_jax.evaluation.baselines import BASELINES, baseline_of
from bridge_jax.evaluation.run import load_sets
from bridge_jax.files import AnyPath, as_path

EXAMPLES = """Examples:
  python -m bridge_jax.evaluate --workdir=runs/pocket
  python -m bridge_jax.evaluate --config=configs/pocket.py --workdir=runs/pocket --datasets=embedded/musique --limit=50
  python -m bridge_jax.evaluate --workdir=runs/pocket --checkpoint=start      (before RL: the warm-started policy)
  python -m bridge_jax.evaluate --workdir=runs/pocket --dry-run               (without a model: is everything there?)
  python -m bridge_jax.evaluate --workdir=runs/b --against=runs/a             (question by question)
  python -m bridge_jax.evaluate --config=configs/pocket.py --workdir=runs/base --checkpoint=start --config.policy.warmstart= \\
      --baseline=react
  python -m bridge_jax.evaluate --config=configs/medical.py --workdir=runs/gpt-4o --baseline=medrag --datasets=mirage \\
      --corpora=wiki.jsonl,pubmed.jsonl --endpoint=https://api.openai.com/v1 --model=gpt-4o"""


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bridge_jax.evaluate",
        description="Answer the evaluation questions greedily and score them: em, f1, sub_em, recall, searches, tokens, latency; "
        "accuracy on multiple choice.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    cli.add_flags(parser, own_folder)
    distributed.add_flags(parser)
    parser.add_argument(
        "--datasets",
        metavar="A,B",
        help="sets, files, embedded/<set>, mirage or mirage/<set> (default: config.data.eval)",
    )
    parser.add_argument("--limit", type=int, metavar="N", help="questions a source; 0 = all (default: config.data.eval_limit)")
    parser.add_argument("--split", help="split of each source (default: config.data.eval_split)")
    parser.add_argument("--baseline", default="", metavar="NAME", help=f"instead of the search protocol: {', '.join(BASELINES)}")
    parser.add_argument("--context-tokens", type=int, metavar="N", help="of a baseline: what a search may show")
    parser.add_argument("--corpora", default="", metavar="A,B", help="search these instead of config.index.corpus, as one")
    parser.add_argument("--encoders", default="", metavar="A,B", help="with these instead of config.retriever.encoder, fused")
    parser.add_argument(
        "--dry-run", action="store_true", help="without a model: check questions, index and folder first (docs/evaluation.md)"
    )
    parser.add_argument("--against", metavar="RUN", help="a result file, or a run's folder: compare question by question")
    parser.add_argument("--shard", metavar="P/N", help="answer questions p, p + n, ...; the shard that ends last writes the result")
    parser.add_argument("--name", metavar="NAME", help="of the result file (default: step, sets, split, limit)")
    endpoint.add_flags(parser)
    return parser


@main_guard
def main(argv: Sequence[str] | None = None) -> int:
    args, config = cli.parse(make_parser(), argv)
    check(args)
    split = config.data.eval_split if args.split is None else args.split
    limit = config.data.eval_limit if args.limit is None else args.limit
    specs = _names(args.datasets)
    sets = load_sets(config, specs, split, limit)

    from bridge_jax.evaluation import command  # late: bad flags and missing questions are told before models are loaded

    with distributed.processes(args.distributed, args.heartbeat):
        path, result = command.evaluate(args, config, specs, sets, default_name(args, sets, split, limit))
    console = Console()
    if result is None:
        console.print(f"this shard is done, others are not: {path}", markup=False, highlight=False, soft_wrap=True)
        return 0
    command.show(console, result)
    if args.against:
        command.show_against(console, result, args.against, path)
    console.print(f"predictions and metrics: {path}", markup=False, highlight=False, soft_wrap=True)


def own_folder(text: str) -> AnyPath:
    """The path of --workdir. UserError for one in a bucket."""
    if re.match("gs:/", text):
        here = f"runs/{text.rstrip('/').rpartition('/')[2]}"
        raise UserError(
            f"--workdir={text}: evaluate appends its answers one by one, which a bucket cannot do: copy the run here, "
            f"gcloud storage cp -r {text} runs/, and give --workdir={here}"
        )
    return as_path(text)


def check(args: argparse.Namespace) -> None:
    """Refuse flags that contradict each other. UserError naming them."""
    if args.datasets is not None and not _names(args.datasets):
        raise UserError("--datasets= names no set: leave it out for those of config.data.eval")
    if args.limit is not None and args.limit < 0:
        raise UserError(f"--limit={args.limit}: must be at least 0")
    if args.context_tokens is not None and args.context_tokens < 0:
        raise UserError(f"--context-tokens={args.context_tokens}: must be at least 0 (0: no limit)")
    if args.dry_run and args.endpoint:
        raise UserError("--dry-run asks no model: leave out --endpoint, or --dry-run")
    if args.dry_run:
        args.baseline = args.baseline or "rag"
    if args.baseline:
        baseline_of(args.baseline)
    elif args.endpoint:
        raise UserError(f"--endpoint needs a --baseline: one of {', '.join(BASELINES)}")
    if args.context_tokens is not None and not args.baseline:
        raise UserError("--context-tokens is of a --baseline; the search protocol has --config.rollout.max_observation_tokens")
    if args.name and not re.fullmatch(r"[\w.+-]+", args.name):
        raise UserError(f"--name={args.name}: letters, digits, . + - and _ only")
    args.shard = _shard(args.shard)


def _shard(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if not match or not int(match[1]) < int(match[2]):
        raise UserError(f"--shard={text}: give P/N with P below N, counted from 0, such as 0/8")
    return int(match[1]), int(match[2])


def default_name(args: argparse.Namespace, sets, split: str, limit: int) -> str:
    """What follows the step, or the endpoint's model, in the name of a result."""
    parts = ["+".join(name.replace("/", "-") for name in sets), split or "default", str(limit or "all")]
    return "_".join([*parts, args.baseline] if args.baseline else parts)


def _names(text: str | None) -> tuple[str, ...]:
    return tuple(name.strip() for name in (text or "").split(",") if name.strip())


if __name__ == "__main__":
    sys.exit(main())
