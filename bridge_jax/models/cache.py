"""The key/value cache of a decoder: a block of columns, for every layer."""

from __future__ import annotations

import math

import flax.struct
import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from bridge_jax.mesh import BATCH


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


def write_columns(cache: jax.Array, new: jax.Array, layer: jax.Array, at: jax.Array, mesh: Mesh | None) -> jax.Array:
    """cache [L, B, S, K, H] with new [B, T, K, H] in columns at .. at + T of a layer.

    On TPUs the new columns are given the layout of whole rows first. They come out of a matrix product with the batch innermost;
    left alone, the compiler carries that order over to the cache, keeps a second cache in it while a loop runs, and copies the
    first one into it and back (compiled for v5e: 5.6 of 14.8 GiB a chip, and three times the bytes, for a 3B model).
    """
    new = new[None].astype(cache.dtype)
    platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    if platform == "tpu":
        new = _by_rows(new, mesh)
    return jax.lax.dynamic_update_slice(cache, new, (layer, 0, at, 0, 0))


def _by_rows(x: jax.Array, mesh: Mesh | None) -> jax.Array:
    """x [1, B, T, K, H] laid out [B, K, T, H] on every device."""

    def local(x):
        return with_layout_constraint(x, Layout(major_to_minor=(0, 1, 3, 2, 4)))

    if mesh is None:
        return local(x)
    rows = BATCH if x.shape[1] % math.prod(mesh.shape[axis] for axis in BATCH) == 0 else None
    heads = "tensor" if x.shape[3] % mesh.shape["tensor"] == 0 else None
    spec = P(None, rows, None, heads)
    # By hand, because XLA does not split a layout constraint: it would gather x on every device.
    return jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)(x)
