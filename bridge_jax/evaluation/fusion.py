"""Several encoders and corpora searched as one, as MedRAG does: corpora by score, encoders by reciprocal rank.

    FusedRetriever([[e5_on_wikipedia, e5_on_pubmed], [medcpt_on_wikipedia, medcpt_on_pubmed]])

The scores of one encoder are comparable over corpora, those of two encoders are not: for each encoder the corpora's results are put
into one order, and a passage's score is the sum over encoders of 1 / (100 + its rank). With one encoder that changes nothing, and
scores stay inner products.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bridge_jax.errors import UserError
from bridge_jax.retrieval.merged import MergedCorpus
from bridge_jax.retrieval.retriever import RetrievalResult, Retriever

RRF_K = 100


class FusedRetriever:
    """`search` and `corpus` of a Retriever. groups: a list an encoder, each over the same corpora in the same order."""

    def __init__(self, groups: Sequence[Sequence[Retriever]], rrf_k: int = RRF_K):
        corpora = [[retriever.corpus for retriever in group] for group in groups]
        if not corpora or not corpora[0] or any([*map(len, found)] != [*map(len, corpora[0])] for found in corpora):
            raise UserError("every encoder must be over the same corpora")
        self.groups, self.rrf_k = [list(group) for group in groups], rrf_k
        self.corpus = MergedCorpus(corpora[0])

    def search(self, queries: Sequence[str], k: int, lora=None) -> RetrievalResult:
        """The k best passages of each query; `lora` and query_vectors are of the first encoder's query tower."""
        depth = k if len(self.groups) == 1 else max(2 * k, 100)
        merged = [self._merged(group, queries, depth, lora if n == 0 else None) for n, group in enumerate(self.groups)]
        if len(merged) == 1:
            return merged[0]
        fused = [fuse([found.rows[n] for found in merged], k, self.rrf_k) for n in range(len(queries))]
        scores, rows = (np.stack(part) for part in zip(*fused, strict=True))
        return RetrievalResult(merged[0].query_vectors, scores, rows)

    def _merged(self, group: Sequence[Retriever], queries: Sequence[str], k: int, lora) -> RetrievalResult:
        found = [retriever.search(queries, min(k, len(retriever.corpus)), lora=lora) for retriever in group]
        scores = np.concatenate([one.scores for one in found], axis=1)
        rows = np.concatenate(
            [one.rows + np.where(one.rows >= 0, start, 0) for one, start in zip(found, self.corpus.starts)], axis=1
        )
        scores = np.where(rows >= 0, scores, -np.inf)
        order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        taken = (np.take_along_axis(part, order, axis=1) for part in (scores.astype(np.float32), rows.astype(np.int32)))
        return RetrievalResult(found[0].query_vectors, *taken)


def fuse(lists: Sequence[np.ndarray], k: int, rrf_k: int = RRF_K) -> tuple[np.ndarray, np.ndarray]:
    """Reciprocal-rank fusion of ranked rows (-1: none): (scores [k] float32, rows [k] int32), -inf and -1 where there are fewer.

    Ties go to whoever came first in the first list that has it.
    """
    scores: dict[int, float] = {}
    for ranked in lists:
        for rank, row in enumerate(map(int, ranked), start=1):
            if row >= 0:
                scores[row] = scores.get(row, 0.0) + 1 / (rrf_k + rank)
    best = sorted(scores, key=scores.get, reverse=True)[:k]  # stable: dict order is the order of first mention
    pad = k - len(best)
    return (
        np.asarray([scores[row] for row in best] + [-np.inf] * pad, np.float32),
        np.asarray(best + [-1] * pad, np.int32),
    )
