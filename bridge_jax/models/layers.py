"""Layers shared by the decoder and the encoder. Parameters are float32 at initialisation and cast to `dtype` where used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from bridge_jax.models.gather import gathered
from bridge_jax.models.lora import LoRAConfig

INIT = nn.initializers.normal(0.02)


class Dense(nn.Module):
    """x [..., in] -> [..., features]: x @ kernel (+ bias), plus the low-rank adapter (x @ a) @ b * alpha / rank.

    The adapter acts exactly when the "lora" collection passed to `apply` holds "a" [in, r] and "b" [r, out] for this module;
    without it this is the base layer, bit for bit.
    """

    features: int
    use_bias: bool = False
    dtype: Any = jnp.float32
    lora: LoRAConfig | None = None
    mesh: Mesh | None = None
    heads: int | None = None  # of its output or input, where it is part of an attention: never split

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = self.param("kernel", INIT, (x.shape[-1], self.features))
        x = x.astype(self.dtype)
        units = None if self.heads is None else {self.name: self.heads}
        y = x @ gathered(kernel.astype(self.dtype), self.mesh, (self.name, "kernel"), units)
        if self.use_bias:
            y = y + self.param("bias", nn.initializers.zeros, (self.features,)).astype(self.dtype)
        if self.has_variable("lora", "a"):
            if self.lora is None:
                raise ValueError(
                    "a lora collection was passed to a model built without `lora=LoRAConfig(...)`: its scale is unknown"
                )
            factors = (self.get_variable("lora", name).astype(self.dtype) for name in "ab")
            a, b = (gathered(x, self.mesh, (self.name, name), units) for x, name in zip(factors, "ab"))
            y = y + (x @ a) @ b * self.lora.scale
        return y


class RMSNorm(nn.Module):
    """x / rms(x) * scale over the last axis, in float32; the result has x's dtype."""

    epsilon: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.epsilon)
        return (wide * scale.astype(jnp.float32)).astype(x.dtype)


class Embed(nn.Module):
    """ids [...] int32 -> [..., features] in `dtype`; ids outside the table are clipped (padding may hold anything).

    Over a mesh the table is gathered along "fsdp" first. The devices split the ids, too: left alone, each would make the states of
    the whole batch from its part of the table, and all would be added up; a batch grows with the devices, the table does not.
    """

    num_embeddings: int
    features: int
    dtype: Any = jnp.float32
    mesh: Mesh | None = None

    def setup(self):
        self.embedding = self.param("embedding", INIT, (self.num_embeddings, self.features))

    def __call__(self, ids: jax.Array) -> jax.Array:
        table = gathered(self.embedding, self.mesh, (self.name, "embedding"))
        return jnp.take(table, ids, axis=0, mode="clip").astype(self.dtype)


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's rotary embedding for contexts longer than those of pre-training, of `positions` tokens.

    With the wavelength w of a frequency, in tokens: frequencies with positions / w above `high` are kept, below `low` divided by
    `factor`, and in between interpolated linearly in positions / w.
    """

    factor: float
    low: float
    high: float
    positions: int

    def __call__(self, frequencies: np.ndarray) -> np.ndarray:
        turns = np.float32(self.positions) / (np.float32(2 * np.pi) / frequencies)
        kept = np.clip((turns - np.float32(self.low)) / np.float32(self.high - self.low), 0, 1).astype(np.float32)
        return (1 - kept) * frequencies / np.float32(self.factor) + kept * frequencies

    def to_hf(self) -> dict:
        return {
            "rope_type": "llama3",
            "factor": self.factor,
            "low_freq_factor": self.low,
            "high_freq_factor": self.high,
            "original_max_position_embeddings": self.positions,
        }


def rope(positions: jax.Array, head_dim: int, theta: float, scaling: RopeScaling | None = None) -> tuple[jax.Array, jax.Array]:
    """positions [B, T] int32 -> (cos, sin), each [B, T, 1, H/2] float32."""
    # float32 throughout: the reference implementation rounds the frequencies the same way, which shows at long positions.
    frequencies = np.float32(1) / np.float32(theta) ** (np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim))
    if scaling is not None:
        frequencies = scaling(frequencies)
    angles = positions.astype(jnp.float32)[:, :, None, None] * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate x [B, T, N, H] by position; dimension i is paired with i + H/2. Computed in float32, returned in x's dtype."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
