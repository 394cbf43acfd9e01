"""Two evaluations question by question: differences with paired bootstrap intervals, wins and losses, McNemar's exact test."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import scipy.stats

from bridge_jax.errors import UserError
from bridge_jax.evaluation.aggregate import groups, interval
from bridge_jax.evaluation.store import differing

METRICS = ("em", "f1", "sub_em", "recall@3")


def compare(ours: Mapping, theirs: Mapping, seed: int = 0) -> dict:
    """Ours minus theirs, over the questions that both have answered.

    Args:
      ours, theirs: results of evaluations ("predictions": {set: [record]}).

    Returns:
      {"datasets": {set: row}, "averages": {group: row}, "only_ours", "only_theirs": questions left out, "settings": what differs};
      a row has "n", for each metric {"ours", "theirs", "difference", "low", "high"} (95 %), of "em" also "wins", "losses" and "p",
      the two-sided probability of such a split if neither were better. In averages every set counts the same.

    Raises:
      UserError: they share no question.
    """
    pairs: dict[str, list[tuple[dict, dict]]] = {}
    left_out = [0, 0]
    for name in dict.fromkeys([*ours["predictions"], *theirs["predictions"]]):
        mine, other = ({row["id"]: row for row in result["predictions"].get(name, ())} for result in (ours, theirs))
        shared = [id for id in mine if id in other]
        left_out[0] += len(mine) - len(shared)
        left_out[1] += len(other) - len(shared)
        if shared:
            pairs[name] = [(mine[id], other[id]) for id in shared]
    if not pairs:
        raise UserError("the two evaluations share no question: compare runs over the same sets")
    rows = {name: _row([part], seed) for name, part in pairs.items()}
    averages = {group: _row([pairs[name] for name in names], seed) for group, names in groups(list(pairs)).items()}
    changed = [name for name, _, _ in differing(theirs.get("settings", {}), ours.get("settings", {}))]
    return {"datasets": rows, "averages": averages, "only_ours": left_out[0], "only_theirs": left_out[1], "settings": changed}


def _row(parts: list[list[tuple[dict, dict]]], seed: int) -> dict:
    row: dict = {"n": sum(map(len, parts))}
    for metric in METRICS:
        known = [
            [(a[metric], b[metric]) for a, b in part if a.get(metric) is not None and b.get(metric) is not None] for part in parts
        ]
        known = [np.asarray(part, np.float64) for part in known if part]
        if not known:
            row[metric] = None
            continue
        means = np.mean([part.mean(0) for part in known], axis=0)
        low, high = interval([part[:, 0] - part[:, 1] for part in known], seed)
        row[metric] = {"ours": float(means[0]), "theirs": float(means[1]), "difference": float(means[0] - means[1])}
        row[metric] |= {"low": low, "high": high}
        if metric == "em":
            gaps = np.concatenate([part[:, 0] - part[:, 1] for part in known])
            row[metric] |= mcnemar(int((gaps > 0).sum()), int((gaps < 0).sum()))
    return row


def mcnemar(wins: int, losses: int) -> dict:
    """{"wins", "losses", "p"}: exact two-sided sign test over the questions on which they differ; p = 1 where there is none."""
    p = scipy.stats.binomtest(wins, wins + losses).pvalue if wins + losses else 1.0
    return {"wins": wins, "losses": losses, "p": float(p)}
