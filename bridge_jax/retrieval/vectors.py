"""The stored passage vectors and what every index kind shares: argument checks, exact rescoring, a deterministic order.

An index kind only proposes candidates. Their scores are then computed here, once, from the stored bfloat16 vectors in float32, so
that all kinds return the same numbers for the same passage, and equal scores are ordered by row.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np

from bridge_jax.errors import UserError

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
SLACK = 16  # candidates proposed beyond k: near ties at the cut are decided by the exact score, not by the proposal's rounding
RESCORE_BYTES = 64 << 20


def open_vectors(file: Path, rows: int, dim: int, mode: str = "r") -> np.memmap:
    """The bfloat16 matrix [rows, dim] of an index folder, memory-mapped (mode "w+" creates it)."""
    if mode != "w+":
        found, wanted = (file.stat().st_size if file.is_file() else 0), rows * dim * 2
        if found != wanted:
            raise UserError(f"{file}: holds {found:,} bytes where {wanted:,} belong; rebuild the index with --force")
    return np.memmap(file, BFLOAT16, mode, 0, (rows, dim))


def rescore(embeddings: np.ndarray, queries: np.ndarray, candidates: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The best k of each query's candidates by exact inner product.

    Args:
      embeddings: [N, D] bfloat16.
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


class EmbeddingIndex(abc.ABC):
    """Inner-product search over stored passage vectors.

    Attributes:
      kind: "scann" or "exact".
      embeddings: [N, D] bfloat16, memory-mapped.
    """

    kind: str

    def __init__(self, embeddings: np.ndarray):
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
        queries = np.ascontiguousarray(queries, np.float32)
        if queries.ndim != 2 or queries.shape[1] != self.dim:
            raise ValueError(f"queries have shape {queries.shape}; the index holds vectors of {self.dim} dimensions")
        if not np.isfinite(queries).all():
            raise ValueError(f"query {int(np.argmin(np.isfinite(queries).all(-1)))} of the batch is not finite")
        if not 1 <= k <= len(self):
            raise UserError(f"{k} passages asked for from an index of {len(self)}; ask for 1 to {len(self)}")
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
