"""One process at a time in a run's folder."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

from bridge_jax.errors import UserError


@contextlib.contextmanager
def exclusive(workdir: Path) -> Iterator[None]:
    """Hold the folder's lock; it ends with the process, however that ends.

    Raises:
      UserError: another process holds it.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    with (workdir / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another process is at work in {workdir}: wait for it, or use another --workdir") from None
        yield
