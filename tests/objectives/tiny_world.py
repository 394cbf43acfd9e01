"""Tiny models with real code paths, and a batch of rollouts and turns."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from bridge_jax.models.e5 import Bert, BertConfig
from bridge_jax.models.lora import E5_TARGETS, LoRAConfig, init_lora
from bridge_jax.models.qwen2 import Qwen2, Qwen2Config
from bridge_jax.objectives.bilevel import Batch, Rollouts, Turns
from bridge_jax.objectives.logprobs import sequence_logps


def louder(params, factor=4.0):
    """Initial weights are so small that every distribution is flat; tests want contrasts."""
    return jax.tree.map(lambda x: x * factor if x.ndim > 1 else x + 0.1, params)


@functools.cache
def make_policy(vocab=64, tie=True, kind="qwen2", lora=True, seed=0):
    config = Qwen2Config(vocab, 32, 48, 2, 4, 2, 8, tie_embeddings=tie, model_type=kind)
    adapter_config = LoRAConfig(4, 8.0) if lora else None
    model = Qwen2(config, lora=adapter_config)
    params = louder(jax.jit(model.init)(jax.random.key(seed), jnp.zeros((1, 2), jnp.int32))["params"])
    if not lora:
        return model, params, None
    return model, params, init_lora(jax.random.key(seed + 1), params, adapter_config)


@functools.cache
def make_encoder(dim=16, seed=3):
    config = BertConfig(50, dim, 24, 2, 2, 32)
    adapter_config = LoRAConfig(2, 4.0, E5_TARGETS)
    module = Bert(config, lora=adapter_config)
    tokens = jnp.ones((1, 2), jnp.int32)
    params = louder(jax.jit(module.init)(jax.random.key(seed), tokens, tokens)["params"])
    return module, params, init_lora(jax.random.key(seed + 1), params, adapter_config)


def nudged(tree, seed, scale=0.2):
    """The tree with noise added: an adapter whose b is zero is a special point."""
    leaves, structure = jax.tree.flatten(tree)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    return structure.unflatten([x + scale * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys)])


jitted_logps = jax.jit(sequence_logps, static_argnums=0)


def cut(rollouts, minibatch=4, microbatch=2):
    """Rows of one rollout each [B, T], with advantages and outcomes [B], as minibatches of micro-batches: [S, P, R, T]."""

    def shaped(x):
        x = jnp.broadcast_to(x[:, None], rollouts.tokens.shape) if x.ndim == 1 else x
        return x.reshape(-1, minibatch // microbatch, microbatch, x.shape[1])

    return jax.tree.map(shaped, rollouts)


def make_batch(model, variables, B=8, T=20, U=8, C=6, dim=16, seed=0):
    """Rollouts with an observation in the middle and ragged ends, log-probs of `variables`, and turns with random documents.

    Rows of one rollout each, with an advantage a row: `cut` makes what a step takes of them.
    """
    rng = np.random.default_rng(seed)
    tokens = rng.integers(1, model.config.vocab_size, (B, T)).astype(np.int32)
    lengths = rng.integers(T - 6, T + 1, B)
    column = np.arange(T)[None]
    real = column < lengths[:, None]
    mask = real & (column >= 5) & ~((column >= 9) & (column < 12))
    positions = np.broadcast_to(column, (B, T)).astype(np.int32)
    logps, _ = jitted_logps(model, variables, tokens, positions=positions, segment_ids=real.astype(np.int32))
    rollouts = Rollouts(
        tokens=jnp.asarray(tokens),
        positions=jnp.asarray(positions),
        segment_ids=jnp.asarray(real.astype(np.int32)),
        mask=jnp.asarray(mask),
        old_logps=jnp.where(mask, logps, 0.0),
        advantages=jnp.asarray(rng.normal(size=B).astype(np.float32)),
    )
    docs = rng.normal(size=(U, C, dim)).astype(np.float32)
    turns = Turns(
        query_tokens=jnp.asarray(rng.integers(1, 50, (U, 7)).astype(np.int32)),
        query_mask=jnp.asarray((np.arange(7)[None] < rng.integers(3, 8, U)[:, None]).astype(np.int32)),
        doc_vectors=jnp.asarray(docs / np.linalg.norm(docs, axis=-1, keepdims=True)),
        doc_mask=jnp.ones((U, C), bool),
        log_likelihood=jnp.asarray(-np.abs(rng.normal(size=(U, C)) * 4).astype(np.float32)),
        advantages=jnp.asarray(rng.normal(size=U).astype(np.float32)),
        mask=jnp.ones(U, bool),
    )
    return Batch(rollouts, turns)
