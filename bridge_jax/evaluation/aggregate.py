"""From answers to numbers: a record a question, means and intervals a data set, averages over data sets. Pure functions.

Names are fixed: `em` (the headline), `f1`, `sub_em`, `recall@3`, `recall@<k>` (k = candidates), `searches`, `generated_tokens`.

Recall is over the episode: the share of the question's gold passages that occur among the first 3 (or k) results of any of its
searches. Where the source names no passages, or none that this corpus holds, it is 1 when a gold answer occurs there (normalised,
as whole words), else 0; a question that is answered by yes, no or maybe has none then. `recall_by` of a record says which it was.
An episode without a search has recall 0 and is counted in `no_search`; who cannot search (`may_search`) has none.

Multiple-choice questions: `em` is 1 when the answer names the right option, by letter or text; `choice` is the letter it names,
None (`unparseable`) for an answer that names none; f1 and sub_em mean nothing and are None.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from bridge_jax.data import medical, mini
from bridge_jax.data.formats import Question, canonical_name
from bridge_jax.data.medical import MedicalQuestion
from bridge_jax.evaluation.choices import choose
from bridge_jax.objectives import rewards
from bridge_jax.retrieval.corpus import Corpus
from bridge_jax.rollout.episodes import Episode, Turn
from bridge_jax.training.episode_metrics import answer_in_top, recall

SINGLE_HOP = ("nq", "triviaqa", "popqa", "one_hop", "one_hop_ood")
MULTI_HOP = ("hotpotqa", "2wikimultihopqa", "musique", "bamboogle", *mini.MULTI_HOP)
MEDICAL = tuple(medical.TASKS)
STATUSES = ("answered", "no_answer", "truncated", "context_full", "environment_fault")
RESAMPLES = 1000
UNPARSEABLE = "unparseable"  # a reason beside rewards.REASONS
_UNTOLD = frozenset({"yes", "no", "maybe"})  # answers that a passage holds by chance


@dataclasses.dataclass
class Outcome:
    """What became of one question.

    latency: seconds it was under way, the waits for others included. outage: the index failed; the question should be asked again.
    """

    question: Question
    turns: list[Turn]
    status: str
    answer: str | None
    trace: list[tuple[str, str]]
    prompt_tokens: int  # read: prompts and observations, those of every request
    generated_tokens: int
    latency: float = 0.0
    may_search: bool = True
    outage: bool = False

    @classmethod
    def of(cls, episode: Episode) -> Outcome:
        generated = int(episode.generated.sum())
        read = len(episode.prompt) + len(episode.tokens) - generated
        what = episode.question, episode.turns, episode.status, episode.answer, episode.trace
        return cls(*what, read, generated, episode.seconds, outage=episode.status == "environment_fault")


def record(outcome: Outcome | Episode, corpus: Corpus | None, k: int) -> dict:
    """One question's prediction as a JSON object: scores, what was retrieved, and the trace. corpus None: nobody searched."""
    if isinstance(outcome, Episode):
        outcome = Outcome.of(outcome)
    question = outcome.question
    by, (recall_3, recall_k) = _recalls(outcome, corpus, (3, k))
    return {
        "id": question.id,
        "dataset": question.dataset,
        "question": question.question,
        "golds": list(question.golds),
        "prediction": outcome.answer,
        "status": outcome.status,
        **_scores(outcome),
        "recall@3": recall_3,
        f"recall@{k}": recall_k,
        "recall_by": by,
        "searches": len(outcome.turns),
        "generated_tokens": outcome.generated_tokens,
        "prompt_tokens": outcome.prompt_tokens,
        "turns": [
            {
                "query": turn.query,
                "ids": [corpus[int(row)].id for row in turn.rows[:k] if row >= 0],
                "scores": [round(float(score), 6) for row, score in zip(turn.rows[:k], turn.scores) if row >= 0],
                "shown": turn.shown,
            }
            for turn in outcome.turns
        ],
        "gold_passage_ids": list(question.gold_passage_ids),
        "trace": [{"kind": kind, "text": text} for kind, text in outcome.trace],
    }


