"""ScaNN's two search parameters, picked on a sample of queries for a requested recall, and the recall they then have on others.

Recall@k of a query: of its k exact best, the share whose scores the search reaches (equal scores count as equal passages).
The cheapest pair that reaches the target, and MARGIN, on one half of the sample is taken; the other half, which had no say, gives
the figure that is written into the manifest.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import numpy as np

from bridge_jax.retrieval.corpus import Corpus
from bridge_jax.retrieval.scann_index import ScannIndex
from bridge_jax.retrieval.vectors import exact_top

log = logging.getLogger(__name__)

K = 40  # candidates of a turn
RECALL = 0.98
QUERIES = 512
REORDER = (100, 200, 400, 800, 1600)
SAME_SCORE = 1e-5
STEP = 1.2  # between two numbers of leaves that are tried
MARGIN = 0.25  # of what the target leaves open: what is picked for some queries does a little less for others


def sample_queries(corpus: Corpus, count: int = QUERIES, seed: int = 0) -> list[str]:
    """Queries made from passages, for a corpus without questions: four to twelve words in a row out of the text."""
    rng = np.random.default_rng(seed)
    queries = []
    for row in rng.choice(len(corpus), min(count, len(corpus)), replace=False):
        passage = corpus[int(row)]
        words = f"{passage.title} {passage.text}".split()
        length = int(rng.integers(4, 13))
        start = int(rng.integers(0, max(1, len(words) - length + 1)))
        queries.append(" ".join(words[start : start + length]))
    return queries


def recall_of(index, queries: np.ndarray, truth: np.ndarray) -> tuple[float, float]:
    """-> (mean recall@k, seconds a query). truth [B, k]: the exact best scores of each query, as `exact_top` gives them."""
    began = time.perf_counter()
    scores, _ = index.search(queries, truth.shape[1])
    seconds = (time.perf_counter() - began) / len(queries)
    return float((scores >= truth[:, -1:] - SAME_SCORE).mean()), seconds


def tune(index: ScannIndex, queries: np.ndarray, target: float = RECALL, k: int = K) -> tuple[ScannIndex, dict]:
    """The index with the cheapest search that reaches `target` recall@k, and what was measured.

    Args:
      queries: [B, D] float32, at least 2.

    Returns:
      The index; {"k", "target", "recall" (held-out half), "queries", "leaves_to_search", "reorder", "milliseconds" a query of a
      batch}. When no pair reaches the target, the one with the best recall; it is said.
    """
    k = min(k, len(index))
    truth = exact_top(index.embeddings, queries, k)[0]
    picking, held = slice(0, None, 2), slice(1, None, 2)
    wanted = target + MARGIN * (1 - target)
    found = [_fewest_leaves(index, queries[picking], truth[picking], reorder, wanted) for reorder in _reorders(index, k)]
    good = [each for each in found if each[0] >= wanted]
    _, _, chosen = min(good, key=lambda each: each[1]) if good else max(found, key=lambda each: each[0])
    recall, seconds = recall_of(chosen, queries[held], truth[held])
    if recall < target:
        log.warning("recall@%d is %.4f on held-out queries where %.4f was asked for", k, recall, target)
    p = chosen.parameters
    report = {"k": k, "target": target, "recall": recall, "queries": len(queries) - len(queries) // 2}
    report |= {"leaves_to_search": p.leaves_to_search, "reorder": p.reorder, "milliseconds": 1e3 * seconds}
    return chosen, report


def _reorders(index: ScannIndex, k: int) -> Sequence[int]:
    if not index.parameters.dims_per_block:
        return (0,)
    return [r for r in REORDER if k <= r < len(index)] or [len(index)]


def _fewest_leaves(index: ScannIndex, queries, truth, reorder: int, target: float) -> tuple[float, float, ScannIndex]:
    """-> (recall, seconds a query, the index) with the fewest leaves that reach the target; all leaves when none do."""
    leaves = index.parameters.leaves
    if not leaves:
        chosen = index.with_search(0, reorder)
        return *recall_of(chosen, queries, truth), chosen
    steps = [leaves]
    while steps[-1] > 1:
        steps.append(min(steps[-1] - 1, int(steps[-1] / STEP)))
    steps.reverse()
    low, high, found = 0, len(steps) - 1, None
    while low < high:
        middle = (low + high) // 2
        chosen = index.with_search(steps[middle], reorder)
        recall, seconds = recall_of(chosen, queries, truth)
        if recall >= target:
            high, found = middle, (recall, seconds, chosen)
        else:
            low = middle + 1
    if found is None or found[2].parameters.leaves_to_search != steps[high]:
        chosen = index.with_search(steps[high], reorder)
        found = (*recall_of(chosen, queries, truth), chosen)
    return found
