"""Several encoders searched as one, as MedRAG does: by reciprocal rank.

    FusedRetriever([e5_on_all_corpora, medcpt_on_all_corpora])

The scores of two encoders are not comparable: a passage's score is the sum over encoders of 1 / (100 + its rank). (Those of one
encoder over several corpora are: `retrieval.merged`.)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bridge_jax.errors import UserError
from bridge_jax.retrieval.retriever import RetrievalResult, Retriever

RRF_K = 100


class FusedRetriever:
    """`search` and `corpus` of a Retriever. retrievers: one an encoder, over the same passages in the same order."""

    def __init__(self, retrievers: Sequence[Retriever], rrf_k: int = RRF_K):
        if len({retriever.corpus.fingerprint for retriever in retrievers}) != 1:
            raise UserError("every encoder must be over the same corpora")
        self.retrievers, self.rrf_k, self.corpus = list(retrievers), rrf_k, retrievers[0].corpus

    def search(self, queries: Sequence[str], k: int, lora=None) -> RetrievalResult:
        """The k best passages of each query; `lora` and query_vectors are of the first encoder's query tower."""
        depth = min(max(2 * k, 100), len(self.corpus))
        found = [retriever.search(queries, depth, lora=None if n else lora) for n, retriever in enumerate(self.retrievers)]
        fused = [fuse([one.rows[n] for one in found], k, self.rrf_k) for n in range(len(queries))]
        scores, rows = (np.stack(part) for part in zip(*fused, strict=True))
        return RetrievalResult(found[0].query_vectors, scores, rows)


def fuse(lists: Sequence[np.ndarray], k: int, rrf_k: int = RRF_K) -> tuple[np.ndarray, np.ndarray]:
    """Reciprocal-rank fusion of ranked rows (-1: none): (scores [k] float32, rows [k] int32), -inf and -1 where there are fewer.

    Of equal scores the one comes first that is higher in the first list, then in the second, and so on.
    """
    scores: dict[int, float] = {}
    for ranked in lists:
        for rank, row in enumerate(map(int, ranked), start=1):
            if row >= 0:
                scores[row] = scores.get(row, 0.0) + 1 / (rrf_k + rank)
    # Rounded: a sum of three in another order differs in its last bit. Stable: dict order is the order of first mention.
    best = sorted(scores, key=lambda row: -round(scores[row], 12))[:k]
    pad = k - len(best)
    return (
        np.asarray([scores[row] for row in best] + [-np.inf] * pad, np.float32),
        np.asarray(best + [-1] * pad, np.int32),
    )
