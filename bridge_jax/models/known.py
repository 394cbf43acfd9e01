"""The published shapes of the models that configurations name, for questions that need no weights (`launch/fit.py`).

    policy_config("Qwen/Qwen2.5-7B")          -> Qwen2Config       no file is read, nothing is fetched
    policy_config("runs/a/policy")            -> Qwen2Config       of the folder's config.json
    encoder_config("intfloat/e5-base-v2")     -> BertConfig

Source: the config.json of each model on the hub. An instruction-tuned model has the shape of its base.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from bridge_jax.errors import UserError
from bridge_jax.models import hub, pocket_models
from bridge_jax.models.e5 import BertConfig
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


def _bert(hidden: int, ffn: int, layers: int, heads: int) -> dict:
    return {
        "model_type": "bert",
        "vocab_size": 30_522,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": 512,
    }


POLICIES = {
    "Qwen/Qwen2.5-0.5B": _qwen(896, 4_864, 24, 14, 2),
    "Qwen/Qwen2.5-1.5B": _qwen(1_536, 8_960, 28, 12, 2),
    "Qwen/Qwen2.5-3B": _qwen(2_048, 11_008, 36, 16, 2),
    "Qwen/Qwen2.5-7B": _qwen(3_584, 18_944, 28, 28, 4, 152_064, tied=False),
    "Qwen/Qwen2.5-14B": _qwen(5_120, 13_824, 48, 40, 8, 152_064, tied=False),
    "HuggingFaceTB/SmolLM2-135M": _qwen(576, 1_536, 30, 9, 3, 49_152)
    | {"model_type": "llama", "rope_theta": 100_000.0, "rms_norm_eps": 1e-5, "eos_token_id": 2},
}
ENCODERS = {
    "intfloat/e5-small-v2": _bert(384, 1_536, 12, 12),
    "intfloat/e5-base-v2": _bert(768, 3_072, 12, 12),
    "intfloat/e5-large-v2": _bert(1_024, 4_096, 24, 16),
    "sentence-transformers/all-MiniLM-L6-v2": _bert(384, 1_536, 6, 12),
}


def policy_config(name: str | Path) -> Qwen2Config:
    """The decoder's shape. name: a folder, a shipped or pocket model's name, or a hub id, known here or in the hub's cache.

    Raises:
      UserError: neither a folder nor a known or cached model.
    """
    return _config(str(name), POLICIES, Qwen2Config.from_hf, config_from_folder)


def encoder_config(name: str | Path) -> BertConfig:
    """The encoder's shape; as `policy_config`."""

    def read(folder: Path) -> BertConfig:
        return BertConfig.from_hf(hub.read_json(folder / "config.json"), str(folder / "config.json"))

    return _config(str(name), ENCODERS, BertConfig.from_hf, read)


def _config(name: str, table: dict[str, dict], from_hf: Callable, from_folder: Callable):
    if pocket_models.is_known(name):
        name = pocket_models.upstream(name)
    base = name.removesuffix("-Instruct")
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
