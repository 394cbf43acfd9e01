"""Device meshes and where parameters live on them: one table of rules.

Axes: "data" (replicated parameters), "fsdp" (parameters and batch sharded), "tensor" (heads and ffn columns sharded).
All axes are of Auto type: XLA propagates shardings from parameters and batches. Everything works with `mesh=None` (one device).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from bridge_jax.errors import UserError

log = logging.getLogger(__name__)

AXES = ("data", "fsdp", "tensor")
BATCH = ("data", "fsdp")

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
    return jax.make_mesh(tuple(sizes), AXES, axis_types=(AxisType.Auto,) * 3, devices=devices)


def _fit(mesh: Mesh, spec: Sequence, shape: Sequence[int], name: str, units: int | None) -> P:
    """`spec` with the entries dropped whose mesh axes do not divide their dimension (for "tensor": do not divide `units` of it)."""
    kept = []
    for axes, size in zip(spec, shape, strict=True):
        ways = math.prod(mesh.shape[a] for a in ((axes,) if isinstance(axes, str) else axes or ()))
        parts = units if units is not None and axes == "tensor" else size
        if parts % ways == 0:
            kept.append(axes if ways > 1 else None)
            continue
        kept.append(None)
        if (name, axes, ways) not in _said:
            _said.add((name, axes, ways))
            what = f"{parts} heads" if parts != size else f"size {size}"
            log.warning("%s: %s cannot be split %d ways over %s; replicated there", name, what, ways, axes)
    return P(*kept)


def param_sharding(
    mesh: Mesh, path: tuple[str, ...], shape: Sequence[int], units: Mapping[str, int] | None = None
) -> NamedSharding:
    """Sharding of the parameter at `path`, e.g. ("layers", "q_proj", "kernel"), of `shape`.

    `units`: module name -> number of attention heads in its tensor-parallel dimension; a head is never split. A dimension that
    cannot be divided is replicated, which is logged once. LoRA factors, norms and unknown names are replicated.
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
    spec = (None,) * (len(shape) - len(spec)) + tuple(spec)
    return NamedSharding(mesh, _fit(mesh, spec, shape, "/".join(path), heads))


def tree_path(key_path) -> tuple[str, ...]:
    """The names along a jax key path of nested dicts."""
    return tuple(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in key_path)


def shard_tree(mesh: Mesh | None, tree, units: Mapping[str, int] | None = None):
    """`tree` (nested dicts of arrays) placed on `mesh` by `param_sharding`; unchanged when `mesh` is None."""
    if mesh is None:
        return tree
    return jax.tree_util.tree_map_with_path(
        lambda p, x: jax.device_put(x, param_sharding(mesh, tree_path(p), x.shape, units)), tree
    )


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
    ways = [math.prod(mesh.shape[a] for a in ((s,) if isinstance(s, str) else s or ())) for s in spec]
    kept = [s if size % w == 0 else None for s, w, size in zip(spec, ways, x.shape)]
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*kept)))
