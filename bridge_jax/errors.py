"""Errors a user can cause, and how a command reports them."""

from __future__ import annotations

import errno
import functools
import logging
import sys
from collections.abc import Callable

from bridge_jax.terminal import visible

# A place that cannot be written: the user's to mend, wherever it is noticed.
_USERS = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR, errno.EEXIST}


class UserError(Exception):
    """Something the user gave is wrong. The message is one line: it names the thing and the mend."""


def one_line(error: Exception) -> str:
    """What a terminal is told of an error, which may quote a file or a server."""
    return " ".join(visible(str(error)).split())


class _Stderr(logging.StreamHandler):
    """Writes to whatever `sys.stderr` is at the time: commands may be called one after another in one process."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def _show_log() -> None:
    """The project's remarks (bytes needed, an index reused) and everybody's warnings as plain lines on stderr."""
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if type(handler) is logging.StreamHandler]:
        root.removeHandler(handler)  # a library's basicConfig: every line would come twice
    if not any(isinstance(handler, _Stderr) for handler in root.handlers):
        handler = _Stderr()
        handler.setFormatter(logging.Formatter("%(message)s"))
        root.addHandler(handler)
    logging.getLogger("bridge_jax").setLevel(logging.INFO)
    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax remarks on every save without a score


def main_guard(main: Callable[..., int | None]) -> Callable[..., int]:
    """Turn `UserError` into one line on stderr and exit code 2, and Ctrl-C into exit code 130."""

    @functools.wraps(main)
    def run(*args, **kwargs) -> int:
        _show_log()
        try:
            return main(*args, **kwargs) or 0
        except UserError as error:
            print(f"error: {one_line(error)}", file=sys.stderr)
            return 2
        except OSError as error:
            if error.errno not in _USERS or not error.filename:
                raise
            print(f"error: {error.filename}: {error.strerror}; give another place, or make room there", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print("interrupted; run the same command again to go on", file=sys.stderr)
            return 130

    return run
