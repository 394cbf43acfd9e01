"""Passages -> vectors on disk: bucketed by length, in shards that are files of their own until all are there.

The shard is the unit of everything: passages are sorted by length inside a shard, batches never cross shards, and a shard's file
appears whole, its digest with it. So a build that was killed writes the same bytes as one that was not, and several processes, on
one machine or on many with a common folder, share the work by taking every n-th shard. The one that finds all shards there puts
them together.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from bridge_jax.errors import UserError
from bridge_jax.models import e5
from bridge_jax.retrieval.corpus import Corpus
from bridge_jax.retrieval.progress import track
from bridge_jax.retrieval.vectors import BFLOAT16, VectorWriter

SHARDS = "shards"
SHARD_ROWS = 4096
BATCH_TOKENS = 1536  # what a CPU's caches hold, MiniLM to E5-base; accelerators take more (bridge_jax/index.py)
DIGEST = 32  # bytes of the sha256 behind a shard's vectors


def encode_shards(
    encoder,
    corpus: Corpus,
    out: Path,
    part: tuple[int, int] = (0, 1),
    assembled: int = 0,
    *,
    batch_tokens: int = BATCH_TOKENS,
    shard_rows: int = SHARD_ROWS,
) -> None:
    """Encodes the passages (`corpus.contents`, with the encoder's passage prefix) of every n-th shard that is not there yet.

    Args:
      encoder: a models.e5.Encoder; its passage tower is frozen, so no LoRA enters here.
      corpus: N passages.
      out: an existing folder; shards are files in `out/shards`. The caller answers for those that are there being of the same
        encoder and corpus (retrieval/index.py compares manifests first).
      part: (i, n): shards i, i + n, i + 2n, ...
      assembled: rows that have been put together already.
      batch_tokens: tokens a forward pass.
      shard_rows: passages a shard; shards of another size are encoded anew.
    """
    rows, folder = len(corpus), out / SHARDS
    folder.mkdir(exist_ok=True)
    spans = [(at, min(at + shard_rows, rows)) for at in range(0, rows, shard_rows)][part[0] :: part[1]]
    missing = [span for span in spans if span[0] >= assembled and _read(folder, span, encoder.dim) is None]
    total = sum(stop - start for start, stop in spans)
    left = sum(stop - start for start, stop in missing)
    label = "encoding" if part[1] == 1 else f"encoding {part[0]}/{part[1]}"
    with track(label, total, "passages", total - left) as advance:
        for (start, stop), batches in _encoded(encoder, corpus, missing, batch_tokens):
            vectors = np.empty((stop - start, encoder.dim), BFLOAT16)
            for chosen, found in batches:
                _refuse_nonfinite(found, corpus, start + np.asarray(chosen))
                vectors[chosen] = found.astype(BFLOAT16)
                advance(len(chosen))
            _write(folder, (start, stop), vectors)


def _encoded(encoder, corpus: Corpus, spans, batch_tokens: int) -> Iterator[tuple[tuple[int, int], Iterator]]:
    """(span, batches of (rows within it, vectors float32)). A shard's texts are read and tokenised, and its batches given to the
    devices, while those of the one before are computed."""

    def tokenized(span: tuple[int, int]):
        return e5.tokenize(encoder, [corpus.contents(row) for row in range(*span)], "passage")

    def fetched(batches):
        return ((chosen, np.asarray(vectors)[: len(chosen)]) for chosen, vectors in batches)

    with ThreadPoolExecutor(1) as reader:
        ahead = [reader.submit(tokenized, span) for span in spans[:1]]
        running = None
        for i, span in enumerate(spans):
            ids = ahead.pop().result()
            if i + 1 < len(spans):
                ahead.append(reader.submit(tokenized, spans[i + 1]))
            started = span, e5.dispatch_many(encoder, ids, batch_tokens)
            if running is not None:
                yield running[0], fetched(running[1])
            running = started
        if running is not None:
            yield running[0], fetched(running[1])


def assemble(out: Path, rows: int, dim: int, store: str, *, shard_rows: int = SHARD_ROWS) -> bool:
    """Puts the shards together in the store's files; each is deleted when its rows are there. False when one is missing.

    A kill in between costs nothing: it goes on after the last whole shard.
    """
    spans = [(at, min(at + shard_rows, rows)) for at in range(0, rows, shard_rows)]
    done = assembled_rows(out, rows, dim, store, shard_rows)
    if not all((out / SHARDS / _name(span)).exists() for span in spans if span[0] >= done):
        return False
    writer = VectorWriter(out, dim, store, shard_rows)
    for span in spans:
        if span[0] >= writer.rows:
            vectors = _read(out / SHARDS, span, dim)
            if vectors is None:
                return False
            writer.append(vectors)
        (out / SHARDS / _name(span)).unlink(missing_ok=True)
    writer.close()
    return True


def assembled_rows(out: Path, rows: int, dim: int, store: str, shard_rows: int = SHARD_ROWS) -> int:
    """How many rows a killed `assemble` has put together."""
    return min(rows, VectorWriter.written(out, dim, store) // shard_rows * shard_rows)


def _name(span: tuple[int, int]) -> str:
    return f"{span[0]:010d}-{span[1]:010d}.bf16"


def _write(folder: Path, span: tuple[int, int], vectors: np.ndarray) -> None:
    data = vectors.tobytes()
    temporary = folder / f"{_name(span)}.{os.getpid()}.tmp"
    with open(temporary, "wb") as file:
        file.write(data)
        file.write(hashlib.sha256(data).digest())
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, folder / _name(span))


def _read(folder: Path, span: tuple[int, int], dim: int) -> np.ndarray | None:
    """A shard's vectors, None when it is not there or not sound."""
    data = b""
    with contextlib.suppress(FileNotFoundError):
        data = (folder / _name(span)).read_bytes()
    rows = span[1] - span[0]
    if len(data) != rows * dim * 2 + DIGEST or hashlib.sha256(data[:-DIGEST]).digest() != data[-DIGEST:]:
        return None
    return np.frombuffer(data, BFLOAT16, rows * dim).reshape(rows, dim)


def _refuse_nonfinite(vectors: np.ndarray, corpus: Corpus, rows: np.ndarray) -> None:
    bad = ~np.isfinite(vectors).all(-1) | (np.abs(vectors).sum(-1) == 0)
    if bad.any():
        passage = corpus[int(rows[np.argmax(bad)])].id
        raise UserError(f"the encoder gives passage {passage!r} a vector that is zero or not finite; check the encoder's weights")
