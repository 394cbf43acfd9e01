"""The step with PPO on tiny real models: against a step written by hand; batching, observations and faults change nothing."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_ppo import slow_ppo
from tiny_world import cut, jitted_logps, make_batch, make_encoder, make_policy, nudged

from bridge_jax.models.value import init_critic, token_values
from bridge_jax.objectives import ppo_step
from bridge_jax.objectives.bilevel import Frozen, Modules, OptimizerConfig, StepConfig, init_state, make_optimizers
from bridge_jax.objectives.grpo import GRPOConfig, policy_loss
from bridge_jax.objectives.ppo import PPOConfig, value_loss

CONFIG = StepConfig(
    grpo=GRPOConfig(kl_coef=0.0),
    policy_optimizer=OptimizerConfig(lr=1e-2, weight_decay=0.01, warmup=2),
    ppo=PPOConfig(gae_lambda=0.95, discount=0.99, kl_coef=0.05, value_clip=0.5),
    critic_optimizer=OptimizerConfig(lr=1e-2, warmup=3),
)
jitted_values = jax.jit(token_values, static_argnums=0)


def world(config=CONFIG, tie=True):
    """(modules, frozen, fresh-state function, rollouts); the policy starts off its reference, the critic off zero."""
    return _world(config, tie)


@functools.cache
def _world(config, tie):
    model, params, adapter = make_policy(lora=config.trainable == "lora", tie=tie)
    encoder, encoder_params, eta = make_encoder()
    policy = nudged(params, 7, 0.02) if adapter is None else nudged(adapter, 7)
    critic = init_critic(jax.random.key(9), params, model.lora)
    critic["head"]["kernel"] = 0.1 * jax.random.normal(jax.random.key(10), critic["head"]["kernel"].shape)
    modules = Modules(model, encoder, *make_optimizers(config))
    variables = {"params": policy} if adapter is None else {"params": params, "lora": policy}
    outcomes = jnp.asarray([1, 0, 0, 1, 0, 1, 0, 0], jnp.float32)
    rollouts = make_batch(model, variables).rollouts.replace(rewards=outcomes, advantages=jnp.full(8, jnp.nan))

    def fresh():
        return init_state(modules, *jax.tree.map(jnp.array, (policy, eta)), jax.random.key(4), jax.tree.map(jnp.array, critic))

    return modules, Frozen(params, encoder_params), fresh, rollouts


@functools.cache
def compiled(config, modules):
    return jax.jit(functools.partial(ppo_step.policy_step, config, modules), donate_argnums=1)


def run(config=CONFIG, rollouts=None, optimizer=None, **sizes):
    modules, frozen, fresh, default = world(config)
    state = fresh()
    if optimizer is not None:
        modules = dataclasses.replace(modules, policy_optimizer=optimizer, critic_optimizer=optimizer)
        state = init_state(modules, state.policy, state.retriever, state.rng, state.critic)
    return compiled(config, modules)(frozen, state, cut(default if rollouts is None else rollouts, **sizes))


def learned(state):
    return state.policy, state.critic


def same(a, b):
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def close(a, b, atol):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=atol), a, b)


PPO_METRICS = {
    *("ppo/value_loss", "ppo/value_clip_fraction", "ppo/explained_variance"),
    *("ppo/kl_reward", "ppo/critic_grad_norm", "ppo/skipped_updates"),
}


def test_a_step_moves_policy_and_critic_and_says_so():
    modules, _, fresh, _ = world()
    state, metrics = run()
    assert state.step == 1
    assert same((state.retriever, state.retriever_opt), (fresh().retriever, fresh().retriever_opt))
    for after, before in zip(learned(state), learned(fresh()), strict=True):
        assert not same(after, before)
    assert set(metrics) >= PPO_METRICS
    assert all(np.isfinite(v) and v.shape == () for v in metrics.values())
    assert metrics["ppo/critic_grad_norm"] > 0 and metrics["policy/grad_norm"] > 0 and metrics["ppo/value_loss"] > 0
    assert metrics["gap/logp_max"] < 2e-5
    assert metrics["policy/kl"] > 0  # a metric: the reference is known, and no term of the loss
    assert same(learned(run()[0]), learned(state))
    assert compiled(CONFIG, modules)._cache_size() == 1


def by_hand():
    """The step written out: values and reference first, GAE by the slow loop, numpy's whitening, then two minibatches a network."""
    modules, frozen, fresh, rollouts = world()
    state, model = fresh(), modules.policy
    where = {"positions": rollouts.positions, "segment_ids": rollouts.segment_ids}
    mask = np.asarray(rollouts.mask)
    values = np.asarray(jitted_values(model, frozen.policy, state.critic, rollouts.tokens, **where))
    ref = np.asarray(jitted_logps(model, {"params": frozen.policy}, rollouts.tokens, **where)[0])
    p = CONFIG.ppo
    args = (mask, np.asarray(rollouts.rewards), np.asarray(rollouts.old_logps), ref, values, p.kl_coef, p.discount, p.gae_lambda)
    rewards, advantages, returns = slow_ppo(*args)
    white = np.where(mask, (advantages - advantages[mask].mean()) / advantages[mask].std(ddof=1), 0.0)

    policy, policy_opt, critic, critic_opt = state.policy, state.policy_opt, state.critic, state.critic_opt
    for half in (slice(0, 4), slice(4, 8)):
        rows, part = jax.tree.map(lambda x, half=half: x[half], (rollouts, {"v": values, "r": returns, "a": white}))
        where = {"positions": rows.positions, "segment_ids": rows.segment_ids}

        def critic_loss(critic, rows=rows, part=part, where=where):
            new = jitted_values(model, frozen.policy, critic, rows.tokens, **where)
            total, count, _ = value_loss(new, part["v"], part["r"], rows.mask, p.value_clip)
            return total / count

        def loss(policy, rows=rows, part=part, where=where):
            logp, _ = jitted_logps(model, {"params": frozen.policy, "lora": policy}, rows.tokens, **where)
            total, count, _ = policy_loss(logp, rows.old_logps, None, part["a"], rows.mask, CONFIG.grpo)
            return total / count

        updates, critic_opt = modules.critic_optimizer.update(jax.grad(critic_loss)(critic), critic_opt, critic)
        critic = optax.apply_updates(critic, updates)
        updates, policy_opt = modules.policy_optimizer.update(jax.grad(loss)(policy), policy_opt, policy)
        policy = optax.apply_updates(policy, updates)
    penalty = (rewards.sum() - float(rollouts.rewards.sum())) / len(mask)
    return policy, critic, penalty, 1 - np.var((returns - values)[mask]) / np.var(returns[mask])


