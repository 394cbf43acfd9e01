"""Exact search on the accelerator (or the CPU): every passage is scored, in blocks of rows, sharded over a mesh if there is one."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from bridge_jax.retrieval.vectors import EmbeddingIndex, query_batches

BLOCK = 16_384


class DeviceIndex(EmbeddingIndex):
    """Scores all passages. The vectors lie on the devices in bfloat16, rows split over all mesh axes."""

    kind = "exact"

    def __init__(self, embeddings: np.ndarray, mesh: Mesh | None = None):
        super().__init__(embeddings)
        self._mesh = mesh
        rows, dim = embeddings.shape
        shards = mesh.size if mesh is not None else 1
        self._block = min(BLOCK, -(-rows // shards))
        padded = -(-rows // (shards * self._block)) * shards * self._block

        def piece(index: tuple[slice, ...]) -> np.ndarray:
            start, stop, _ = index[0].indices(padded)
            real = np.asarray(embeddings[start : min(stop, rows)])
            return np.pad(real, ((0, stop - start - len(real)), (0, 0)))

        if mesh is None:
            self._placed = jnp.asarray(piece((slice(None),)))
        else:
            sharding = NamedSharding(mesh, P(mesh.axis_names, None))
            self._placed = jax.make_array_from_callback((padded, dim), sharding, piece)

    def _candidates(self, queries: np.ndarray, count: int) -> np.ndarray:
        found = [
            np.asarray(_top_rows(self._placed, batch, count=count, rows=len(self), block=self._block, mesh=self._mesh))[:real]
            for real, batch in query_batches(queries)
        ]
        return np.concatenate(found).astype(np.int64)


@functools.partial(jax.jit, static_argnames=("count", "rows", "block", "mesh"))
def _top_rows(placed, queries, *, count: int, rows: int, block: int, mesh: Mesh | None):
    """placed [padded, D] bfloat16, queries [B, D] float32 -> rows [B, count] int32, best first; equal scores by row."""
    if mesh is None:
        return _top_of_shard(placed, queries, 0, count, rows, block)[1]
    axes = mesh.axis_names

    def shard(part, queries):
        scores, found = _top_of_shard(part, queries, jax.lax.axis_index(axes) * part.shape[0], count, rows, block)
        return scores[None], found[None]

    scores, found = jax.shard_map(shard, mesh=mesh, in_specs=(P(axes, None), P()), out_specs=P(axes), check_vma=False)(
        placed, queries
    )
    # [S, B, count] -> [B, S * count]: lower rows stay first, and top_k keeps the first of equals.
    scores, found = (x.transpose(1, 0, 2).reshape(queries.shape[0], -1) for x in (scores, found))
    return jnp.take_along_axis(found, jax.lax.top_k(scores, count)[1], -1)


def _top_of_shard(part, queries, first_row, count: int, rows: int, block: int):
    """Scans the blocks of one shard, keeping the best `count` so far -> (scores [B, count], rows [B, count])."""

    def step(best, at):
        vectors = jax.lax.dynamic_slice_in_dim(part, at, block).astype(jnp.float32)
        scores = jnp.einsum("bd,nd->bn", queries, vectors, precision=jax.lax.Precision.HIGHEST)
        row = first_row + at + jnp.arange(block, dtype=jnp.int32)
        scores = jnp.where(row < rows, scores, -jnp.inf)
        top, where = jax.lax.top_k(scores, min(count, block))
        # The earlier blocks' rows come first, so that top_k, which keeps the first of equals, keeps the lower row.
        scores = jnp.concatenate([best[0], top], -1)
        found = jnp.concatenate([best[1], row[where]], -1)
        top, where = jax.lax.top_k(scores, count)
        return (top, jnp.take_along_axis(found, where, -1)), None

    batch = queries.shape[0]
    start = (jnp.full((batch, count), -jnp.inf), jnp.full((batch, count), -1, jnp.int32))
    return jax.lax.scan(step, start, jnp.arange(0, part.shape[0], block, dtype=jnp.int32))[0]
