"""From rollouts to numbers: a record a question, means and intervals a data set, averages over data sets. Pure functions.

Names are fixed: `em` (the headline), `f1`, `sub_em`, `recall@3`, `recall@<k>` (k = candidates), `searches`, `generated_tokens`.

Recall is by passage id over the episode: the share of the question's gold passages that occur among the first 3 (or k)
results of any of its searches. An episode without a search has recall 0 and is counted in `no_search`. A question without
gold passage ids has no recall: it is left out of that mean and counted in `without_gold_ids`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from bridge_jax.data import mini
from bridge_jax.data.formats import canonical_name
from bridge_jax.objectives import rewards
from bridge_jax.retrieval.corpus import Corpus
from bridge_jax.rollout.episodes import Episode
from bridge_jax.training.episode_metrics import recall

SINGLE_HOP = ("nq", "triviaqa", "popqa", "one_hop", "one_hop_ood")
MULTI_HOP = ("hotpotqa", "2wikimultihopqa", "musique", "bamboogle", *mini.MULTI_HOP)
STATUSES = ("answered", "no_answer", "truncated", "context_full", "environment_fault")
RESAMPLES = 1000


def record(episode: Episode, corpus: Corpus, k: int) -> dict:
    """One question's prediction as a JSON object: scores, what was retrieved, and the trace."""
    question = episode.question
    _, reason = rewards.score_episode(episode.answer, episode.status, question.golds, any(turn.shown for turn in episode.turns))
    return {
        "id": question.id,
        "dataset": question.dataset,
        "question": question.question,
        "golds": list(question.golds),
        "prediction": episode.answer,
        "status": episode.status,
        "reason": reason,
        "em": rewards.exact_match(episode.answer, question.golds),
        "f1": rewards.f1(episode.answer, question.golds),
        "sub_em": rewards.sub_em(episode.answer, question.golds),
        "recall@3": recall(episode, corpus, 3),
        f"recall@{k}": recall(episode, corpus, k),
        "searches": len(episode.turns),
        "generated_tokens": int(episode.generated.sum()),
        "turns": [
            {
                "query": turn.query,
                "ids": [corpus[int(row)].id for row in turn.rows[:k]],
                "scores": [round(float(score), 6) for score in turn.scores[:k]],
                "shown": turn.shown,
            }
            for turn in episode.turns
        ],
        "gold_passage_ids": list(question.gold_passage_ids),
        "trace": [{"kind": kind, "text": text} for kind, text in episode.trace],
    }


def summarise(records: Sequence[Mapping], k: int, seed: int = 0) -> dict:
    """The metrics of one data set. `em_low`, `em_high`: 95 % bootstrap interval over questions."""
    low, high = interval([[row["em"] for row in records]], seed)
    statuses = Counter(row["status"] for row in records)
    summary = {"n": len(records), "em": _mean(records, "em"), "em_low": low, "em_high": high}
    summary |= {name: _mean(records, name) for name in _names(k)[1:]}
    summary["no_search"] = sum(not row["searches"] for row in records)
    summary["without_gold_ids"] = sum(row["recall@3"] is None for row in records)
    summary["statuses"] = {status: statuses[status] for status in STATUSES}
    summary["reasons"] = dict(sorted(Counter(row["reason"] for row in records).items()))
    return summary


def averages(records: Mapping[str, Sequence[Mapping]], k: int, seed: int = 0) -> dict[str, dict]:
    """{"single_hop": .., "multi_hop": .., "overall": ..}: every data set counts the same. No set of a kind, no entry."""
    result = {}
    for group, names in groups(list(records)).items():
        parts = [records[name] for name in names]
        low, high = interval([[row["em"] for row in part] for part in parts], seed)
        result[group] = {"datasets": names, "n": sum(map(len, parts)), "em_low": low, "em_high": high}
        for name in _names(k):
            means = [mean for part in parts if (mean := _mean(part, name)) is not None]
            result[group][name] = float(np.mean(means)) if means else None
    return result


def groups(sets: Sequence[str]) -> dict[str, list[str]]:
    """{"single_hop", "multi_hop", "overall"}: the sets that each average is over; a group without a set is left out."""
    known = {"single_hop": SINGLE_HOP, "multi_hop": MULTI_HOP}
    found = {group: [name for name in sets if canonical_name(name.split("/")[-1]) in names] for group, names in known.items()}
    return {group: names for group, names in (found | {"overall": list(sets)}).items() if names}


def interval(values: Sequence[Sequence[float]], seed: int) -> tuple[float, float]:
    """95 % bootstrap interval of the mean over sets of the mean over questions; questions are resampled within each set."""
    rng = np.random.default_rng(seed)
    total = np.zeros(RESAMPLES)
    for part in values:
        part = np.asarray(part, np.float64)
        # How often each distinct value is drawn is all that matters: one multinomial instead of a [RESAMPLES, n] array of indices.
        distinct, counts = np.unique(part, return_counts=True)
        total += rng.multinomial(len(part), counts / len(part), RESAMPLES) @ distinct / len(part)
    low, high = np.quantile(total / len(values), [0.025, 0.975])
    return float(low), float(high)


def _names(k: int) -> tuple[str, ...]:
    return tuple(dict.fromkeys(("em", "f1", "sub_em", "recall@3", f"recall@{k}", "searches", "generated_tokens")))


def _mean(records: Sequence[Mapping], name: str) -> float | None:
    values = [row[name] for row in records if row[name] is not None]
    return float(np.mean(values)) if values else None
