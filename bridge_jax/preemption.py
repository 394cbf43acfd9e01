"""SIGTERM: the machine is about to be taken away. Noted at once, obeyed where nothing is lost.

The signal is the process's, so is the note. A thread waits for it: the main one may be deep in a compiled program, or waiting for
other processes, when it comes, and those must hear of it at once to be done within the half minute that is usually left.

    with listening(say):           # SIGTERM no longer kills
        ...
        check()                    # Preempted, if one has come to this process or to another one
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

from bridge_jax import distributed
from bridge_jax.distributed import Preempted

ASK_EVERY = 0.5  # seconds between two looks at what other processes say

_noted = threading.Event()
_asked = 0.0


@contextlib.contextmanager
def listening(say: Callable[[str], None]) -> Iterator[None]:
    """Note SIGTERM instead of dying of it. `say`: told, from another thread, when it comes. Only the main thread can listen."""
    _noted.clear()
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    read, write = os.pipe()
    os.set_blocking(write, False)

    def wait() -> None:
        while signals := os.read(read, 1):
            if signals[0] == signal.SIGTERM and not _noted.is_set():
                _noted.set()
                distributed.tell("preempted")
                say("SIGTERM: stopping as soon as what has been learnt is safe")
            elif signals[0] == 0:
                return

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    # The C handler writes the signal's number into the pipe whatever the main thread is doing; Python's own would wait for it.
    before, wakeup = signal.signal(signal.SIGTERM, lambda *_: None), signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        signal.signal(signal.SIGTERM, before)
        os.write(write, b"\0")
        thread.join()
        os.close(read)
        os.close(write)


def noted() -> bool:
    """Whether this process, or another one, is to stop."""
    global _asked
    if not _noted.is_set() and distributed.count() > 1 and time.monotonic() - _asked > ASK_EVERY:
        _asked = time.monotonic()
        if distributed.told("preempted"):
            _noted.set()
    return _noted.is_set()


def check() -> None:
    """Raises Preempted when the run is to stop."""
    if noted():
        raise Preempted


def check_together() -> None:
    """The same where all processes must stop at the same place. All must call it."""
    if distributed.any_process(noted()):
        raise Preempted
