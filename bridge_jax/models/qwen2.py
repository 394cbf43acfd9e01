"""Qwen2/Qwen2.5 decoders, and Qwen3 and Llama checkpoints, which differ in details, as one linen module with stacked layers.

    model, params = qwen2.load("Qwen/Qwen2.5-0.5B-Instruct", dtype=jnp.bfloat16)
    logits = model.apply({"params": params}, tokens)                             # [B, T, V] float32
    logits, cache = model.apply({"params": params}, tokens, private=cache, write_at=0)

Source: the models' published configurations; checked against `transformers` in tests/models/test_qwen2*.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from bridge_jax.errors import UserError
from bridge_jax.files import write_text
from bridge_jax.mesh import BATCH, constrain, param_sharding
from bridge_jax.models import hub
from bridge_jax.models.attention import attend, causal_mask
from bridge_jax.models.attention_kernels import attend_sequences
from bridge_jax.models.cache import KVBlock, write_columns
from bridge_jax.models.decoder_config import Qwen2Config, ids_of, one_or_list
from bridge_jax.models.layers import INIT, Dense, Embed, RMSNorm, rope, rotate
from bridge_jax.models.lora import LoRAConfig, check_lora

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "sentencepiece.bpe.model", "vocab.txt", "vocab.json")


class Block(nn.Module):
    """One decoder layer, as the body of a scan over layers."""

    config: Qwen2Config
    dtype: Any
    lora: LoRAConfig | None
    mesh: Mesh | None
    attention: str
    keep: bool  # give k and v [B,T,K,H] of this layer as the scan's output

    @nn.compact
    def __call__(self, carry, per_layer, common):
        """carry: x [B,T,D], cache k and v [L,B,S,K,H] or None. per_layer: layer index, shared k and v [U,P,K,H] or None."""
        c = self.config
        x, cache_k, cache_v = carry
        layer, shared_k, shared_v = per_layer
        cos, sin, mask, segment_ids, shared_valid, write_at = common
        batch, length, _ = x.shape

        def dense(name, features, bias=False):
            return Dense(features, bias, self.dtype, self.lora, self.mesh, c.units.get(name), name=name)

        h = RMSNorm(c.rms_norm_eps, name="input_norm")(x)
        q = dense("q_proj", c.num_heads * c.head_dim, c.qkv_bias)(h).reshape(batch, length, c.num_heads, c.head_dim)
        k = dense("k_proj", c.num_kv_heads * c.head_dim, c.qkv_bias)(h).reshape(batch, length, c.num_kv_heads, c.head_dim)
        v = dense("v_proj", c.num_kv_heads * c.head_dim, c.qkv_bias)(h).reshape(batch, length, c.num_kv_heads, c.head_dim)
        if c.qk_norm:
            q, k = RMSNorm(c.rms_norm_eps, name="q_norm")(q), RMSNorm(c.rms_norm_eps, name="k_norm")(k)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if cache_k is not None:
            # In the carry, not scanned in and out: XLA then updates the columns in place instead of copying the cache.
            cache_k = write_columns(cache_k, k, layer, write_at, self.mesh)
            cache_v = write_columns(cache_v, v, layer, write_at, self.mesh)
            k, v = (jax.lax.dynamic_index_in_dim(cache, layer, keepdims=False) for cache in (cache_k, cache_v))
        if mask is None:
            h = attend_sequences(q, k, v, segment_ids, self.attention, self.mesh)
        else:
            h = attend(q, k, v, mask, shared_k, shared_v, shared_valid)
        x = x + dense("o_proj", c.hidden_size)(h.reshape(batch, length, -1))

        h = RMSNorm(c.rms_norm_eps, name="post_norm")(x)
        h = nn.silu(dense("gate_proj", c.intermediate_size)(h)) * dense("up_proj", c.intermediate_size)(h)
        x = x + dense("down_proj", c.hidden_size)(h)
        x = constrain(x, self.mesh, P(BATCH))
        return (x, cache_k, cache_v), (k, v) if self.keep else None


class _Head(nn.Module):
    """The untied output projection's kernel [D, V]."""

    shape: tuple[int, int]

    @nn.compact
    def __call__(self) -> jax.Array:
        return self.param("kernel", INIT, self.shape)


