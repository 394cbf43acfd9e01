"""Errors a user can cause, and how a command reports them."""

from __future__ import annotations

import errno
import functools
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable

from bridge_jax.terminal import visible

# A place that cannot be written or read: the user's to mend, wherever it is noticed.
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_USERS = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP}


INTERRUPTED = "interrupted; run the same command again to go on"


class UserError(Exception):
    """Something the user gave is wrong. The message is one line: it names the thing and the mend."""


class Outage(UserError):
    """Searches failed, and what was to be made of them is not made. All processes know of the same episodes, and raise this."""

    everywhere = True


def no_room(error: BaseException | None) -> str | None:
    """What an error says of a full disk, if that is what it or its cause is about; libraries that write by themselves each have
    their own kind of error for it (Orbax in groups, from threads; tokenizers and tensorstore with the system's words alone)."""
    if error is None:
        return None
    if isinstance(error, BaseExceptionGroup):
        return next(filter(None, map(no_room, error.exceptions)), None)
    if isinstance(error, OSError) and error.errno in _NO_ROOM:
        return os.strerror(error.errno)
    said = next((text for text in map(os.strerror, _NO_ROOM) if text in str(error)), None)
    return said or no_room(error.__cause__ or error.__context__)


def one_line(error: Exception) -> str:
    """What a terminal is told of an error, which may quote a file or a server."""
    return " ".join(visible(str(error)).split())


class _Stderr(logging.StreamHandler):
    """Writes to whatever `sys.stderr` is at the time: commands may be called one after another in one process."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and isinstance(record.exc_info[1], KeyboardInterrupt):
            return  # Orbax, whose wait for a save was broken off, shows where; `main_guard` says what is to be said
        if record.exc_info and no_room(record.exc_info[1]):  # Orbax logs what it then raises
            return
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


def _in_thread(otherwise: Callable, args: threading.ExceptHookArgs) -> None:
    """A full disk that a library's thread notices (Orbax's, while a checkpoint is written) is told by who waits for it."""
    if no_room(args.exc_value) is None:
        otherwise(args)


def main_guard(main: Callable[..., int | None]) -> Callable[..., int]:
    """Turn `UserError` into one line on stderr and exit code 2, and Ctrl-C into exit code 130."""

    @functools.wraps(main)
    def run(*args, **kwargs) -> int:
        _show_log()
        hook = threading.excepthook
        threading.excepthook = functools.partial(_in_thread, hook)
        try:
            return main(*args, **kwargs) or 0
        except UserError as error:
            print(f"error: {one_line(error)}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            if sys.excepthook is leave_quietly:  # a process of its own: Ctrl-C once more does not wait for threads that are left
                signal.signal(signal.SIGINT, lambda *_: os._exit(130))
            print(INTERRUPTED, file=sys.stderr, flush=True)
            return 130
        except Exception as error:
            where = getattr(error, "filename", None)
            if why := no_room(error):
                print(f"error: {where or 'the disk'}: {why}; make room there, and run the same command again", file=sys.stderr)
            elif isinstance(error, OSError) and error.errno in _USERS and where:
                print(f"error: {where}: {error.strerror}; give another place", file=sys.stderr)
            else:
                raise
            return 2
        finally:
            threading.excepthook = hook

    return run


def leave_quietly(kind: type[BaseException], error: BaseException, traceback) -> None:
    """An excepthook: Ctrl-C before `main_guard` is there, or after it, is one line and exit code 130, too."""
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, traceback)
        return
    print(INTERRUPTED, file=sys.stderr, flush=True)
    os._exit(130)  # nothing has begun, or all is done
