"""Search on the accelerator (or the CPU): every passage is scored, in blocks of rows, sharded over a mesh if there is one."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from bridge_jax.retrieval.vectors import EmbeddingIndex, Int8Vectors, Vectors, query_batches

BLOCK = 16_384  # rows scored at a time
APPROXIMATE = 0.99  # recall@k asked of `approx_max_k` in each block


class DeviceIndex(EmbeddingIndex):
    """Scores all passages. The vectors lie on the devices as they are stored, rows split over all mesh axes.

    kind "exact" keeps the best of each block by sorting; "approx" by `jax.lax.approx_max_k`, which is faster on TPUs and the same
    elsewhere. A mesh over several processes is searched by all of them together, with the same queries.
    """

    def __init__(self, embeddings: Vectors, mesh: Mesh | None = None, kind: str = "exact"):
        super().__init__(embeddings)
        self.kind = kind
        self._mesh = mesh
        rows = len(embeddings)
        devices = list(mesh.devices.flat) if mesh is not None else jax.devices()[:1]
        self._block, padded = layout(rows, len(devices))
        # Accelerators multiply bfloat16; a CPU is faster in float32.
        self._split = devices[0].platform != "cpu"

        def piece(values: np.ndarray, index: tuple[slice, ...]) -> np.ndarray:
            start, stop, _ = index[0].indices(padded)
            real = np.asarray(values[start : min(stop, rows)])
            return np.pad(real, ((0, stop - start - len(real)), (0, 0)))

        parts = (embeddings.codes, embeddings.scales) if isinstance(embeddings, Int8Vectors) else (embeddings,)
        if mesh is None:
            self._placed = tuple(jnp.asarray(piece(part, (slice(None),))) for part in parts)
        else:
            sharding = NamedSharding(mesh, P(mesh.axis_names, None))
            self._placed = tuple(
                jax.make_array_from_callback((padded, part.shape[1]), sharding, functools.partial(piece, part)) for part in parts
            )

    def _candidates(self, queries: np.ndarray, count: int) -> np.ndarray:
        program = functools.partial(
            top_rows, count=count, rows=len(self), block=self._block, mesh=self._mesh, split=self._split, kind=self.kind
        )
        found = [np.asarray(program(self._placed, batch).addressable_data(0))[:real] for real, batch in query_batches(queries)]
        return np.concatenate(found).astype(np.int64)


def layout(rows: int, shards: int) -> tuple[int, int]:
    """-> (rows a block, rows of the placed vectors: whole blocks for every shard)."""
    block = min(BLOCK, -(-rows // shards))
    return block, -(-rows // (shards * block)) * shards * block


@functools.partial(jax.jit, static_argnames=("count", "rows", "block", "mesh", "split", "kind"))
def top_rows(placed, queries, *, count: int, rows: int, block: int, mesh: Mesh | None, split: bool, kind: str):
    """The search's program.

    Args:
      placed: (vectors [padded, D] bfloat16,) or (codes [padded, D] int8, scales [padded, 1] float32), sharded by rows.
      queries: [B, D] float32.
      rows: how many of `padded` are passages. block: as `layout`.
      split: multiply in bfloat16, the queries in two halves, which loses nothing that float32 would keep.

    Returns:
      [B, count] int32, best first; equal scores by row. The same on all devices.
    """
    search = functools.partial(_top_of_shard, count=count, rows=rows, block=block, split=split, kind=kind)
    if mesh is None:
        return search(placed, queries, 0)[1]
    axes = mesh.axis_names

    def shard(part, queries):
        scores, found = search(part, queries, jax.lax.axis_index(axes) * part[0].shape[0])
        return scores[None], found[None]

    scores, found = jax.shard_map(shard, mesh=mesh, in_specs=(P(axes, None), P()), out_specs=P(axes), check_vma=False)(
        placed, queries
    )
    # [S, B, count] -> [B, S * count]: lower rows stay first, and top_k keeps the first of equals.
    scores, found = (x.transpose(1, 0, 2).reshape(queries.shape[0], -1) for x in (scores, found))
    best = jnp.take_along_axis(found, jax.lax.top_k(scores, count)[1], -1)
    return jax.lax.with_sharding_constraint(best, NamedSharding(mesh, P()))


def _top_of_shard(part, queries, first_row, *, count: int, rows: int, block: int, split: bool, kind: str):
    """Scans the blocks of one shard, keeping the best `count` so far -> (scores [B, count], rows [B, count])."""
    batch = queries.shape[0]
    if split:
        high = queries.astype(jnp.bfloat16)
        low = (queries - high.astype(jnp.float32)).astype(jnp.bfloat16)
        queries = jnp.concatenate([high, low])

    def score(blocks):
        vectors = blocks[0].astype(jnp.bfloat16 if split else jnp.float32)
        found = jnp.einsum("bd,nd->bn", queries, vectors, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
        found = found[:batch] + found[batch:] if split else found
        return found * blocks[1][:, 0] if len(blocks) == 2 else found

    def step(best, given):
        at, blocks = given
        row = first_row + at + jnp.arange(block, dtype=jnp.int32)
        scores = jnp.where(row < rows, score(blocks), -jnp.inf)
        keep = min(count, block)
        if kind == "approx":
            top, where = jax.lax.approx_max_k(scores, keep, recall_target=APPROXIMATE)
        else:
            top, where = jax.lax.top_k(scores, keep)
        # The earlier blocks' rows come first, so that top_k, which keeps the first of equals, keeps the lower row.
        scores = jnp.concatenate([best[0], top], -1)
        found = jnp.concatenate([best[1], row[where]], -1)
        top, where = jax.lax.top_k(scores, count)
        return (top, jnp.take_along_axis(found, where, -1)), None

    start = (jnp.full((batch, count), -jnp.inf), jnp.full((batch, count), -1, jnp.int32))
    blocks = [x.reshape(-1, block, x.shape[1]) for x in part]
    return jax.lax.scan(step, start, (jnp.arange(0, part[0].shape[0], block, dtype=jnp.int32), blocks))[0]
