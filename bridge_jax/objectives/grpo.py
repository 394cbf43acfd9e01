"""GRPO: group advantages and the clipped policy loss with its Dr.GRPO and DAPO variants.

Sources: METHOD 4 and 7; Dr.GRPO (arXiv 2503.20783): no std, constant normaliser; DAPO (arXiv 2503.14476): clip-higher,
token mean, groups without spread left out. Shapes: N groups, G rollouts a group, B rows, T tokens; a row holds one rollout, or
several that `segment_ids` [B, T] tell apart (`objectives.segments`).

Losses come as (sum, denominator): summing both over micro-batches and dividing once is exactly the loss of the whole batch.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from bridge_jax.objectives.segments import last_of_each, sums_within

ADVANTAGE_EPSILON = 1e-6

# Log-ratios are clamped here before exp: e^10 = 2.2e4 is far outside every clip range; e^20 would already be 5e8 in the KL term.
LOG_RATIO_CLAMP = 10.0


@dataclasses.dataclass(frozen=True)
class GRPOConfig:
    """Options of the policy loss.

    clip_low, clip_high: ratio clipped to [1 - clip_low, 1 + clip_high] (DAPO raises clip_high).
    dual_clip: bound c > 1 on the ratio of negative advantages, loss at most -c A; None switches it off.
    kl_coef: weight beta of the k3 KL to the reference, a term of the loss.
    aggregation: "token_mean" (sum over tokens / tokens), "seq_mean" (mean of the rollouts' token means),
        "dr_grpo" (constant normaliser: sum over tokens / (rollouts * normaliser)).
    normaliser: the response limit that "dr_grpo" divides by; no other aggregation reads it.
    llds: weight lambda of `displacement_guard`; 0 switches it off. llds_gate: it guards actions of A >= 0 ("nonnegative") or of
        A > 0 ("positive"). llds_slack: a fall of less than this a token is rounding between sampler and trainer, and no fall.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = 3.0
    kl_coef: float = 1e-4
    aggregation: str = "token_mean"
    normaliser: float = 1.0
    llds: float = 0.0
    llds_gate: str = "nonnegative"
    llds_slack: float = 0.0

    def __post_init__(self):
        if self.aggregation not in ("token_mean", "seq_mean", "dr_grpo"):
            raise ValueError(f"aggregation {self.aggregation!r}: allowed are token_mean, seq_mean, dr_grpo")
        if self.dual_clip is not None and self.dual_clip <= 1.0:
            raise ValueError(f"dual_clip {self.dual_clip}: must be above 1, or None")
        if self.llds_gate not in ("nonnegative", "positive"):
            raise ValueError(f"llds_gate {self.llds_gate!r}: allowed are nonnegative, positive")


def group_advantages(rewards: jax.Array, mode: str = "grpo", valid: jax.Array | None = None) -> jax.Array:
    """Advantages of rollouts relative to their group.

    rewards [N, G]; valid [N, G] bool, False for rollouts that count neither in the statistics nor in the update (environment
    faults). mode "grpo": (r - mean) / (std + 1e-6); "dr_grpo": r - mean. `std` is the *sample* deviation (ddof = 1), as in verl,
    TRL and Tunix. Returns [N, G] float32; exactly 0 for invalid rollouts, for groups whose valid rewards are all equal, and for
    groups with fewer than two valid rollouts.
    """
    if mode not in ("grpo", "dr_grpo"):
        raise ValueError(f"advantage mode {mode!r}: allowed are grpo, dr_grpo")
    rewards = jnp.asarray(rewards, jnp.float32)
    valid = jnp.ones(rewards.shape, bool) if valid is None else jnp.asarray(valid, bool)
    count = valid.sum(-1, keepdims=True)
    mean = jnp.where(valid, rewards, 0.0).sum(-1, keepdims=True) / jnp.maximum(count, 1)
    centred = jnp.where(valid, rewards - mean, 0.0)
    if mode == "grpo":
        std = jnp.sqrt(jnp.square(centred).sum(-1, keepdims=True) / jnp.maximum(count - 1, 1))
        centred = centred / (std + ADVANTAGE_EPSILON)
    # The mean of equal numbers may be off by one rounding, which 1e-6 would blow up: equality is tested on the rewards themselves.
    return jnp.where(informative_groups(rewards, valid)[:, None], centred, 0.0)


def informative_groups(rewards: jax.Array, valid: jax.Array | None = None) -> jax.Array:
    """[N] bool: the group's valid rewards are not all equal.

    Also DAPO's dynamic-sampling filter: clear the loss mask of the other groups (the policy's only, never the retriever's).
    """
    rewards = jnp.asarray(rewards, jnp.float32)
    valid = jnp.ones(rewards.shape, bool) if valid is None else jnp.asarray(valid, bool)
    low = jnp.where(valid, rewards, jnp.inf).min(-1)
    high = jnp.where(valid, rewards, -jnp.inf).max(-1)
    return high > low


def k3_kl(logps: jax.Array, ref_logps: jax.Array) -> jax.Array:
    """Schulman's k3 estimate of KL(policy || reference) per token: e^r - r - 1 with r = log ref - log policy, clamped. >= 0."""
    log_ratio = jnp.clip(ref_logps - logps, -LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    return jnp.expm1(log_ratio) - log_ratio


def policy_loss(
    logps: jax.Array,
    old_logps: jax.Array,
    ref_logps: jax.Array | None,
    advantages: jax.Array,
    mask: jax.Array,
    config: GRPOConfig,
    entropy: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    """The clipped surrogate with k3 KL, as sums.

    logps, old_logps, ref_logps [B, T] float32: log-prob of token t under the policy, the sampler, the reference (None: no KL term).
    advantages [B] or, of each token's rollout or its own, [B, T]; mask [B, T] bool: generated tokens, the only ones that count.
    entropy [B, T]: a metric. segment_ids [B, T]: the rollouts of a row; None: one.

    Per token: max(-r A, -clip(r) A), for A < 0 at most -dual_clip A, plus kl_coef * k3.
    Returns (loss sum, denominator, metric sums): loss = sum / denominator. Metric sums over masked tokens: `tokens`,
    `clip_fraction` (the clip decided), `dual_clip_fraction`, `kl`, `entropy`, and over tokens with A >= 0
    (`displacement_tokens` of them) `likelihood_displacement` = logp - old and `likelihood_displacement_ref` = logp - ref.
    An empty mask gives 0, 0 and zeros; values at masked tokens, even NaN, never matter.
    """
    mask = jnp.asarray(mask, bool)
    advantages = jnp.asarray(advantages, jnp.float32)
    advantages = jnp.broadcast_to(advantages[:, None] if advantages.ndim == 1 else advantages, mask.shape)
    advantages = jnp.where(mask, advantages, 0.0)
    logps = jnp.where(mask, logps, 0.0)
    change = logps - jnp.where(mask, old_logps, 0.0)

    ratio = jnp.exp(jnp.clip(change, -LOG_RATIO_CLAMP, LOG_RATIO_CLAMP))
    plain = -ratio * advantages
    clipped = -jnp.clip(ratio, 1.0 - config.clip_low, 1.0 + config.clip_high) * advantages
    loss = jnp.maximum(plain, clipped)
    metrics = {"tokens": mask, "clip_fraction": clipped > plain}
    if config.dual_clip is not None:
        bound = -config.dual_clip * advantages
        metrics["dual_clip_fraction"] = (advantages < 0) & (loss > bound)
        loss = jnp.where(advantages < 0, jnp.minimum(loss, bound), loss)

    rising = mask & (advantages >= 0)
    metrics |= {"displacement_tokens": rising, "likelihood_displacement": jnp.where(rising, change, 0.0)}
    if ref_logps is not None:
        ref_logps = jnp.where(mask, ref_logps, 0.0)
        kl = k3_kl(logps, ref_logps)
        loss = loss + config.kl_coef * kl
        metrics |= {"kl": kl, "likelihood_displacement_ref": jnp.where(rising, logps - ref_logps, 0.0)}
    if entropy is not None:
        metrics["entropy"] = jnp.where(mask, entropy, 0.0)

    loss = jnp.where(mask, loss, 0.0)
    if config.aggregation == "seq_mean":
        loss = loss / jnp.maximum(sums_within(mask.astype(jnp.float32), segment_ids), 1.0)
    sums = {name: jax.lax.stop_gradient(value).astype(jnp.float32).sum() for name, value in metrics.items()}
    return loss.sum(), loss_denominator(mask, config, segment_ids), sums


def displacement_guard(
    logps: jax.Array,
    old_logps: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    config: GRPOConfig,
    segment_ids: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The guard against likelihood displacement (METHOD 11, arXiv 2512.04220) as (sum, number of tokens).

    An action is one contiguous span of masked tokens of a rollout. For actions that pass the gate on A and whose summed log-prob
    fell, the mean over their tokens of max(0, logp_old - logp) is to be added lambda times to the policy's loss. Arguments as in
    `policy_loss`. The number of tokens is that of the *fallen* actions: it depends on logps, is no part of the loss's own
    denominator, and over micro-batches both are summed before the one is divided by the other.
    """
    mask = jnp.asarray(mask, bool)
    advantages = jnp.asarray(advantages, jnp.float32)
    advantages = jnp.broadcast_to(advantages[:, None] if advantages.ndim == 1 else advantages, mask.shape)
    fall = jnp.where(mask, old_logps, 0.0) - jnp.where(mask, logps, 0.0)

    # Spans are numbered from 1 within a row; unmasked columns are numbered like the span before them and add nothing.
    goes_on = mask[:, :-1] if segment_ids is None else mask[:, :-1] & (segment_ids[:, 1:] == segment_ids[:, :-1])
    span = jnp.cumsum(mask & ~jnp.pad(goes_on, ((0, 0), (1, 0))), axis=1)
    change, size = sums_within(jax.lax.stop_gradient(fall), span), sums_within(mask.astype(jnp.float32), span)
    wanted = advantages > 0 if config.llds_gate == "positive" else advantages >= 0
    fallen = mask & wanted & (change > config.llds_slack * size)
    return jnp.where(fallen, jax.nn.relu(fall), 0.0).sum(), fallen.astype(jnp.float32).sum()


def loss_denominator(mask: jax.Array, config: GRPOConfig, segment_ids: jax.Array | None = None) -> jax.Array:
    """What a loss over `mask` [B, T] is divided by. Rollouts without a trained token count nowhere."""
    if config.aggregation == "token_mean":
        return mask.astype(jnp.float32).sum()
    rollouts = last_of_each(mask, segment_ids).astype(jnp.float32).sum()
    return rollouts if config.aggregation == "seq_mean" else rollouts * config.normaliser
