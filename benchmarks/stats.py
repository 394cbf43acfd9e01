"""Means, intervals and paired differences over questions and seeds.

A *table of scores* is `{set: [seeds, questions]}`: the same questions in the same order for every method, and seed s of one method
drew the same training questions as seed s of another. Averages follow the paper: every set counts the same, whatever its size.

Intervals are for the mean over seeds *and* questions that might have been drawn. Both are random and crossed (every seed answers
the same questions), so the variance of the mean has two parts: that of the seeds' means, over the number of seeds (in it is what
a seed's answers to single questions add by chance), and that of a question's difficulty, which all seeds share, over the number of
questions. The interval is Student's t with the degrees of freedom of Satterthwaite. A bootstrap over three seeds would cover 79 %
where it promises 95 %; tests/benchmarks/test_stats.py checks the coverage of these by simulation. Of a single seed the interval is
over questions alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import scipy.stats

LEVEL = 0.95

Scores = Mapping[str, np.ndarray]


def mean(scores: Scores, sets: Sequence[str]) -> float:
    """Mean over sets of the mean over seeds and questions."""
    return float(np.mean([np.mean(scores[name]) for name in sets]))


def seed_means(scores: Scores, sets: Sequence[str]) -> list[float]:
    """The same for each seed alone."""
    return [float(value) for value in np.mean([np.mean(scores[name], axis=1) for name in sets], axis=0)]


def estimate(scores: Scores, sets: Sequence[str]) -> dict[str, float]:
    """{"mean", "low", "high"}: with its 95 % interval."""
    found = mean(scores, sets)
    error, freedom = _error(scores, sets)
    half = error * scipy.stats.t.ppf((1 + LEVEL) / 2, freedom)
    return {"mean": found, "low": float(found - half), "high": float(found + half)}


def difference(ours: Scores, theirs: Scores, sets: Sequence[str]) -> dict[str, float]:
    """ours - theirs, paired over questions and seeds: {"mean", "low", "high", "not_above"}.

    Of a method with more seeds than the other the first ones are compared. not_above: one-sided p that it is not above 0.
    """
    for name in sets:
        if ours[name].shape[1:] != theirs[name].shape[1:]:
            raise ValueError(f"{name}: {ours[name].shape} scores against {theirs[name].shape}: not the same questions")
    seeds = min(len(ours[sets[0]]), len(theirs[sets[0]]))
    gap = {name: ours[name][:seeds] - theirs[name][:seeds] for name in sets}
    error, freedom = _error(gap, sets)
    found = mean(gap, sets)
    not_above = scipy.stats.t.sf(found / error, freedom) if error > 0 else found <= 0
    return estimate(gap, sets) | {"not_above": float(not_above)}


def _error(scores: Scores, sets: Sequence[str]) -> tuple[float, float]:
    """(standard error of the mean, degrees of freedom)"""
    seeds = len(scores[sets[0]])
    of_seeds = float(np.var(seed_means(scores, sets), ddof=1)) / seeds if seeds > 1 else 0.0
    of_questions, count = 0.0, 0
    for name in sets:
        table = np.asarray(scores[name], np.float64)
        questions = table.shape[1]
        if questions < 2:
            continue
        # A question's own mean varies by its difficulty and by what the seeds add by chance; the seeds' part has that already.
        chance = table - table.mean(0) - table.mean(1, keepdims=True) + table.mean()
        chance = float((chance**2).sum() / ((seeds - 1) * (questions - 1))) if seeds > 1 else 0.0
        difficulty = max(float(np.var(table.mean(0), ddof=1)) - chance / seeds, 0.0)
        of_questions += difficulty / questions / len(sets) ** 2
        count += questions - 1
    total = of_seeds + of_questions
    parts = (of_seeds**2 / (seeds - 1) if seeds > 1 else 0.0) + of_questions**2 / max(count, 1)
    return float(np.sqrt(total)), float(total**2 / parts) if parts > 0 else float(max(seeds - 1, 1))


def spread(values: Sequence[float]) -> dict[str, float]:
    """{"mean", "min", "max"} of measurements that are not questions, such as seconds; one value a seed."""
    return {"mean": float(np.mean(values)), "min": float(np.min(values)), "max": float(np.max(values))}
