"""Means, intervals and paired differences over questions and seeds, with numpy alone.

A *table of scores* is `{set: [seeds, questions]}`: the same questions in the same order for every method, and seed s of one method
drew the same training questions as seed s of another. Averages follow the paper: every set counts the same, whatever its size.

Intervals are percentile bootstraps that resample questions within each set and seeds across all of them, the same draws for both
methods of a difference. With three seeds the resampling of seeds is coarse: a difference between runs of one method is in it, but
its own uncertainty is not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

RESAMPLES = 4000

Scores = Mapping[str, np.ndarray]


def mean(scores: Scores, sets: Sequence[str]) -> float:
    """Mean over sets of the mean over seeds and questions."""
    return float(np.mean([np.mean(scores[name]) for name in sets]))


def seed_means(scores: Scores, sets: Sequence[str]) -> list[float]:
    """The same for each seed alone."""
    return [float(value) for value in np.mean([np.mean(scores[name], axis=1) for name in sets], axis=0)]


def estimate(scores: Scores, sets: Sequence[str], seed: int = 0) -> dict[str, float]:
    """{"mean", "low", "high"}: with its 95 % interval."""
    return {"mean": mean(scores, sets)} | _interval(_draws(scores, sets, seed))


def difference(ours: Scores, theirs: Scores, sets: Sequence[str], seed: int = 0) -> dict[str, float]:
    """ours - theirs, paired over questions and seeds: {"mean", "low", "high", "not_above"}.

    not_above: share of resamples in which the difference is not above 0, a one-sided bootstrap p.
    """
    for name in sets:
        if ours[name].shape != theirs[name].shape:
            raise ValueError(f"{name}: {ours[name].shape} scores against {theirs[name].shape}: not the same questions and seeds")
    gap = {name: ours[name] - theirs[name] for name in sets}
    draws = _draws(gap, sets, seed)
    return {"mean": mean(gap, sets)} | _interval(draws) | {"not_above": float(np.mean(draws <= 0))}


def _draws(scores: Scores, sets: Sequence[str], seed: int) -> np.ndarray:
    """[RESAMPLES] bootstrap means."""
    rng = np.random.default_rng(seed)
    seeds = len(scores[sets[0]])
    of_seed = _weights(rng, seeds)
    total = np.zeros(RESAMPLES)
    for name in sets:
        by_seed = _weights(rng, scores[name].shape[1]) @ np.asarray(scores[name], np.float64).T  # [RESAMPLES, seeds]
        total += (of_seed * by_seed).sum(1)
    return total / len(sets)


def _weights(rng: np.random.Generator, n: int) -> np.ndarray:
    """[RESAMPLES, n]: how often each of n items is in a resample, as a share."""
    return rng.multinomial(n, np.full(n, 1 / n), RESAMPLES) / n


def _interval(draws: np.ndarray) -> dict[str, float]:
    low, high = np.quantile(draws, [0.025, 0.975])
    return {"low": float(low), "high": float(high)}


def spread(values: Sequence[float]) -> dict[str, float]:
    """{"mean", "min", "max"} of measurements that are not questions, such as seconds; one value a seed."""
    return {"mean": float(np.mean(values)), "min": float(np.min(values)), "max": float(np.max(values))}
