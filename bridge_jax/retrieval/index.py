"""An index folder: built once, resumable, never overwritten unasked; opened only for what it was built from, and if it works.

embeddings.bf16   [N, D] bfloat16, row-major, memory-mapped; or embeddings.int8 and embeddings.scale (vectors.STORES)
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
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
import numpy as np

from bridge_jax.errors import UserError
from bridge_jax.models import e5
from bridge_jax.retrieval import manifest as manifests
from bridge_jax.retrieval import scann_index, tuning
from bridge_jax.retrieval.corpus import Corpus, Source
from bridge_jax.retrieval.device_index import DeviceIndex
from bridge_jax.retrieval.embed import BATCH_TOKENS, SHARD_ROWS, SHARDS, assemble, assembled_rows, encode_shards
from bridge_jax.retrieval.faiss_file import open_flat
from bridge_jax.retrieval.manifest import FINISHED, UNFINISHED, Manifest
from bridge_jax.retrieval.memory import refuse_too_big, shown_size
from bridge_jax.retrieval.progress import track
from bridge_jax.retrieval.scann_index import ScannIndex
from bridge_jax.retrieval.self_check import self_check
from bridge_jax.retrieval.vectors import STORE_FILES, STORES, EmbeddingIndex, Vectors, VectorWriter, open_vectors, vector_bytes

log = logging.getLogger(__name__)

KINDS = ("auto", "scann", "exact", "approx")
SCANN, SCANN_PARTIAL, LOCK = "scann", "scann.partial", "building.lock"
OWN_FILES = {SHARDS, SCANN, SCANN_PARTIAL, LOCK, FINISHED, UNFINISHED, f"{FINISHED}.tmp", f"{UNFINISHED}.tmp"}
OWN_FILES |= STORE_FILES | {f"{name}.part" for name in STORE_FILES}
IMPORT_ROWS = 65_536
POLL_SECONDS = 2.0


def build_index(
    corpus: Corpus | Source,
    encoder,
    out: str | os.PathLike,
    kind: str = "auto",
    limit: int | None = None,
    *,
    batch_tokens: int = BATCH_TOKENS,
    force: bool = False,
    shard_rows: int = SHARD_ROWS,
    part: tuple[int, int] = (0, 1),
    wait: bool = False,
    store: str = "bfloat16",
    faiss_file: str | os.PathLike | None = None,
    queries: Sequence[str] | None = None,
    recall: float = tuning.RECALL,
) -> EmbeddingIndex | None:
    """Builds an index folder, or goes on with an unfinished one, or reuses a finished one of the same encoder and corpus.

    Args:
      corpus: an open corpus, or what `Corpus.open` takes (with `limit`: the first so many passages).
      encoder: a models.e5.Encoder.
      out: the folder; new, empty, or an index folder.
      kind: "scann", "exact" (the device index), or "auto": ScaNN where it is installed.
      force: replace the index in the folder (nothing but index files is ever deleted).
      part: (i, n): encode every n-th shard only; the part that is done last finishes the index. wait: the others wait for it;
        their result is None otherwise.
      store: as `vectors.STORES`.
      faiss_file: take the vectors from a FAISS Flat index of the same passages in the same order, and encode nothing.
      queries, recall: what ScaNN's search is tuned on (None: `tuning.sample_queries`) and for; 0 leaves it as the rule chose it.

    Returns:
      The opened, self-checked index.

    Raises:
      UserError: bad corpus; `out` holds something else; not enough memory or disk; a FAISS file that does not fit.
    """
    corpus = corpus if isinstance(corpus, Corpus) else Corpus.open(corpus, limit)
    out, kind = Path(out).expanduser(), _resolve_kind(kind)
    if store not in STORES:
        raise UserError(f"store is {store!r}; it must be one of {', '.join(STORES)}")
    if not 0 <= part[0] < part[1]:
        raise UserError(f"shard {part[0]}/{part[1]}: it must be 0/n to n-1/n")
    wanted = manifests.make_manifest(encoder, corpus, kind, store)
    ready = None if faiss_file is None else _ready_vectors(Path(faiss_file).expanduser(), wanted)
    with _locked(out) as lock:
        have = _prepare(out, wanted, force)
        if have is None and not _has_vectors(out, wanted):
            _say_needs(out, wanted)
            if ready is not None:
                wanted = _import(ready, out, wanted)
            else:
                done = assembled_rows(out, wanted.rows, wanted.dim, store, shard_rows)
                if part[1] > 1:
                    lock(fcntl.LOCK_SH)
                encode_shards(encoder, corpus, out, part, done, batch_tokens=batch_tokens, shard_rows=shard_rows)
                if wait:
                    log.info("%s: part %d/%d is encoded; waiting for the others", out, *part)
                while True:
                    lock(fcntl.LOCK_EX)
                    have = manifests.read(out)
                    if have is not None or assemble(out, wanted.rows, wanted.dim, store, shard_rows=shard_rows):
                        break
                    if not wait:
                        log.info("%s: part %d/%d is encoded; the part that is done last finishes the index", out, *part)
                        return None
                    lock(fcntl.LOCK_UN)
                    time.sleep(POLL_SECONDS)
        if have is None:
            shutil.rmtree(out / SHARDS, ignore_errors=True)
        done = _finish(out, have or wanted, kind, encoder, corpus, queries, recall)
        if done is have:
            log.info("%s: already built from this encoder and corpus, reused", out)
    return open_index(out, encoder, corpus, kind)


def open_index(
    folder: str | os.PathLike, encoder=None, corpus: Corpus | None = None, kind: str | None = None, mesh=None
) -> EmbeddingIndex:
    """Opens a finished index folder.

    Args:
      folder: what `build_index` wrote.
      encoder, corpus: what the index will be used with; a difference from what it was built from is refused.
      kind: "scann", "exact", "approx" or "auto"; None is the kind it was built as. Every index opens as "exact" and as "approx".
      mesh: for the device index: the devices the vectors are spread over; None is one device.

    Raises:
      UserError: no finished index there; another encoder or corpus; damaged files; not enough memory; the self-check fails.
    """
    folder = Path(folder).expanduser()
    manifest = read_manifest(folder)
    manifests.refuse_other(folder, manifest, encoder, corpus)
    vectors = open_vectors(folder, manifest.rows, manifest.dim, manifest.store)
    kind = _open_kind(folder, manifest, kind)
    if kind == "scann":
        refuse_too_big(f"{folder}: ScaNN", scann_index.load_bytes(*vectors.shape, manifest.store))
        index = ScannIndex.open(vectors, folder / SCANN, manifest.scann)
    else:
        devices = list(mesh.devices.flat) if mesh is not None else jax.devices()[:1]
        refuse_too_big(f"{folder}: the device index", vectors.nbytes, devices)
        index = DeviceIndex(vectors, mesh, kind)
    self_check(index, folder, encoder, corpus, manifest.unusable)
    return index


def read_manifest(folder: Path) -> Manifest:
    """UserError when the folder holds no finished index."""
    manifest = manifests.read(folder)
    if manifest is None:
        if (folder / UNFINISHED).exists():
            raise UserError(f"{folder}: the index is unfinished; run the command that builds it again, it goes on where it stopped")
        raise UserError(f"{folder}: holds no index; build one with python -m bridge_jax.index --out {folder}")
    return manifest


def _open_kind(folder: Path, manifest: Manifest, kind: str | None) -> str:
    if kind is not None and kind not in KINDS:
        raise UserError(f"kind is {kind!r}; it must be one of {', '.join(KINDS)}")
    if kind in ("exact", "approx"):
        return kind
    if kind != "scann" and manifest.scann is None:
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
def _locked(out: Path) -> Iterator[Callable[[int], None]]:
    """Only one process builds in a folder, others wait. Yields what changes the lock (fcntl.LOCK_*): parts share it to encode.

    The lock ends with the process, however that ends. Where the file system has none, it is left out.
    """
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

    def lock(how: int) -> None:
        try:
            fcntl.flock(file, how | fcntl.LOCK_NB)
        except BlockingIOError:
            log.warning("%s: another process is building this index: waiting for it", out)
            fcntl.flock(file, how)
        except OSError as error:
            log.warning("%s: no lock on this file system (%s): see to it that nothing else builds there", out, error.strerror)

    with file:
        lock(fcntl.LOCK_EX)
        yield lock


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


def _has_vectors(out: Path, wanted: Manifest) -> bool:
    try:
        open_vectors(out, wanted.rows, wanted.dim, wanted.store)
    except UserError:
        return False
    return True


def _ready_vectors(file: Path, wanted: Manifest) -> np.memmap:
    vectors = open_flat(file)
    if vectors.shape != (wanted.rows, wanted.dim):
        rows, dim = vectors.shape
        raise UserError(
            f"{file}: holds {rows:,} x {dim} where the corpus and the encoder make {wanted.rows:,} x {wanted.dim}; "
            "give the files that belong together"
        )
    return vectors


def _import(vectors: np.memmap, out: Path, wanted: Manifest) -> Manifest:
    """The vectors of a FAISS file -> the store."""
    file, unusable = vectors.filename, 0
    writer = VectorWriter(out, wanted.dim, wanted.store, 0)
    with track("importing", wanted.rows, "vectors") as advance:
        for at in range(0, wanted.rows, IMPORT_ROWS):
            block = np.array(vectors[at : at + IMPORT_ROWS])
            bad = ~np.isfinite(block).all(-1)
            block[bad] = 0
            norms = np.linalg.norm(block, axis=-1)
            unusable += int((norms == 0).sum())
            far = (norms != 0) & (np.abs(norms - 1) > 0.02)
            if far.any():
                row = at + int(np.argmax(far))
                raise UserError(
                    f"{file}: the vector of row {row} has length {norms[row - at]:.3f}, not 1; only unit vectors are searched"
                )
            writer.append(block)
            advance(len(block))
    writer.close()
    if unusable:
        log.warning("%s: %d of %d vectors are zero or not finite: their passages cannot be found", file, unusable, wanted.rows)
    wanted = dataclasses.replace(wanted, unusable=unusable, imported=str(Path(file).resolve()))
    wanted.write(out, UNFINISHED)
    return wanted


def _finish(out: Path, manifest: Manifest, kind: str, encoder, corpus: Corpus, queries, recall: float) -> Manifest:
    """Builds and tunes the searcher where there is none yet, or none for that recall; writes the manifest. -> what is there now."""
    done = manifest
    if kind == "scann":
        vectors = open_vectors(out, manifest.rows, manifest.dim, manifest.store)
        if done.scann is None:
            done = dataclasses.replace(done, scann=_build_scann(out, vectors, manifest.store), tuned=None)
        asked = bool(done.scann["dims_per_block"] and recall)
        if asked and (done.tuned is None or done.tuned["target"] != recall or queries is not None):
            index = ScannIndex.open(vectors, out / SCANN, done.scann)
            texts = list(queries) if queries is not None else tuning.sample_queries(corpus)
            tuned, report = tuning.tune(index, e5.embed(encoder, texts, kind="query"), recall)
            log.info("tuned for recall@%(k)d %(target)s: %(recall).4f on held-out queries, %(milliseconds).2f ms a query", report)
            done = dataclasses.replace(
                done, scann=tuned.describe(), tuned={**report, "from": "passages" if queries is None else "given"}
            )
    if done is not manifest or not (out / FINISHED).exists():
        done.write(out)
        (out / UNFINISHED).unlink(missing_ok=True)
    return done


def _build_scann(out: Path, vectors: Vectors, store: str) -> dict:
    """Builds the searcher beside and moves it into place -> its parameters."""
    parameters = scann_index.choose_parameters(*vectors.shape)
    partial = out / SCANN_PARTIAL
    for folder in (partial, out / SCANN):
        shutil.rmtree(folder, ignore_errors=True)
    partial.mkdir()
    log.info("building the ScaNN searcher: %s", parameters)
    refuse_too_big(f"{out}: building the searcher", scann_index.build_bytes(*vectors.shape, store))
    ScannIndex.build(vectors, partial, parameters)
    os.replace(partial, out / SCANN)
    return dataclasses.asdict(parameters)


def _say_needs(out: Path, wanted: Manifest) -> None:
    rows, dim, store = wanted.rows, wanted.dim, wanted.store
    vectors = vector_bytes(rows, dim, store)
    scann = wanted.kind == "scann"
    disk = vectors + (scann_index.load_bytes(rows, dim, store) if scann else 0)
    peak = disk + (rows * dim * 4 if scann else 0)  # ScaNN's input
    memory = scann_index.build_bytes(rows, dim, store) if scann else vectors
    log.info("%s passages x %d: %s on disk, %s while it is built", f"{rows:,}", dim, shown_size(disk), shown_size(peak))
    present = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    free = shutil.disk_usage(out).free
    if peak - present > free:
        raise UserError(
            f"{out}: the index needs {shown_size(peak - present)} of disk and {shown_size(free)} are free; give another folder"
        )
    refuse_too_big(f"{out}: building", memory)
