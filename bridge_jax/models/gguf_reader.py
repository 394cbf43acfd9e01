"""GGUF file -> Hugging Face folder, for Llama and Qwen2 language models, without torch.

    convert(path, folder, on_bytes)    writes config.json, generation_config.json, model.safetensors, tokenizer.json,
                                       tokenizer_config.json

Weights are de-quantised in float32 a block of rows at a time and stored in bfloat16 (round to nearest even), so a model of
any size needs memory for one block only. Nothing is guessed: a tensor, a tokenizer or an option this module does not know is a
`UserError` that names it.

Two things a GGUF file does to a checkpoint are undone here:

* llama.cpp rotates *neighbouring* pairs of a head's dimensions, Hugging Face rotates the two *halves*. For the `llama`
  architecture the converter therefore interleaved the rows of q and k; `halves_order` puts them back. Qwen2 is stored as is.
* The tokenizer is spread over metadata fields. `tokenizer.ggml.pre` names the rule that cuts text before the merges apply; the
  rules are those the models were trained with (SmolLM: every digit alone, also in front of spaces; Qwen2: NFC, its own regular
  expression). Ids that only pad the vocabulary (type UNUSED) are no tokens, as in the original tokenizers.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import ml_dtypes
import numpy as np

from bridge_jax.errors import UserError

BLOCK_ELEMENTS = 1 << 24  # de-quantised at once: 64 MiB of float32

CONTROL, USER_DEFINED, UNUSED = 3, 4, 5  # values of tokenizer.ggml.token_type

QWEN2_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def convert(path: Path, folder: Path, on_bytes: Callable[[int], None] = lambda n: None) -> None:
    """Write the model in the GGUF file `path` as Hugging Face files into the existing `folder`.

    `on_bytes(n)` is called as bytes are written. Raises `UserError` for a file that is no GGUF or of an unknown architecture.
    """
    import gguf  # imports take a moment and only a first use needs them

    try:
        reader = gguf.GGUFReader(path)
    except (ValueError, OSError, IndexError) as error:
        raise UserError(f"{path} is not a readable GGUF file ({error}); fetch it again") from error
    meta = {name: field.contents() for name, field in reader.fields.items()}
    tensors = {hf_name(tensor.name): tensor for tensor in reader.tensors}
    config = hf_config(meta, tied="lm_head.weight" not in tensors)
    _write_json(folder / "config.json", config)
    token_ids = {key: config[key] for key in ("bos_token_id", "pad_token_id") if key in config}
    _write_json(folder / "generation_config.json", {**token_ids, "eos_token_id": end_ids(meta)})
    write_tokenizer(meta, folder)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    entries = []
    for name, tensor in sorted(tensors.items()):
        shape = tuple(int(n) for n in reversed(tensor.shape))  # GGUF lists the fastest axis first
        interleaved = heads.get(name.split(".")[-2]) if config["model_type"] == "llama" else None
        entries.append((name, shape, _rows(tensor, shape, interleaved)))
    write_bfloat16(folder / "model.safetensors", entries, on_bytes)


def hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    parts = name.split(".")
    if parts[-1] in ("weight", "bias"):
        if len(parts) == 2 and parts[0] in TOP_TENSORS:
            return f"{TOP_TENSORS[parts[0]]}.{parts[1]}"
        if len(parts) == 4 and parts[0] == "blk" and parts[2] in LAYER_TENSORS:
            return f"model.layers.{parts[1]}.{LAYER_TENSORS[parts[2]]}.{parts[3]}"
    raise UserError(f"the GGUF file has a tensor {name!r} that plain Llama and Qwen2 models do not have; use one of those")


def hf_config(meta: dict, tied: bool) -> dict:
    """GGUF metadata -> the contents of config.json."""
    arch = meta.get("general.architecture")
    if arch not in ("llama", "qwen2"):
        raise UserError(f"the GGUF file holds a model of architecture {arch!r}; only 'llama' and 'qwen2' can be read")
    scaling = [key for key in meta if key.startswith((f"{arch}.rope.scaling", f"{arch}.expert"))]
    if scaling:
        raise UserError(f"the GGUF file sets {scaling[0]}, which is not supported; use a model without it")

    def get(key: str, default=None):
        value = meta.get(f"{arch}.{key}", default)
        if value is None:
            raise UserError(f"the GGUF file lacks {arch}.{key}; fetch it again")
        return value

    heads, width = get("attention.head_count"), get("embedding_length")
    config = {
        "architectures": [{"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}[arch]],
        "model_type": arch,
        "hidden_act": "silu",
        "hidden_size": width,
        "intermediate_size": get("feed_forward_length"),
        "max_position_embeddings": get("context_length"),
        "num_attention_heads": heads,
        "num_hidden_layers": get("block_count"),
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "rms_norm_eps": shortest(get("attention.layer_norm_rms_epsilon")),
        "rope_theta": shortest(get("rope.freq_base", 10000.0)),
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "vocab_size": len(meta["tokenizer.ggml.tokens"]),
    }
    if arch == "llama":
        config |= {"head_dim": get("rope.dimension_count", width // heads), "attention_bias": False, "mlp_bias": False}
    else:
        config |= {"use_sliding_window": False}
    for key, gguf_key in {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}.items():
        if f"tokenizer.ggml.{gguf_key}_token_id" in meta:
            config[key] = meta[f"tokenizer.ggml.{gguf_key}_token_id"]
    return config


def shortest(value: float) -> float:
    """The shortest decimal that is `value` in float32: 9.999999974752427e-07 -> 1e-06."""
    return float(str(np.float32(value)))


def end_ids(meta: dict) -> list[int]:
    """The end of a chat turn, and the end of a text where the vocabulary has one."""
    tokens, end_of_turn = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.eos_token_id"]
    end_of_text = tokens.index("<|endoftext|>") if "<|endoftext|>" in tokens else end_of_turn
    return list(dict.fromkeys((end_of_turn, end_of_text)))


# --- tokenizer


def write_tokenizer(meta: dict, folder: Path) -> None:
    """Byte-level BPE from the metadata -> tokenizer.json, tokenizer_config.json (with the chat template)."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    kind, rule = meta.get("tokenizer.ggml.model"), meta.get("tokenizer.ggml.pre")
    if kind != "gpt2" or rule not in ("smollm", "qwen2") or meta.get("tokenizer.ggml.add_bos_token"):
        raise UserError(f"the GGUF file has a tokenizer {kind!r} with rule {rule!r}; only gpt2 with smollm or qwen2 can be read")
    tokens, types = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    vocabulary = {token: i for i, token in enumerate(tokens) if types[i] != UNUSED}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    if rule == "smollm":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    else:
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(QWEN2_SPLIT), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    tokenizer.decoder = decoders.ByteLevel()
    added = [(token, kind) for token, kind in zip(tokens, types) if kind in (CONTROL, USER_DEFINED)]
    tokenizer.add_tokens([AddedToken(token, special=kind == CONTROL, normalized=False) for token, kind in added])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": meta[f"{meta['general.architecture']}.context_length"],
    }
    for key, gguf_key in {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}.items():
        if f"tokenizer.ggml.{gguf_key}_token_id" in meta:
            config[key] = tokens[meta[f"tokenizer.ggml.{gguf_key}_token_id"]]
    if "tokenizer.chat_template" in meta:
        config["chat_template"] = meta["tokenizer.chat_template"]
    _write_json(folder / "tokenizer_config.json", config)


