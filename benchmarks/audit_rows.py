"""The credit audit (`bridge_jax.training.credit_audit`) of logged rollouts: the same rows, from `rollouts/step_*.jsonl`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from bridge_jax.training.credit_audit import hop_of, measures_of, turn_of, used_of


def rows_of(rollouts: Iterable[Mapping]) -> list[dict[str, float]]:
    """One row a credited turn, with the columns of `credit_audit.audit` and `step`; turns that were not chosen are left out."""
    rows = []
    for episode, rollout in enumerate(rollouts):
        golds = rollout["gold_passage_ids"]
        shown: set[str] = set()
        for number, turn in enumerate(rollout["turns"]):
            documents = turn["documents"]
            if turn["credit"] is not None and documents:
                hop = hop_of(golds, shown, {document["id"] for document in documents})
                row = {"step": rollout["step"], "hop": hop, **used_of(turn["credit"], turn["span"])}
                row |= turn_of(episode, number, rollout["advantage"], len(golds), rollout["golds"])
                rows.append(row | _measures(documents, golds[hop - 1] if hop else None))
            shown |= {document["id"] for document in documents if document["shown"]}
    return rows


def _measures(documents: list[Mapping], gold: str | None) -> dict[str, float]:
    column = {name: np.asarray([document[name] for document in documents]) for name in ("p", "w", "l") if name in documents[0]}
    is_gold = None if gold is None else np.asarray([document["id"] == gold for document in documents])
    return measures_of(column["p"], column.get("w"), column.get("l"), is_gold)
