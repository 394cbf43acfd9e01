"""Where prepared data is kept: one folder, entries written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bridge_jax.errors import UserError


def cache_dir() -> Path:
    """$BRIDGE_JAX_CACHE, else ~/.cache/bridge_jax."""
    return Path(os.environ.get("BRIDGE_JAX_CACHE") or Path.home() / ".cache" / "bridge_jax").expanduser()


@contextlib.contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """Yield an empty folder beside `target`; on success it becomes `target`, on an error nothing is left.

    When another process finished the same entry meanwhile, theirs stays: entries are named by their content.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as error:
        mend = "set BRIDGE_JAX_CACHE to a writable folder"
        raise UserError(f"cannot write the cache {target.parent}: {error.strerror}; {mend}") from error
    try:
        yield folder
        if not target.exists():
            with contextlib.suppress(FileExistsError):
                _rename(folder, target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _rename(folder: Path, target: Path) -> None:
    try:
        os.rename(folder, target)
    except OSError:
        if not target.exists():  # not the race with another process, a real failure
            raise
