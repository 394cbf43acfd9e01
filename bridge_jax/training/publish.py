"""Weights from the training layout to the rollout layout, once a step.

    training mesh (all devices)                             rollout mesh (of each process)
    float32, split over fsdp and tensor   -- cast, gather -->   compute dtype, split over tensor alone, a copy for each data row

A compiled program casts a parameter where it lies and then gathers it (half the bytes on the wire in bfloat16). Its result lies on
the *publish mesh*, which has every process' rollout mesh behind an axis "process": the parts on a process' own devices are, without
a copy, its rollout weights. A program has one order of devices; the training mesh therefore has those of a process together
(`mesh.make_mesh`), and the publish mesh is the same order cut otherwise.

Each parameter has a program of its own: on TPUs a gather holds its result twice until it is in place, and a program of all of them
would hold all results twice.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from bridge_jax.mesh import AXES, rollout_mesh, shardings

PROCESS = "process"


def publish_mesh(mesh: Mesh, rollout: Mesh | None) -> Mesh:
    """The devices of `mesh` as ("process", *AXES): the rollout meshes side by side."""
    shape = (1, 1, 1) if rollout is None else rollout.devices.shape
    devices = mesh.devices.reshape(-1, *shape)
    assert all(len({device.process_index for device in part.flat}) == 1 for part in devices), "devices of a process stand apart"
    return Mesh(devices, (PROCESS, *AXES), axis_types=(mesh.axis_types[0],) * 4)


def in_dtype(params, dtype):
    """Weights as the model computes with them: kernels and embeddings are cast where used, norm scales act in float32."""
    return jax.tree_util.tree_map_with_path(lambda path, x: x if path[-1].key == "scale" else x.astype(dtype), params)


def programs(mesh: Mesh, rollout_tensor: int, params, units: Mapping[str, int] | None, dtype):
    """-> trees like `params`: the jitted program of each, the sharding of its argument, and that of its result.

    Args:
      params: arrays or ShapeDtypeStructs. dtype: of the results; None keeps each one's own.

    Needs descriptions of devices alone: they can be lowered and compiled for a topology that is not here.
    """
    return _programs(mesh, rollout_mesh(mesh, rollout_tensor, mesh.devices.flat[0].process_index), params, units, dtype)


def _programs(mesh: Mesh, rollout: Mesh | None, params, units, dtype):
    given = shardings(mesh, params, units)
    target = publish_mesh(mesh, rollout)
    wanted = jax.tree.map(lambda s: NamedSharding(target, s.spec), shardings(target, params, units))
    dtypes = jax.tree.map(lambda x: x.dtype, params)
    if dtype is not None:
        dtypes = jax.tree.map(lambda x: x.dtype, jax.eval_shape(functools.partial(in_dtype, dtype=dtype), params))
    return jax.tree.map(_program, given, wanted, dtypes), given, wanted


@functools.cache
def _program(given: NamedSharding, wanted: NamedSharding, dtype):
    def cast_and_gather(x):
        return jax.lax.with_sharding_constraint(x.astype(dtype), given)  # cast before it is sent

    return jax.jit(cast_and_gather, in_shardings=given, out_shardings=wanted)


class Publisher:
    """Publishes trees of parameters on `mesh` (None: one device, where only the cast is left) to the rollout mesh `rollout`.

    units: as in `mesh.param_sharding`.
    """

    def __init__(self, mesh: Mesh | None, rollout: Mesh | None, units: Mapping[str, int]):
        self._mesh, self._rollout, self._units = mesh, rollout, units
        self._cast = jax.jit(in_dtype, static_argnames="dtype")
        self._programs: dict = {}

    def __call__(self, params, dtype=None):
        """`params` in the rollout layout and `dtype` (None: as they are)."""
        if self._mesh is None:
            return params if dtype is None else self._cast(params, dtype=dtype)
        key = jax.tree.structure(params), dtype
        if key not in self._programs:
            self._programs[key] = _programs(self._mesh, self._rollout, params, self._units, dtype)[0]
        return jax.tree.map(lambda program, x: self._own(program(x)), self._programs[key], params)

    def _own(self, x: jax.Array) -> jax.Array:
        """This process' part of a published array, as an array of its own."""
        parts = [shard.data for shard in x.addressable_shards]
        if self._rollout is None:
            return parts[0]
        return jax.make_array_from_single_device_arrays(x.shape, NamedSharding(self._rollout, x.sharding.spec), parts)


def bytes_per_device(tree) -> int:
    """Of the arrays (or ShapeDtypeStructs with shardings) of a tree, what one device holds."""
    return sum(int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize for x in jax.tree.leaves(tree))