def _scores(outcome: Outcome) -> dict:
    """reason, em, f1, sub_em; for a multiple-choice question options, letter and choice too."""
    question, answer = outcome.question, outcome.answer
    searched = not outcome.may_search or any(turn.shown for turn in outcome.turns)
    if not isinstance(question, MedicalQuestion):
        _, reason = rewards.score_episode(answer, outcome.status, question.golds, searched)
        scores = {"em": rewards.exact_match(answer, question.golds), "f1": rewards.f1(answer, question.golds)}
        return {"reason": reason} | scores | {"sub_em": rewards.sub_em(answer, question.golds)}
    choice = choose(answer, question.options)
    right = choice == question.letter and outcome.status != "environment_fault"
    _, reason = rewards.score_episode(answer, outcome.status, question.golds, searched)
    if right:
        reason = "correct"
    elif answer and answer.strip() and choice is None:
        reason = UNPARSEABLE
    elif reason == "correct":
        reason = "wrong answer"
    chosen = {"options": dict(question.options), "letter": question.letter, "choice": choice}
    return {"reason": reason, "em": float(right), "f1": None, "sub_em": None} | chosen


def _recalls(outcome: Outcome, corpus: Corpus | None, depths: Sequence[int]) -> tuple[str | None, list[float | None]]:
    if corpus is None or not outcome.may_search:
        return None, [None] * len(depths)
    known = known_ids(outcome.question.gold_passage_ids, corpus)
    if known:
        question = dataclasses.replace(outcome.question, gold_passage_ids=known)
        return "id", [recall(dataclasses.replace(outcome, question=question), corpus, k) for k in depths]
    if {rewards.normalize_answer(gold) for gold in outcome.question.golds} <= _UNTOLD:
        return None, [None] * len(depths)
    found = [answer_in_top(outcome, corpus, k) for k in depths]
    return (None if found[0] is None else "answer"), found


def known_ids(ids: Sequence[str], corpus: Corpus) -> tuple[str, ...]:
    """All of the ids, if the corpus holds one of them: ids of another corpus say nothing about this one."""
    for id in ids:
        try:
            corpus.row_of(id)
        except KeyError:
            continue
        return tuple(ids)
    return ()


def summarise(records: Sequence[Mapping], k: int, seed: int = 0) -> dict:
    """The metrics of one data set. `em_low`, `em_high`: 95 % bootstrap interval over questions.

    Of multiple-choice questions also `accuracy` (em), its `standard_error` sqrt(p (1 - p) / n) and how many were `unparseable`.
    """
    low, high = interval([[row["em"] for row in records]], seed)
    statuses = Counter(row["status"] for row in records)
    summary = {"n": len(records), "em": _mean(records, "em"), "em_low": low, "em_high": high}
    summary |= {name: _mean(records, name) for name in _names(k)[1:]}
    summary["no_search"] = sum(not row["searches"] for row in records)
    summary["recall_by"] = {by: sum(row.get("recall_by") == by for row in records) for by in ("id", "answer")}
    summary["statuses"] = {status: statuses[status] for status in STATUSES}
    summary["reasons"] = dict(sorted(Counter(row["reason"] for row in records).items()))
    if all("choice" in row for row in records):
        accuracy = summary["em"]
        summary["accuracy"] = accuracy
        summary["standard_error"] = float(np.sqrt(accuracy * (1 - accuracy) / len(records)))
        summary["unparseable"] = sum(row["choice"] is None for row in records)
    return summary


def result(records: Mapping[str, Sequence[Mapping]], k: int, seed: int = 0) -> dict:
    """{"datasets": {name: `summarise`}, "averages", "predictions": the records, "k"}."""
    return {
        "datasets": {name: summarise(rows, k, seed) for name, rows in records.items()},
        "averages": averages(records, k, seed),
        "predictions": dict(records),
        "k": k,
    }


def averages(records: Mapping[str, Sequence[Mapping]], k: int, seed: int = 0) -> dict[str, dict]:
    """{"single_hop", "multi_hop", "medical", "overall"}: every data set counts the same. No set of a kind, no entry."""
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
    """{"single_hop", "multi_hop", "medical", "overall"}: the sets each average is over; a group without a set is left out."""
    known = {"single_hop": SINGLE_HOP, "multi_hop": MULTI_HOP, "medical": MEDICAL}
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
    names = ("em", "f1", "sub_em", "recall@3", f"recall@{k}", "searches", "generated_tokens", "prompt_tokens", "latency")
    return tuple(dict.fromkeys(names))


def _mean(records: Sequence[Mapping], name: str) -> float | None:
    values = [row[name] for row in records if row.get(name) is not None]
    return float(np.mean(values)) if values else None
