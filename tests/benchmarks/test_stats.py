"""Bootstrap intervals and paired differences against closed forms and a plain resampling loop."""

import numpy as np
import pytest
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


def test_difference_agrees_with_resampling_by_indices():
    ours, theirs = scores((3, 40), (3, 25), p=0.6, seed=1), scores((3, 40), (3, 25), p=0.4, seed=2)
    sets = ["set0", "set1"]
    found = stats.difference(ours, theirs, sets)
    rng, draws = np.random.default_rng(7), []
    for _ in range(4000):
        chosen, means = rng.integers(3, size=3), []
        for name in sets:
            gap = (ours[name] - theirs[name])[chosen]
            means.append(gap[:, rng.integers(gap.shape[1], size=gap.shape[1])].mean())
        draws.append(np.mean(means))
    low, high = np.quantile(draws, [0.025, 0.975])
    assert found["mean"] == pytest.approx(stats.mean(ours, sets) - stats.mean(theirs, sets))
    assert (found["low"], found["high"]) == pytest.approx((low, high), abs=0.015)
    assert found["not_above"] == pytest.approx(np.mean(np.asarray(draws) <= 0), abs=0.02)


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
