"""The stored passage vectors and what every index kind shares: argument checks, exact rescoring, a deterministic order.

An index kind only proposes candidates. Their scores are then computed here, once, from the stored vectors in float32, so that all
kinds return the same numbers for the same passage, and equal scores are ordered by row.
"""

from __future__ import annotations

import abc
import math
import os
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np

from bridge_jax.errors import UserError
from bridge_jax.retrieval.mapped import open_array

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
SLACK = 16  # candidates proposed beyond k: near ties at the cut are decided by the exact score, not by the proposal's rounding
RESCORE_BYTES = 64 << 20

# What a store keeps of each vector: (file, dtype, values a row; 0 stands for the dimensions).
STORES = {
    "bfloat16": (("embeddings.bf16", BFLOAT16, 0),),
    "int8": (("embeddings.int8", np.dtype(np.int8), 0), ("embeddings.scale", np.dtype(np.float32), 1)),
}
STORE_FILES = {name for parts in STORES.values() for name, _, _ in parts}


def vector_bytes(rows: int, dim: int, store: str) -> int:
    """What the vectors take, in a file or on devices."""
    return sum(rows * (width or dim) * dtype.itemsize for _, dtype, width in STORES[store])


class Int8Vectors:
    """[N, D] float32 from 8 bits a value and a scale a row; rows are converted when they are asked for.

    codes [N, D] int8 and scales [N, 1] float32, memory-mapped. The error of a value is at most half a 127th of its row's largest.
    """

    def __init__(self, codes: np.ndarray, scales: np.ndarray):
        self.codes, self.scales = codes, scales
        self.shape, self.nbytes = codes.shape, codes.nbytes + scales.nbytes

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, rows) -> np.ndarray:
        return np.asarray(self.codes[rows], np.float32) * self.scales[rows]


Vectors = np.ndarray | Int8Vectors