class Qwen2(nn.Module):
    """The decoder. `dtype` is the compute dtype (parameters are cast where used; softmax, norms and logits are float32).

    `lora` gives the scale of the adapter that is active when a "lora" collection is passed. `remat` recomputes each layer in the
    backward pass. `mesh` keeps activations split over the batch axes. `attention`: the backend of `attend_sequences`,
    which serves whole sequences; with a cache, and for making one, attention is XLA's.
    """

    config: Qwen2Config
    dtype: Any = jnp.float32
    lora: LoRAConfig | None = None
    remat: bool = False
    mesh: Mesh | None = None
    attention: str = "xla"

    @nn.compact
    def __call__(
        self,
        tokens: jax.Array,
        *,
        positions: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        valid: jax.Array | None = None,
        shared: KVBlock | None = None,
        private: KVBlock | None = None,
        write_at: jax.Array | int | None = None,
        output: str = "logits",
    ):
        """Run T tokens of B rows.

        Args:
          tokens: [B, T] int32.
          positions: [B, T] int32, RoPE positions. Default: the number of earlier columns that the token sees.
          segment_ids: [B, T] int32, without `private` only: tokens see earlier tokens of their own segment; 0 is padding.
          valid: [B, T] bool, False for padding (default: all). Without `private` it is the same as segments of 0 and 1.
          shared: columns read by every row; of U rows, block row b // (B // U) by row b.
          private: the rows' own columns. The new ones are written at [:, write_at : write_at + T], which must lie inside the block
            (write_at is clamped otherwise); token t sees the valid columns up to write_at + t.
          write_at: int32 scalar.
          output: "logits" [B, T, V] float32, or "hidden" [B, T, D] after the final norm, for `unembed`; without `private` also
            "block": the T columns as a `KVBlock` to be `shared` (a gradient would save a cache in the carry once a layer).

        Returns:
          The output; with `private`, (output, the updated private block). Rows that see nothing hold finite garbage.
        """
        c = self.config
        batch, length = tokens.shape
        if output not in ("logits", "hidden", "block") or (output == "block" and private is not None):
            raise ValueError(f"output={output!r}: it is 'logits', 'hidden', or, without `private`, 'block'")
        if "lora" in self.variables:
            check_lora(self.variables["params"], self.variables["lora"])

        seen_before = (
            0 if shared is None else jnp.repeat(shared.valid.sum(-1, dtype=jnp.int32), batch // shared.valid.shape[0])[:, None]
        )
        if private is None:
            if segment_ids is None and valid is not None:
                segment_ids = valid.astype(jnp.int32)
            mask = causal_mask(batch, length, segment_ids)
            columns = jnp.ones((batch, length), bool) if segment_ids is None else segment_ids > 0
            seen = mask.sum(-1, dtype=jnp.int32)
            if shared is None and output != "block":
                mask = None  # whole sequences
        else:
            if write_at is None or segment_ids is not None:
                raise ValueError("with `private`, give `write_at` and `valid`, not `segment_ids`")
            write_at = jnp.asarray(write_at, jnp.int32)
            new = jnp.ones((batch, length), bool) if valid is None else valid
            columns = jax.lax.dynamic_update_slice(private.valid, new, (0, write_at))
            time = jnp.arange(columns.shape[1])[None, :] <= write_at + jnp.arange(length)[:, None]
            mask = columns[:, None, :] & time
            seen = jax.lax.dynamic_slice(jnp.cumsum(columns, axis=-1, dtype=jnp.int32), (0, write_at), (batch, length))
        if positions is None:
            positions = jnp.maximum(seen_before + seen - 1, 0)
        cos, sin = rope(positions, c.head_dim, c.rope_theta, c.rope_scaling)

        embed = Embed(c.vocab_size, c.hidden_size, self.dtype, self.mesh, name="embed")
        x = constrain(embed(tokens), self.mesh, P(BATCH))
        block = nn.remat(Block, prevent_cse=False) if self.remat else Block
        layers = nn.scan(
            block,
            variable_axes={"params": 0, "lora": 0, "intermediates": 0},
            split_rngs={"params": True},
            in_axes=(0, nn.broadcast),
            length=c.num_layers,
        )(c, self.dtype, self.lora, self.mesh, self.attention, output == "block", name="layers")
        carry = (x, None, None) if private is None else (x, private.k, private.v)
        per_layer = (jnp.arange(c.num_layers), *((None, None) if shared is None else (shared.k, shared.v)))
        common = (cos, sin, mask, segment_ids, None if shared is None else shared.valid, write_at)
        (x, new_k, new_v), kept = layers(carry, per_layer, common)
        x = RMSNorm(c.rms_norm_eps, name="norm")(x)
        if output == "block":
            return KVBlock(*kept, columns)
        if output == "logits":
            head = None if c.tie_embeddings else _Head((c.hidden_size, c.vocab_size), name="lm_head")()
            x = _project(x, embed.embedding, head)
        return x if private is None else (x, KVBlock(new_k, new_v, columns))


def _project(hidden: jax.Array, embedding: jax.Array, head: jax.Array | None) -> jax.Array:
    if head is None:
        return jnp.einsum("...d,vd->...v", hidden, embedding.astype(hidden.dtype), preferred_element_type=jnp.float32)
    return jnp.einsum("...d,dv->...v", hidden, head.astype(hidden.dtype), preferred_element_type=jnp.float32)


def unembed(params: Mapping, hidden: jax.Array, config: Qwen2Config) -> jax.Array:
    """hidden [..., D] (the model's output="hidden") -> logits [..., V] float32, exactly those of output="logits"."""
    return _project(hidden, params["embed"]["embedding"], None if config.tie_embeddings else params["lm_head"]["kernel"])


def abstract_params(config: Qwen2Config) -> dict:
    """The parameter tree as float32 ShapeDtypeStructs."""
    return jax.eval_shape(Qwen2(config).init, jax.random.key(0), jax.ShapeDtypeStruct((1, 1), jnp.int32))["params"]


def slots(config: Qwen2Config) -> dict[str, hub.Slot]:
    """Checkpoint tensor name -> place in the parameter tree."""
    biased = ("q_proj", "k_proj", "v_proj") if config.qkv_bias else ()

    def leaves(name: str) -> tuple[str, ...]:
        if name in ("q_norm", "k_norm") and not config.qk_norm:
            return ()
        return ("scale",) if name.endswith("norm") else ("kernel", "bias") if name in biased else ("kernel",)

    places = {"model.embed_tokens.weight": hub.Slot(("embed", "embedding")), "model.norm.weight": hub.Slot(("norm", "scale"))}
    if not config.tie_embeddings:
        places["lm_head.weight"] = hub.Slot(("lm_head", "kernel"), transpose=True)
    return places | hub.layer_slots("qwen2", config.num_layers, leaves)


def config_from_folder(folder: str | Path) -> Qwen2Config:
    """The configuration of a model folder, with the end-of-text tokens of generation_config.json (the longer list in practice)."""
    path = Path(folder) / "config.json"
    config = Qwen2Config.from_hf(hub.read_json(path), str(path))
    generation = path.with_name("generation_config.json")
    more = ids_of(hub.read_json(generation).get("eos_token_id")) if generation.is_file() else ()
    return replace(config, eos_token_ids=tuple(dict.fromkeys((*config.eos_token_ids, *more))))


def load(
    id_or_folder: str | Path,
    dtype: Any = jnp.float32,
    mesh: Mesh | None = None,
    *,
    compute_dtype: Any = None,
    lora: LoRAConfig | None = None,
    remat: bool = False,
    attention: str = "xla",
) -> tuple[Qwen2, dict]:
    """A model and its parameters in `dtype`, streamed onto `mesh` (None: the default device). Computes in `dtype` unless told.

    `id_or_folder`: as `hub.resolve`. Raises UserError for another architecture and for missing, left-over or misshapen tensors.
    """
    folder = hub.resolve(id_or_folder)
    config = config_from_folder(folder)
    sharding = None if mesh is None else lambda path, shape: param_sharding(mesh, path, shape, config.units)
    ignored = ["*.rotary_emb.inv_freq"]
    if config.tie_embeddings:
        ignored.append("lm_head.weight")
        tensors = hub.open_tensors(folder)
        head, embedding = tensors.get("lm_head.weight"), tensors.get("model.embed_tokens.weight")
        if head is not None and embedding is not None and not np.array_equal(head.data, embedding.data):
            raise UserError(f"{head.file}: lm_head.weight is not the embedding; set tie_word_embeddings to false in config.json")
    params = hub.read_params(folder, slots(config), abstract_params(config), np.dtype(dtype), sharding, ignored)
    return Qwen2(config, dtype if compute_dtype is None else compute_dtype, lora, remat, mesh, attention), params


def save(folder: str | Path, model: Qwen2, params: Mapping, tokenizer: Any = None) -> None:
    """Write a Hugging Face folder: config.json, generation_config.json, model.safetensors, tokenizer files. Dtypes are kept."""
    folder = Path(folder)
    hub.write_params(folder / "model.safetensors", slots(model.config), params)
    if jax.process_index():
        return
    config = model.config
    eos = one_or_list(config.eos_token_ids)
    ids = {"bos_token_id": config.bos_token_id, "eos_token_id": eos, "pad_token_id": config.pad_token_id}
    write_text(folder / "generation_config.json", json.dumps(ids, indent=2) + "\n")
    dtype = jnp.dtype(params["embed"]["embedding"].dtype).name
    write_text(folder / "config.json", json.dumps(config.to_hf() | {"torch_dtype": dtype}, indent=2) + "\n")
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def load_tokenizer(id_or_folder: str | Path):
    """The folder's tokenizer: what its tokenizer.json says, whatever the model's type.

    `AutoTokenizer` would choose a class by the model type and rebuild the pipeline as that class knows it: a Qwen2-architecture
    model with a vocabulary of its own would silently split text differently from how it was trained. It serves folders without
    that file.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    folder = hub.resolve(id_or_folder)
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        # transformers would return an empty tokenizer, which maps every text to nothing
        raise UserError(f"{folder} has no tokenizer ({', '.join(_TOKENIZER_FILES)}); fetch the folder again")
    kind = PreTrainedTokenizerFast if (folder / "tokenizer.json").is_file() else AutoTokenizer
    try:
        return kind.from_pretrained(folder, trust_remote_code=False)  # None would ask whether to run the folder's Python
    except Exception as error:  # the tokenizers library raises bare Exception for a file it cannot parse
        why = " ".join(str(error).split())[:200]
        raise UserError(f"{folder}: no usable tokenizer ({why}); fetch the folder again") from None


def eos_ids(folder: str | Path, tokenizer: Any) -> tuple[int, ...]:
    """Every token that ends a text, sorted: of config.json, generation_config.json and the tokenizer; UserError if none."""
    folder = Path(folder)
    found = {tokenizer.eos_token_id}
    for name in ("config.json", "generation_config.json"):
        if (folder / name).is_file():
            found.update(ids_of(hub.read_json(folder / name).get("eos_token_id")))
    found.discard(None)
    if not found:
        raise UserError(f"{folder}: neither configuration nor tokenizer has an end-of-text token; add eos_token_id to config.json")
    return tuple(sorted(found))
