"""A Hugging Face folder as a Tunix model, through its own loader.

Two traps, found by comparing tokens: `Qwen2(config, rngs=...)` has all-zero MLP kernels (and repeats its input), so weights always
come from a file; and Tunix's Llama ignores the configuration's rope_theta, so only Qwen2 folders are taken.
"""

from __future__ import annotations

import json
from pathlib import Path

import jax.numpy as jnp


def load(folder: str):
    """(model, config) of a Qwen2 folder, float32."""
    from tunix.models.qwen2 import model as qwen
    from tunix.models.qwen2 import params

    hf = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    assert hf["model_type"] == "qwen2", hf["model_type"]
    config = qwen.ModelConfig(
        num_layers=hf["num_hidden_layers"],
        vocab_size=hf["vocab_size"],
        embed_dim=hf["hidden_size"],
        hidden_dim=hf["intermediate_size"],
        num_heads=hf["num_attention_heads"],
        head_dim=hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"],
        num_kv_heads=hf["num_key_value_heads"],
        rope_theta=hf.get("rope_theta") or hf["rope_parameters"]["rope_theta"],
        norm_eps=hf["rms_norm_eps"],
        use_tied_embedding=bool(hf.get("tie_word_embeddings")),
        dtype=jnp.float32,
        param_dtype=jnp.float32,
    )
    return params.create_model_from_safe_tensors(folder, config, dtype=jnp.float32), config
