"""Several rollouts in a row give the losses, metrics and gradients of one rollout a row."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny_world import make_encoder, make_policy, nudged

from bridge_jax.models.value import init_critic
from bridge_jax.objectives import bilevel, ppo, ppo_step
from bridge_jax.objectives.bilevel import Frozen, Modules, OptimizerConfig, StepConfig, init_state
from bridge_jax.objectives.grpo import GRPOConfig, displacement_guard, policy_loss
from bridge_jax.objectives.logprobs import sequence_logps
from bridge_jax.objectives.ppo import PPOConfig
from bridge_jax.rollout.episodes import Episode
from bridge_jax.training.batch import lay_out, packing_fill
from bridge_jax.training.packing import Packing, pack

B, MINIBATCH, MICROBATCH, LONGEST = 12, 6, 2, 24
EMPTY, FAULT = 4, 7
TRAINED = np.arange(B) != FAULT
ONE_A_ROW = Packing(tuple(tuple((b,) for b in range(m, m + MINIBATCH)) for m in (0, MINIBATCH)), (3, MICROBATCH, LONGEST))


def make_episodes(seed=0):
    """Ragged ones with an observation inside, an empty one and a fault; some end in a generated token, some do not."""
    rng = np.random.default_rng(seed)
    episodes = []
    for b in range(B):
        prompt, response = int(rng.integers(2, 6)), 0 if b == EMPTY else int(rng.integers(4, 16))
        generated = np.arange(response) % 7 < 4
        logps = np.where(generated, rng.normal(-2, 0.5, response), 0.0).astype(np.float32)
        tokens = [rng.integers(1, 64, size).astype(np.int32) for size in (prompt, response)]
        episodes.append(Episode(None, b // 3, b % 3, *tokens, generated, logps, [], "answered", None, []))
    episodes[FAULT].logps[:] = np.nan
    return episodes, (rng.random(B) < 0.4).astype(np.float32), rng.normal(size=B).astype(np.float32)


def both(seed=0):
    """The same rollouts as (one a row, packed)."""
    episodes, rewards, advantages = make_episodes(seed)
    lengths = [len(e.prompt) + len(e.tokens) if wanted and len(e.tokens) else 0 for e, wanted in zip(episodes, TRAINED)]
    packing = pack(lengths, MINIBATCH, MICROBATCH, (LONGEST, 2 * LONGEST))
    alone, packed = (lay_out(p, episodes, rewards, advantages, TRAINED) for p in (ONE_A_ROW, packing))
    assert packed.segment_ids.max() > 1 and packing_fill(packed) > 1.2 * packing_fill(alone)
    return alone, packed


def rows_of(rollouts):
    return jax.tree.map(lambda x: jnp.asarray(x).reshape(-1, x.shape[-1]), rollouts)


def by_token(rollouts, *arrays):
    """Values at trained tokens in an order that packing does not change."""
    order = np.lexsort((rollouts.tokens[rollouts.mask], rollouts.positions[rollouts.mask], rollouts.old_logps[rollouts.mask]))
    return [np.asarray(x)[rollouts.mask][order] for x in arrays]


def close(a, b, tolerance=1e-5):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance * max(1.0, float(np.abs(y).max())))


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean", "dr_grpo"])
def test_the_losses(aggregation, seed):
    """Of log-probs that are a function of the token alone; every branch of the loss is taken."""
    config = GRPOConfig(dual_clip=1.2, kl_coef=0.1, aggregation=aggregation, normaliser=7.0, llds=0.5)
    found = []
    for rollouts in map(rows_of, both(seed)):
        noise, ref, entropy = (jnp.sin(k * rollouts.tokens + rollouts.positions) for k in (1.0, 2.0, 3.0))
        given = rollouts.old_logps, ref, rollouts.advantages, rollouts.mask

        def loss(logps, rollouts=rollouts, given=given, entropy=entropy):
            total, denominator, sums = policy_loss(logps, *given, config, entropy, rollouts.segment_ids)
            fall, fallen = displacement_guard(
                logps, rollouts.old_logps, rollouts.advantages, rollouts.mask, config, rollouts.segment_ids
            )
            return total / denominator + fall / fallen, (denominator, sums, fall, fallen)

        logps = jnp.where(rollouts.mask, rollouts.old_logps, 0.0) + 0.5 * noise
        (value, aux), gradient = jax.value_and_grad(loss, has_aux=True)(logps)
        assert not np.asarray(gradient)[~np.asarray(rollouts.mask)].any()
        found.append((value, aux, by_token(jax.tree.map(np.asarray, rollouts), gradient)))
    close(*found)
    assert all(found[0][1][1][name] > 0 for name in ("clip_fraction", "dual_clip_fraction")) and found[0][1][3] > 0


def test_actions_of_neighbours_are_two_actions():
    """Rollouts without prompts: the end of one touches the start of the next, and only one of them fell."""
    mask, segments = jnp.ones((1, 6), bool), jnp.array([[1, 1, 2, 2, 2, 2]])
    old, new = jnp.zeros((1, 6)), jnp.array([[-1.0, -1.0, 1.0, 1.0, 1.0, -0.5]])
    fall, tokens = displacement_guard(new, old, jnp.ones((1, 6)), mask, GRPOConfig(llds=1.0), segments)
    assert (fall, tokens) == (2.0, 2.0)


def test_rewards_and_advantages_of_ppo():
    found = []
    for rollouts in both():
        values, ref = np.sin(rollouts.tokens + rollouts.positions), np.cos(rollouts.tokens)
        rewards = ppo.token_rewards(rollouts.rewards, rollouts.old_logps, ref, rollouts.mask, 0.3, rollouts.segment_ids)
        made = ppo.gae(rewards, values, rollouts.mask, 0.9, 0.8, rollouts.segment_ids)
        found.append(by_token(rollouts, rewards, *made, ppo.whiten(made[0], rollouts.mask)))
    close(*found)


CONFIG = StepConfig(grpo=GRPOConfig(kl_coef=0.05, dual_clip=1.1), policy_optimizer=OptimizerConfig(lr=1.0))
OPTIONS = {
    "seq_mean with the guard": {"grpo": GRPOConfig(kl_coef=0.05, aggregation="seq_mean", llds=0.5)},
    "dr_grpo in full": {"grpo": GRPOConfig(kl_coef=0.05, aggregation="dr_grpo", normaliser=9.0), "trainable": "full", "epochs": 2},
    "ppo": {"grpo": GRPOConfig(kl_coef=0.0), "ppo": PPOConfig(gae_lambda=0.9, discount=0.95, kl_coef=0.05)},
}


def record(gradient, seen, params):
    return jax.tree.map(jnp.zeros_like, gradient), jax.tree.map(lambda g, s: g + 0.5 * s, gradient, seen)


# Moves nothing; its state is the gradients of the minibatches, each of weight one half of the next.
RECORDER = optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), record)


@functools.cache
def world(option):
    config = dataclasses.replace(CONFIG, **OPTIONS[option])
    model, params, adapter = make_policy(lora=config.trainable == "lora")
    encoder, encoder_params, eta = make_encoder()
    policy = nudged(params, 7, 0.02) if adapter is None else nudged(adapter, 7)
    critic = None
    if config.ppo:
        critic = init_critic(jax.random.key(9), params, model.lora)
        critic["head"]["kernel"] = 0.1 * jax.random.normal(jax.random.key(10), critic["head"]["kernel"].shape)
    modules = Modules(model, encoder, *[RECORDER] * 3)
    step = functools.partial((ppo_step if config.ppo else bilevel).policy_step, config, modules)
    state = init_state(modules, policy, eta, jax.random.key(4), critic)
    return modules, Frozen(params, encoder_params), state, jax.jit(step)


def sampled(option, rollouts):
    """The rollouts with log-probs near those of the policy, so that ratios are as in training."""
    modules, frozen, state, _ = world(option)
    variables = bilevel.policy_variables(dataclasses.replace(CONFIG, **OPTIONS[option]), frozen.policy, state.policy)
    rows = rows_of(rollouts)
    logps, _ = jax.jit(sequence_logps, static_argnums=0)(
        modules.policy, variables, rows.tokens, positions=rows.positions, segment_ids=rows.segment_ids
    )
    noise = 0.2 * jnp.sin(rows.tokens + rows.positions)
    return rollouts.replace(old_logps=jnp.where(rows.mask, logps + noise, jnp.nan).reshape(rollouts.tokens.shape))


@pytest.mark.parametrize("option", OPTIONS)
def test_a_step(option):
    _, frozen, state, step = world(option)
    (alone, metrics_alone), (packed, metrics) = (step(frozen, state, sampled(option, rollouts)) for rollouts in both())
    close(metrics, metrics_alone)
    assert metrics["policy/skipped_updates"] == 0 and metrics["policy/grad_norm"] > 0
    if "policy/llds" in metrics_alone:
        assert metrics["policy/llds"] > 0
    for made, expected in zip((packed.policy_opt, packed.critic_opt), (alone.policy_opt, alone.critic_opt), strict=True):
        size = optax.tree.norm(expected)
        assert optax.tree.norm(jax.tree.map(jnp.subtract, made, expected)) <= 1e-5 * size and (size > 0.1 or expected is None)

    compiled = step._cache_size()
    _, other = both(seed=5)
    assert other.tokens.shape == both()[1].tokens.shape and not np.array_equal(other.segment_ids, both()[1].segment_ids)
    step(frozen, state, sampled(option, other))
    assert step._cache_size() == compiled == 2  # other lengths, the same buckets: no program more
