"""Errors a user can cause, and how a command reports them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable


class UserError(Exception):
    """Something the user gave is wrong. The message is one line: it names the thing and the mend."""


def main_guard(main: Callable[..., int | None]) -> Callable[..., int]:
    """Turn `UserError` into one line on stderr and exit code 2, and Ctrl-C into exit code 130."""

    @functools.wraps(main)
    def run(*args, **kwargs) -> int:
        try:
            return main(*args, **kwargs) or 0
        except UserError as error:
            print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print("interrupted; run the same command again to go on", file=sys.stderr)
            return 130

    return run
