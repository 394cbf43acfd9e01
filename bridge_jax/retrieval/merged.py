"""Several indexes of one encoder searched as one (Wikipedia + PubMed + Textbooks): each one's rows follow those of the last."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np

from bridge_jax.errors import UserError
from bridge_jax.retrieval.corpus import Corpus
from bridge_jax.retrieval.passages import Passage
from bridge_jax.retrieval.vectors import EmbeddingIndex, check_queries

HOW = ("score", "rank")


class MergedIndex:
    """`search`, `vectors`, `dim` and `len` of EmbeddingIndex over several indexes.

    how: "score", the best inner products of all, which are comparable because the encoder is one; or "rank", reciprocal rank: every
      index's first, then every index's second, and so on, whatever the corpora's sizes. Scores are inner products either way.
    """

    kind = "merged"

    def __init__(self, indexes: Sequence[EmbeddingIndex], how: str = "score"):
        if how not in HOW:
            raise UserError(f"indexes can be merged by {' or '.join(HOW)}, not by {how!r}")
        if len({index.dim for index in indexes}) != 1:
            raise UserError(f"indexes of {', '.join(str(i.dim) for i in indexes)} dimensions cannot be merged; use one encoder")
        self.indexes, self.how, self.dim = list(indexes), how, indexes[0].dim
        self._starts = np.cumsum([0, *map(len, indexes)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def vectors(self, rows: np.ndarray) -> np.ndarray:
        """The stored vectors of `rows` [...] as float32 [..., D]."""
        rows = np.asarray(rows)
        out = np.empty((*rows.shape, self.dim), np.float32)
        owner = np.searchsorted(self._starts, rows, side="right") - 1
        for i, index in enumerate(self.indexes):
            if (own := owner == i).any():
                out[own] = index.vectors(rows[own] - self._starts[i])
        return out

    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """As `EmbeddingIndex.search`; by "rank", best first means by rank, then by score."""
        queries = check_queries(queries, self.dim, k, len(self))
        found = [index.search(queries, min(k, len(index))) for index in self.indexes]
        scores = np.concatenate([s for s, _ in found], -1)
        rows = np.concatenate([r.astype(np.int64) + start for (_, r), start in zip(found, self._starts)], -1)
        ranks = np.concatenate([np.arange(s.shape[1]) for s, _ in found])
        keys = (rows, -scores) if self.how == "score" else (rows, -scores, np.broadcast_to(ranks, scores.shape))
        best = np.lexsort(keys, axis=-1)[:, :k]
        return np.take_along_axis(scores, best, -1), np.take_along_axis(rows, best, -1).astype(np.int32)


class MergedCorpus:
    """`Corpus` over several corpora, in the order of the merged index. An id that several have is that of the first."""

    def __init__(self, corpora: Sequence[Corpus]):
        self.corpora = list(corpora)
        self.path = [corpus.path for corpus in corpora]
        self.limit = None
        self.fingerprint = hashlib.sha256(" ".join(c.fingerprint for c in corpora).encode()).hexdigest()
        self.starts = np.cumsum([0, *map(len, corpora)])

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __iter__(self) -> Iterator[Passage]:
        return (passage for corpus in self.corpora for passage in corpus)

    def __getitem__(self, row: int) -> Passage:
        corpus, row = self._place(row)
        return corpus[row]

    def contents(self, row: int) -> str:
        corpus, row = self._place(row)
        return corpus.contents(row)

    def document(self, row: int) -> dict[str, str]:
        corpus, row = self._place(row)
        return corpus.document(row)

    def row_of(self, passage_id: str) -> int:
        for corpus, start in zip(self.corpora, self.starts):
            try:
                return int(start) + corpus.row_of(passage_id)
            except KeyError:
                continue
        raise KeyError(passage_id)

    def _place(self, row: int) -> tuple[Corpus, int]:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of corpora of {len(self)} passages")
        i = int(np.searchsorted(self.starts, row, side="right")) - 1
        return self.corpora[i], int(row - self.starts[i])
