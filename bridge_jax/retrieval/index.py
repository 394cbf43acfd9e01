"""An index folder: built once, resumable, never overwritten unasked; opened only for what it was built from, and if it works.

embeddings.bf16   [N, D] bfloat16, row-major, memory-mapped
scann/            ScaNN's own files, where the index has a searcher
manifest.json     written last: a folder with a manifest is finished
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import numpy as np

from bridge_jax.errors import UserError
from bridge_jax.models import e5
from bridge_jax.retrieval import manifest as manifests
from bridge_jax.retrieval import scann_index
from bridge_jax.retrieval.corpus import Corpus
from bridge_jax.retrieval.device_index import DeviceIndex
from bridge_jax.retrieval.embed import PARTIAL, SHARD_ROWS, SHARDS, VECTORS, embed_corpus
from bridge_jax.retrieval.manifest import FINISHED, UNFINISHED, Manifest
from bridge_jax.retrieval.scann_index import ScannIndex
from bridge_jax.retrieval.vectors import EmbeddingIndex, open_vectors

log = logging.getLogger(__name__)

KINDS = ("auto", "scann", "exact")
SCANN, SCANN_PARTIAL, LOCK = "scann", "scann.partial", "building.lock"
OWN_FILES = {VECTORS, PARTIAL, SHARDS, SCANN, SCANN_PARTIAL, LOCK, FINISHED, UNFINISHED, f"{FINISHED}.tmp", f"{UNFINISHED}.tmp"}
CHECKED = 8  # passages that must retrieve themselves
ENCODED = 4  # of which so many are encoded anew, where the encoder is at hand
SAME_VECTOR = 0.98  # least inner product of a stored vector with the same passage encoded anew (bfloat16 compute: about 0.999)


def build_index(
    corpus_path: str | os.PathLike,
    encoder,
    out: str | os.PathLike,
    kind: str = "auto",
    limit: int | None = None,
    *,
    batch_size: int = 64,
    force: bool = False,
    shard_rows: int = SHARD_ROWS,
) -> EmbeddingIndex:
    """Builds an index folder, or goes on with an unfinished one, or reuses a finished one of the same encoder and corpus.

    Args:
      corpus_path: JSON-lines passages (retrieval/corpus.py).
      encoder: a models.e5.Encoder.
      out: the folder; new, empty, or an index folder.
      kind: "scann", "exact" (the device index), or "auto": ScaNN where it is installed.
      limit: the first so many passages only.
      force: replace the index in the folder (nothing but index files is ever deleted).

    Returns:
      The opened, self-checked index.

    Raises:
      UserError: bad corpus; `out` holds something else; not enough memory or disk.
    """
    corpus, out = Corpus.open(corpus_path, limit), Path(out).expanduser()
    kind = _resolve_kind(kind)
    wanted = manifests.make_manifest(encoder, corpus, kind)
    with _locked(out):
        finished = _prepare(out, wanted, force)
        if finished is None or (kind == "scann" and finished.scann is None):
            _say_needs(out, wanted)
            vectors = embed_corpus(encoder, corpus, out, batch_size=batch_size, shard_rows=shard_rows)
            if kind == "scann":
                wanted = dataclasses.replace(wanted, scann=_build_scann(out, vectors))
            wanted.write(out)
            (out / UNFINISHED).unlink(missing_ok=True)
        else:
            log.info("%s: already built from this encoder and corpus, reused", out)
    return open_index(out, encoder, corpus, kind)


def open_index(
    folder: str | os.PathLike, encoder=None, corpus: Corpus | None = None, kind: str | None = None, mesh=None
) -> EmbeddingIndex:
    """Opens a finished index folder.

    Args:
      folder: what `build_index` wrote.
      encoder, corpus: what the index will be used with; a difference from what it was built from is refused.
      kind: "scann", "exact" or "auto"; None is the kind it was built as. Every index can be opened as "exact".
      mesh: for the device index: the devices the vectors are spread over; None is one device.

    Raises:
      UserError: no finished index there; another encoder or corpus; damaged files; not enough memory; the self-check fails.
    """
    folder = Path(folder).expanduser()
    manifest = manifests.read(folder)
    if manifest is None:
        if (folder / UNFINISHED).exists():
            raise UserError(f"{folder}: the index is unfinished; run the command that builds it again, it goes on where it stopped")
        raise UserError(f"{folder}: holds no index; build one with python -m bridge_jax.index --out {folder}")
    manifests.refuse_other(folder, manifest, encoder, corpus)
    vectors = open_vectors(folder / VECTORS, manifest.rows, manifest.dim)
    if _open_kind(folder, manifest, kind) == "exact":
        devices = list(mesh.devices.flat) if mesh is not None else jax.devices()[:1]
        _refuse_too_big(f"{folder}: the device index", vectors.nbytes, devices)
        index = DeviceIndex(vectors, mesh)
    else:
        _refuse_too_big(f"{folder}: ScaNN", scann_index.load_bytes(*vectors.shape))
        index = ScannIndex.open(vectors, folder / SCANN, manifest.scann)
    self_check(index, folder, encoder, corpus)
    return index


def _open_kind(folder: Path, manifest: Manifest, kind: str | None) -> str:
    if kind is not None and kind not in KINDS:
        raise UserError(f"kind is {kind!r}; it must be one of {', '.join(KINDS)}")
    if kind == "exact" or (kind != "scann" and manifest.scann is None):
        return "exact"
    if manifest.scann is None:
        raise UserError(
            f"{folder}: has no ScaNN searcher; add it with python -m bridge_jax.index --kind scann, or open it as exact"
        )
    if scann_index.available():
        return "scann"
    if kind == "scann":
        raise UserError("scann is not installed; pip install scann (Linux on x86-64), or open the index as exact")
    log.warning("%s: scann is not installed here, searching exactly on the device instead", folder)
    return "exact"


def self_check(index: EmbeddingIndex, folder: Path, encoder=None, corpus: Corpus | None = None) -> None:
    """A few passages must retrieve themselves (or something as near); encoded anew, they must give the stored vectors."""
    rows = np.unique(np.linspace(0, len(index) - 1, CHECKED).astype(np.int64))
    queries = index.vectors(rows)
    own = np.einsum("bd,bd->b", queries, queries)
    bad = ~(np.abs(own - 1) < 0.02)
    if bad.any():
        raise UserError(
            f"{folder}: the vector of row {rows[np.argmax(bad)]} has not unit length; delete the folder or rebuild with --force"
        )
    scores, _ = index.search(queries, 1)
    bad = ~(scores[:, 0] >= own - 1e-3)
    if bad.any():
        raise UserError(
            f"{folder}: passage in row {rows[np.argmax(bad)]} does not retrieve itself; delete the folder or rebuild with --force"
        )
    if encoder is None or corpus is None:
        return
    chosen = np.unique(np.linspace(0, len(rows) - 1, ENCODED).astype(np.int64))
    texts = [corpus.contents(int(row)) for row in rows[chosen]]
    same = np.einsum("bd,bd->b", e5.embed(encoder, texts, kind="passage"), queries[chosen])
    if not (same >= SAME_VECTOR).all():
        row = int(rows[chosen][np.argmin(same)])
        raise UserError(
            f"{folder}: passage {corpus[row].id!r} encodes to another vector; delete the folder or rebuild with --force"
        )


# Building -------------------------------------------------------------------------------------------------------------


def _resolve_kind(kind: str) -> str:
    if kind not in KINDS:
        raise UserError(f"kind is {kind!r}; it must be one of {', '.join(KINDS)}")
    if kind == "scann" and not scann_index.available():
        raise UserError("scann is not installed; pip install scann (Linux on x86-64), or use kind exact, the device index")
    if kind == "auto":
        kind = "scann" if scann_index.available() else "exact"
        if kind == "exact":
            log.warning("scann is not installed here: the index is of kind exact, searched on the device")
    return kind


@contextlib.contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Only one process builds in a folder, others wait. The lock ends with the process, however that ends."""
    if out.exists() and not out.is_dir():
        raise UserError(f"{out}: is a file; give a folder for the index")
    foreign = sorted(p.name for p in out.iterdir() if p.name not in OWN_FILES) if out.exists() else []
    if foreign:
        raise UserError(f"{out}: holds {foreign[0]!r}, which is not an index's; give a new or empty folder")
    try:
        out.mkdir(parents=True, exist_ok=True)
        file = open(out / LOCK, "a")  # noqa: SIM115
    except OSError as error:
        raise UserError(f"{out}: cannot be written ({error.strerror}); give a writable folder") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.warning("%s: another process is building this index: waiting for it", out)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _prepare(out: Path, wanted: Manifest, force: bool) -> Manifest | None:
    """Refuses, clears, or accepts what is in the folder -> the manifest of a finished index of the same; None: build or go on."""
    finished = (out / FINISHED).exists()
    if not (force and finished):  # forced, an unfinished index of the same is still continued: a forced run may have been killed
        have = manifests.read(out, FINISHED if finished else UNFINISHED)
        found = manifests.difference(have, wanted) if have else None
        if found and not force:
            state = "an index" if finished else "an unfinished index"
            raise UserError(f"{out}: holds {state} with {found[0]}; use --force to replace it, or give another folder")
        if have and not found:
            return have if finished else None
    for name in (FINISHED, *sorted(OWN_FILES - {FINISHED, LOCK})):  # the manifest first: without it nothing here counts
        file = out / name
        shutil.rmtree(file) if file.is_dir() else file.unlink(missing_ok=True)
    wanted.write(out, UNFINISHED)
    return None


