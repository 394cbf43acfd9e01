"""Numbers and log rows of a step's episodes, on the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bridge_jax.objectives import rewards
from bridge_jax.objectives.grpo import informative_groups
from bridge_jax.retrieval.corpus import Corpus
from bridge_jax.rollout.episodes import Episode, Turn
from bridge_jax.training.credit_audit import posterior
from bridge_jax.training.next_action import TurnCredit


def recall(episode: Episode, corpus: Corpus, k: int) -> float | None:
    """Share of the gold passages among the first k results of the episode's searches together; None without gold passage ids."""
    golds = set(episode.question.gold_passage_ids)
    if not golds:
        return None
    found = {corpus[int(row)].id for turn in episode.turns for row in turn.rows[:k] if row >= 0}
    return len(golds & found) / len(golds)


def answer_in_top(episode: Episode, corpus: Corpus, k: int) -> float | None:
    """1.0 when some gold answer occurs in the first k results of a search; None for yes/no questions, where that says nothing."""
    golds = [gold for gold in map(rewards.normalize_answer, episode.question.golds) if gold]
    if not golds or set(golds) <= {"yes", "no"}:
        return None
    passages = {int(row) for turn in episode.turns for row in turn.rows[:k] if row >= 0}
    texts = [f" {rewards.normalize_answer(corpus.contents(row))} " for row in passages]
    return float(any(f" {gold} " in text for gold in golds for text in texts))


def judge(episodes: Sequence[Episode], reward: str, own: rewards.Reward | None = None) -> tuple[np.ndarray, list[str]]:
    """-> (scores [B] float32 by a reward of `rewards.REWARDS`, or by one's own; why the answer of each is right or not)."""
    scores, reasons = [], []
    for e in episodes:
        em, reason = rewards.score_episode(e.answer, e.status, e.question.golds, any(turn.shown for turn in e.turns))
        if own is None:
            formed = rewards.well_formed(e.status, e.answer, e.trace)
            scores.append(rewards.REWARDS[reward](rewards.Judged(em, e.answer, e.question.golds, len(e.turns), formed)))
        else:
            scores.append(em if e.status == "environment_fault" else rewards.own_reward(own, e))
        reasons.append(reason)
    return np.asarray(scores, np.float32), reasons


def step_metrics(
    episodes: Sequence[Episode], scores: np.ndarray, reasons: Sequence[str], valid: np.ndarray, corpus: Corpus
) -> dict:
    """Reward and retrieval metrics.

    Args:
      scores: [B] float32, episodes in N groups of G. valid: [N, G] bool, False for environment faults: they are in no mean.
    """
    zero_groups = ~np.asarray(informative_groups(scores.reshape(valid.shape), valid))
    kept = np.flatnonzero(valid.reshape(-1))
    episodes, scores, reasons = [episodes[i] for i in kept], scores[kept], [reasons[i] for i in kept]
    if not episodes:
        return dict.fromkeys(("reward/mean", "reward/em", "reward/f1", "reward/no_answer"), 0.0) | {
            "reward/zero_advantage_groups": 1.0
        }
    metrics = {
        "reward/mean": float(scores.mean()),
        "reward/em": float(np.mean([rewards.exact_match(e.answer, e.question.golds) for e in episodes])),
        "reward/f1": float(np.mean([rewards.f1(e.answer, e.question.golds) for e in episodes])),
        "reward/no_answer": float(np.mean([reason in ("no answer", "cut off") for reason in reasons])),
        "reward/zero_advantage_groups": float(zero_groups.mean()),
    }
    for name, values in (
        ("retrieval/recall@3", [recall(e, corpus, 3) for e in episodes]),
        ("retrieval/answer_in_top3", [answer_in_top(e, corpus, 3) for e in episodes]),
    ):
        known = [value for value in values if value is not None]
        if known:
            metrics[name] = float(np.mean(known))
    return metrics


def rollout_rows(
    step: int,
    episodes: Sequence[Episode],
    scores: np.ndarray,
    reasons: Sequence[str],
    advantages: np.ndarray,
    corpus: Corpus,
    credits: dict[tuple[int, int], TurnCredit],
    tau: float,
):
    """One JSON object a rollout for `rollouts/step_*.jsonl`.

    Args:
      credits: by (episode number, turn number), the turns that were chosen this step.
    """
    for i, episode in enumerate(episodes):
        question = episode.question
        yield {
            "step": step,
            "id": question.id,
            "dataset": question.dataset,
            "question": question.question,
            "golds": list(question.golds),
            "gold_passage_ids": list(question.gold_passage_ids),
            "sample": episode.sample,
            "reward": float(scores[i]),
            "reason": reasons[i],
            "answer": episode.answer,
            "status": episode.status,
            "advantage": float(advantages[i]),
            "generated_tokens": int(episode.generated.sum()),
            "trace": [{"kind": kind, "text": text} for kind, text in episode.trace],
            "turns": [_turn_row(turn, corpus, credits.get((i, t)), tau, question) for t, turn in enumerate(episode.turns)],
        }


def _turn_row(turn: Turn, corpus: Corpus, credit: TurnCredit | None, tau: float, question) -> dict:
    """`l` is the credited likelihood of each document, which gives `w`; `credit` says which one it is, `span` whose action."""
    real = turn.rows >= 0
    l_d = None if credit is None else credit.likelihood
    p, w = posterior(turn.scores, l_d, tau, real)
    documents = []
    for c in np.flatnonzero(real):
        passage = corpus[int(turn.rows[c])]
        document = {"id": passage.id, "title": passage.title, "score": float(turn.scores[c]), "p": float(p[c])}
        if l_d is not None:
            document |= {"l": float(l_d[c]), "w": float(w[c])}
        documents.append(document | {"shown": bool(c < turn.shown), "gold": passage.id in question.gold_passage_ids})
    return {
        "query": turn.query,
        "error": turn.error,
        "scored": l_d is not None,
        "credit": None if credit is None else credit.kind,
        "span": None if credit is None else credit.author,
        "documents": documents,
    }
