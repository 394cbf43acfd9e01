"""Drawing one token a row: the tempered distribution inverted at one random number, or its top-k / top-p part.

Keys are ``fold_in(fold_in(key, sample_id), position)``: what a sample draws depends on itself only. The recorded log-probability is
the trainer's: float32 log-softmax of the unmodified logits (all V of them, temperature 1) at the drawn token, whatever it was drawn
from. At temperature 1 without options both are the same distribution. With top_p < 1, top_k > 0 or a minimum length the token comes
from a renormalised one and the trainer's importance ratios are biased: for evaluation and `ask`, not for training.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from bridge_jax.rollout.limits import SLICE


def draw(logits: jax.Array, uniform: jax.Array) -> jax.Array:
    """logits [B, V] float32, uniform [B] in [0, 1) -> [B] int32: each row's cumulative distribution inverted at its number.

    One random number a row instead of V, and two short cumulative sums (over blocks, then inside the block) instead of a long one.
    An id of probability 0 is never drawn.
    """
    batch, vocab = logits.shape
    width = 1 << max(1, (vocab.bit_length() + 1) // 2)
    weights = jnp.exp(logits - logits.max(-1, keepdims=True))
    weights = jnp.pad(weights, ((0, 0), (0, -vocab % width))).reshape(batch, -1, width)

    def invert(mass, target):
        """The first possible entry whose cumulative sum passes the target; the likeliest if rounding left none."""
        cumulative = jnp.cumsum(mass, axis=-1)
        passes = (cumulative > target[:, None]) & (mass > 0)
        index = jnp.where(passes.any(-1), passes.argmax(-1), mass.argmax(-1))
        return index, jnp.take_along_axis(cumulative - mass, index[:, None], axis=1)[:, 0]

    blocks = weights.sum(-1)
    target = uniform * jnp.cumsum(blocks, axis=-1)[:, -1]
    block, before = invert(blocks, target)
    inside, _ = invert(jnp.take_along_axis(weights, block[:, None, None], axis=1)[:, 0], target - before)
    return (block * width + inside).astype(jnp.int32)


def draw_top(logits: jax.Array, uniform: jax.Array, top_p: float, top_k: int) -> jax.Array:
    """`draw` from the top of each row's distribution: the `top_k` most likely ids, of these the fewest that hold `top_p` mass.

    top_k in [0, SLICE], 0 for no such limit; top_p in (0, 1], of the mass of the top_k ids, or of all V where there is no top_k
    (temperature, top-k, top-p in the order of transformers). Without top_k only the SLICE most likely ids are looked at: where they
    hold less than top_p, which takes a flat distribution, all of them are kept and the tail is lost.
    """
    best, ids = jax.lax.top_k(logits, min(top_k or SLICE, logits.shape[-1]))
    if top_p < 1:
        mass = jnp.exp(best - jax.nn.logsumexp(best if top_k else logits, axis=-1, keepdims=True))
        before = jnp.cumsum(mass, axis=-1) - mass
        best = jnp.where(before < top_p, best, -jnp.inf)
    return jnp.take_along_axis(ids, draw(best, uniform)[:, None], axis=1)[:, 0].astype(jnp.int32)


def pick(
    logits: jax.Array,
    key: jax.Array,
    sample_id: jax.Array,
    position: jax.Array,
    temperature: jax.Array,
    *,
    top_p: float = 1.0,
    top_k: int = 0,
    barred: jax.Array | None = None,
):
    """(token [B] int32, log-prob [B] float32 under the untempered, full distribution). temperature 0 takes the most likely token.

    logits [B, V] float32; sample_id, position [B]; barred [B, V] bool: ids that may not be taken now. top_p, top_k: `draw_top`.
    """
    keys = jax.vmap(lambda sample, at: jax.random.fold_in(jax.random.fold_in(key, sample), at))(sample_id, position)
    uniform = jax.vmap(lambda row_key: jax.random.uniform(row_key))(keys)
    open_to = logits if barred is None else jnp.where(barred, -jnp.inf, logits)
    tempered = open_to / jnp.where(temperature > 0, temperature, 1.0)
    sampled = draw_top(tempered, uniform, top_p, top_k) if top_p < 1 or top_k else draw(tempered, uniform)
    token = jnp.where(temperature > 0, sampled, open_to.argmax(-1).astype(jnp.int32))
    chosen = jnp.take_along_axis(logits, token[:, None], axis=1)[:, 0]
    return token, chosen - jax.nn.logsumexp(logits, axis=-1)
