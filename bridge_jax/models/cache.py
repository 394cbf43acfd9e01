"""The key/value cache of a decoder: a block of columns, for every layer."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp


@flax.struct.dataclass
class KVBlock:
    """Keys (rotated) and values of S columns for each of B rows, and which columns exist.

    Columns are time in the order of writing; the RoPE position of a column is already in its key. A stopped or padded row has
    invalid columns. A block filled as `private` (say, by prefilling N prompts) may next be read as `shared`.
    """

    k: jax.Array  # [L, B, S, K, H]
    v: jax.Array  # [L, B, S, K, H]
    valid: jax.Array  # [B, S] bool

    @classmethod
    def empty(cls, config, batch: int, length: int, dtype=jnp.float32) -> KVBlock:
        """No valid column. `config` names num_layers, num_kv_heads and head_dim."""
        shape = (config.num_layers, batch, length, config.num_kv_heads, config.head_dim)
        return cls(k=jnp.zeros(shape, dtype), v=jnp.zeros(shape, dtype), valid=jnp.zeros((batch, length), bool))
