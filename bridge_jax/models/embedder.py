"""Text encoders that are decoders (Qwen3-Embedding and its kind): `models.qwen2` without its head, and the last token's state.

The parameters are those of `Qwen2`, under the same names, so LoRA, sharding and checkpoints are the policy's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax

from bridge_jax.errors import UserError
from bridge_jax.models import hub, qwen2
from bridge_jax.models.decoder_config import Qwen2Config
from bridge_jax.models.pooling import pool

PREFIX = "model."  # of the decoder's tensors in a checkpoint with a head
HEADS = ("lm_head.weight",)
IGNORED = ("*.rotary_emb.inv_freq",)


class DecoderEmbedder(qwen2.Qwen2):
    """tokens [B, T] int32, mask [B, T] (1 = token; padding on either side) -> [B, D] float32 of unit length.

    `pooling`: of `pooling.POOLINGS`. A row without tokens gives the zero vector.
    """

    pooling: str = "last"

    def __call__(self, tokens: jax.Array, mask: jax.Array) -> jax.Array:
        return pool(super().__call__(tokens, valid=mask.astype(bool), output="hidden"), mask, self.pooling)


def config_from_hf(hf: Mapping, where: str = "config.json") -> Qwen2Config:
    """The decoder's shape, with the head left out. UserError as `Qwen2Config.from_hf`, and for attention that looks ahead."""
    if hf.get("is_causal") is False or hf.get("use_bidirectional_attention"):
        raise UserError(f"{where}: this decoder's attention looks ahead, which is not computed; give one that is causal")
    return dataclasses.replace(Qwen2Config.from_hf(hf, where), tie_embeddings=True)


def config_to_hf(config: Qwen2Config) -> dict:
    """The contents of config.json for a folder without the head."""
    hf = config.to_hf()
    return hf | {"architectures": [name.replace("ForCausalLM", "Model") for name in hf["architectures"]]}


def slots(config: Qwen2Config, prefix: str = "") -> dict[str, hub.Slot]:
    """Checkpoint tensor name -> place in the parameter tree."""
    return {prefix + name.removeprefix(PREFIX): slot for name, slot in qwen2.slots(config).items()}
