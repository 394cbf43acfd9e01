"""PPO: rewards with a KL penalty per token, generalised advantages over generated tokens, the clipped value loss.

Sources: METHOD 9 (Search-R1); GAE: arXiv 1506.02438, eq. 16; the rest as in verl's `core_algos` (KL penalty "kl", `masked_whiten`,
`compute_value_loss`). The policy's loss is `grpo.policy_loss` with these advantages a token and no KL term of its own.

Observations are not actions: rewards, values and the recursion live on generated tokens alone, and the successor of the last token
of a generation is the first token of the next one. Shapes: T tokens in each of some rows; a row holds one rollout, or several that
`segment_ids` [..., T] tell apart (`objectives.segments`).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from bridge_jax.objectives.segments import last_of_each

WHITEN_EPSILON = 1e-8


@dataclasses.dataclass(frozen=True)
class PPOConfig:
    """Options beyond the policy's clipped loss.

    gae_lambda, discount: of the advantage recursion; both 1 give the return minus the value.
    kl_coef: weight of the KL to the reference, taken off each token's reward. value_clip: a new value counts at most this far
    from the old one.
    """

    gae_lambda: float = 1.0
    discount: float = 1.0
    kl_coef: float = 1e-3
    value_clip: float = 0.5


def token_rewards(
    outcomes: jax.Array,
    old_logps: jax.Array,
    ref_logps: jax.Array | None,
    mask: jax.Array,
    kl_coef: float,
    segment_ids: jax.Array | None = None,
) -> jax.Array:
    """Reward of every token [..., T] float32: - kl_coef (old - ref) on generated tokens, the outcome on a rollout's last of them.

    outcomes [...] of rows of one rollout, or [..., T] of each token's rollout; old_logps, ref_logps [..., T]: the sampler's and the
    reference's log-probs (None: no penalty); mask [..., T] bool: generated tokens. 0 elsewhere, whatever lies there.
    """
    mask, outcomes = jnp.asarray(mask, bool), jnp.asarray(outcomes, jnp.float32)
    outcomes = outcomes[..., None] if outcomes.ndim < mask.ndim else outcomes
    rewards = jnp.where(last_of_each(mask, segment_ids), outcomes, 0.0)
    if ref_logps is not None:
        rewards = rewards - kl_coef * jnp.where(mask, old_logps - ref_logps, 0.0)
    return rewards


def gae(
    rewards: jax.Array,
    values: jax.Array,
    mask: jax.Array,
    discount: float = 1.0,
    gae_lambda: float = 1.0,
    segment_ids: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Generalised advantages and the returns that the critic learns: (A, A + V), both [..., T] float32, 0 off the mask.

    rewards, values, mask [..., T]; V_t is the value *before* token t. Over the masked tokens of a rollout, t' being the next one:
    delta_t = r_t + discount V_t' - V_t and A_t = delta_t + discount lambda A_t'; nothing follows the last one.
    """
    mask = jnp.asarray(mask, bool)
    rewards, values = (jnp.where(mask, x, 0.0).astype(jnp.float32) for x in (rewards, values))

    def back(carry, column):
        reward, value, generated, last = column
        next_value, next_advantage = (jnp.where(last, 0.0, x) for x in carry)  # of the rollout's next generated token
        advantage = reward + discount * next_value - value + discount * gae_lambda * next_advantage
        carry = jnp.where(generated, value, next_value), jnp.where(generated, advantage, next_advantage)
        return carry, jnp.where(generated, advantage, 0.0)

    columns = jax.tree.map(lambda x: jnp.moveaxis(x, -1, 0), (rewards, values, mask, last_of_each(mask, segment_ids)))
    start = (jnp.zeros_like(rewards[..., 0]),) * 2
    advantages = jnp.moveaxis(jax.lax.scan(back, start, columns, reverse=True)[1], 0, -1)
    return advantages, advantages + values


def masked_moments(x: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(mean, sample variance) of x over the mask; 0 where there is nothing to take them of."""
    count = mask.sum()
    mean = jnp.where(mask, x, 0.0).sum() / jnp.maximum(count, 1)
    return mean, jnp.where(mask, jnp.square(x - mean), 0.0).sum() / jnp.maximum(count - 1, 1)


def whiten(advantages: jax.Array, mask: jax.Array) -> jax.Array:
    """(A - mean) / std over all masked tokens of the batch (not of a micro-batch); 0 elsewhere."""
    mean, variance = masked_moments(advantages, mask)
    return jnp.where(mask, (advantages - mean) * jax.lax.rsqrt(variance + WHITEN_EPSILON), 0.0)


def explained_variance(values: jax.Array, returns: jax.Array, mask: jax.Array) -> jax.Array:
    """1 - Var(returns - V) / Var(returns) over the mask; 0 when the returns do not vary."""
    _, total = masked_moments(returns, mask)
    _, left = masked_moments(returns - values, mask)
    return jnp.where(total > WHITEN_EPSILON, 1.0 - left / jnp.maximum(total, WHITEN_EPSILON), 0.0)


def value_loss(
    values: jax.Array, old_values: jax.Array, returns: jax.Array, mask: jax.Array, clip: float
) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    """The clipped value loss, as sums: 1/2 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) per generated token.

    values, old_values, returns, mask [..., T]. Returns (loss sum, masked tokens, {"clip_fraction": tokens that the clip decided}).
    An empty mask gives zeros; what lies off the mask, even NaN, never matters.
    """
    mask = jnp.asarray(mask, bool)
    values, old_values, returns = (jnp.where(mask, x, 0.0) for x in (values, old_values, returns))
    plain = jnp.square(values - returns)
    clipped = jnp.square(jnp.clip(values, old_values - clip, old_values + clip) - returns)
    decided = jax.lax.stop_gradient((clipped > plain).astype(jnp.float32).sum())
    return 0.5 * jnp.maximum(plain, clipped).sum(), mask.astype(jnp.float32).sum(), {"clip_fraction": decided}
