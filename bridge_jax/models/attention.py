"""Attention over two blocks of columns with one softmax: the rows' own block, and a block shared by groups of rows.

The shared block of a group (its prompt, or the history of a turn) is read once for all rows and tokens of the group: their queries
are folded into one matrix product. Key/value heads are never repeated for grouped-query attention. Logits and softmax are float32.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

MASKED = -1e30  # finite: a row without any visible column averages garbage instead of producing NaN


def causal_mask(batch: int, length: int, segment_ids: jax.Array | None = None) -> jax.Array:
    """[B, T, T] bool (or [1, T, T] without segments): query t sees column s <= t of its own segment."""
    mask = jnp.tril(jnp.ones((length, length), bool))[None]
    if segment_ids is None:
        return mask
    assert segment_ids.shape == (batch, length), (segment_ids.shape, batch, length)
    return mask & (segment_ids[:, :, None] == segment_ids[:, None, :])


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array,
    shared_k: jax.Array | None = None,
    shared_v: jax.Array | None = None,
    shared_valid: jax.Array | None = None,
) -> jax.Array:
    """Softmax attention of every query over its own block and its group's shared block together.

    Args:
      q: [B, T, N, H].    k, v: [B, S, K, H], K divides N.    mask: [B or 1, T, S] bool, the visible columns.
      shared_k, shared_v: [U, P, K, H], U divides B: rows u*B/U .. (u+1)*B/U - 1 read block u.    shared_valid: [U, P] bool.

    Returns:
      [B, T, N, H] in q's dtype. Queries that see no column get finite garbage.
    """
    batch, length, heads, dim = q.shape
    kv_heads = k.shape[2]
    scale = dim**-0.5
    q = q.reshape(batch, length, kv_heads, heads // kv_heads, dim)

    # "r": the query heads that read one key/value head. Output orders are those of the bare matrix products: no transposed copies.
    logits = jnp.einsum("btkrh,bskh->bktrs", q, k, preferred_element_type=jnp.float32) * scale
    logits = jnp.where(mask[:, None, :, None, :], logits, MASKED)
    top = logits.max(-1)  # [B, K, T, R]

    if shared_k is not None:
        groups = shared_k.shape[0]
        grouped = q.reshape(groups, batch // groups, *q.shape[1:])
        shared_logits = jnp.einsum("ugtkrh,upkh->ukgtrp", grouped, shared_k, preferred_element_type=jnp.float32) * scale
        shared_logits = jnp.where(shared_valid[:, None, None, None, None, :], shared_logits, MASKED)

        def to_rows(x):  # [U, K, G, T, R, ...] -> [B, K, T, R, ...]
            x = jnp.moveaxis(x, 2, 1)
            return x.reshape(batch, *x.shape[2:])

        def to_groups(x):  # [B, K, T, R] -> [U, K, G, T, R]
            return jnp.moveaxis(x.reshape(groups, batch // groups, *x.shape[1:]), 1, 2)

        top = jnp.maximum(top, to_rows(shared_logits.max(-1)))

    # The subtracted maximum cancels in the quotient, also in its gradient.
    top = jax.lax.stop_gradient(top)
    weights = jnp.exp(logits - top[..., None])
    total = weights.sum(-1)
    out = jnp.einsum("bktrs,bskh->bktrh", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    if shared_k is not None:
        weights = jnp.exp(shared_logits - to_groups(top)[..., None])
        total = total + to_rows(weights.sum(-1))
        out = out + to_rows(
            jnp.einsum("ukgtrp,upkh->ukgtrh", weights.astype(shared_v.dtype), shared_v, preferred_element_type=jnp.float32)
        )
    out = out / total[..., None]
    return jnp.moveaxis(out, 1, 2).reshape(batch, length, heads, dim).astype(q.dtype)
