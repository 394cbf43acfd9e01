"""The published shapes of the models that configurations name, for questions that need no weights (`launch/fit.py`).

    policy_config("Qwen/Qwen2.5-7B")          -> Qwen2Config       no file is read, nothing is fetched
    policy_config("runs/a/policy")            -> Qwen2Config       of the folder's config.json
    encoder_config("intfloat/e5-base-v2")     -> BertConfig, or the Qwen2Config of an embedder

Source: the config.json of each model on the hub. An instruction-tuned model has the shape of its base.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from bridge_jax.errors import UserError
from bridge_jax.models import e5, hub, pocket_models
from bridge_jax.models.qwen2 import Qwen2Config, config_from_folder


def _qwen(hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, vocab: int = 151_936, tied: bool = True) -> dict:
    return {
        "model_type": "qwen2",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "rope_theta": 1_000_000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": tied,
        "eos_token_id": [151_645, 151_643],  # end of a chat turn, end of text
    }


def _qwen3(hidden: int, ffn: int, layers: int, heads: int, vocab: int = 151_936, tied: bool = True) -> dict:
    shape = _qwen(hidden, ffn, layers, heads, 8, vocab, tied)
    return shape | {"model_type": "qwen3", "head_dim": 128}


def _llama(hidden: int, ffn: int, layers: int, heads: int, **more) -> dict:
    """Of Llama 3.1 and what was trained from it."""
    scaling = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8_192}
    shape = _qwen(hidden, ffn, layers, heads, 8, 128_256, tied=False)
    rope = {"rope_theta": 500_000.0, "rope_scaling": {"rope_type": "llama3", "factor": 8.0, **scaling}}
    return shape | {"model_type": "llama", "rms_norm_eps": 1e-5, "eos_token_id": 128_001} | rope | more


def _bert(hidden: int, ffn: int, layers: int, heads: int, vocab: int = 30_522) -> dict:
    return {
        "model_type": "bert",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": 512,
    }


def _xlmr(hidden: int, ffn: int, layers: int, heads: int, positions: int = 514) -> dict:
    more = {"model_type": "xlm-roberta", "max_position_embeddings": positions, "type_vocab_size": 1, "pad_token_id": 1}
    return _bert(hidden, ffn, layers, heads, 250_002) | more


POLICIES = {
    "Qwen/Qwen2.5-0.5B": _qwen(896, 4_864, 24, 14, 2),
    "Qwen/Qwen2.5-1.5B": _qwen(1_536, 8_960, 28, 12, 2),
    "Qwen/Qwen2.5-3B": _qwen(2_048, 11_008, 36, 16, 2),
    "Qwen/Qwen2.5-7B": _qwen(3_584, 18_944, 28, 28, 4, 152_064, tied=False),
    "Qwen/Qwen2.5-14B": _qwen(5_120, 13_824, 48, 40, 8, 152_064, tied=False),
    "Qwen/Qwen3-0.6B": _qwen3(1_024, 3_072, 28, 16),
    "Qwen/Qwen3-1.7B": _qwen3(2_048, 6_144, 28, 16),
    "Qwen/Qwen3-4B": _qwen3(2_560, 9_728, 36, 32),
    "Qwen/Qwen3-8B": _qwen3(4_096, 12_288, 36, 32, tied=False),
    "Qwen/Qwen3-14B": _qwen3(5_120, 17_408, 40, 40, tied=False),
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": _llama(4_096, 14_336, 32, 32),
    "HuggingFaceTB/SmolLM2-135M": _qwen(576, 1_536, 30, 9, 3, 49_152)
    | {"model_type": "llama", "rope_theta": 100_000.0, "rms_norm_eps": 1e-5, "eos_token_id": 2},
}
ENCODERS = {
    "intfloat/e5-small-v2": _bert(384, 1_536, 12, 12),
    "intfloat/e5-base-v2": _bert(768, 3_072, 12, 12),
    "intfloat/e5-large-v2": _bert(1_024, 4_096, 24, 16),
    "sentence-transformers/all-MiniLM-L6-v2": _bert(384, 1_536, 6, 12),
    "BAAI/bge-small-en-v1.5": _bert(384, 1_536, 12, 12),
    "BAAI/bge-base-en-v1.5": _bert(768, 3_072, 12, 12),
    "BAAI/bge-large-en-v1.5": _bert(1_024, 4_096, 24, 16),
    "BAAI/bge-m3": _xlmr(1_024, 4_096, 24, 16, 8_194),
    "intfloat/multilingual-e5-small": _bert(384, 1_536, 12, 12, 250_037),
    "intfloat/multilingual-e5-base": _xlmr(768, 3_072, 12, 12),
    "intfloat/multilingual-e5-large": _xlmr(1_024, 4_096, 24, 16),
    "Qwen/Qwen3-Embedding-0.6B": _qwen3(1_024, 3_072, 28, 16, 151_669),
    "Qwen/Qwen3-Embedding-4B": _qwen3(2_560, 9_728, 36, 32, 151_665),
    "Qwen/Qwen3-Embedding-8B": _qwen3(4_096, 12_288, 36, 32, 151_665),
}


def policy_config(name: str | Path) -> Qwen2Config:
    """The decoder's shape. name: a folder, a shipped or pocket model's name, or a hub id, known here or in the hub's cache.

    Raises:
      UserError: neither a folder nor a known or cached model.
    """
    return _config(str(name), POLICIES, Qwen2Config.from_hf, config_from_folder)


def encoder_config(name: str | Path) -> e5.Shape:
    """The encoder's shape; as `policy_config`."""

    def read(folder: Path) -> e5.Shape:
        return e5.read_config(hub.read_json(folder / "config.json"), str(folder / "config.json"))

    return _config(str(name), ENCODERS, e5.read_config, read)


def _config(name: str, table: dict[str, dict], from_hf: Callable, from_folder: Callable):
    if pocket_models.is_known(name):
        name = pocket_models.upstream(name)
    base = name.removesuffix("-Instruct").removesuffix("-Base")
    if base in table and not Path(name).is_dir():
        return from_hf(table[base], name)
    if name in hub.SHIPPED or Path(name).expanduser().is_dir():
        return from_folder(hub.resolve(name))
    cached = _cached(name)
    if cached is None:
        raise UserError(
            f"the shape of {name} is not known and it is not on this machine: give a model folder, or {', '.join(table)}"
        )
    return from_folder(cached)


def _cached(name: str) -> Path | None:
    """The folder of a hub id that was fetched earlier."""
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(name, "config.json")
    except Exception:  # no valid hub id
        return None
    return Path(found).parent if isinstance(found, str) else None
