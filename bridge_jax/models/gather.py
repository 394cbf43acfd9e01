"""FSDP, said out loud: a parameter is gathered where a layer uses it, and its gradient is added up in parts.

Left to itself the TPU compiler hands the parts of a kernel round in a ring and adds up partial products (seven times the bytes of a
3B model's forward pass on v5e), or adds up whole gradients on every device.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from bridge_jax.mesh import param_sharding


def gathered(x: jax.Array, mesh: Mesh | None, path: tuple[str, ...], units: Mapping[str, int] | None = None) -> jax.Array:
    """The parameter `x` (of one layer, at `path`, cast to what is computed in) whole along "fsdp"; its gradient lies as it does."""
    if mesh is None or mesh.shape["fsdp"] == 1:
        return x
    stored = param_sharding(mesh, path, x.shape, units)
    return _gathered(x, NamedSharding(mesh, P(*map(_without_fsdp, stored.spec))), stored)


def _without_fsdp(axes):
    kept = tuple(axis for axis in ((axes,) if isinstance(axes, str) else axes or ()) if axis != "fsdp")
    return kept or None


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gathered(x, whole: NamedSharding, stored: NamedSharding):
    return jax.lax.with_sharding_constraint(x, whole)


def _forward(x, whole, stored):
    return _gathered(x, whole, stored), None


def _backward(whole, stored, _, gradient):
    return (jax.lax.with_sharding_constraint(gradient, stored),)


_gathered.defvjp(_forward, _backward)
