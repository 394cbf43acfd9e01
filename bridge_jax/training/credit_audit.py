"""Does the credit find the gold passage? One flat row of numbers a credited turn, and their means by turn, hop and answer type.

Source: METHOD 3 (the audit behind "85.26 % of turns had zero advantage", "w puts 88 % on the favoured document") and METHOD 12.
p is computed from the scores the rollout retrieved with, before the update; w from that p and the credited likelihood.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from typing import TYPE_CHECKING

import numpy as np

from bridge_jax.objectives import rewards
from bridge_jax.retrieval.corpus import Corpus
from bridge_jax.rollout.episodes import Episode

if TYPE_CHECKING:
    from bridge_jax.training.credit_stage import Credited

# Columns of a row that are averaged; NaN where a number does not exist for a turn.
OF_GOLD = ("gold_in_candidates", "p_gold", "w_gold", "argmax_p_gold", "argmax_l_gold", "argmax_w_gold")
MEASURES = ("zero_advantage", "p_entropy", "p_max", "w_max", *OF_GOLD)


def audit(
    episodes: Sequence[Episode], credited: Credited, advantages: np.ndarray, corpus: Corpus, tau: float
) -> list[dict[str, float]]:
    """One row a turn of `credited`, in its order. All values are numbers:

      episode, turn (from 1), advantage, golds (gold passages of the question), yes_no (0 or 1: every gold answer is yes or no),
      hop: which of the question's gold passages the turn's gold is (from 1; 0 = the question names none). The turn's gold is the
        first one that no earlier observation of the rollout showed and that is among the candidates; else the first not shown.
      credit_answer, credit_next_action, masked, own_span, sibling_span (0 or 1): what the turn was credited by; "both" has two.
      zero_advantage (0 or 1), p_entropy (nats), p_max, w_max; gold_in_candidates, p_gold, w_gold (0 where it is no candidate),
      argmax_p_gold, argmax_l_gold, argmax_w_gold (0 or 1): of the turn's gold. NaN: no gold passage named, or masked (w, l).

    Args:
      advantages: [B] of the episodes. corpus: where gold ids are looked up; one that is missing there is in no candidates.
    """
    found: dict[tuple[str, ...], list[int]] = {}
    rows = []
    for credit in credited.credits:
        episode, turn = episodes[credit.episode], credit.turn
        ids = tuple(episode.question.gold_passage_ids)
        if ids not in found:
            found[ids] = [_row_of(corpus, passage_id) for passage_id in ids]
        golds = found[ids]
        likelihood = credit.likelihood
        if likelihood is not None and not np.isfinite(likelihood).any():
            likelihood = None  # a gold answer without a token: not credited either
        p, w = posterior(turn.scores, likelihood, tau, turn.rows >= 0)
        shown = {int(row) for earlier in episode.turns[: credit.number] for row in earlier.rows[: earlier.shown]}
        hop = hop_of(golds, shown, {int(row) for row in turn.rows})
        row = turn_of(credit.episode, credit.number, advantages[credit.episode], len(golds), episode.question.golds)
        is_gold = (turn.rows == golds[hop - 1]) & (turn.rows >= 0) if hop else None
        scored = None if likelihood is None else np.where(turn.rows >= 0, likelihood, -np.inf)
        rows.append(row | {"hop": hop} | used_of(credit.kind, credit.author) | measures_of(p, w, scored, is_gold))
    return rows


def posterior(
    scores: np.ndarray, likelihood: np.ndarray | None, tau: float, real: np.ndarray
) -> tuple[np.ndarray, np.ndarray | None]:
    """(p, w), both [C]: METHOD 3 on the host, from scores s [C] and l [C]. w is None without l; what is not real gets 0."""

    def softmax(x):
        x = np.exp(x - x.max()) if np.isfinite(x).any() else np.zeros_like(x)
        return x / max(x.sum(), 1e-30)

    p = softmax(np.where(real, scores / tau, -np.inf))
    if likelihood is None:
        return p, None
    return p, softmax(np.where(real, scores / tau + likelihood, -np.inf))


def summarise(rows: Sequence[dict[str, float]]) -> dict[str, dict[str, float]]:
    """{group: {"turns": how many, measure: its mean}} over `MEASURES`; a measure that no turn of the group has is left out.

    Groups: all; turn1, turn2, ..; hop1, hop2, ..; golds1/turn1, .. (questions by their number of gold passages); yes_no,
    other_answers; answer, next_action, masked, own_span, sibling_span; and the last five by hop, as next_action/hop1. Groups
    without a turn are left out.
    """
    groups: dict[str, list[dict[str, float]]] = {}
    for row in rows:
        used = [name for name in ("credit_answer", "credit_next_action", "masked", "own_span", "sibling_span") if row[name]]
        names = ["all", f"turn{row['turn']}", "yes_no" if row["yes_no"] else "other_answers"]
        names += [name.removeprefix("credit_") for name in used]
        if row["hop"]:
            names += [f"hop{row['hop']}", f"golds{row['golds']}/turn{row['turn']}"]
            names += [f"{name.removeprefix('credit_')}/hop{row['hop']}" for name in used]
        for name in names:
            groups.setdefault(name, []).append(row)
    return {name: {"turns": len(groups[name])} | _means(groups[name]) for name in sorted(groups)}


def step_metrics(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """`credit/*` of metrics.jsonl, over the turns that have the number (see `audit`); without turns there are none."""
    metrics = {}
    if rows:
        metrics["credit/weight_max_p"] = _means(rows)["p_max"]
    turns = {"": rows} | {f"/turn{n}": [row for row in rows if row["turn"] == n] for n in (1, 2)}
    for suffix, group in turns.items():
        means = _means(group)
        for name, measure in (("argmax_gold", "argmax_w_gold"), ("gold_in_candidates", "gold_in_candidates")):
            if measure in means:
                metrics[f"credit/{name}{suffix}"] = means[measure]
    return metrics


def _means(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    means = {}
    for measure in MEASURES:
        known = [row[measure] for row in rows if not math.isnan(row[measure])]
        if known:
            means[measure] = float(np.mean(known))
    return means


def turn_of(episode: int, number: int, advantage: float, golds: int, answers: Sequence[str]) -> dict[str, float]:
    """The columns of `audit` that say which turn it is. number: from 0. golds: gold passages. answers: gold answers."""
    answers = {rewards.normalize_answer(answer) for answer in answers}
    return {
        "episode": episode,
        "turn": number + 1,
        "advantage": float(advantage),
        "golds": golds,
        "yes_no": int(bool(answers) and answers <= {"yes", "no"}),
        "zero_advantage": int(advantage == 0.0),
    }


def used_of(kind: str, author: str | None) -> dict[str, int]:
    """The columns of `audit` that say what the turn was credited by, from `TurnCredit`'s kind and author."""
    return {
        "credit_answer": int(kind in ("answer", "both")),
        "credit_next_action": int(kind in ("next_action", "both")),
        "masked": int(kind == "masked"),
        "own_span": int(author == "own"),
        "sibling_span": int(author == "sibling"),
    }


