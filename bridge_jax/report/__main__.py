"""Write a report: `python -m bridge_jax.report --workdir=runs/demo`, or of several runs beside each other."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from bridge_jax.errors import UserError, main_guard
from bridge_jax.files import as_path
from bridge_jax.report import rollouts
from bridge_jax.report.page import write_report


@main_guard
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bridge_jax.report",
        description="Write one HTML file: evaluations before and after, curves over the steps, and a browser of the rollouts "
        "with the candidates of each search. It needs nothing else, and no network.",
        epilog="Examples:\n"
        "  python -m bridge_jax.report --workdir=runs/demo                            # runs/demo/report.html\n"
        "  python -m bridge_jax.report --workdir=runs/bridge --workdir=runs/vt --out=both.html\n"
        "  python -m bridge_jax.report --workdir=runs/long --budget=100               # more of its rollouts\n"
        "  python -m bridge_jax.report --workdir=runs/long --light                    # none: tables and curves in milliseconds",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--workdir",
        required=True,
        action="append",
        type=as_path,
        metavar="FOLDER",
        help="a run's folder, which may still be going; several: their curves share charts, their rollouts a list",
    )
    parser.add_argument("--out", type=as_path, metavar="FILE", help="where to write (default: report.html in the first folder)")
    parser.add_argument("--light", action="store_true", help="without the rollouts")
    parser.add_argument(
        "--budget",
        type=float,
        default=rollouts.BUDGET / 2**20,
        metavar="MB",
        help="of the file for rollouts; beyond, an even choice over steps is kept, and the page says so (default: %(default)g)",
    )
    args = parser.parse_args(argv)
    if not 0 < args.budget < float("inf"):
        raise UserError(f"--budget={args.budget:g}: must be a number of MB above 0")
    print(write_report(args.workdir, args.out, args.light, int(args.budget * 2**20)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
