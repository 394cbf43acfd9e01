"""`python -m bridge_jax`: the list of the commands. Each is a module of its own, `python -m bridge_jax.train`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

COMMANDS = {
    "prepare": "your documents and a table of questions -> corpus, train and dev questions, a configuration",
    "index": "a corpus and an encoder -> an index; `index eval`: what a retriever finds by itself",
    "serve": "serve an index over HTTP, as Search-R1's /retrieve does",
    "warmstart": "teach a policy the search protocol on supervised traces, before RL",
    "train": "train a search policy together with its retriever",
    "evaluate": "answer questions greedily and score them; baselines, endpoints, comparing two runs",
    "judge": "let a model behind an endpoint grade the answers of an evaluation",
    "ask": "ask a trained run a question, or hold a session",
    "report": "one HTML file of a run or several: curves, tables, a browser of the rollouts",
}


def main(arguments: Sequence[str]) -> int:
    """Exit code 0 with --help, else 2: the package by itself is no command."""
    asked = list(arguments) in (["--help"], ["-h"])
    out = sys.stdout if asked else sys.stderr
    if arguments and not asked:
        mend = f"write python -m bridge_jax.{arguments[0]}" if arguments[0] in COMMANDS else "the commands are:"
        print(f"error: python -m bridge_jax {arguments[0]} is no command; {mend}", file=out)
        if arguments[0] in COMMANDS:
            return 2
    lines = [f"  python -m bridge_jax.{name:<9}  {about}" for name, about in COMMANDS.items()]
    print("\n".join(["The commands, each with --help:", *lines]), file=out)
    return 0 if asked else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
