"""Ask a trained run: `python -m bridge_jax.ask --workdir=runs/pocket "Who founded ...?"`; without a question it is a session.

Prints what the policy thinks, searches and reads as it comes, each search's documents with score and probability, and the answer.
The rollout is the one of training and evaluation.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rich.console import Console

from bridge_jax.errors import main_guard
from bridge_jax.evaluation import cli

STREAMED = 4  # tokens between two looks of the host, where somebody watches


@main_guard
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bridge_jax.ask",
        description="Answer questions and show the whole way as it comes: thoughts, searches, documents with scores, answer.",
        epilog="Examples:\n"
        '  python -m bridge_jax.ask --workdir=runs/pocket "Were Scott Derrickson and Ed Wood of the same nationality?"\n'
        "  python -m bridge_jax.ask --workdir=runs/pocket                          # a session: :help lists its commands\n"
        '  python -m bridge_jax.ask --workdir=runs/pocket --temperature=1 --json "Who wrote The Hobbit?"\n'
        "  python -m bridge_jax.ask --workdir=runs/pocket --json < questions.txt   # one question a line, one JSON object a line\n"
        "Exit codes: 0 answered; 2 something given is wrong, or a line of a pipe could not be answered; 130 stopped by Ctrl-C.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    cli.add_flags(parser)
    parser.add_argument("question", nargs="?", help="in quotes; without it a session, or lines from a pipe")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="of sampling; 0 = greedy (default: 0)")
    parser.add_argument("--seed", type=int, default=0, help="of sampling (default: 0)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the coloured trace")
    args, config = cli.parse(parser, argv)

    from bridge_jax.evaluation import ask_session  # late: --help need not wait for jax

    if args.question is not None:
        ask_session.checked_question(args.question)
    ask_session.checked_temperature(args.temperature)
    from bridge_jax.training.session import open_session  # late: bad flags are told before models are loaded

    console = Console()
    if console.is_terminal and not args.json:
        config.rollout.chunk = min(config.rollout.chunk, STREAMED)
    session = open_session(config, args.workdir, args.checkpoint)
    asking = ask_session.Asking(session, config, console, args.temperature, args.seed)
    if args.question is None:
        return ask_session.converse(asking, args.json)
    asking.answer(args.question, show=not args.json)
    if args.json:
        print(asking.json(indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
