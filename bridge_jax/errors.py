"""Errors a user can cause, and how a command reports them."""

from __future__ import annotations

import errno
import functools
import logging
import os
import signal
import sys
from collections.abc import Callable

# A place that cannot be written: the user's to mend, wherever it is noticed.
_USERS = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR, errno.EEXIST}


INTERRUPTED = "interrupted; run the same command again to go on"


class UserError(Exception):
    """Something the user gave is wrong. The message is one line: it names the thing and the mend."""


class _Stderr(logging.StreamHandler):
    """Writes to whatever `sys.stderr` is at the time: commands may be called one after another in one process."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and isinstance(record.exc_info[1], KeyboardInterrupt):
            return  # Orbax, whose wait for a save was broken off, shows where; `main_guard` says what is to be said
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
            print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
            return 2
        except OSError as error:
            if error.errno not in _USERS or not error.filename:
                raise
            print(f"error: {error.filename}: {error.strerror}; give another place, or make room there", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            if sys.excepthook is leave_quietly:  # a process of its own: Ctrl-C once more does not wait for threads that are left
                signal.signal(signal.SIGINT, lambda *_: os._exit(130))
            print(INTERRUPTED, file=sys.stderr, flush=True)
            return 130

    return run


def leave_quietly(kind: type[BaseException], error: BaseException, traceback) -> None:
    """An excepthook: Ctrl-C before `main_guard` is there, or after it, is one line and exit code 130, too."""
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, traceback)
        return
    print(INTERRUPTED, file=sys.stderr, flush=True)
    os._exit(130)  # nothing has begun, or all is done