def _build_scann(out: Path, vectors: np.ndarray) -> dict:
    """Builds the searcher beside and moves it into place -> its parameters."""
    parameters = scann_index.choose_parameters(*vectors.shape)
    partial = out / SCANN_PARTIAL
    for folder in (partial, out / SCANN):
        shutil.rmtree(folder, ignore_errors=True)
    partial.mkdir()
    log.info("building the ScaNN searcher: %s", parameters)
    ScannIndex.build(vectors, partial, parameters)
    os.replace(partial, out / SCANN)
    return dataclasses.asdict(parameters)


# Bytes ----------------------------------------------------------------------------------------------------------------


def _say_needs(out: Path, wanted: Manifest) -> None:
    vectors = wanted.rows * wanted.dim * 2
    disk = vectors + (scann_index.load_bytes(wanted.rows, wanted.dim) if wanted.kind == "scann" else 0)
    memory = scann_index.build_bytes(wanted.rows, wanted.dim) if wanted.kind == "scann" else vectors
    log.info("%s passages x %d: %s on disk", f"{wanted.rows:,}", wanted.dim, _size(disk))
    present = sum(file.stat().st_size for file in (out / VECTORS, out / PARTIAL) if file.exists())
    free = shutil.disk_usage(out).free
    if disk - present > free:
        raise UserError(f"{out}: the index needs {_size(disk - present)} of disk and {_size(free)} are free; give another folder")
    _refuse_too_big(f"{out}: building", memory)


def _refuse_too_big(what: str, needed: int, devices: Sequence[jax.Device] = ()) -> None:
    """UserError when the memory (of the devices, if these are not the host) is not there. Unknown free memory refuses nothing."""
    if devices and devices[0].platform != "cpu":
        stats = [device.memory_stats() or {} for device in devices if device.process_index == jax.process_index()]
        known = [s["bytes_limit"] - s.get("bytes_in_use", 0) for s in stats if "bytes_limit" in s]
        free = min(known) * len(devices) if known else None
    else:
        free = _free_memory()
    if free is not None and needed > free:
        raise UserError(f"{what} needs {_size(needed)} of memory and {_size(free)} are free; use --limit, or a larger machine")
    log.info("%s needs %s of memory", what, _size(needed))


def _free_memory() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    except OSError:
        pass
    return None


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
