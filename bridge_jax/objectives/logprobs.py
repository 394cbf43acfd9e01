"""Log-probabilities of given tokens without a [B, T, V] array.

Source: DESIGN 2 and TRAPS 36. The vocabulary projection runs over a few tokens at a time and is recomputed in the backward pass, so
few logits exist at once in either direction, however many rows, columns and vocabulary entries there are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from bridge_jax.mesh import BATCH, batch_ways, constrain
from bridge_jax.models import qwen2

# At once on a device: 268 MB in float32, of which a backward pass holds a few copies. Qwen2.5's 151,936 entries make it 256 tokens.
LOGITS = 1 << 26


def steps_of(count: int, most: int) -> int:
    """The least number of equal steps, a divisor of `count`, that take at most `most` each; `count` where none does."""
    return next(steps for steps in range(1, count + 1) if count % steps == 0 and (count // steps <= most or steps == count))


def token_logps(
    hidden: jax.Array,
    unembed_fn: Callable[[jax.Array], jax.Array],
    targets: jax.Array,
    chunk: int = 1024,
    ways: int = 1,
    mesh: Mesh | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Log-probability of `targets` and the entropy of the distribution they were drawn from.

    hidden [B, T, D]: states that predict `targets` [B, T] int32 (already shifted by the caller). unembed_fn maps [..., D] to
    logits [..., V]; gradients flow to `hidden` and to whatever it closes over. chunk: tokens (rows x columns) unembedded at once
    for each device; fewer where the vocabulary is so large that they would be more than `LOGITS` logits. ways: devices the rows are
    split over. mesh: theirs; it splits a chunk's logits over the vocabulary, where that divides, instead of rows.
    Returns (logp [B, T] float32, entropy [B, T] float32); the entropy is a metric and carries no gradient.

    Rows are taken together as far as one column of them fits, and apart where it does not, as many of every device's at a time: a
    batch sharded over rows stays sharded.
    """
    B, T, D = hidden.shape
    vocabulary = jax.eval_shape(unembed_fn, jax.ShapeDtypeStruct((1, 1, D), hidden.dtype)).shape[-1]
    chunk = min(chunk, max(64, 1 << (LOGITS // vocabulary).bit_length() - 1))
    ways = ways if B % ways == 0 else 1
    # Parts of the vocabulary on every device, for the rows of all: the states of a chunk are few, its logits and the weights many.
    parts = mesh is not None and vocabulary % (mesh.shape["fsdp"] * mesh.shape["tensor"]) == 0
    rows_over, logits_over = (P("data"), P("data", None, ("fsdp", "tensor"))) if parts else (P(BATCH), P(BATCH, None, "tensor"))
    steps = steps_of(B // ways, chunk)
    rows = B // steps
    columns = max(1, min(T, chunk * ways // rows))
    chunks = -(-T // columns)
    pad = chunks * columns - T

    def split(x):  # [B, T, ...] -> [steps * chunks, rows, columns, ...]; a step takes every steps-th row
        x = jnp.pad(x, ((0, 0), (0, pad), *((0, 0),) * (x.ndim - 2)))
        x = x.reshape(rows, steps, chunks, columns, *x.shape[2:])
        return jnp.moveaxis(x, 0, 2).reshape(steps * chunks, rows, columns, *x.shape[4:])

    @jax.checkpoint
    def one_chunk(args):
        states, labels = (constrain(x, mesh, rows_over) for x in args)
        logits = constrain(unembed_fn(states).astype(jnp.float32), mesh, logits_over)
        normaliser = jax.nn.logsumexp(logits, -1)
        # A masked sum instead of a gather: it fuses, needs no scatter backwards, and partitions over a sharded vocabulary.
        hit = jax.lax.broadcasted_iota(labels.dtype, logits.shape, logits.ndim - 1) == labels[..., None]
        logp = jnp.where(hit, logits, 0.0).sum(-1) - normaliser
        log_probs = jax.lax.stop_gradient(logits - normaliser[..., None])
        return logp, -(jnp.exp(log_probs) * log_probs).sum(-1)

    logp, entropy = jax.lax.map(one_chunk, (split(hidden), split(targets)))

    def restore(x):
        return jnp.moveaxis(x.reshape(steps, chunks, rows, columns), 2, 0).reshape(B, chunks * columns)[:, :T]

    return restore(logp), restore(entropy)


def sequence_logps(model, variables, tokens, *, positions=None, segment_ids=None, chunk: int = 1024) -> tuple[jax.Array, jax.Array]:
    """Log-prob and entropy of every token of whole sequences, aligned to the token itself.

    tokens [B, T] int32, positions [B, T], segment_ids [B, T] (0 = padding), as `models.qwen2.Qwen2` takes them. chunk: as above.
    Returns two [B, T] float32 arrays: entry t of the first is log pi(tokens[t] | tokens[<t]); entry 0 is 0. At tokens that
    start a segment the value has no meaning: mask them.
    """
    hidden = model.apply(variables, tokens, positions=positions, segment_ids=segment_ids, output="hidden")
    head = functools.partial(qwen2.unembed, variables["params"], config=model.config)
    logp, entropy = token_logps(hidden, head, jnp.roll(tokens, -1, axis=1), chunk, batch_ways(model.mesh), model.mesh)

    def shift(x):
        return jnp.pad(x[:, :-1], ((0, 0), (1, 0)))

    return shift(logp), shift(entropy)
