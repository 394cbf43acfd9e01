"""Queries -> passages: the query tower with its LoRA, then the index, with bounded retries around it."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bridge_jax.errors import UserError
from bridge_jax.models import e5
from bridge_jax.retrieval.corpus import Corpus
from bridge_jax.retrieval.vectors import EmbeddingIndex

log = logging.getLogger(__name__)

ATTEMPTS = 3
FIRST_WAIT = 0.2


class RetrievalFault(Exception):
    """The index failed every attempt. The rollout marks its episodes as environment faults; it never blames the policy."""


class RetrievalResult(NamedTuple):
    """query_vectors [B, D] float32 of unit length; scores [B, k] float32, best first; rows [B, k] int32 into the corpus."""

    query_vectors: np.ndarray
    scores: np.ndarray
    rows: np.ndarray


class Retriever:
    """Search by text. Holds no state beyond its parts: the LoRA is an argument of every search."""

    def __init__(self, encoder, index: EmbeddingIndex, corpus: Corpus):
        if len(index) != len(corpus):
            raise UserError(f"the index holds {len(index):,} passages, the corpus {len(corpus):,}; open the corpus of this index")
        self.encoder, self.index, self.corpus = encoder, index, corpus

    def search(self, queries: Sequence[str], k: int, lora=None) -> RetrievalResult:
        """The k best passages of each query; `lora` None is the base query tower.

        Raises:
          RetrievalFault: the index failed `ATTEMPTS` times.
          UserError: k is more than the corpus holds.
        """
        vectors = e5.embed(self.encoder, list(queries), kind="query", lora=lora)
        return RetrievalResult(vectors, *self._search(vectors, k))

    def _search(self, vectors: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return self.index.search(vectors, k)
            except (UserError, RetrievalFault, ValueError, TypeError):
                raise  # a mistake of the caller, or a server that was tried again and again: once more would fail too
            except Exception as error:
                if attempt == ATTEMPTS:
                    raise RetrievalFault(f"the index failed {ATTEMPTS} times: {error}") from error
                log.warning("search failed (%s), attempt %d of %d follows", error, attempt + 1, ATTEMPTS)
                time.sleep(FIRST_WAIT * 2 ** (attempt - 1))
        raise AssertionError("unreachable")


def recall_at(rows: np.ndarray, gold_rows: Sequence[Sequence[int]], k: int) -> np.ndarray:
    """Share of each query's gold passages among its first k rows: rows [B, >= k] -> [B] float32, NaN for a query without golds."""
    found = [len(set(golds) & set(map(int, row[:k]))) / len(set(golds)) if golds else np.nan for row, golds in zip(rows, gold_rows)]
    return np.asarray(found, np.float32)
