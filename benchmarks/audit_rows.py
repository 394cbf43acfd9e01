"""The credit audit (`bridge_jax.training.credit_audit`) of logged rollouts: the same rows, from `rollouts/step_*.jsonl`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np

from bridge_jax.objectives import rewards
from bridge_jax.training.credit_audit import hop_of


def rows_of(rollouts: Iterable[Mapping]) -> list[dict[str, float]]:
    """One row a credited turn, with the columns of `credit_audit.audit` and `step`; turns that were not chosen are left out."""
    rows = []
    for episode, rollout in enumerate(rollouts):
        golds = rollout["gold_passage_ids"]
        answers = {rewards.normalize_answer(gold) for gold in rollout["golds"]}
        shown: set[str] = set()
        for number, turn in enumerate(rollout["turns"], 1):
            documents = turn["documents"]
            ids = [document["id"] for document in documents]
            if turn["credit"] is not None and documents:
                hop = hop_of(golds, shown, set(ids))
                row = {
                    "step": rollout["step"],
                    "episode": episode,
                    "turn": number,
                    "advantage": rollout["advantage"],
                    "golds": len(golds),
                    "yes_no": int(bool(answers) and answers <= {"yes", "no"}),
                    "hop": hop,
                    "credit_answer": int(turn["credit"] in ("answer", "both")),
                    "credit_next_action": int(turn["credit"] in ("next_action", "both")),
                    "masked": int(turn["credit"] == "masked"),
                    "own_span": int(turn["span"] == "own"),
                    "sibling_span": int(turn["span"] == "sibling"),
                    "zero_advantage": int(rollout["advantage"] == 0.0),
                }
                rows.append(row | _measures(documents, golds[hop - 1] if hop else None))
            shown |= {document["id"] for document in documents if document["shown"]}
    return rows


def _measures(documents: list[Mapping], gold: str | None) -> dict[str, float]:
    p = np.asarray([document["p"] for document in documents])
    credited = "w" in documents[0]
    w = np.asarray([document["w"] for document in documents]) if credited else None
    l_d = np.asarray([document["l"] for document in documents]) if credited else None
    is_gold = np.asarray([document["id"] == gold for document in documents])
    values = {
        "p_entropy": float(-(p[p > 0] * np.log(p[p > 0])).sum()),
        "p_max": float(p.max()),
        "w_max": float(w.max()) if credited else math.nan,
    }
    for name, value in (
        ("gold_in_candidates", lambda: is_gold.any()),
        ("p_gold", lambda: p[is_gold].sum()),
        ("argmax_p_gold", lambda: is_gold[p.argmax()]),
    ):
        values[name] = float(value()) if gold is not None else math.nan
    for name, value in (
        ("w_gold", lambda: w[is_gold].sum()),
        ("argmax_l_gold", lambda: is_gold[l_d.argmax()]),
        ("argmax_w_gold", lambda: is_gold[w.argmax()]),
    ):
        values[name] = float(value()) if credited and gold is not None else math.nan
    return values