def measures_of(p: np.ndarray, w: np.ndarray | None, likelihood: np.ndarray | None, is_gold: np.ndarray | None) -> dict[str, float]:
    """The columns of `audit` that are measured on the candidates, arrays [C]. w, likelihood None: masked; is_gold None: no gold."""
    found = {
        "p_entropy": float(-(p[p > 0] * np.log(p[p > 0])).sum()),
        "p_max": float(p.max()),
        "w_max": math.nan if w is None else float(w.max()),
    } | dict.fromkeys(OF_GOLD, math.nan)
    if is_gold is not None:
        found |= {
            "gold_in_candidates": int(is_gold.any()),
            "p_gold": float(p[is_gold].sum()),
            "argmax_p_gold": int(is_gold[p.argmax()]),
        }
        if w is not None:
            found |= {"w_gold": float(w[is_gold].sum()), "argmax_w_gold": int(is_gold[w.argmax()])}
            found |= {"argmax_l_gold": int(is_gold[likelihood.argmax()])}
    return found


def hop_of(golds: Sequence, shown: Set, candidates: Set) -> int:
    """Which gold passage (from 1) a turn is about, see `audit`; 0 without any. All are corpus rows (-1: none), or all are ids."""
    missing = [n for n, gold in enumerate(golds, 1) if gold not in shown] or list(range(1, len(golds) + 1))
    found = [n for n in missing if golds[n - 1] != -1 and golds[n - 1] in candidates]
    return next(iter(found or missing), 0)


def _row_of(corpus: Corpus, passage_id: str) -> int:
    """-1 for a passage that the corpus lacks."""
    try:
        return corpus.row_of(passage_id)
    except KeyError:
        return -1