# --- weights


def halves_order(rows: int, heads: int) -> np.ndarray:
    """Row order that turns a head stored as pairs (0, h/2, 1, h/2 + 1, ...) back into halves (0, 1, ..., h/2, h/2 + 1, ...)."""
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(rows)


def _rows(tensor, shape: tuple[int, ...], interleaved_heads: int | None) -> Iterator[np.ndarray]:
    """The tensor in bfloat16, a block of rows at a time. Rows are permuted while quantised: quantisation runs along a row."""
    from gguf import dequantize

    stored = tensor.data if len(shape) > 1 else tensor.data[None]
    order = halves_order(shape[0], interleaved_heads) if interleaved_heads else np.arange(len(stored))
    step = max(1, BLOCK_ELEMENTS // shape[-1])
    for start in range(0, len(stored), step):
        block = stored[order[start : start + step]] if interleaved_heads else stored[start : start + step]
        yield dequantize(block, tensor.tensor_type).astype(ml_dtypes.bfloat16)


Entry = tuple[str, tuple[int, ...], Iterator[np.ndarray]]  # name, shape, the values in blocks


def write_bfloat16(path: Path, entries: list[Entry], on_bytes: Callable[[int], None]) -> None:
    """A safetensors file of bfloat16 tensors, streamed: 8 bytes of header length, a JSON header, the tensors' bytes in order."""
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, shape, _ in entries:
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # data starts aligned
    with open(path, "wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for _, _, blocks in entries:
            for block in blocks:
                out.write(np.ascontiguousarray(block).view(np.uint8))
                on_bytes(block.nbytes)
        written = out.tell() - 8 - len(text)
    if written != offset:
        raise UserError(f"the GGUF file's tensors hold {written} bytes where their shapes say {offset}; fetch it again")


def _write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
