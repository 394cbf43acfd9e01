"""This checkout: importing it makes `bridge_jax` importable, installed or not (a launcher needs Python alone); and its commits."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bridge_jax.errors import UserError  # noqa: E402


def commit(runner, name: str, allow_dirty: bool) -> str:
    """The full id of the commit `name`.

    Raises:
      UserError: no such commit; or HEAD is asked for and files differ from it, which would stay behind.
    """
    found = runner.ask(["git", "-C", str(ROOT), "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}"])
    if found.code:
        raise UserError(f"--commit={name}: {ROOT} has no such commit or branch")
    head = runner.ask(["git", "-C", str(ROOT), "rev-parse", "HEAD"]).out.strip()
    changed = runner.ask(["git", "-C", str(ROOT), "status", "--porcelain"]).out.splitlines()
    if found.out.strip() == head and changed and not allow_dirty:
        files = ", ".join(line[3:] for line in changed[:8]) + (f" and {len(changed) - 8} more" if len(changed) > 8 else "")
        raise UserError(f"not in any commit: {files}; commit them, or pass --allow-dirty to run without them")
    return found.out.strip()


def refuse_config(path: str, overrides: Sequence[str]) -> None:
    """UserError for a configuration that training would refuse: better here than on a machine that costs money.

    Not checked where ml_collections is missing: the launcher needs Python alone.
    """
    with contextlib.suppress(ImportError):
        from bridge_jax import config

        config.load(ROOT / path, overrides)


def archive(runner, commit: str, target: Path) -> None:
    """Write the commit's files as a tar.gz."""
    target.parent.mkdir(parents=True, exist_ok=True)
    runner.need(["git", "-C", str(ROOT), "archive", "--format=tar.gz", f"--output={target}", commit], "the code cannot be packed")


def refuse_missing(runner, commit: str, path: str) -> None:
    """UserError when the commit has no such file: it would be missed on the machines."""
    if Path(path).is_absolute() or runner.ask(["git", "-C", str(ROOT), "cat-file", "-e", f"{commit}:./{path}"]).code:
        raise UserError(f"--config={path} is not in commit {commit[:12]}: give one that is, such as configs/qwen2_5_3b.py")
