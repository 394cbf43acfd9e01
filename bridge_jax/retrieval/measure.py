"""A retriever alone, on questions: where the gold passages are, and whether the answer is in what was found."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from bridge_jax.data.formats import Question
from bridge_jax.retrieval.corpus import Corpus

YES_NO = {"yes", "no"}


def measure(
    questions: Sequence[Question], rows: np.ndarray, corpus: Corpus, ks: Sequence[int], normalize: Callable[[str], str]
) -> dict[str, np.ndarray]:
    """One value a question, NaN where the question says nothing.

    Args:
      rows: [Q, C] passages found, best first, C >= max(ks). normalize: of answers and passages (rewards.normalize_answer).

    Returns:
      recall@k: share of the gold passage ids among the first k; of a gold id that the corpus lacks, none.
      mrr: 1 / rank of the first gold passage, 0 when none of the C is one. (NaN without gold passage ids, as recall.)
      answer@k: 1.0 when one of the first k holds a gold answer; NaN for yes/no questions, whose answers are words of any text.
    """
    found: dict[str, list[float]] = {name: [] for name in (*(f"recall@{k}" for k in ks), "mrr", *(f"answer@{k}" for k in ks))}
    for question, line in zip(questions, rows, strict=True):
        golds = set(question.gold_passage_ids)
        gold_rows = {row for row in (_row_of(corpus, gold) for gold in golds) if row is not None}
        hits = np.isin(line, list(gold_rows))
        for k in ks:
            found[f"recall@{k}"].append(hits[:k].sum() / len(golds) if golds else np.nan)
        found["mrr"].append(np.nan if not golds else 1 / (1 + int(np.argmax(hits))) if hits.any() else 0.0)
        first = _first_with_answer(question, line[: max(ks)], corpus, normalize)
        for k in ks:
            found[f"answer@{k}"].append(np.nan if first is None else float(first < k))
    return {name: np.asarray(values) for name, values in found.items()}


def _row_of(corpus: Corpus, passage_id: str) -> int | None:
    try:
        return corpus.row_of(passage_id)
    except KeyError:
        return None


def _first_with_answer(question: Question, line: np.ndarray, corpus: Corpus, normalize: Callable[[str], str]) -> float | None:
    """Where (from 0) the first passage with a gold answer stands, infinity without one; None for yes/no questions."""
    golds = [gold for gold in map(normalize, question.golds) if gold]
    if not golds or set(golds) <= YES_NO:
        return None
    for place, row in enumerate(line.tolist()):
        text = f" {normalize(corpus.contents(row))} "
        if any(f" {gold} " in text for gold in golds):
            return place
    return np.inf


def means(values: dict[str, np.ndarray]) -> dict[str, float | None]:
    """Mean over the questions that say something; None where none does."""
    return {name: float(np.nanmean(each)) if (~np.isnan(each)).any() else None for name, each in values.items()}
