"""Qwen2 folders for engines that are to compute with the same weights: a small random one, and a Llama as a Qwen2."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from bridge_jax.models import qwen2

EMBEDDING, GAIN = 0.02, 1.6  # standard deviation; of a kernel times sqrt(D)


def random_config(vocab_size: int = 8192) -> qwen2.Qwen2Config:
    """4.5 M parameters; heads, groups and tied embeddings in the proportions of Qwen2.5."""
    return qwen2.Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=256,
        intermediate_size=576,
        num_layers=4,
        num_heads=8,
        num_kv_heads=2,
        head_dim=32,
        tie_embeddings=True,
    )


def random_params(config: qwen2.Qwen2Config, seed: int) -> dict:
    """Float32 on the host. The layers outweigh the embedding: with tied embeddings the model would repeat its input otherwise."""
    rng, kernel = np.random.default_rng(seed), GAIN / config.hidden_size**0.5

    def draw(path, like):
        name = path[-1].key
        values = rng.standard_normal(like.shape, np.float32) * (EMBEDDING if name == "embedding" else kernel)
        return 1 + values if name == "scale" else values

    return jax.tree_util.tree_map_with_path(draw, qwen2.abstract_params(config))


def write_random(folder: Path, config: qwen2.Qwen2Config, seed: int) -> Path:
    qwen2.save(folder, qwen2.Qwen2(config), random_params(config, seed))
    return folder


def as_qwen2(folder: Path, target: Path) -> Path:
    """`folder` itself, or for a Llama a Qwen2 in `target` that computes the same: its biases are 0."""
    config = qwen2.config_from_folder(folder)
    if config.model_type == "qwen2":
        return folder
    _, given = qwen2.load(folder, dtype=jnp.bfloat16)
    layers = dict(given["layers"])
    for name in ("q_proj", "k_proj", "v_proj"):
        kernel = layers[name]["kernel"]
        layers[name] = {"kernel": kernel, "bias": jnp.zeros((kernel.shape[0], kernel.shape[2]), kernel.dtype)}
    qwen2.save(target, qwen2.Qwen2(dataclasses.replace(config, model_type="qwen2")), {**given, "layers": layers})
    return target


def count(config: qwen2.Qwen2Config) -> int:
    """Parameters."""
    return sum(int(np.prod(x.shape)) for x in jax.tree.leaves(qwen2.abstract_params(config)))
