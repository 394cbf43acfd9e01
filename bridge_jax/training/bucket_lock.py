"""A run folder's lock in a bucket, where no lock ends with its process.

The lock is an object with its owner's name and a count that goes up every BEAT seconds. One whose count stands still for SILENT
seconds is taken over: a machine that was taken away could not give it back. This is weaker than a file's lock. Two processes that
take a free one at once are told apart after SETTLE seconds, which a request that takes longer defeats; and an owner that is cut off
from the bucket for SILENT seconds loses it, and says so in its log once it is back.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator

from etils import epath

from bridge_jax.errors import UserError
from bridge_jax.files import first_line, write_text

log = logging.getLogger(__name__)

BEAT = 15.0  # seconds between two signs of life
SILENT = 60.0  # seconds without one, after which the owner counts as dead
SETTLE = 3.0  # seconds after which two that took it at once know which of them has it


@contextlib.contextmanager
def bucket_lock(workdir: epath.Path) -> Iterator[None]:
    """Hold `<workdir>/.lock`.

    Raises:
      UserError: another process holds it; the bucket cannot be written.
    """
    path = workdir / ".lock"
    me = {"host": socket.gethostname(), "pid": os.getpid(), "id": uuid.uuid4().hex}
    try:
        _wait_for_silence(path, workdir)
        _write_lock(path, me, 0)
    except UserError:
        raise
    except Exception as error:  # gcsfs, google.auth and aiohttp each have their own
        raise UserError(f"{workdir} cannot be written ({first_line(error)}): check the bucket and your rights to it") from error
    time.sleep(SETTLE)
    if (_read_lock(path) or {}).get("id") != me["id"]:
        raise UserError(_taken(workdir, _read_lock(path)))
    ended = threading.Event()
    heart = threading.Thread(target=_beat, args=(path, me, ended), name="workdir-lock", daemon=True)
    heart.start()
    try:
        yield
    finally:
        ended.set()
        heart.join()
        if (_read_lock(path) or {}).get("id") == me["id"]:
            path.unlink(missing_ok=True)


def _wait_for_silence(path: epath.Path, workdir: epath.Path) -> None:
    """Return when the lock is free or stands still. Counts are compared, not times: clocks of machines differ."""
    seen = _read_lock(path)
    if seen is None:
        return
    log.info("%s: %s held it; waiting up to %.0f s for a sign of life", workdir, _owner(seen), SILENT)
    until = time.monotonic() + SILENT
    while time.monotonic() < until:
        time.sleep(min(BEAT, SILENT) / 3)
        now = _read_lock(path)
        if now is None:
            return
        if now != seen:
            raise UserError(_taken(workdir, now))
    log.warning("%s: no sign of life of %s: the lock is taken over", workdir, _owner(seen))


def _beat(path: epath.Path, me: dict, ended: threading.Event) -> None:
    count = 0
    while not ended.wait(BEAT):
        try:
            owner = _read_lock(path)
            if owner is not None and owner.get("id") != me["id"]:
                log.error("%s: %s took the lock over; end one of the two runs", path, _owner(owner))
                return
            count += 1
            _write_lock(path, me, count)
        except Exception as error:  # the network may come back
            log.warning("%s cannot be renewed (%s)", path, first_line(error))


def _read_lock(path: epath.Path) -> dict | None:
    try:
        found = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _write_lock(path: epath.Path, me: dict, count: int) -> None:
    write_text(path, json.dumps({**me, "count": count}) + "\n")


def _owner(lock: dict) -> str:
    return f"process {lock.get('pid')} of {lock.get('host')}"


def _taken(workdir: epath.Path, lock: dict | None) -> str:
    owner = f" ({_owner(lock)})" if lock else ""
    return f"another process is at work in {workdir}{owner}: wait for it, or use another --workdir"
