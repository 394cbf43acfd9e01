"""From a text's token states to its vector."""

from __future__ import annotations

import jax
import jax.numpy as jnp

POOLINGS = ("mean", "cls", "last")


def pool(states: jax.Array, mask: jax.Array, how: str) -> jax.Array:
    """states [B, T, D], mask [B, T] (1 = token) -> [B, D] float32 of unit length; zero for a row without tokens.

    how: "mean" over the tokens, "cls" the first token, "last" the last one, on whichever side the padding is.
    """
    states, seen = states.astype(jnp.float32), mask.astype(bool)
    if how == "mean":
        vectors = jnp.sum(jnp.where(seen[..., None], states, 0.0), axis=1) / jnp.maximum(seen.sum(axis=1, keepdims=True), 1)
    elif how in ("cls", "last"):
        columns = jnp.arange(seen.shape[1])
        at = jnp.argmax(seen, axis=1) if how == "cls" else jnp.max(jnp.where(seen, columns, 0), axis=1)
        vectors = jnp.take_along_axis(states, at[:, None, None], axis=1)[:, 0]
        vectors = jnp.where(seen.any(axis=1, keepdims=True), vectors, 0.0)
    else:
        raise ValueError(f"pooling {how!r}: it is {', '.join(POOLINGS)}")
    return vectors * jax.lax.rsqrt(jnp.maximum(jnp.sum(vectors * vectors, axis=-1, keepdims=True), 1e-24))
