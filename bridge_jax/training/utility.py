"""Which passages a sub-query should have found: dual utility (METHOD 8). Pure functions.

Local: a score of 0 to 100 for what a passage says about the sub-query. Global: whether the agent, shown this passage alone, ends
the episode with the right answer. Candidates are sorted by (global, local); a turn teaches only where the first of them has both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Chosen:
    """Places among the candidates: positives are ties with the best one, negatives the ones that rank last."""

    positives: tuple[int, ...]
    negatives: tuple[int, ...]


def choose(em: Sequence[float], local: Sequence[float], least: float, positives: int, negatives: int) -> Chosen | None:
    """Positives and negatives of one turn's candidates [C], or None where the turn teaches nothing.

    least: local score that the best candidate must have. positives, negatives: at most so many. Equal candidates stay in the order
    in which they were retrieved.
    """
    rank = sorted(range(len(em)), key=lambda c: (-em[c], -local[c], c))
    if not rank or em[rank[0]] < 1 or local[rank[0]] < least:
        return None
    ties = [c for c in rank if (em[c], local[c]) == (em[rank[0]], local[rank[0]])]
    best, others = ties[:positives], rank[len(ties) :]  # a tie beyond `positives` is no negative
    return Chosen(tuple(best), tuple(others[-negatives:])) if others else None


def percent(likelihood: np.ndarray, tokens: int) -> list[int] | None:
    """Answer log-likelihoods [C] as local scores of 0 to 100, where nobody judges: 100 exp(l / tokens), rounded.

    So a score is the (geometric) mean probability of a token of the gold answer, in per cent, when it is written straight after
    this passage. It sees the hop that holds the answer and no other: in a search before that, no passage comes to much, and with a
    least score of some 60 such a turn teaches nothing, rather than something by chance. None where no answer could be scored.
    """
    values = np.asarray(likelihood, np.float64)
    if not tokens or not np.isfinite(values).any():
        return None
    return [int(x) for x in np.floor(100.0 * np.exp(np.minimum(values, 0.0) / tokens) + 0.5)]
