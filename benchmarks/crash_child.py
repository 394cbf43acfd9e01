"""One training run that kills itself: the child of benchmarks/crash_matrix.py.

    python benchmarks/crash_child.py --point=save --call=3 --delay=0.02 --note=kill.json -- --config=... --workdir=...
    python benchmarks/crash_child.py --count=counts.json -- --config=... --workdir=...        # how often each point is passed

`--delay` seconds after the `--call`-th entry into the point, the process gets SIGKILL from a thread of its own: nothing is tidied
up, and whatever else is under way (a checkpoint being written, a program being compiled) is cut off with it. `--note` gets the
point that had been entered last by then: where the kill fell.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

# point -> (module, what is called there)
POINTS = {
    "publish": ("bridge_jax.training.state", "Learner.policy_variables"),
    "rollout": ("bridge_jax.rollout.flight", "Flight._decode"),
    "scoring": ("bridge_jax.training.credit_stage", "CreditStage._likelihoods"),
    "retriever step": ("bridge_jax.training.state", "Learner.retriever_step"),
    "policy step": ("bridge_jax.training.state", "Learner.policy_step"),
    "rollout log": ("bridge_jax.training.metrics", "RunLog.write_rollouts"),
    "metrics": ("bridge_jax.training.metrics", "RunLog.write"),
    "save": ("bridge_jax.training.checkpoints", "Checkpoints.save"),
    "restore": ("bridge_jax.training.checkpoints", "Checkpoints.restore"),
    "evaluation": ("bridge_jax.evaluation.run", "evaluate_sets"),
    "export": ("bridge_jax.training.loop", "export"),
}


def watch(point: str, entered: Callable[[str], None]) -> None:
    """Call `entered(point)` whenever the point is passed, before what stands there."""
    module, path = POINTS[point]
    *owners, name = path.split(".")
    owner = importlib.import_module(module)
    for part in owners:
        owner = getattr(owner, part)
    function = getattr(owner, name)

    @functools.wraps(function)
    def watched(*args, **kwargs):
        entered(point)
        return function(*args, **kwargs)

    setattr(owner, name, watched)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--point", choices=POINTS, help="where to die")
    parser.add_argument("--call", type=int, default=1, help="at which entry")
    parser.add_argument("--delay", type=float, default=0.0, help="how many seconds later")
    parser.add_argument("--signal", choices=("KILL", "INT"), default="KILL", help="how: kill -9, or Ctrl-C")
    parser.add_argument("--note", type=Path, help="where to write, before dying, how far the run had come")
    parser.add_argument("--count", type=Path, help="do not die; write how often each point was entered")
    parser.add_argument("train", nargs="+", help="after --, the words of bridge_jax.train")
    args = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that starts this in the background has it ignored
    counts: Counter[str] = Counter()
    last = ""

    def die() -> None:
        time.sleep(args.delay)
        if args.note:
            args.note.write_text(json.dumps({"point": args.point, "call": args.call, "delay": args.delay, "fell": last}))
        # to the main thread, whose sleep it ends
        signal.pthread_kill(threading.main_thread().ident, signal.Signals[f"SIG{args.signal}"])

    def entered(point: str) -> None:
        nonlocal last
        counts[point], last = counts[point] + 1, point
        if point == args.point and counts[point] == args.call:
            threading.Thread(target=die, daemon=True).start()
            if not args.delay:
                time.sleep(60)  # die here, not a line further

    for point in POINTS:
        watch(point, entered)
    from bridge_jax import train

    code = train.main(args.train)
    if args.count:
        args.count.write_text(json.dumps(counts))
    return code


if __name__ == "__main__":
    raise SystemExit(main())
