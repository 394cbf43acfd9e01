"""A sum over the bits of every array of a checkpoint, so that a flipped bit on disk is found and not trained on.

Orbax's arrays carry none: one flipped bit in their file comes back as another weight, without a word. Sums are taken on the
devices, modulo 2^32, each element times an odd number of its place: whatever single element differs, the sum differs, and neither
the order of summation nor the mesh changes it, so a checkpoint may be restored onto other devices. One pass over the memory.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from bridge_jax.mesh import tree_path

_BITS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def checksums(tree) -> dict[str, int]:
    """{"path/of/the/array": sum below 2^32}. tree: arrays of up to 32 bits an element, on any one set of devices.

    With several processes all must call it.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    names = ["/".join(tree_path(path)) for path, _ in leaves]
    arrays = [leaf if isinstance(leaf, jax.Array) else np.asarray(leaf) for _, leaf in leaves]
    meshes = {array.sharding.mesh for array in arrays if isinstance(getattr(array, "sharding", None), jax.NamedSharding)}
    sums = _program(next(iter(meshes), None))(arrays)
    return dict(zip(names, map(int, np.asarray(jax.device_get(sums))), strict=True))


@functools.cache
def _program(mesh: jax.sharding.Mesh | None):
    everywhere = {} if mesh is None else {"out_shardings": jax.NamedSharding(mesh, jax.P())}
    return jax.jit(lambda arrays: jnp.stack([_sum(array) for array in arrays]), **everywhere)


def _sum(array: jax.Array) -> jax.Array:
    """uint32 []"""
    if array.dtype == bool:
        array = array.astype(jnp.uint8)
    bits = jax.lax.bitcast_convert_type(array, _BITS[array.dtype.itemsize]).astype(jnp.uint32)
    place = jnp.zeros((), jnp.uint32)  # of an element in the flattened array; large ones wrap around, which keeps it odd below
    for axis in range(array.ndim):
        stride = math.prod(array.shape[axis + 1 :]) % 2**32
        place = place + jax.lax.broadcasted_iota(jnp.uint32, array.shape, axis) * jnp.uint32(stride)
    return jnp.sum(bits * (2 * place + 1), dtype=jnp.uint32)