def quantize(vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[N, D] -> codes [N, D] int8, scales [N, 1] float32. Rows that are not finite come out as zeros."""
    vectors = np.nan_to_num(np.asarray(vectors, np.float32), nan=0.0, posinf=0.0, neginf=0.0)
    scales = np.abs(vectors).max(-1, keepdims=True) / np.float32(127)
    return np.rint(vectors / np.where(scales == 0, 1, scales)).astype(np.int8), scales


def open_vectors(folder: Path, rows: int, dim: int, store: str = "bfloat16") -> Vectors:
    """The vectors [rows, dim] of an index folder, memory-mapped. FileChanged when they are read after their file has changed.

    Raises:
      UserError: a file is missing or has another size.
    """
    parts = []
    for name, dtype, width in STORES[store]:
        file, shape = folder / name, (rows, width or dim)
        found, wanted = (file.stat().st_size if file.is_file() else 0), math.prod(shape) * dtype.itemsize
        if found != wanted:
            raise UserError(f"{file}: holds {found:,} bytes where {wanted:,} belong; rebuild the index with --force")
        parts.append(open_array(file, dtype, 0, shape))
    return parts[0] if store == "bfloat16" else Int8Vectors(*parts)


class VectorWriter:
    """Appends vectors to the files of a store, under names ending in .part until `close`. Goes on with what a kill has left.

    Attributes:
      rows: how many are written.
    """

    def __init__(self, folder: Path, dim: int, store: str, keep_multiple: int):
        """`keep_multiple`: of what is there, a multiple of so many rows is kept; 0: nothing."""
        self._folder, self._store = folder, store
        self.rows = self.written(folder, dim, store) // keep_multiple * keep_multiple if keep_multiple else 0
        self._files = []
        for name, dtype, width in STORES[store]:
            if self.rows and not (folder / f"{name}.part").exists():
                os.replace(folder / name, folder / f"{name}.part")
            file = open(folder / f"{name}.part", "ab")  # noqa: SIM115
            file.truncate(self.rows * (width or dim) * dtype.itemsize)
            self._files.append(file)

    @staticmethod
    def written(folder: Path, dim: int, store: str) -> int:
        """The rows a writer that did not come to its end has left."""
        rows = []
        for name, dtype, width in STORES[store]:
            # A kill in `close` leaves some of the files with their names.
            file = next((f for f in (folder / f"{name}.part", folder / name) if f.exists()), None)
            rows.append(file.stat().st_size // ((width or dim) * dtype.itemsize) if file else 0)
        return min(rows)

    def append(self, vectors: np.ndarray) -> None:
        """[n, D] of any float dtype; on disk when this returns."""
        parts = (np.asarray(vectors, BFLOAT16),) if self._store == "bfloat16" else quantize(vectors)
        for part, file in zip(parts, self._files, strict=True):
            file.write(np.ascontiguousarray(part).view(np.uint8).data)
            file.flush()
            os.fsync(file.fileno())
        self.rows += len(vectors)

    def close(self) -> None:
        for file, (name, _, _) in zip(self._files, STORES[self._store], strict=True):
            file.close()
            os.replace(self._folder / f"{name}.part", self._folder / name)


def rescore(embeddings: Vectors, queries: np.ndarray, candidates: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The best k of each query's candidates by exact inner product.

    Args:
      embeddings: [N, D].
      queries: [B, D] float32.
      candidates: [B, C] rows, C >= k; -1 marks an empty place, of which at most C - k may be in a line.

    Returns:
      scores [B, k] float32, best first, and rows [B, k] int32. Equal scores are ordered by row.
    """
    scores = np.empty(candidates.shape, np.float32)
    step = max(1, RESCORE_BYTES // (4 * candidates.shape[1] * embeddings.shape[1]))
    for at in range(0, len(queries), step):
        part = candidates[at : at + step]
        vectors = np.asarray(embeddings[np.maximum(part, 0)]).astype(np.float32)
        # einsum sums every product in the same order wherever it stands in the batch; a BLAS product does not.
        scores[at : at + step] = np.einsum("bd,bcd->bc", queries[at : at + step], vectors)
    scores = np.where(candidates < 0, -np.inf, scores)
    best = np.lexsort((candidates, -scores), axis=-1)[:, :k]
    return np.take_along_axis(scores, best, -1), np.take_along_axis(candidates, best, -1).astype(np.int32)


def check_queries(queries: np.ndarray, dim: int, k: int, rows: int) -> np.ndarray:
    """-> queries as contiguous float32.

    Raises:
      UserError: k is out of range.
      ValueError: queries of another shape, or not finite.
    """
    queries = np.ascontiguousarray(queries, np.float32)
    if queries.ndim != 2 or queries.shape[1] != dim:
        raise ValueError(f"queries have shape {queries.shape}; the index holds vectors of {dim} dimensions")
    if not np.isfinite(queries).all():
        raise ValueError(f"query {int(np.argmin(np.isfinite(queries).all(-1)))} of the batch is not finite")
    if not 1 <= k <= rows:
        raise UserError(f"{k} passages asked for from an index of {rows}; ask for 1 to {rows}")
    return queries


class EmbeddingIndex(abc.ABC):
    """Inner-product search over stored passage vectors.

    Attributes:
      kind: "scann" or "exact".
      embeddings: [N, D], memory-mapped.
    """

    kind: str

    def __init__(self, embeddings: Vectors):
        self.embeddings = embeddings

    def __len__(self) -> int:
        return len(self.embeddings)

    @property
    def dim(self) -> int:
        return self.embeddings.shape[1]

    def vectors(self, rows: np.ndarray) -> np.ndarray:
        """The stored vectors of `rows` [...] as float32 [..., D]."""
        return np.asarray(self.embeddings[np.asarray(rows)]).astype(np.float32)

    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """The k best passages of each query.

        Args:
          queries: [B, D] float32, finite.
          k: at most the number of passages.

        Returns:
          scores [B, k] float32 (exact inner products with the stored vectors), best first; rows [B, k] int32.

        Raises:
          UserError: k is out of range.
          ValueError: queries of another shape, or not finite.
        """
        queries = check_queries(queries, self.dim, k, len(self))
        if not len(queries):
            return np.zeros((0, k), np.float32), np.zeros((0, k), np.int32)
        return rescore(self.embeddings, queries, self._candidates(queries, min(k + SLACK, len(self))), k)

    @abc.abstractmethod
    def _candidates(self, queries: np.ndarray, count: int) -> np.ndarray:
        """[B, D] float32 -> distinct rows [B, count] of the (nearly) best passages, in any order."""


def query_batches(queries: np.ndarray, smallest: int = 8, largest: int = 256) -> Iterator[tuple[int, np.ndarray]]:
    """Cuts [B, D] into batches padded with zeros to a power of two, so that few shapes are compiled. Yields (real rows, batch)."""
    for at in range(0, len(queries), largest):
        part = queries[at : at + largest]
        size = max(smallest, 1 << math.ceil(math.log2(len(part))))
        yield len(part), np.pad(part, ((0, size - len(part)), (0, 0)))


def exact_top(embeddings: Vectors, queries: np.ndarray, k: int, block: int = 65_536) -> tuple[np.ndarray, np.ndarray]:
    """Exact search on the host in bounded memory, for a sample of queries against a store that need not fit: the truth of a tuning.

    Returns scores [B, k] float32 and rows [B, k] int32, as `EmbeddingIndex.search`.
    """
    scores, rows = np.full((len(queries), 0), 0, np.float32), np.zeros((len(queries), 0), np.int64)
    count = min(k + SLACK, len(embeddings))
    for at in range(0, len(embeddings), block):
        part = queries @ np.asarray(embeddings[at : at + block]).astype(np.float32).T
        keep = min(count, part.shape[1])
        best = np.argpartition(-part, keep - 1, axis=-1)[:, :keep]
        scores = np.concatenate([scores, np.take_along_axis(part, best, -1)], -1)
        rows = np.concatenate([rows, best + at], -1)
        if scores.shape[1] > count:
            best = np.argpartition(-scores, count - 1, axis=-1)[:, :count]
            scores, rows = np.take_along_axis(scores, best, -1), np.take_along_axis(rows, best, -1)
    return rescore(embeddings, queries, rows, k)
