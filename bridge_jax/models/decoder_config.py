"""The shape of a decoder, from and to Hugging Face's config.json: Qwen2, Qwen2.5, Qwen3 and Llama.

What sets the families apart, all else being equal: Qwen2 has biases on q, k and v; Qwen3 has none, and normalises the queries and
keys of each head; Llama has neither, and Llama 3.1 stretches its rotary embedding (`layers.RopeScaling`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bridge_jax.errors import UserError
from bridge_jax.models.layers import RopeScaling

_CLASSES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}


@dataclass(frozen=True)
class Qwen2Config:
    """The shape of a decoder. `vocab_size` V is the embedding's, often padded beyond the tokenizer's."""

    vocab_size: int
    hidden_size: int  # D
    intermediate_size: int  # F
    num_layers: int  # L
    num_heads: int  # N
    num_kv_heads: int  # K
    head_dim: int  # H
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    tie_embeddings: bool = False
    model_type: str = "qwen2"  # | "qwen3" | "llama"
    max_positions: int = 32768
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    rope_scaling: RopeScaling | None = None

    @property
    def qkv_bias(self) -> bool:
        return self.model_type == "qwen2"

    @property
    def qk_norm(self) -> bool:
        return self.model_type == "qwen3"

    @property
    def units(self) -> dict[str, int]:
        """Heads in each attention projection: tensor parallelism never splits one."""
        return {"q_proj": self.num_heads, "o_proj": self.num_heads, "k_proj": self.num_kv_heads, "v_proj": self.num_kv_heads}

    @classmethod
    def from_hf(cls, hf: Mapping, where: str = "config.json") -> Qwen2Config:
        """From the contents of config.json. UserError for what `models.qwen2` does not compute, naming it."""
        kind = hf.get("model_type")
        if kind not in _CLASSES:
            raise UserError(
                f"{where}: model_type {kind!r} is not supported; give a qwen2 (Qwen2, Qwen2.5), qwen3 or llama checkpoint"
            )
        # transformers 5 writes rope_parameters, 4 wrote rope_theta and rope_scaling
        rope_settings = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
        rope_type = rope_settings.get("rope_type", rope_settings.get("type", "default"))
        refused = {
            "rope scaling": rope_type if rope_type not in ("default", "llama3") else None,
            "use_sliding_window": hf.get("use_sliding_window") and hf.get("sliding_window"),
            "layer_types": [t for t in hf.get("layer_types") or () if t != "full_attention"],
            "attention_bias": kind != "qwen2" and hf.get("attention_bias"),
            "mlp_bias": hf.get("mlp_bias"),
            "hidden_act": None if hf.get("hidden_act", "silu") == "silu" else hf["hidden_act"],
            "quantization_config": "present" if hf.get("quantization_config") else None,
        }
        for name, value in refused.items():
            if value:
                raise UserError(f"{where}: {name} = {value} is not supported; give a checkpoint without it")
        try:
            heads = hf["num_attention_heads"]
            return cls(
                vocab_size=hf["vocab_size"],
                hidden_size=hf["hidden_size"],
                intermediate_size=hf["intermediate_size"],
                num_layers=hf["num_hidden_layers"],
                num_heads=heads,
                num_kv_heads=hf.get("num_key_value_heads") or heads,
                head_dim=hf.get("head_dim") or hf["hidden_size"] // heads,
                rope_theta=float(rope_settings.get("rope_theta") or hf.get("rope_theta") or 10000.0),
                rms_norm_eps=float(hf.get("rms_norm_eps", 1e-6)),
                tie_embeddings=bool(hf.get("tie_word_embeddings", False)),
                model_type=kind,
                max_positions=hf.get("max_position_embeddings", 32768),
                bos_token_id=hf.get("bos_token_id"),
                eos_token_ids=ids_of(hf.get("eos_token_id")),
                pad_token_id=hf.get("pad_token_id"),
                rope_scaling=_scaling(rope_settings) if rope_type == "llama3" else None,
            )
        except KeyError as error:
            raise UserError(f"{where}: field {error.args[0]} is missing; fetch the model folder again") from None

    def to_hf(self) -> dict:
        """The contents of config.json (read by transformers 4 and 5)."""
        hf = {
            "architectures": [_CLASSES[self.model_type]],
            "model_type": self.model_type,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rope_theta": self.rope_theta,
            "rms_norm_eps": self.rms_norm_eps,
            "tie_word_embeddings": self.tie_embeddings,
            "max_position_embeddings": self.max_positions,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": one_or_list(self.eos_token_ids),
            "pad_token_id": self.pad_token_id,
        }
        if self.model_type != "qwen2":
            hf |= {"attention_bias": False}
        if self.model_type == "llama":
            hf |= {"mlp_bias": False}
        if self.rope_scaling is not None:
            hf |= {"rope_scaling": self.rope_scaling.to_hf()}
        return hf


def _scaling(settings: Mapping) -> RopeScaling:
    low, high = settings["low_freq_factor"], settings["high_freq_factor"]
    return RopeScaling(float(settings["factor"]), float(low), float(high), int(settings["original_max_position_embeddings"]))


def ids_of(value: int | list[int] | None) -> tuple[int, ...]:
    """Token ids as config files have them: none, one, or a list."""
    return () if value is None else tuple(value) if isinstance(value, list) else (value,)


def one_or_list(ids: tuple[int, ...]) -> int | list[int] | None:
    """The other way round."""
    return None if not ids else ids[0] if len(ids) == 1 else list(ids)
