"""PPO's parts against a loop in plain Python and against closed forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bridge_jax.objectives.ppo import explained_variance, gae, token_rewards, value_loss, whiten


def fixed(seed=0, B=5, T=12):
    """Rows with observations inside, of different length, one without any generated token."""
    rng = np.random.default_rng(seed)
    mask = rng.uniform(size=(B, T)) < 0.6
    mask[:, :2] = False  # the prompt
    mask[1, 7:] = False
    mask[3] = False
    arrays = [rng.normal(size=(B, T)).astype(np.float32) for _ in range(4)]
    return mask, rng.integers(0, 2, B).astype(np.float32), *arrays


def slow_ppo(mask, outcomes, old, ref, values, kl_coef, discount, lam):
    """(rewards, advantages, returns), row by row over the list of its generated tokens; GAE as the sum of its definition."""
    rewards, advantages, returns = (np.zeros(mask.shape) for _ in range(3))
    for b, row in enumerate(mask):
        steps = [t for t in range(len(row)) if row[t]]
        if not steps:
            continue
        for t in steps:
            rewards[b, t] = -kl_coef * (float(old[b, t]) - float(ref[b, t]))
        rewards[b, steps[-1]] += outcomes[b]
        V = [float(values[b, t]) for t in steps] + [0.0]
        deltas = [rewards[b, t] + discount * V[k + 1] - V[k] for k, t in enumerate(steps)]
        for k, t in enumerate(steps):
            advantages[b, t] = sum((discount * lam) ** (j - k) * deltas[j] for j in range(k, len(steps)))
            returns[b, t] = advantages[b, t] + V[k]
    return rewards, advantages, returns


@pytest.mark.parametrize(("discount", "lam"), [(1.0, 1.0), (0.9, 0.7), (1.0, 0.95), (0.8, 0.0)])
def test_against_the_slow_loop(discount, lam):
    mask, outcomes, old, ref, values, _ = fixed()
    expected = slow_ppo(mask, outcomes, old, ref, values, 0.3, discount, lam)
    rewards = token_rewards(outcomes, old, ref, mask, 0.3)
    got = (rewards, *gae(rewards, values, mask, discount, lam))
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_lambda_and_discount_of_one_give_the_return_minus_the_value():
    mask, outcomes, old, ref, values, _ = fixed()
    rewards = np.asarray(token_rewards(outcomes, old, ref, mask, 1e-3))
    to_go = np.cumsum(rewards[:, ::-1], axis=1)[:, ::-1]
    advantages, returns = gae(rewards, values, mask)
    np.testing.assert_allclose(advantages, np.where(mask, to_go - values, 0.0), atol=1e-6)
    np.testing.assert_allclose(returns, np.where(mask, to_go, 0.0), atol=1e-6)


def test_lambda_of_zero_is_one_step_of_temporal_difference_across_an_observation():
    mask = jnp.array([[False, True, False, False, True]])
    values = jnp.array([[9.0, 0.25, 9.0, 9.0, 0.5]])
    advantages, returns = gae(jnp.array([[0.0, 0.0, 0.0, 0.0, 1.0]]), values, mask, 0.9, 0.0)
    np.testing.assert_allclose(advantages[0], [0, 0.9 * 0.5 - 0.25, 0, 0, 1.0 - 0.5], atol=1e-7)
    np.testing.assert_allclose(returns[0], [0, 0.9 * 0.5, 0, 0, 1.0], atol=1e-7)


def test_without_a_reference_the_outcome_on_the_last_generated_token_is_all():
    mask, outcomes, old, *_ = fixed()
    rewards = np.asarray(token_rewards(outcomes, old, None, mask, 0.5))
    for b, row in enumerate(mask):
        expected = np.zeros(len(row), np.float32)
        if row.any():
            expected[np.flatnonzero(row)[-1]] = outcomes[b]
        np.testing.assert_array_equal(rewards[b], expected)


def test_observations_and_padding_change_nothing():
    """Columns of any content before, between and after generated tokens: these keep their numbers, bit for bit."""
    mask, outcomes, old, ref, values, _ = fixed()
    rng = np.random.default_rng(1)
    places = np.sort(rng.choice(30, mask.shape[1], replace=False))

    def spread(x, fill):
        wide = np.full((x.shape[0], 30), fill, x.dtype)
        wide[:, places] = x
        return wide

    def all_of(mask, old, ref, values):
        rewards = token_rewards(outcomes, old, ref, mask, 0.1)
        advantages, returns = gae(rewards, values, mask, 0.95, 0.9)
        return rewards, advantages, returns, whiten(advantages, mask)

    short = all_of(mask, old, ref, values)
    wide = all_of(spread(mask, False), *(spread(x, np.nan) for x in (old, ref, values)))
    for a, b in zip(short[:3], wide[:3], strict=True):
        np.testing.assert_array_equal(np.asarray(b)[:, places], a)
        assert not np.delete(np.asarray(b), places, axis=1).any()
    np.testing.assert_allclose(np.asarray(wide[3])[:, places], short[3], atol=1e-6)  # sums in another order


def test_whitening_over_the_generated_tokens():
    mask, _, x, *_ = fixed()
    white = np.asarray(whiten(np.where(mask, x, np.nan), mask))
    np.testing.assert_allclose(white[mask], (x[mask] - x[mask].mean()) / x[mask].std(ddof=1), rtol=1e-5)
    assert not white[~mask].any()
    assert not np.asarray(whiten(x, np.zeros_like(mask))).any()
    one = np.zeros_like(mask)
    one[0, 3] = True
    assert not np.asarray(whiten(x, one)).any()
    assert not np.asarray(whiten(np.full_like(x, 0.3), mask)).round(3).any()


def test_explained_variance():
    mask, _, returns, values, *_ = fixed()
    assert explained_variance(returns, returns, mask) == 1.0
    assert explained_variance(np.full_like(returns, 0.7), returns, mask) == pytest.approx(0.0, abs=1e-6)
    expected = 1 - np.var((returns - values)[mask]) / np.var(returns[mask])
    assert explained_variance(values, returns, mask) == pytest.approx(expected, rel=1e-5)
    assert explained_variance(values, np.ones_like(returns), mask) == 0.0


def test_value_loss_by_hand():
    # a value inside the clip range; outside, the clip decides; outside, the plain error decides; no generated token
    V = np.array([[0.4, 2.0, -2.0, np.nan]], np.float32)
    old = np.array([[0.2, 0.0, 0.0, np.nan]], np.float32)
    R = np.array([[1.0, 3.0, 1.0, np.inf]], np.float32)
    mask = np.array([[True, True, True, False]])
    total, count, sums = value_loss(V, old, R, mask, 0.5)
    assert float(total) == pytest.approx(0.5 * (0.6**2 + (0.5 - 3.0) ** 2 + 3.0**2))
    assert (count, sums["clip_fraction"]) == (3, 1)
    gradient = np.asarray(jax.grad(lambda v: value_loss(v, old, R, mask, 0.5)[0])(V))
    np.testing.assert_allclose(gradient, [[0.4 - 1.0, 0.0, -2.0 - 1.0, 0.0]], atol=1e-6)


def test_micro_batches_of_the_value_loss_are_the_whole():
    mask, _, values, old, returns, _ = fixed()
    whole = value_loss(values, old, returns, mask, 0.2)
    parts = [value_loss(values[i], old[i], returns[i], mask[i], 0.2) for i in (slice(0, 1), slice(1, 4), slice(4, 5))]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), whole, jax.tree.map(lambda *x: sum(x), *parts))


def test_an_empty_mask_gives_zeros_whatever_lies_under_it():
    junk, empty = jnp.full((3, 4), jnp.nan), jnp.zeros((3, 4), bool)
    rewards = token_rewards(jnp.full(3, jnp.nan), junk, junk, empty, 0.1)
    for array in (rewards, *gae(junk, junk, empty), whiten(junk, empty)):
        assert not np.asarray(array).any()
    total, count, sums = value_loss(junk, junk, junk, empty, 0.5)
    assert total == count == sums["clip_fraction"] == 0
    assert not np.asarray(jax.grad(lambda v: value_loss(v, junk, junk, empty, 0.5)[0])(junk)).any()
