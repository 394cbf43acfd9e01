"""The policy's half of a step with PPO (METHOD 9): values, advantages a token, the critic's update, then the policy's. Pure.

    values, reference log-probs   (before any update, micro-batch by micro-batch, forward only)
    -> rewards, GAE               (whole batch; whitened for the policy, returns for the critic)
    -> critic: minibatches of the clipped value loss    -> policy: the same minibatches of `grpo.policy_loss`

Memory beyond GRPO's: the critic, its optimiser's state, and two arrays of a number a token.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from bridge_jax.models.value import token_values
from bridge_jax.objectives import ppo
from bridge_jax.objectives.bilevel import (
    BridgeState,
    Frozen,
    Modules,
    Rollouts,
    StepConfig,
    constrained,
    guarded_update,
    one_minibatch,
    over_parts,
    policy_update,
)
from bridge_jax.objectives.logprobs import sequence_logps
from bridge_jax.objectives.segments import last_of_each


def before_update(config: StepConfig, modules: Modules, frozen_params, critic, rollouts: Rollouts):
    """-> (values, reference log-probs or None when the KL costs nothing), [S, P, R, T], under the weights a step starts with."""

    def forward(rows: Rollouts):
        rows = constrained(rows, modules.policy)
        where = {"positions": rows.positions, "segment_ids": rows.segment_ids}
        values = token_values(modules.policy, frozen_params, critic, rows.tokens, **where)
        if config.ppo.kl_coef == 0.0:
            return values, None
        return values, sequence_logps(modules.policy, {"params": frozen_params}, rows.tokens, chunk=config.chunk, **where)[0]

    rows = one_minibatch(rollouts)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(forward, jax.tree.map(lambda x: x[0], rows)))
    parts = jax.lax.map(lambda rows: jax.lax.cond(rows.mask.any(), forward, lambda _: zeros, rows), rows)
    return jax.tree.map(lambda x: x.reshape(rollouts.tokens.shape), parts)


def critic_update(config: StepConfig, modules: Modules, frozen_params, critic, opt_state, rollouts: Rollouts, values, returns):
    """Minibatches in order, each the exact mean over its micro-batches, AdamW on the clipped value loss.

    values, returns [S, P, R, T]: the critic's own before the update, and what it learns. Returns (critic, opt_state, metrics).
    """

    def loss(critic, part):
        rows, old_values, returns = part
        new = token_values(
            modules.policy, frozen_params, critic, rows.tokens, positions=rows.positions, segment_ids=rows.segment_ids
        )
        total, tokens, sums = ppo.value_loss(new, old_values, returns, rows.mask, config.ppo.value_clip)
        return total, sums | {"loss": total, "tokens": tokens}

    def micro(critic, part):
        return jax.grad(loss, has_aux=True)(critic, constrained(part, modules.policy))

    def minibatch(carry, parts):
        critic, opt_state = carry
        gradient, sums = over_parts(lambda part: micro(critic, part), parts, parts[0].mask)
        tokens = sums["tokens"]
        gradient = jax.tree.map(lambda g: g / jnp.maximum(tokens, 1.0), gradient)
        critic, opt_state, norm, skipped = guarded_update(modules.critic_optimizer, gradient, opt_state, critic, tokens > 0)
        return (critic, opt_state), (sums, norm, skipped)

    rows = rollouts, values, returns
    (critic, opt_state), out = jax.lax.scan(
        lambda carry, _: jax.lax.scan(minibatch, carry, rows), (critic, opt_state), None, length=config.epochs
    )
    sums, norms, skipped = jax.tree.map(jnp.ravel, out)  # [epochs * minibatches]
    tokens, applied = sums["tokens"].sum(), ((sums["tokens"] > 0) & (skipped == 0)).sum()
    metrics = {
        "ppo/value_loss": sums["loss"].sum() / jnp.maximum(tokens, 1.0),
        "ppo/value_clip_fraction": sums["clip_fraction"].sum() / jnp.maximum(tokens, 1.0),
        "ppo/critic_grad_norm": norms.sum() / jnp.maximum(applied, 1),
        "ppo/skipped_updates": skipped.sum(),
    }
    return critic, opt_state, metrics


def policy_step(config: StepConfig, modules: Modules, frozen: Frozen, state: BridgeState, rollouts: Rollouts):
    """(state, rollouts) -> (state, metrics), in the place of `bilevel.policy_step`. `rollouts.rewards` are the outcomes."""
    mask, segments = rollouts.mask, rollouts.segment_ids
    values, ref_logps = before_update(config, modules, frozen.policy, state.critic, rollouts)
    kl = rollouts.old_logps, ref_logps, mask, config.ppo.kl_coef, segments
    rewards = ppo.token_rewards(rollouts.rewards, *kl)
    advantages, returns = ppo.gae(rewards, values, mask, config.ppo.discount, config.ppo.gae_lambda, segments)
    critic, critic_opt, metrics = critic_update(
        config, modules, frozen.policy, state.critic, state.critic_opt, rollouts, values, returns
    )
    ready = rollouts.replace(advantages=ppo.whiten(advantages, mask), ref_logps=ref_logps)
    policy, policy_opt, policy_metrics = policy_update(config, modules, frozen.policy, state.policy, state.policy_opt, ready)
    metrics["ppo/explained_variance"] = ppo.explained_variance(values, returns, mask)
    count = last_of_each(mask, segments).sum()
    metrics["ppo/kl_reward"] = ppo.token_rewards(jnp.zeros_like(rollouts.rewards), *kl).sum() / jnp.maximum(count, 1)
    state = state.replace(step=state.step + 1, policy=policy, policy_opt=policy_opt, critic=critic, critic_opt=critic_opt)
    return state, metrics | policy_metrics
