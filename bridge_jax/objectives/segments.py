"""Rollouts side by side in one row of tokens: what is theirs alone.

segment_ids [..., T] int32 tell them apart: they ascend along a row, equal within a rollout, and 0 is padding, which comes last.
None stands for rows of one rollout each.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def sums_within(x: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
    """x [B, T] -> [B, T]: at every column the sum of x over the columns of its row with the same id (0 <= id <= T)."""
    if segment_ids is None:
        return jnp.broadcast_to(x.sum(-1, keepdims=True), x.shape)
    sums = jax.vmap(lambda row, ids: jax.ops.segment_sum(row, ids, num_segments=x.shape[1] + 1))(x, segment_ids)
    return jnp.take_along_axis(sums, segment_ids, axis=1)


def last_of_each(mask: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
    """mask [..., T] bool -> [..., T] bool: the last masked token of every rollout that has one."""
    none = jnp.iinfo(jnp.int32).max
    ids = jnp.where(mask, 0 if segment_ids is None else segment_ids, none)
    following = jax.lax.cummin(ids, axis=ids.ndim - 1, reverse=True)  # of the next masked token, this one included
    following = jnp.concatenate([following[..., 1:], jnp.full_like(following[..., :1], none)], -1)
    return mask & (following != ids)
