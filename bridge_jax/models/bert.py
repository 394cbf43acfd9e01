"""BERT and XLM-RoBERTa as one linen module that gives a vector of unit length: E5, BGE, MiniLM, multilingual E5.

XLM-RoBERTa is BERT with one token type and with positions that count from padding's id + 1. Source: Devlin et al. 2018, Conneau et
al. 2019; checked against `transformers` in tests/models/test_e5.py and test_encoders.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from bridge_jax.errors import UserError
from bridge_jax.mesh import BATCH, constrain
from bridge_jax.models import hub
from bridge_jax.models.attention import attend
from bridge_jax.models.layers import INIT, Dense, Embed
from bridge_jax.models.lora import LoRAConfig, check_lora
from bridge_jax.models.pooling import pool

_CLASSES = {"bert": "BertModel", "xlm-roberta": "XLMRobertaModel", "roberta": "RobertaModel"}
# Of a checkpoint with pretraining heads: what its tensors' names begin with, and the heads, which make no vector.
PREFIXES = {"bert": "bert.", "xlm-roberta": "roberta.", "roberta": "roberta."}
HEADS = ("cls.predictions.*", "cls.seq_relationship.*", "lm_head.*")
# What a checkpoint may hold beside the encoder, to no effect: the pooler, buffers of positions and types.
IGNORED = ("pooler.dense.weight", "pooler.dense.bias", "embeddings.position_ids", "embeddings.token_type_ids")


@dataclass(frozen=True)
class BertConfig:
    """The shape of an encoder."""

    vocab_size: int
    hidden_size: int  # D
    intermediate_size: int  # F
    num_layers: int  # L
    num_heads: int  # N
    max_positions: int  # rows of the position table
    type_vocab_size: int = 2
    layer_norm_eps: float = 1e-12
    pad_token_id: int = 0
    model_type: str = "bert"  # | "xlm-roberta" | "roberta"

    @property
    def first_position(self) -> int:
        """Of the first token; RoBERTa's rows up to padding's are not used."""
        return 0 if self.model_type == "bert" else self.pad_token_id + 1

    @property
    def max_tokens(self) -> int:
        return self.max_positions - self.first_position

    @property
    def units(self) -> dict[str, int]:
        """Heads in each attention projection: tensor parallelism never splits one."""
        return dict.fromkeys(("query", "key", "value", "attention_output"), self.num_heads)

    @classmethod
    def from_hf(cls, hf: Mapping, where: str = "config.json") -> BertConfig:
        """From the contents of config.json. UserError for what this module does not compute, naming it."""
        kind = hf.get("model_type")
        if kind not in _CLASSES:
            raise UserError(
                f"{where}: model_type {kind!r} is no text encoder; give a {' or '.join(_CLASSES)} checkpoint such as E5 or BGE"
            )
        wanted = {"hidden_act": "gelu", "position_embedding_type": "absolute", "is_decoder": False, "add_cross_attention": False}
        for name, value in wanted.items():
            if hf.get(name, value) not in (value, None):
                raise UserError(f"{where}: {name} = {hf[name]!r} is not supported, only {value!r}; give another checkpoint")
        try:
            config = cls(
                vocab_size=hf["vocab_size"],
                hidden_size=hf["hidden_size"],
                intermediate_size=hf["intermediate_size"],
                num_layers=hf["num_hidden_layers"],
                num_heads=hf["num_attention_heads"],
                max_positions=hf["max_position_embeddings"],
                type_vocab_size=hf.get("type_vocab_size", 2),
                layer_norm_eps=float(hf.get("layer_norm_eps", 1e-12)),
                pad_token_id=_pad(hf, kind),
                model_type=kind,
            )
        except KeyError as error:
            raise UserError(f"{where}: field {error.args[0]} is missing; fetch the model folder again") from None
        if config.hidden_size % config.num_heads:
            raise UserError(f"{where}: hidden_size {config.hidden_size} is no multiple of num_attention_heads {config.num_heads}")
        return config

    def to_hf(self) -> dict:
        """The contents of config.json."""
        return {
            "architectures": [_CLASSES[self.model_type]],
            "model_type": self.model_type,
            "hidden_act": "gelu",
            "position_embedding_type": "absolute",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "max_position_embeddings": self.max_positions,
            "type_vocab_size": self.type_vocab_size,
            "layer_norm_eps": self.layer_norm_eps,
            "pad_token_id": self.pad_token_id,
        }


def _pad(hf: Mapping, kind: str) -> int:
    value = hf.get("pad_token_id")
    return (0 if kind == "bert" else 1) if value is None else value


class LayerNorm(nn.Module):
    """(x - mean) / std * scale + bias over the last axis, in float32; the result has x's dtype."""

    epsilon: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        bias = self.param("bias", nn.initializers.zeros, (x.shape[-1],))
        wide = x.astype(jnp.float32)
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.epsilon)
        return (wide * scale.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)


