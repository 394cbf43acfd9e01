"""GRPO against torch written from the definitions of TRL, verl and Tunix, and its promises at the edges."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from bridge_jax.objectives.grpo import GRPOConfig, displacement_guard, group_advantages, informative_groups, k3_kl, policy_loss


def fixed(seed=0, B=6, T=11):
    rng = np.random.default_rng(seed)
    old = rng.normal(-1.5, 0.7, (B, T)).astype(np.float32)
    new = (old + rng.normal(0, 0.6, (B, T))).astype(np.float32)
    ref = (old + rng.normal(0, 0.4, (B, T))).astype(np.float32)
    advantages = np.array([1.5, -0.7, 0.0, -2.0, 0.3, 0.9], np.float32)[:B]
    lengths = np.array([11, 3, 7, 11, 0, 5])[:B]
    mask = np.arange(T)[None] < lengths[:, None]
    mask[0, 4:6] = False  # an observation in the middle
    return new, old, ref, advantages, mask, rng.uniform(0, 3, (B, T)).astype(np.float32)


def torch_loss(new, old, ref, advantages, mask, *, low=0.2, high=0.2, dual=3.0, beta=1e-4, kind="bnpo", length=1.0):
    """TRL's per-token loss (coef_1, coef_2, min) and its three loss types, with verl's dual clip for negative advantages."""
    new = torch.tensor(new, requires_grad=True)
    old, ref, mask = torch.tensor(old), torch.tensor(ref), torch.tensor(mask).float()
    A = torch.tensor(advantages)[:, None]
    coef = torch.exp(new - old)
    gain = torch.minimum(coef * A, torch.clamp(coef, 1 - low, 1 + high) * A)
    if dual is not None:
        gain = torch.where(A < 0, torch.maximum(gain, dual * A), gain)
    per_token = -gain + beta * (torch.exp(ref - new) - (ref - new) - 1)
    rows = (mask.sum(-1) > 0).sum()  # rows without a trained token do not count (TRL would count them)
    if kind == "bnpo":
        loss = (per_token * mask).sum() / mask.sum()
    elif kind == "grpo":
        loss = ((per_token * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).sum() / rows
    else:
        loss = (per_token * mask).sum() / (rows * length)
    loss.backward()
    return loss.item(), new.grad.numpy()


CASES = [
    (GRPOConfig(), {}),
    (GRPOConfig(dual_clip=None, kl_coef=0.04), {"dual": None, "beta": 0.04}),
    (GRPOConfig(clip_high=0.28, aggregation="seq_mean"), {"high": 0.28, "kind": "grpo"}),
    (GRPOConfig(aggregation="dr_grpo", normaliser=64.0, dual_clip=1.1), {"kind": "dr_grpo", "length": 64.0, "dual": 1.1}),
]


@pytest.mark.parametrize(("config", "options"), CASES)
@pytest.mark.parametrize("seed", [0, 1])
def test_loss_and_gradient_against_torch(config, options, seed):
    new, old, ref, advantages, mask, _ = fixed(seed)

    def loss(x):
        total, denominator, _ = policy_loss(x, old, ref, advantages, mask, config)
        return total / denominator

    value, grad = jax.value_and_grad(loss)(jnp.asarray(new))
    expected, expected_grad = torch_loss(new, old, ref, advantages, mask, **options)
    assert float(value) == pytest.approx(expected, rel=1e-5, abs=1e-6)
    np.testing.assert_allclose(grad, expected_grad, atol=2e-6)
    assert not np.asarray(grad)[~mask].any()


def test_metrics_by_hand():
    new, old, ref, advantages, mask, entropy = fixed()
    _, _, sums = policy_loss(new, old, ref, advantages, mask, GRPOConfig(dual_clip=1.3), entropy)
    ratio, A = np.exp(new - old), np.broadcast_to(advantages[:, None], mask.shape)
    clipped = ((ratio > 1.2) & (A > 0)) | ((ratio < 0.8) & (A < 0))
    assert sums["tokens"] == mask.sum()
    assert sums["clip_fraction"] == (clipped & mask).sum() > 0
    assert sums["dual_clip_fraction"] == ((ratio > 1.3) & (A < 0) & mask).sum() > 0
    assert sums["entropy"] == pytest.approx(entropy[mask].sum(), rel=1e-5)
    r = ref - new
    assert sums["kl"] == pytest.approx((np.exp(r) - r - 1)[mask].sum(), rel=1e-4)
    up = mask & (A >= 0)
    assert sums["displacement_tokens"] == up.sum()
    assert sums["likelihood_displacement"] == pytest.approx((new - old)[up].sum(), rel=1e-4)
    assert sums["likelihood_displacement_ref"] == pytest.approx((new - ref)[up].sum(), rel=1e-4)


@pytest.mark.parametrize("config", [case[0] for case in CASES])
def test_micro_batches_change_nothing(config):
    new, old, ref, advantages, mask, entropy = fixed()
    whole = policy_loss(new, old, ref, advantages, mask, config, entropy)
    cuts = (slice(0, 2), slice(2, 5), slice(5, 6))
    parts = [policy_loss(new[i], old[i], ref[i], advantages[i], mask[i], config, entropy[i]) for i in cuts]
    summed = jax.tree.map(lambda *x: sum(x), *parts)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), whole, summed)


def guard_by_hand(new, old, advantages, mask, passes, slack=0.0):
    """Span by span: (sum, tokens, gradient) over actions whose summed log-prob fell."""
    total, tokens, grad = 0.0, 0, np.zeros(mask.shape)
    for b, row in enumerate(mask):
        edges = np.flatnonzero(np.diff(np.pad(row.astype(int), 1)))
        for start, end in edges.reshape(-1, 2):
            fall = old[b, start:end] - new[b, start:end]
            if passes(advantages[b]) and fall.sum() > slack * (end - start):
                total, tokens = total + np.maximum(fall, 0).sum(), tokens + end - start
                grad[b, start:end] = -(fall > 0).astype(float)
    return total, tokens, grad


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(
    ("options", "passes", "slack"),
    [
        ({}, lambda a: a >= 0, 0.0),
        ({"llds_gate": "positive"}, lambda a: a > 0, 0.0),
        ({"llds_slack": 0.15}, lambda a: a >= 0, 0.15),
    ],
)
def test_the_displacement_guard_by_hand(seed, options, passes, slack):
    new, old, _, advantages, mask, _ = fixed(seed)
    mask[2, 2:3] = mask[3, 5:7] = False  # more rows of several actions
    config = GRPOConfig(llds=0.2, **options)
    expected = guard_by_hand(new, old, advantages, mask, passes, slack)
    assert expected[1] > 0
    (total, tokens), grad = jax.value_and_grad(lambda x: displacement_guard(x, old, advantages, mask, config), has_aux=True)(new)
    assert float(total) == pytest.approx(expected[0], rel=1e-5)
    assert tokens == expected[1]
    np.testing.assert_array_equal(grad, expected[2])
    # what lies under the mask never matters, and cuts of the batch add up
    junk = np.where(mask, new, np.nan), np.where(mask, old, np.nan), advantages, mask, config
    np.testing.assert_array_equal(displacement_guard(*junk), (total, tokens))
    parts = [displacement_guard(new[i], old[i], advantages[i], mask[i], config) for i in (slice(0, 2), slice(2, 6))]
    np.testing.assert_allclose(np.sum(parts, 0), (total, tokens), rtol=1e-5)


def test_the_displacement_guard_leaves_unchanged_actions_alone():
    """On-policy nothing fell, and the kink of max(0, .) has no slope: no gradient."""
    _, old, _, advantages, mask, _ = fixed()
    args = old, advantages, mask, GRPOConfig(llds=1.0)
    (total, tokens), grad = jax.value_and_grad(lambda x: displacement_guard(x, *args), has_aux=True)(jnp.asarray(old))
    assert total == tokens == 0
    assert not np.asarray(grad).any()


@pytest.mark.parametrize("config", [case[0] for case in CASES])
def test_an_empty_mask_gives_zero_whatever_lies_under_it(config):
    junk = jnp.full((3, 4), jnp.nan).at[0].set(jnp.inf)
    empty = jnp.zeros((3, 4), bool)

    def total(x):
        return policy_loss(x, junk, junk, jnp.full(3, jnp.nan), empty, config, junk)[0]

    value, denominator, sums = policy_loss(junk, junk, junk, jnp.full(3, jnp.nan), empty, config, junk)
    assert value == denominator == 0.0
    assert all(v == 0.0 for v in sums.values())
    assert not np.asarray(jax.grad(total)(junk)).any()


def test_huge_ratios_stay_finite():
    new, old = jnp.array([[0.0, -90.0, 0.0]]), jnp.array([[-90.0, 0.0, 0.0]])
    for A in (1.0, -1.0):
        args = (old, old, jnp.array([A]), jnp.ones((1, 3), bool), GRPOConfig())
        value, grad = jax.value_and_grad(lambda x, args=args: policy_loss(x, *args)[0])(new)
        assert np.isfinite(value)
        assert np.isfinite(grad).all()
        assert abs(value) < 100


def test_on_policy_the_ratio_is_one_and_the_gradient_is_the_policy_gradient():
    _, old, _, advantages, mask, _ = fixed()
    config = GRPOConfig(kl_coef=0.0)
    grad = jax.grad(lambda x: policy_loss(x, old, None, advantages, mask, config)[0])(jnp.asarray(old))
    np.testing.assert_array_equal(grad, np.where(mask, -advantages[:, None], 0.0))
    _, _, sums = policy_loss(old, old, None, advantages, mask, config)
    assert sums["clip_fraction"] == sums["likelihood_displacement"] == 0
    assert "kl" not in sums


def test_token_level_advantages():
    new, old, ref, advantages, mask, _ = fixed()
    a = policy_loss(new, old, ref, advantages, mask, GRPOConfig())
    b = policy_loss(new, old, ref, np.repeat(advantages[:, None], mask.shape[1], 1), mask, GRPOConfig())
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_k3_is_a_kl_estimate():
    logits = jax.random.normal(jax.random.key(0), (2, 7))
    p, q = jax.nn.log_softmax(logits[0]), jax.nn.log_softmax(logits[1])
    assert float((jnp.exp(p) * k3_kl(p, q)).sum()) == pytest.approx(float((jnp.exp(p) * (p - q)).sum()), rel=1e-5)


def tunix_advantages(rewards, valid):
    """Tunix's and verl's rule, rollout by rollout: sample std over the group's valid rollouts, 1e-6."""
    out = np.zeros(rewards.shape)
    for n, row in enumerate(rewards):
        good = [r for r, v in zip(row, valid[n]) if v]
        if len(good) < 2:
            continue
        mean = sum(good) / len(good)
        std = (sum((r - mean) ** 2 for r in good) / (len(good) - 1)) ** 0.5
        for g, r in enumerate(row):
            out[n, g] = (r - mean) / (std + 1e-6) if valid[n][g] else 0.0
    return out


