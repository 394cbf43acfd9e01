"""Device meshes and where everything lives on them: one table of rules.

Axes: "data" (replicated parameters), "fsdp" (parameters and batch sharded), "tensor" (heads and ffn columns sharded).
All axes are of Auto type: XLA propagates shardings from parameters and batches. Everything works with `mesh=None` (one device).

There are two meshes. The *training* mesh has all devices of all processes; the *rollout* mesh those of this process alone, and
parameters are not split over "fsdp" there: weights gathered for every decoded token would be ruinous. `training.publish` brings
weights from one to the other, for which the devices of a process stand together in the training mesh.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from bridge_jax.errors import UserError

log = logging.getLogger(__name__)

AXES = ("data", "fsdp", "tensor")
BATCH = ("data", "fsdp")
_AUTO = (AxisType.Auto,) * 3

# Module name -> spec of the last dimensions of its kernel. Leading (layer) axes are never sharded: the layer scan walks them.
_COLUMN = ("fsdp", "tensor")  # [in, out]: each device computes some heads or ffn columns
_ROW = ("tensor", "fsdp")  # [in, out]: consumes what the column-parallel kernels made
_KERNELS = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "query", "key", "value", "intermediate"), _COLUMN),
    "lm_head": (None, ("fsdp", "tensor")),  # as the embedding: logits are computed in parts of the vocabulary
    **dict.fromkeys(("o_proj", "down_proj", "attention_output", "output"), _ROW),
}
# An embedding sharded along both dimensions makes XLA rematerialise it whole at the lookup: only the vocabulary is split.
_EMBEDDING = (("fsdp", "tensor"), None)

_said: set[tuple] = set()


def make_mesh(data: int = 1, fsdp: int = -1, tensor: int = 1, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Mesh of axes ("data", "fsdp", "tensor"); one of the three may be -1, the rest of the devices.

    Devices are in jax's order for the topology, those of one process together: a rollout mesh is a part of it in the same order,
    and the innermost axes stay within a host where they fit.

    Raises UserError when the sizes do not multiply to the number of devices.
    """
    devices = list(jax.devices() if devices is None else devices)
    sizes = [data, fsdp, tensor]
    if sizes.count(-1) > 1 or any(size < 1 and size != -1 for size in sizes):
        raise UserError(f"mesh data={data} fsdp={fsdp} tensor={tensor}: sizes are positive and at most one is -1 (the rest)")
    if -1 in sizes:
        known = math.prod(size for size in sizes if size != -1)
        sizes[sizes.index(-1)] = len(devices) // known
    if math.prod(sizes) != len(devices):
        raise UserError(f"mesh data={data} fsdp={fsdp} tensor={tensor} does not fill {len(devices)} devices; set one size to -1")
    mesh = jax.make_mesh(tuple(sizes), AXES, axis_types=_AUTO, devices=devices)
    hosts = [device.process_index for device in mesh.devices.flat]
    together = sorted(mesh.devices.flat, key=lambda device: hosts.index(device.process_index))
    return Mesh(np.asarray(together).reshape(sizes), AXES, axis_types=_AUTO)


def rollout_mesh(mesh: Mesh | None, tensor: int = 1, process: int | None = None) -> Mesh | None:
    """The devices of one process (this one) as a mesh with `tensor` ways of tensor parallelism, the rest data, and fsdp = 1.

    None where there is no training mesh, or that process has one device.

    Raises UserError when `tensor` does not divide the devices of a process.
    """
    if mesh is None:
        if tensor != 1:
            raise UserError(f"config.mesh.rollout_tensor={tensor}: there is one device; set it to 1")
        return None
    process = jax.process_index() if process is None else process
    devices = np.asarray([device for device in mesh.devices.flat if device.process_index == process])
    if devices.size % tensor:
        raise UserError(
            f"config.mesh.rollout_tensor={tensor}: does not divide the {devices.size} devices of a process; tensor parallelism of "
            "rollouts stays within one"
        )
    return None if devices.size == 1 else Mesh(devices.reshape(-1, 1, tensor), AXES, axis_types=_AUTO)


def _names(axes) -> tuple[str, ...]:
    """The axes of one entry of a PartitionSpec."""
    return (axes,) if isinstance(axes, str) else axes or ()