class Block(nn.Module):
    """One encoder layer, as the body of a scan over layers."""

    config: BertConfig
    dtype: Any
    lora: LoRAConfig | None
    mesh: Mesh | None

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array):
        """x [B, T, D], mask [B, 1, T] bool."""
        c = self.config

        def dense(name: str, features: int) -> Dense:
            return Dense(features, True, self.dtype, self.lora, self.mesh, c.units.get(name), name=name)

        heads = (*x.shape[:2], c.num_heads, c.hidden_size // c.num_heads)
        q, k, v = (dense(name, c.hidden_size)(x).reshape(heads) for name in ("query", "key", "value"))
        h = dense("attention_output", c.hidden_size)(attend(q, k, v, mask).reshape(x.shape))
        x = LayerNorm(c.layer_norm_eps, name="attention_norm")(x + h)
        h = jax.nn.gelu(dense("intermediate", c.intermediate_size)(x), approximate=False)
        x = LayerNorm(c.layer_norm_eps, name="output_norm")(x + dense("output", c.hidden_size)(h))
        return constrain(x, self.mesh, P(BATCH)), None


class Bert(nn.Module):
    """tokens [B, T] int32, mask [B, T] (1 = token, 0 = padding, on the right) -> [B, D] float32 of unit length.

    `dtype` is the compute dtype; norms, softmax and pooling are float32. `lora` gives the scale of the adapter that is active when
    a "lora" collection is passed. `pooling`: of `pooling.POOLINGS`. A row without tokens gives the zero vector.
    """

    config: BertConfig
    dtype: Any = jnp.float32
    lora: LoRAConfig | None = None
    mesh: Mesh | None = None
    pooling: str = "mean"

    @nn.compact
    def __call__(self, tokens: jax.Array, mask: jax.Array) -> jax.Array:
        c = self.config
        length = tokens.shape[1]
        if length > c.max_tokens:
            raise ValueError(f"{length} tokens, but the encoder has {c.max_tokens} positions")
        if "lora" in self.variables:
            check_lora(self.variables["params"], self.variables["lora"])
        positions = self.param("positions", INIT, (c.max_positions, c.hidden_size))
        types = self.param("types", INIT, (c.type_vocab_size, c.hidden_size))
        x = Embed(c.vocab_size, c.hidden_size, self.dtype, self.mesh, name="embed")(tokens)
        where = positions[c.first_position : c.first_position + length]
        x = x + types[0].astype(self.dtype) + where.astype(self.dtype)
        x = constrain(LayerNorm(c.layer_norm_eps, name="embed_norm")(x), self.mesh, P(BATCH))
        layers = nn.scan(
            Block,
            variable_axes={"params": 0, "lora": 0},
            split_rngs={"params": True},
            in_axes=nn.broadcast,
            length=c.num_layers,
        )(c, self.dtype, self.lora, self.mesh, name="layers")
        x, _ = layers(x, mask.astype(bool)[:, None, :])
        return pool(x, mask, self.pooling)


def slots(config: BertConfig, prefix: str = "") -> dict[str, hub.Slot]:
    """Checkpoint tensor name -> place in the parameter tree."""
    places = {
        "embeddings.word_embeddings.weight": hub.Slot(("embed", "embedding")),
        "embeddings.position_embeddings.weight": hub.Slot(("positions",)),
        "embeddings.token_type_embeddings.weight": hub.Slot(("types",)),
        "embeddings.LayerNorm.weight": hub.Slot(("embed_norm", "scale")),
        "embeddings.LayerNorm.bias": hub.Slot(("embed_norm", "bias")),
    }
    places |= hub.layer_slots("bert", config.num_layers, lambda name: ("scale" if name.endswith("norm") else "kernel", "bias"))
    return {prefix + name: slot for name, slot in places.items()}
