"""Log-probabilities of given tokens without a [B, T, V] array.

Source: DESIGN 2 and TRAPS 36. The vocabulary projection runs over a few token columns at a time and is recomputed in the backward
pass, so at most [B, T_chunk, V] logits exist at once in either direction.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from bridge_jax.models import qwen2

# At once: 268 MB in float32, of which a backward pass holds a few copies. Qwen2.5's 151,936 entries make it 256 tokens.
LOGITS = 1 << 26


def token_logps(
    hidden: jax.Array, unembed_fn: Callable[[jax.Array], jax.Array], targets: jax.Array, chunk: int = 1024
) -> tuple[jax.Array, jax.Array]:
    """Log-probability of `targets` and the entropy of the distribution they were drawn from.

    hidden [B, T, D]: states that predict `targets` [B, T] int32 (already shifted by the caller). unembed_fn maps [..., D] to
    logits [..., V]; gradients flow to `hidden` and to whatever it closes over. chunk: tokens (rows x columns) unembedded at once.
    Returns (logp [B, T] float32, entropy [B, T] float32); the entropy is a metric and carries no gradient.

    Columns are chunked, rows are not, so a batch sharded over rows stays sharded.
    """
    B, T, D = hidden.shape
    columns = max(1, min(T, chunk // B))
    chunks = -(-T // columns)
    pad = chunks * columns - T
    hidden = jnp.pad(hidden, ((0, 0), (0, pad), (0, 0))).reshape(B, chunks, columns, D).swapaxes(0, 1)
    targets = jnp.pad(targets, ((0, 0), (0, pad))).reshape(B, chunks, columns).swapaxes(0, 1)

    @jax.checkpoint
    def one_chunk(args):
        states, labels = args
        logits = unembed_fn(states).astype(jnp.float32)
        normaliser = jax.nn.logsumexp(logits, -1)
        # A masked sum instead of a gather: it fuses, needs no scatter backwards, and partitions over a sharded vocabulary.
        hit = jax.lax.broadcasted_iota(labels.dtype, logits.shape, logits.ndim - 1) == labels[..., None]
        logp = jnp.where(hit, logits, 0.0).sum(-1) - normaliser
        log_probs = jax.lax.stop_gradient(logits - normaliser[..., None])
        return logp, -(jnp.exp(log_probs) * log_probs).sum(-1)

    logp, entropy = jax.lax.map(one_chunk, (hidden, targets))

    def restore(x):
        return x.swapaxes(0, 1).reshape(B, chunks * columns)[:, :T]

    return restore(logp), restore(entropy)


def sequence_logps(model, variables, tokens, *, positions=None, segment_ids=None, chunk: int = 1024) -> tuple[jax.Array, jax.Array]:
    """Log-prob and entropy of every token of whole sequences, aligned to the token itself.

    chunk: tokens unembedded at once; fewer where the vocabulary is so large that they would be more than `LOGITS` logits.

    tokens [B, T] int32, positions [B, T], segment_ids [B, T] (0 = padding), as `models.qwen2.Qwen2` takes them.
    Returns two [B, T] float32 arrays: entry t of the first is log pi(tokens[t] | tokens[<t]); entry 0 is 0. At tokens that
    start a segment the value has no meaning: mask them.
    """
    chunk = min(chunk, max(64, 1 << (LOGITS // model.config.vocab_size).bit_length() - 1))
    hidden = model.apply(variables, tokens, positions=positions, segment_ids=segment_ids, output="hidden")
    logp, entropy = token_logps(
        hidden, lambda x: qwen2.unembed(variables["params"], x, model.config), jnp.roll(tokens, -1, axis=1), chunk
    )

    def shift(x):
        return jnp.pad(x[:, :-1], ((0, 0), (1, 0)))

    return shift(logp), shift(entropy)