def test_advantages_against_the_peers():
    rewards = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1], [0.2, 0.9, 0.4, 1.0]], np.float32)
    valid = np.ones(rewards.shape, bool)
    np.testing.assert_allclose(group_advantages(rewards), tunix_advantages(rewards, valid), rtol=1e-5)
    torch_rewards = torch.tensor(rewards)
    trl = (torch_rewards - torch_rewards.mean(1, keepdim=True)) / (torch_rewards.std(1, keepdim=True) + 1e-6)
    np.testing.assert_allclose(group_advantages(rewards), trl.numpy(), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(group_advantages(rewards, "dr_grpo"), rewards - rewards.mean(1, keepdims=True), atol=1e-7)

    valid[0, 0] = valid[1, 3] = valid[4, 1:] = False
    np.testing.assert_allclose(group_advantages(rewards, valid=valid), tunix_advantages(rewards, valid), rtol=1e-5)


@pytest.mark.parametrize("mode", ["grpo", "dr_grpo"])
@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, 1 / 3, 1e-8, 7e5])
def test_equal_rewards_give_exactly_zero(mode, value):
    for G in (1, 2, 5, 7, 16):
        assert not np.asarray(group_advantages(np.full((2, G), value), mode)).any()


def test_faults_leave_no_trace():
    rewards = np.array([[1.0, 0.0, 0.0, np.nan], [np.nan] * 4], np.float32)
    valid = np.array([[True, True, True, False], [False] * 4])
    advantages = np.asarray(group_advantages(rewards, valid=valid))
    np.testing.assert_array_equal(advantages[0, :3], np.asarray(group_advantages(rewards[:1, :3]))[0])
    assert advantages[0, 3] == 0
    assert not advantages[1].any()
    np.testing.assert_array_equal(informative_groups(rewards, valid), [True, False])


def test_bad_options_are_refused():
    with pytest.raises(ValueError, match="token_mean"):
        GRPOConfig(aggregation="mean")
    with pytest.raises(ValueError, match="dual_clip"):
        GRPOConfig(dual_clip=0.5)
    with pytest.raises(ValueError, match="llds_gate"):
        GRPOConfig(llds_gate="all")
    with pytest.raises(ValueError, match="dr_grpo"):
        group_advantages(np.zeros((1, 2)), "rloo")
