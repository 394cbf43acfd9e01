"""Judge the reasoning of an evaluation: `python -m bridge_jax.judge --result=runs/x/eval/y.json --endpoint=URL --model=NAME`.

A language model behind an OpenAI-compatible endpoint grades every trace, without its passages, from 0 to 4 (x 25). Writes
`<result>.judge-<model>.json` beside the result. Killed, or left by its judge, the same command goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from bridge_jax import endpoint
from bridge_jax.errors import main_guard
from bridge_jax.evaluation.judge import judge
from bridge_jax.evaluation.store import read_result
from bridge_jax.evaluation.table import judge_table
from bridge_jax.files import write_text


@main_guard
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bridge_jax.judge",
        description="Reasoning quality of an evaluation's traces by a language model, 0 to 4 (x 25).",
        epilog="Example:\n"
        "  python -m bridge_jax.judge --result=runs/medical/eval/step_000000_medqa_default_100.json --votes=3 \\\n"
        "      --endpoint=https://api.openai.com/v1 --model=gpt-4o",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--result", required=True, type=Path, metavar="FILE", help="of an evaluation: <workdir>/eval/<name>.json")
    parser.add_argument("--votes", type=int, default=1, metavar="N", help="times each trace is graded (default: 1)")
    endpoint.add_flags(parser, required=True)
    args = parser.parse_args(argv)
    result = read_result(args.result)
    slug = re.sub(r"[^\w.+-]+", "-", args.model or "")
    path = args.result.with_name(f"{args.result.stem}.judge-{slug}.json")
    client = endpoint.from_flags(args, path.with_suffix(".requests.jsonl"))
    found = judge(client, result["predictions"], args.votes)
    write_text(path, json.dumps(found | {"of": args.result.name, "endpoint": client.spent()}, ensure_ascii=False) + "\n")
    console = Console()
    console.print(judge_table(found, title=f"reasoning quality by {args.model}"))
    if found["down"]:
        console.print(f"the judge was left: {found['down']}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"grades: {path}", markup=False, highlight=False, soft_wrap=True)
    return 1 if found["down"] else 0


if __name__ == "__main__":
    sys.exit(main())