def test_the_step_is_the_one_written_by_hand():
    policy, critic, penalty, explained = by_hand()
    state, metrics = run()
    close(learned(state), (policy, critic), 2e-5)
    assert metrics["ppo/kl_reward"] == pytest.approx(penalty, rel=1e-4)
    assert metrics["ppo/explained_variance"] == pytest.approx(explained, rel=1e-4)


def test_micro_batches_are_the_whole_batch():
    start, sgd = world()[2](), optax.sgd(1.0)
    a, metrics = run(optimizer=sgd, minibatch=8, microbatch=8)
    b, metrics_parts = run(optimizer=sgd, minibatch=8)
    steps = [jax.tree.map(jnp.subtract, learned(start), learned(state)) for state in (a, b)]
    for one, parts in zip(*steps, strict=True):
        size = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(one))
        assert size > 0
        close(one, parts, 3e-5 * size)
    for name in metrics:
        assert metrics[name] == pytest.approx(float(metrics_parts[name]), rel=1e-4, abs=2e-5), name


def test_what_lies_off_the_mask_changes_nothing():
    """Junk in a last observation, and NaN where nothing was generated."""
    rows = world()[3]
    tail = jnp.arange(20) >= 17
    rows = rows.replace(mask=rows.mask & ~tail)
    base, _ = run(rollouts=rows)
    junk = rows.replace(tokens=jnp.where(tail, 1, rows.tokens), old_logps=jnp.where(rows.mask, rows.old_logps, jnp.nan))
    assert same(learned(run(rollouts=junk)[0]), learned(base))
    fault = rows.replace(mask=rows.mask.at[2].set(False))
    other = fault.replace(rewards=fault.rewards.at[2].set(jnp.nan))
    (a, metrics), (b, _) = run(rollouts=fault), run(rollouts=other)
    assert same(learned(a), learned(b)) and np.isfinite(metrics["ppo/kl_reward"])


def test_a_gradient_that_is_not_finite_is_skipped_and_counted():
    _, _, fresh, rows = world()
    assert rows.mask[1, 6]
    state, metrics = run(rollouts=rows.replace(old_logps=rows.old_logps.at[1, 6].set(jnp.nan)))
    # row 1's returns are spoilt (one critic minibatch), and the whole batch's whitening with them
    assert (metrics["ppo/skipped_updates"], metrics["policy/skipped_updates"]) == (1, 2)
    assert same(state.policy, fresh().policy) and not same(state.critic, fresh().critic)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((state.policy, state.critic, state.critic_opt)))


def test_nothing_to_learn_from_moves_nothing():
    _, _, fresh, rows = world()
    state, metrics = run(rollouts=rows.replace(mask=jnp.zeros_like(rows.mask)))
    assert same(learned(state), learned(fresh()))
    assert all(np.isfinite(v) for v in metrics.values())
    assert metrics["policy/skipped_updates"] == metrics["ppo/skipped_updates"] == 0


@pytest.mark.parametrize(("tie", "kl_coef"), [(True, 0.05), (False, 0.0)])
def test_training_in_full_reads_a_reference_for_the_kl_alone(tie, kl_coef):
    config = dataclasses.replace(CONFIG, trainable="full", ppo=PPOConfig(kl_coef=kl_coef))
    modules, frozen, fresh, rows = world(config, tie)
    frozen = frozen if kl_coef else frozen.replace(policy=None)
    state, metrics = compiled(config, modules)(frozen, fresh(), cut(rows, 8, 4))
    for after, before in zip(learned(state), learned(fresh()), strict=True):
        assert not same(after, before)
    assert (metrics["ppo/kl_reward"] != 0) == ("policy/kl" in metrics) == (kl_coef > 0)


def test_the_critic_learns_what_its_rollouts_return():
    config = dataclasses.replace(CONFIG, ppo=PPOConfig())
    modules, frozen, fresh, rows = world(config)
    state, seen, rows = fresh(), [], cut(rows, 8, 8)
    for _ in range(30):
        state, metrics = compiled(config, modules)(frozen, state, rows)
        seen.append((float(metrics["ppo/value_loss"]), float(metrics["ppo/explained_variance"])))
    assert seen[-1][0] < 0.2 * seen[0][0]
    assert seen[-1][1] > 0.8 > seen[0][1]
