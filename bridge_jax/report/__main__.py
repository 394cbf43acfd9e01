"""Write a run's report: `python -m bridge_jax.report --workdir=runs/demo`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from bridge_jax.errors import main_guard
from bridge_jax.files import as_path
from bridge_jax.report.page import write_report


@main_guard
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bridge_jax.report",
        description="Write <workdir>/report.html: evaluations before and after, curves over the steps. One file, no network.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--workdir", required=True, type=as_path, metavar="FOLDER", help="the run's folder; a run may still be going"
    )
    args = parser.parse_args(argv)
    print(write_report(args.workdir))
    return 0


if __name__ == "__main__":
    sys.exit(main())
