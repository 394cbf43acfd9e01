"""Causal self-attention of whole sequences by one of three backends: training, log-probs and values.

    backend = choose_backend("auto", jax.devices()[0], jnp.bfloat16, head_dim=128)           # when the model is built
    out = attend_sequences(q, k, v, segment_ids, backend, mesh)                              # [B, T, N, H]

What each holds besides its operands, for B rows of T tokens and N query heads on one device:

| backend  | runs on            | without segments              | with segments (packed or padded rows)                         |
|----------|--------------------|-------------------------------|---------------------------------------------------------------|
| `xla`    | everywhere         | logits: 4 B N T^2, and copies | the same                                                      |
| `cudnn`  | NVIDIA, 8.0 and up | O(T)                          | one mask for all heads, 2 B T^2 bytes; backward: its gradient |
| `splash` | TPU                | O(T)                          | O(T): ids are compared inside the kernel                      |

jax.nn.dot_product_attention offers cuDNN sequence lengths as the alternative to a mask, one segment a row: no packed rows. cuDNN
computes the mask's gradient whether or not anybody wants it.

Sources: jax.nn.dot_product_attention; jax.experimental.pallas.ops.tpu.splash_attention.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from bridge_jax.errors import UserError
from bridge_jax.mesh import BATCH
from bridge_jax.models.attention import attend, causal_mask

LANES = 128  # of a TPU's vector registers: what a block of the splash kernel is a multiple of
BLOCKS = (512, 256, 128)


def choose_backend(name: str, device: Any, dtype: Any, head_dim: int) -> str:
    """-> "xla", "cudnn" or "splash" for the config's `policy.attention`, which may also be "auto".

    "auto" is xla on every platform: trainer and sampler then round alike (splash in bfloat16 moved the log-probs of a random
    four-layer model by 0.004 a token in the mean, 0.02 at most). The kernels are for lengths whose logits do not fit.

    Args:
      device: of the kind the model runs on (a `jax.Device`). dtype: the compute dtype. head_dim: H.

    Raises:
      UserError: a kernel that does not run there.
    """
    name_it, instead = f"config.policy.attention={name}", "use config.policy.attention=auto"
    if name == "splash":
        if device.platform != "tpu":
            raise UserError(f"{name_it}: a TPU kernel, and this is {device.platform}: {instead}")
    elif name == "cudnn":
        capability = str(getattr(device, "compute_capability", "")).split(".")[0]
        if device.platform != "gpu" or not capability.isdigit() or int(capability) < 8:
            what = f"{device.platform} {getattr(device, 'compute_capability', '')}".strip()
            raise UserError(f"{name_it}: needs an NVIDIA GPU of compute capability 8.0 or later, and this is {what}: {instead}")
        if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
            raise UserError(f"{name_it}: not in {jnp.dtype(dtype).name}: set config.policy.compute_dtype=bfloat16, or {instead}")
        if head_dim > 128:  # more only on some architectures
            raise UserError(f"{name_it}: heads of at most 128 columns, and this model's have {head_dim}: {instead}")
    if name in ("splash", "cudnn") and head_dim % 8:
        raise UserError(f"{name_it}: heads of a multiple of 8 columns, and this model's have {head_dim}: {instead}")
    return "xla" if name == "auto" else name


def attend_sequences(
    q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array | None, backend: str = "xla", mesh: Mesh | None = None
) -> jax.Array:
    """Every token attends to itself and the earlier tokens of its own segment.

    Args:
      q: [B, T, N, H].    k, v: [B, T, K, H], K divides N.
      segment_ids: [B, T] int32, several segments in a row where rollouts are packed; 0 is padding, which sees padding. None:
        one segment.
      backend: of `choose_backend`. `cudnn` takes bfloat16 and float16 only; `splash` is interpreted where there is no TPU (slow).
      mesh: the kernels run per device: rows over the batch axes, query heads over "tensor", where they divide.

    Returns:
      [B, T, N, H] in q's dtype. No token sees nothing; padding holds finite garbage.
    """
    if backend == "xla":
        return attend(q, k, v, causal_mask(q.shape[0], q.shape[1], segment_ids))
    if backend == "cudnn":
        return _per_device(cudnn_attend, mesh, q, k, v, segment_ids)
    if backend == "splash":
        interpret = _platform(mesh) != "tpu"
        return _per_device(functools.partial(splash_attend, interpret=interpret), mesh, q, k, v, segment_ids)
    raise ValueError(f"backend {backend!r}: allowed are xla, cudnn, splash")


def _platform(mesh: Mesh | None) -> str:
    return jax.default_backend() if mesh is None else mesh.devices.flat[0].platform


def _per_device(kernel: Callable, mesh: Mesh | None, q, k, v, segment_ids) -> jax.Array:
    """`kernel(q, k, v, segment_ids)` on each device's rows and query heads.

    Key/value heads that do not divide over "tensor" are replicated, as their projections are: each device picks those its query
    heads read. Rows, or query heads, that do not divide are computed by every device.
    """
    if mesh is None:
        return kernel(q, k, v, segment_ids)
    heads, kv_heads, tensor = q.shape[2], k.shape[2], mesh.shape["tensor"]
    rows = BATCH if q.shape[0] % math.prod(mesh.shape[axis] for axis in BATCH) == 0 else None
    split = "tensor" if heads % tensor == 0 else None
    split_kv = split if kv_heads % tensor == 0 else None

    def local(q, k, v, segment_ids):
        if split != split_kv:
            own, group = heads // tensor, heads // kv_heads
            share = math.gcd(own, group)  # a run of so many query heads reads one key/value head
            read = (jax.lax.axis_index("tensor") * own + share * jnp.arange(own // share)) // group
            k, v = k[:, :, read], v[:, :, read]
        return kernel(q, k, v, segment_ids)

    specs = (P(rows, None, split), P(rows, None, split_kv), P(rows, None, split_kv), P(rows))
    # check_vma: the kernels do not say over which axes their results vary.
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=specs[0], check_vma=False)(q, k, v, segment_ids)


def _padded(x: jax.Array, length: int) -> jax.Array:
    """Columns (axis 1) up to `length`. Being last they are seen by no token before them, whatever segment they are of."""
    return jnp.pad(x, ((0, 0), (0, length - x.shape[1])) + ((0, 0),) * (x.ndim - 2))


def cudnn_attend(
    q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array | None, implementation: str = "cudnn"
) -> jax.Array:
    """As `attend_sequences`, on one device. `implementation="xla"` runs the same call without a GPU."""
    length = q.shape[1]
    mask = None
    if segment_ids is not None:
        # With a mask, cuDNN's backward pass wants an even length.
        q, k, v, segment_ids = (_padded(x, length + length % 2) for x in (q, k, v, segment_ids))
        mask = (segment_ids[:, :, None] == segment_ids[:, None, :])[:, None]  # [B, 1, T, T]: causality is the kernel's own
    return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True, implementation=implementation)[:, :length]


def splash_block(length: int) -> int:
    """The largest of BLOCKS that divides `length`, a multiple of LANES: the fewest padded columns first, then the largest block."""
    return next(block for block in BLOCKS if length % block == 0)


def splash_attend(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array | None, interpret: bool = False) -> jax.Array:
    """As `attend_sequences`, on one device: blocks above the diagonal are skipped, grouped key/value heads are not repeated.

    Any length: it is padded to a multiple of LANES. Any H (below LANES, lanes are left empty).
    """
    # Here and not above: the experimental module is needed by nobody else.
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

    length, heads, dim = q.shape[1:]
    padded = -(-length // LANES) * LANES
    q, k, v = (jnp.swapaxes(_padded(x, padded), 1, 2) for x in ((q * dim**-0.5).astype(q.dtype), k, v))
    block = splash_block(padded)
    mask = splash_attention_mask.CausalMask((padded, padded))
    kernel = splash_attention_kernel.make_splash_mha(
        splash_attention_mask.MultiHeadMask([mask] * heads),
        block_sizes=splash_attention_kernel.BlockSizes(*(block,) * 8),
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
    )
    ids = None
    if segment_ids is not None:
        ids = splash_attention_kernel.SegmentIds(*(_padded(segment_ids, padded),) * 2)
    out = jax.vmap(kernel)(q, k, v, ids)
    return jnp.swapaxes(out, 1, 2)[:, :length]
