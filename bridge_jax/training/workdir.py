"""A run's folder: of one configuration, and used by one process at a time. It may lie in a bucket (`files.as_path`)."""

from __future__ import annotations

import contextlib
import fcntl
import json
import tempfile
from collections.abc import Iterator, Sequence

from ml_collections import ConfigDict

from bridge_jax.config import default, flatten
from bridge_jax.errors import UserError
from bridge_jax.files import AnyPath, as_path, is_remote, refuse_unreachable, write_text
from bridge_jax.training.bucket_lock import bucket_lock
from bridge_jax.training.methods import method_of

PROBE = 2**20  # bytes that must fit


def refuse_unusable(workdir: AnyPath) -> None:
    """What can be known of a run's folder before anything is loaded: that it can be made and written, and that nobody holds it.

    A bucket is asked when the folder is claimed. Leaves nothing behind.

    Raises:
      UserError: it is a file, or below one; it cannot be written; the disk is full; another process holds it.
    """
    workdir = as_path(workdir)
    if is_remote(workdir):
        return
    there = next(folder for folder in (workdir, *workdir.absolute().parents) if folder.exists())
    if not there.is_dir():
        raise UserError(f"--workdir={workdir}: {there} is a file: give a folder")
    try:
        with tempfile.TemporaryFile(dir=there) as probe:
            probe.write(bytes(PROBE))
            probe.flush()
    except OSError as error:
        raise UserError(
            f"--workdir={workdir}: {there} cannot be written ({error.strerror}): make room or rights there, or give another folder"
        ) from error
    if (workdir / ".lock").is_file():
        with (workdir / ".lock").open() as file:
            _lock(file, fcntl.LOCK_SH, workdir)


def _lock(file, kind: int, workdir: AnyPath) -> None:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"another process is at work in {workdir}: wait for it, or use another --workdir") from None


@contextlib.contextmanager
def exclusive(workdir: AnyPath) -> Iterator[None]:
    """Hold the folder's lock; it ends with the process, however that ends (in a bucket a minute later: `bucket_lock`).

    Raises:
      UserError: another process holds it; the bucket cannot be reached; the folder cannot be made.
    """
    workdir = as_path(workdir)
    if is_remote(workdir):
        with bucket_lock(workdir):
            yield
        return
    try:
        workdir.mkdir(parents=True, exist_ok=True)
    except OSError as error:  # also where there can be no folder at all, as below /proc
        raise UserError(f"--workdir={workdir}: the folder cannot be made ({error.strerror}): give another one") from error
    try:
        file = (workdir / ".lock").open("w")
    except OSError as error:
        raise UserError(f"--workdir={workdir}: cannot be written ({error.strerror}): give another one") from error
    with file:
        _lock(file, fcntl.LOCK_EX, workdir)
        yield


def claim_workdir(
    config: ConfigDict, workdir: AnyPath, name: str = "config.json", may_change: Sequence[str] = (), write: bool = True
) -> None:
    """Write `<workdir>/<name>`, or compare with the one there: a run folder belongs to one configuration.

    A field that the written one lacks is newer than the folder: its default is what the run was made with.

    Args:
      may_change: fields that a rerun may change (`train.steps`: train longer).
      write: False only compares.

    Raises:
      UserError: the folder was made by another configuration; names the first differing fields. Nothing is written.
    """
    workdir = as_path(workdir)
    refuse_unreachable(workdir)
    path = workdir / name
    if workdir.exists() and not workdir.is_dir():
        raise UserError(f"{workdir} is a file: give a folder as --workdir")
    resolved = _plain(flatten(config))
    if path.exists():
        try:
            old = _plain(flatten(default())) | json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UserError(f"{path} is not readable JSON ({error}): use another --workdir") from error
        differ = [k for k in sorted(resolved.keys() | old.keys()) if resolved.get(k) != old.get(k) and k not in may_change]
        if differ:
            shown = "; ".join(f"{k} was {old.get(k)!r}, now {resolved.get(k)!r}" for k in differ[:3])
            raise UserError(
                f"{workdir} belongs to another configuration ({shown}): {_derived(config, differ, old)}use another --workdir, or "
                "delete this one"
            )
    if not write:
        return
    write_text(path, json.dumps(resolved, indent=1, sort_keys=True) + "\n")


def _derived(config: ConfigDict, differ: Sequence[str], old: dict[str, object]) -> str:
    """What to do where nothing differs but what the method derives from other fields, such as a warm-up from train.steps."""
    derived = {name for name, value in method_of(config).implied.items() if callable(value)}
    if not derived.issuperset(differ):
        return ""
    kept = " ".join(f"--config.{name}={old[name]}" for name in differ)
    return f"method {config.method.name} derives {', '.join(differ)} from other fields; pass {kept} to go on as it was, "


def _plain(fields: dict[str, object]) -> dict[str, object]:
    """As JSON gives them back."""
    return {key: list(value) if isinstance(value, tuple | list) else value for key, value in fields.items()}


def written_field(workdir: AnyPath, name: str, default: object) -> object:
    """A field of the configuration that the folder was last used with; `default` without one."""
    try:
        return json.loads((as_path(workdir) / "config.json").read_text(encoding="utf-8")).get(name, default)
    except (OSError, ValueError):
        return default
