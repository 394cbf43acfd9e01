"""Files of a run, on this machine or in a bucket: whole or not there.

A folder is a `pathlib.Path`, or for `gs://bucket/...` an `etils.epath.Path`, which has the same methods. `as_path` makes the right
one; `pathlib.Path` swallows a slash of `gs://`. An object store has no folders, no appending and no rename: an object appears at
once, whole, when its upload has ended.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

from etils import epath

from bridge_jax.errors import UserError, no_room

AnyPath: TypeAlias = Path | epath.Path
CHUNK = 64 * 2**20  # bytes a request while fetching; a small one is slow over a network


def as_path(text: str | os.PathLike) -> AnyPath:
    """A path on this machine, or in a Google Cloud Storage bucket when it begins with `gs://`.

    Raises:
      UserError: no address or another kind of one; or `gs://` without a library that can read it.
    """
    if not os.fspath(text):  # a shell's variable that is not set: "" would be the folder one stands in
        raise UserError("a folder or file was given as '': write . for the folder you are in")
    address = re.sub(r"^gs:/+", "gs://", os.fspath(text))  # a pathlib.Path made of it has lost a slash
    scheme, colon, rest = address.partition("://")
    if not colon:
        return Path(text)
    if scheme != "gs":
        raise UserError(f"{address}: only folders of this machine and gs://bucket/folder are known")
    if not rest.strip("/"):
        raise UserError(f"{address} names no bucket: write gs://bucket/folder")
    if not any(importlib.util.find_spec(library) for library in ("gcsfs", "tensorflow")):
        raise UserError(f"{address} needs gcsfs: pip install 'bridge-jax[gcs]'")
    _forget_listings()
    return epath.Path(address)


def _forget_listings() -> None:
    """gcsfs remembers listings with sizes: an object that another process makes longer would be read cut off at its old size."""
    with contextlib.suppress(ImportError):  # fsspec comes with gcsfs; tensorflow remembers nothing
        import fsspec

        fsspec.config.conf.setdefault("gcs", {}).setdefault("use_listings_cache", False)


def is_remote(path: str | os.PathLike) -> bool:
    return "://" in os.fspath(path)


def refuse_unreachable(path: AnyPath) -> None:
    """UserError when the bucket of a remote path does not answer."""
    try:
        if is_remote(path):
            path.exists()
    except Exception as error:  # gcsfs, google.auth and aiohttp each have their own
        raise UserError(
            f"{path} cannot be reached ({first_line(error)}): check the bucket's name and your rights "
            "(gcloud auth application-default login)"
        ) from error


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".split("\n")[0][:200]


def absolute(path: AnyPath) -> AnyPath:
    """epath's own would put the current folder before `gs://`."""
    return path if is_remote(path) else path.absolute()


def make_folder(path: AnyPath) -> None:
    """Object stores have no folders (and gcsfs would make a bucket of a misspelt name)."""
    if not is_remote(path):
        path.mkdir(parents=True, exist_ok=True)


@contextlib.contextmanager
def writing(path: AnyPath) -> Iterator[None]:
    """Around what writes a file or folder: a full disk is a UserError that names it, whichever library notices."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        why = no_room(error)
        if why is None:
            raise
        raise UserError(f"{path} cannot be written ({why}): make room there, and run the same command again to go on") from error


def write_text(path: AnyPath, text: str) -> None:
    """Write atomically (UTF-8), making the folder: a kill leaves the old file or the new one, never a half.

    Raises:
      UserError: the disk is full; the old file stays.
    """
    if is_remote(path):
        path.write_bytes(text.encode("utf-8"))
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    with writing(path):
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)


def append_text(path: AnyPath, text: str) -> None:
    """Append (UTF-8) and have it on disk before returning; in a bucket the whole object is written again."""
    if is_remote(path):
        path.write_bytes((path.read_bytes() if path.exists() else b"") + text.encode("utf-8"))
        return
    with writing(path), path.open("a", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def local_copy(path: str | os.PathLike, cache: Path) -> Path:
    """A file or folder as one of this machine: itself, or a copy below `cache`, brought up to date by the objects' sizes and times.

    For what must be memory-mapped or is read by a library of its own: an index, a corpus, a model's folder.

    Raises:
      UserError: nothing is there.
    """
    path = as_path(path)
    if not is_remote(path):
        return path
    target = cache / "fetched" / hashlib.sha256(os.fspath(path).encode()).hexdigest()[:16] / path.name
    sources = [path] if path.is_file() else list(_below(path))
    if not sources:
        raise UserError(f"{path}: nothing is there")
    for source in sources:
        # Not pathlib's relative_to: a file's own name is not below itself.
        _fetch(source, target / os.fspath(source)[len(os.fspath(path)) :].lstrip("/"))
    return target


def _below(folder: epath.Path):
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _below(entry)
        else:
            yield entry


def _fetch(source: epath.Path, target: Path) -> None:
    # The copy gets the object's own time: this machine's clock may be any, and may jump.
    there = source.stat()
    stamp = int(there.mtime or 0)
    if target.is_file() and (target.stat().st_size, int(target.stat().st_mtime)) == (there.length, stamp):
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{target.name}.{os.getpid()}.part")  # processes of one machine may fetch the same
    with writing(target), source.open("rb") as reader, part.open("wb") as writer:
        shutil.copyfileobj(reader, writer, CHUNK)
    os.utime(part, (stamp, stamp))
    os.replace(part, target)


@contextlib.contextmanager
def written_locally(folder: AnyPath) -> Iterator[Path]:
    """A folder of this machine for libraries that write to no other: `folder` itself, or one that is uploaded to it at the end."""
    if not is_remote(folder):
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="bridge-jax-") as scratch:
        yield Path(scratch)
        upload(Path(scratch), folder)


def delete_folder(path: AnyPath) -> None:
    """With all below it; one that is not there is no error."""
    if not is_remote(path):
        shutil.rmtree(path, ignore_errors=True)
    elif path.exists():
        epath.Path(path).rmtree()


def upload(folder: Path, target: AnyPath) -> None:
    """Copy a folder of this machine, with all below it; config.json last, by which a model's folder counts as whole."""
    for source in sorted(folder.rglob("*"), key=lambda path: (path.name == "config.json", path)):
        if source.is_file():
            with source.open("rb") as reader, (target / source.relative_to(folder).as_posix()).open("wb") as writer:
                shutil.copyfileobj(reader, writer, CHUNK)
