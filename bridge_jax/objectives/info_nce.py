"""InfoNCE for a whole text encoder, queries and passages through the same tower: METHOD 8.

A row is a query, the passage that is to be found, and its own negatives. Its negatives are also all passages of all other rows of
the batch: with B rows of M passages, B M - 1 of them. The batch is the *global* one. Over a mesh its rows are split over all
devices of all processes, and what a query is compared with is gathered from all of them (XLA puts the all-gather where the [B, B M]
scores are made): loss and gradient do not depend on how many devices there are.

A passage that is known to be right for a query is no negative of it, wherever in the batch it stands: two ties with the top of one
list come as two rows, and siblings search alike.

The batch is as large as InfoNCE wants it, not as memory has it: vectors first, a part of the rows at a time and without a gradient;
then the loss's gradient with respect to the vectors, which is small; then each part once more, pulled back to the parameters
(Gao et al. 2021). The gradient is exact, for one more forward pass.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from bridge_jax.mesh import BATCH, constrain

OUT = -1e30  # a score that counts nowhere


class PairBatch(flax.struct.PyTreeNode):
    """B = P R rows in P parts, computed one after another. The first of a row's M passages is the one to find."""

    query_tokens: jax.Array  # [P, R, T] int32
    query_mask: jax.Array  # [P, R, T] int32
    passage_tokens: jax.Array  # [P, R, M, T'] int32
    passage_mask: jax.Array  # [P, R, M, T'] int32
    passage_rows: jax.Array  # [P, R, M] int32: corpus rows, -1 where there is none
    known: jax.Array  # [P, R, K] int32: corpus rows that are right for the query, the first passage's among them; -1 = none
    mask: jax.Array  # [P, R] bool: rows that count


def info_nce(queries, passages, passage_rows, known, mask, temperature: float):
    """-> (summed loss, rows that count, rows whose passage scores highest), float32 scalars.

    queries [B, D] and passages [B, M, D] of unit length; passage_rows [B, M], known [B, K], mask [B] as in `PairBatch`.
    """
    B, M = passage_rows.shape
    scores = jnp.einsum("bd,cmd->bcm", queries, passages, preferred_element_type=jnp.float32).reshape(B, B * M) / temperature
    flat = passage_rows.reshape(-1)
    own = jnp.arange(B)[:, None] * M == jnp.arange(B * M)
    right = (known[:, :, None] == flat).any(1)  # [B, B M]
    there = (flat >= 0) & jnp.repeat(mask, M, total_repeat_length=B * M)
    scores = jnp.where(own | (there & ~right), scores, OUT)
    found = jnp.take_along_axis(scores, jnp.arange(B)[:, None] * M, axis=1)[:, 0]
    loss = jnp.where(mask, jax.nn.logsumexp(scores, axis=1) - found, 0.0)
    best = mask & (found >= scores.max(1))
    return loss.sum(), mask.sum(dtype=jnp.float32), best.sum(dtype=jnp.float32)


def info_nce_gradient(module, params, batch: PairBatch, temperature: float):
    """The batch's mean loss -> (its gradient with respect to `params`, (summed loss, rows, hits)).

    module: tokens [B, T], mask [B, T] -> unit vectors [B, D], such as `models.e5.Bert`, with its mesh.
    """
    mesh = module.mesh

    def encode(params, part: PairBatch):
        """One part [R, ...] -> queries [R, D], passages [R, M, D]."""
        part = jax.tree.map(lambda x: constrain(x, mesh, P(BATCH)), part)
        R, M, T = part.passage_tokens.shape
        queries = module.apply({"params": params}, part.query_tokens, part.query_mask)
        flat = part.passage_tokens.reshape(R * M, T), part.passage_mask.reshape(R * M, T)
        return queries, module.apply({"params": params}, *flat).reshape(R, M, -1)

    def loss(vectors):
        queries, passages = (x.reshape(-1, *x.shape[2:]) for x in vectors)
        rows = (x.reshape(-1, *x.shape[2:]) for x in (batch.passage_rows, batch.known, batch.mask))
        total, count, hits = info_nce(queries, passages, *rows, temperature)
        return total / jnp.maximum(count, 1.0), (total, count, hits)

    vectors = jax.lax.map(lambda part: encode(params, part), batch)
    pulls, sums = jax.grad(loss, has_aux=True)(vectors)

    def back(total, part):
        rows, pull = part
        _, to_params = jax.vjp(lambda params: encode(params, rows), params)
        return jax.tree.map(jnp.add, total, to_params(pull)[0]), None

    gradient, _ = jax.lax.scan(back, jax.tree.map(jnp.zeros_like, params), (batch, pulls))
    return gradient, sums