def _fit(mesh: Mesh, spec: Sequence, shape: Sequence[int], name: str, units: int | None) -> P:
    """`spec` without the mesh axes that do not divide their dimension ("tensor": the `units` of it), and those of size 1."""
    kept = []
    for axes, size in zip(spec, shape, strict=True):
        chosen: list[str] = []
        for axis in _names(axes):
            ways = mesh.shape[axis]
            heads = units if axis == "tensor" else None
            so_far = math.prod(mesh.shape[a] for a in chosen)
            if size % (so_far * ways) == 0 and (heads is None or heads % ways == 0):
                chosen += [axis] if ways > 1 else []
            elif (name, axis, ways) not in _said:
                _said.add((name, axis, ways))
                what = f"size {size // so_far}" if heads is None else f"{heads} heads"
                log.warning("%s: %s cannot be split %d ways over %s; replicated there", name, what, ways, axis)
        kept.append(tuple(chosen) if len(chosen) > 1 else chosen[0] if chosen else None)
    return P(*kept)


def param_sharding(
    mesh: Mesh, path: tuple[str, ...], shape: Sequence[int], units: Mapping[str, int] | None = None
) -> NamedSharding:
    """Sharding of the parameter at `path`, e.g. ("layers", "q_proj", "kernel"), of `shape`.

    `units`: module name -> number of attention heads in its tensor-parallel dimension; a head is never split. A dimension that
    cannot be divided is replicated, which is logged once. An optimiser's moments, being trees like their parameters, have their
    shardings. A LoRA factor is split along the side of the kernel that it stands at, over both axes; norms, biases of row-parallel
    kernels and unknown names are replicated.
    """
    module = path[-2] if len(path) > 1 else ""
    heads = (units or {}).get(module)
    spec: tuple = ()
    if path[-1] == "embedding":
        spec = _EMBEDDING
    elif module in _KERNELS and path[-1] == "kernel":
        spec = _KERNELS[module]
    elif module in _KERNELS and path[-1] == "bias":
        spec = ("tensor",) if _KERNELS[module] is _COLUMN else (None,)
    elif module in _KERNELS and path[-1] in ("a", "b"):  # [in, r], [r, out]
        inner, outer = _KERNELS[module]
        spec = ((inner, outer), None) if path[-1] == "a" else (None, (outer, inner))
    spec = (None,) * (len(shape) - len(spec)) + tuple(spec)
    return NamedSharding(mesh, _fit(mesh, spec, shape, "/".join(path), heads))


def common_units(*units: Mapping[str, int]) -> dict[str, int]:
    """Units for a tree that holds parameters of several models: of a module that more than one has, what splits all of theirs."""
    names = {name for one in units for name in one}
    return {name: math.gcd(*(one[name] for one in units if name in one)) for name in sorted(names)}


def tree_path(key_path) -> tuple[str, ...]:
    """The names along a jax key path of nested dicts."""
    return tuple(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in key_path)


def put(x, sharding: NamedSharding) -> jax.Array:
    """A host's array (or an array of this process) on the devices of `sharding`. With several processes each gives its own parts.

    All of them must hold the same array; nothing is sent or compared.
    """
    if sharding.is_fully_addressable:
        return jax.device_put(x, sharding)
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(put(jax.random.key_data(x), sharding), impl=jax.random.key_impl(x))
    x = np.asarray(x)
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def shardings(mesh: Mesh, tree, units: Mapping[str, int] | None = None):
    """The shardings of a tree of arrays or ShapeDtypeStructs: nested dicts, or what holds such (a step's state)."""
    return jax.tree_util.tree_map_with_path(lambda p, x: param_sharding(mesh, tree_path(p), x.shape, units), tree)


def shard_tree(mesh: Mesh | None, tree, units: Mapping[str, int] | None = None):
    """`tree` placed on `mesh` by `shardings`; unchanged when `mesh` is None."""
    return tree if mesh is None else jax.tree.map(put, tree, shardings(mesh, tree, units))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Leading axis split over data and fsdp."""
    return NamedSharding(mesh, P(BATCH))


def batch_ways(mesh: Mesh | None) -> int:
    """How many ways `batch_sharding` splits."""
    return 1 if mesh is None else math.prod(mesh.shape[axis] for axis in BATCH)


def constrain(x: jax.Array, mesh: Mesh | None, spec: P) -> jax.Array:
    """`with_sharding_constraint` on `mesh`; the identity without one. Axes that do not divide their dimension are dropped."""
    if mesh is None:
        return x
    spec = tuple(spec) + (None,) * (x.ndim - len(spec))
    ways = [math.prod(mesh.shape[a] for a in _names(s)) for s in spec]
    kept = [s if size % w == 0 else None for s, w, size in zip(spec, ways, x.shape)]
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*kept)))
