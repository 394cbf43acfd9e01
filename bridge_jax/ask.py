"""Ask one question: `python -m bridge_jax.ask --workdir=runs/pocket "Who founded the club that ...?"`.

Prints what the policy thought, searched and read, each search's documents with score and probability, and the answer.
The rollout is the one of training and evaluation.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

import jax
from rich.console import Console

from bridge_jax.data.prompts import build_prompt
from bridge_jax.data.qa import Question
from bridge_jax.errors import UserError, main_guard
from bridge_jax.evaluation import ask_view, cli


@main_guard
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bridge_jax.ask",
        description="Answer one question and show the whole way: thoughts, searches, documents with scores, answer.",
        epilog="Examples:\n"
        '  python -m bridge_jax.ask --workdir=runs/pocket "Were Scott Derrickson and Ed Wood of the same nationality?"\n'
        '  python -m bridge_jax.ask --workdir=runs/pocket --temperature=1 --json "Who wrote The Hobbit?"',
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    cli.add_flags(parser)
    parser.add_argument("question", help="in quotes")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="of sampling; 0 = greedy (default: 0)")
    parser.add_argument("--seed", type=int, default=0, help="of sampling (default: 0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the coloured trace")
    args, config = cli.parse(parser, argv)
    if not args.question.isprintable() or args.question.encode("utf-8", "replace").decode() != args.question:
        raise UserError("the question holds characters that are no text (control characters or broken UTF-8): write it again")
    if not args.question.strip():
        raise UserError("the question is empty: write it in quotes behind the flags")
    if not 0 <= args.temperature < float("inf"):
        raise UserError(f"--temperature={args.temperature}: must be at least 0")

    from bridge_jax.training.session import open_session  # late: bad flags are told before models are loaded

    session = open_session(config, args.workdir, args.checkpoint)
    assets = session.assets
    prompt = build_prompt(args.question, assets.tokenizer, config.rollout.prompt, max_tokens=config.rollout.max_prompt_tokens)
    episodes, _ = assets.engine.run(
        session.policy_variables,
        [Question(id="ask", question=args.question, golds=(), gold_passage_ids=(), dataset="ask")],
        prompts=[prompt],
        group_size=1,
        key=jax.random.key(args.seed),
        temperature=args.temperature,
        retriever_lora=session.retriever_lora,
    )
    if args.json:
        print(json.dumps(ask_view.as_json(episodes[0], assets.corpus, config.credit.tau), ensure_ascii=False, indent=1))
    else:
        ask_view.show(Console(), episodes[0], assets.corpus, config.credit.tau)
    return 0


if __name__ == "__main__":
    sys.exit(main())
