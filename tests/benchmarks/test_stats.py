"""Intervals and paired differences against closed forms, scipy's t tests, and their coverage by simulation."""

import numpy as np
import pytest
import scipy.stats
import stats


def scores(*shapes, p=0.4, seed=0):
    rng = np.random.default_rng(seed)
    return {f"set{i}": (rng.random(shape) < p).astype(float) for i, shape in enumerate(shapes)}


def test_every_set_counts_the_same():
    table = {"small": np.ones((2, 3)), "large": np.zeros((2, 30))}
    assert stats.mean(table, ["small", "large"]) == 0.5
    table["small"][1] = 0.0
    assert stats.seed_means(table, ["small", "large"]) == [0.5, 0.0]


def test_interval_of_one_seed_is_that_of_a_proportion():
    table = scores((1, 400))
    found = stats.estimate(table, ["set0"])
    p = found["mean"]
    assert found["high"] - found["low"] == pytest.approx(2 * 1.96 * np.sqrt(p * (1 - p) / 400), rel=0.08)
    assert found["low"] < p < found["high"]


def test_many_questions_leave_the_t_interval_of_the_seeds():
    rng = np.random.default_rng(3)
    chance = rng.random(4)[:, None]  # a seed's level; questions all alike
    table = {"set0": (rng.random((4, 20000)) < chance).astype(float)}
    found = stats.estimate(table, ["set0"])
    low, high = scipy.stats.ttest_1samp(table["set0"].mean(1), 0).confidence_interval()
    assert (found["low"], found["high"]) == pytest.approx((low, high), abs=2e-3)


def test_one_sided_p_is_that_of_a_t_test():
    rng = np.random.default_rng(4)
    level = rng.normal(0.05, 0.05, 5)[:, None]
    ours = {"set0": np.repeat(level, 50, 1)}
    found = stats.difference(ours, {"set0": np.zeros((5, 50))}, ["set0"])
    assert found["not_above"] == pytest.approx(scipy.stats.ttest_1samp(level[:, 0], 0, alternative="greater").pvalue)


@pytest.mark.parametrize(("seeds", "spread", "lowest"), [(3, 0.0, 0.93), (3, 0.08, 0.93), (5, 0.08, 0.93), (5, 0.02, 0.93)])
def test_coverage(seeds, spread, lowest):
    """95 % intervals hold the truth in at least about 95 of 100 worlds: drawn seeds, drawn questions, answers by chance."""
    rng, hits, worlds, sets = np.random.default_rng(seeds), 0, 600, ["a", "b"]
    for _ in range(worlds):
        of_seed = rng.normal(0, spread, seeds)[:, None]
        table = {}
        for name, questions in (("a", 60), ("b", 90)):
            difficulty = rng.uniform(0.2, 0.8, questions)[None]  # mean 0.5
            table[name] = (rng.random((seeds, questions)) < np.clip(difficulty + of_seed, 0, 1)).astype(float)
        found = stats.estimate(table, sets)
        hits += found["low"] <= 0.5 <= found["high"]
    assert lowest <= hits / worlds


def test_more_seeds_on_one_side_are_left_out():
    ours, theirs = scores((5, 30)), scores((3, 30), seed=1)
    found = stats.difference(ours, theirs, ["set0"])
    assert found == stats.difference({"set0": ours["set0"][:3]}, theirs, ["set0"])


def test_pairing_takes_out_what_both_share():
    theirs = scores((1, 300), p=0.5)
    ours = {"set0": theirs["set0"].copy()}
    ours["set0"][0, :6] = 1.0  # a few questions more, all others alike
    paired = stats.difference(ours, theirs, ["set0"])
    alone = stats.estimate(ours, ["set0"])
    assert paired["high"] - paired["low"] < 0.3 * (alone["high"] - alone["low"])
    same = stats.difference(theirs, theirs, ["set0"])
    assert (same["mean"], same["low"], same["high"], same["not_above"]) == (0.0, 0.0, 0.0, 1.0)


def test_a_difference_between_seeds_widens_the_interval():
    flat = {"set0": np.tile(scores((1, 500))["set0"], (3, 1))}
    uneven = {"set0": flat["set0"].copy()}
    uneven["set0"][0], uneven["set0"][2] = 0.0, 1.0
    width = [found["high"] - found["low"] for found in (stats.estimate(flat, ["set0"]), stats.estimate(uneven, ["set0"]))]
    assert width[1] > 3 * width[0]


def test_other_questions_are_refused():
    with pytest.raises(ValueError, match=r"set0.*not the same questions"):
        stats.difference(scores((2, 10)), scores((2, 11)), ["set0"])
