"""Passages -> vectors on disk: bucketed by length, in shards, each finished shard recorded, so that a killed run goes on.

The shard is the unit of everything: passages are sorted by length inside a shard, batches never cross shards, and the record of a
shard is written after its bytes are on disk. A run that was killed therefore writes the same bytes as one that was not.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path

import numpy as np

from bridge_jax.errors import UserError
from bridge_jax.models import e5
from bridge_jax.retrieval.corpus import Corpus
from bridge_jax.retrieval.progress import track
from bridge_jax.retrieval.vectors import BFLOAT16, open_vectors

VECTORS = "embeddings.bf16"
PARTIAL = "embeddings.bf16.partial"
SHARDS = "embeddings.shards.jsonl"
SHARD_ROWS = 2048
GROUP = 4  # batches given to the encoder at a time, and steps of the progress display; it sorts them by their length in tokens


def embed_corpus(encoder, corpus: Corpus, out: Path, *, batch_size: int = 64, shard_rows: int = SHARD_ROWS) -> np.memmap:
    """Encodes every passage (`corpus.contents`, with the encoder's passage prefix) into `out/embeddings.bf16`.

    Args:
      encoder: a models.e5.Encoder; its passage tower is frozen, so no LoRA enters here.
      corpus: N passages.
      out: an existing folder. Finished vectors are reused; finished shards of an interrupted run are kept. The caller answers for
        these being of the same encoder and corpus (retrieval/index.py compares manifests first).
      batch_size: passages a forward pass.
      shard_rows: passages a shard; shards of another size are encoded anew.

    Returns:
      [N, D] bfloat16, memory-mapped read-only.
    """
    rows, dim = len(corpus), encoder.dim
    with contextlib.suppress(UserError):
        return open_vectors(out / VECTORS, rows, dim)
    done = _finished_shards(out, rows, dim, shard_rows)
    mode = "r+" if done else "w+"
    vectors = open_vectors(out / PARTIAL, rows, dim, mode)
    if mode == "w+":
        (out / SHARDS).unlink(missing_ok=True)
    shards = [(at, min(at + shard_rows, rows)) for at in range(0, rows, shard_rows)]
    finished = sum(stop - start for i, (start, stop) in enumerate(shards) if i in done)
    with open(out / SHARDS, "a", encoding="utf-8") as record, track("encoding", rows, "passages", finished) as advance:
        record.write("\n")  # ends a line that was torn by a kill
        for i, (start, stop) in enumerate(shards):
            if i in done:
                continue
            part = np.empty((stop - start, dim), BFLOAT16)
            texts = [corpus.contents(row) for row in range(start, stop)]
            order = np.argsort([len(text) for text in texts], kind="stable")
            for at in range(0, len(order), GROUP * batch_size):
                chosen = order[at : at + GROUP * batch_size]
                found = e5.embed(encoder, [texts[j] for j in chosen], kind="passage", batch_size=batch_size)
                _refuse_nonfinite(found, corpus, start + chosen)
                part[chosen] = found.astype(BFLOAT16)
                advance(len(chosen))
            vectors[start:stop] = part
            vectors.flush()
            line = {"shard": i, "shard_rows": shard_rows, "sha256": hashlib.sha256(part.tobytes()).hexdigest()}
            record.write(json.dumps(line) + "\n")
            record.flush()
            os.fsync(record.fileno())
    del vectors
    os.replace(out / PARTIAL, out / VECTORS)
    (out / SHARDS).unlink()
    return open_vectors(out / VECTORS, rows, dim)


def _finished_shards(out: Path, rows: int, dim: int, shard_rows: int) -> set[int]:
    """The shards an interrupted run finished, their bytes checked. Torn lines and other shard sizes or bytes: not done."""
    try:
        lines = (out / SHARDS).read_text(encoding="utf-8").splitlines()
        vectors = open_vectors(out / PARTIAL, rows, dim)
    except (FileNotFoundError, UserError):
        return set()
    done = set()
    for text in lines:
        try:
            line = json.loads(text)
        except ValueError:
            continue
        start = line["shard"] * shard_rows
        part = vectors[start : start + shard_rows]
        if line["shard_rows"] == shard_rows and hashlib.sha256(part.tobytes()).hexdigest() == line["sha256"]:
            done.add(line["shard"])
    return done


def _refuse_nonfinite(vectors: np.ndarray, corpus: Corpus, rows: np.ndarray) -> None:
    bad = ~np.isfinite(vectors).all(-1) | (np.abs(vectors).sum(-1) == 0)
    if bad.any():
        passage = corpus[int(rows[np.argmax(bad)])].id
        raise UserError(f"the encoder gives passage {passage!r} a vector that is zero or not finite; check the encoder's weights")
