"""E5-style text encoders: BERT, mean over the real tokens, unit length.

    encoder = e5.load("intfloat/e5-base-v2")                                # or a folder, or "minilm-l6-v2"
    vectors = e5.embed(encoder, ["who founded it"], kind="query")           # [B, D] float32, unit length
    vectors = encoder.module.apply({"params": encoder.params, "lora": adapter}, tokens, mask)     # differentiable

Queries and passages are told apart by a prefix that is part of the text (E5 was trained with "query: " and "passage: ");
`tokenize` is the only place that adds it. Source: Devlin et al. 2018 (BERT), Wang et al. 2022 (E5); checked against `transformers`
in tests/models/test_e5.py.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
from bridge_jax.mesh import BATCH, batch_sharding, batch_ways, constrain, param_sharding
from bridge_jax.models import hub
from bridge_jax.models.attention import attend
from bridge_jax.models.layers import INIT, Dense, Embed
from bridge_jax.models.lora import LoRAConfig, check_lora

LENGTHS = (16, 32, 64, 96, 128, 192, 256, 512)  # padded lengths: one compilation each
FINE_LENGTHS = (*range(16, 257, 16), *range(320, 513, 64))  # less padding, for many texts: more compilations pay
FEW_ROWS = 8  # what does not fill a batch goes in batches of this size: two batch shapes, little padding

# What a checkpoint may hold beside the encoder, to no effect: the pooler and the pretraining heads of BERT, a buffer of positions.
IGNORED = ("pooler.dense.weight", "pooler.dense.bias", "embeddings.position_ids")
IGNORED_HEADS = ("cls.predictions.*", "cls.seq_relationship.*")


@dataclass(frozen=True)
class BertConfig:
    """The shape of an encoder."""

    vocab_size: int
    hidden_size: int  # D
    intermediate_size: int  # F
    num_layers: int  # L
    num_heads: int  # N
    max_positions: int
    type_vocab_size: int = 2
    layer_norm_eps: float = 1e-12
    pad_token_id: int = 0

    @property
    def units(self) -> dict[str, int]:
        """Heads in each attention projection: tensor parallelism never splits one."""
        return dict.fromkeys(("query", "key", "value", "attention_output"), self.num_heads)

    @classmethod
    def from_hf(cls, hf: Mapping, where: str = "config.json") -> BertConfig:
        """From the contents of config.json. UserError for what this module does not compute, naming it."""
        if hf.get("model_type") != "bert":
            raise UserError(
                f"{where}: model_type {hf.get('model_type')!r} is no text encoder; give a bert checkpoint such as E5 v2"
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
                pad_token_id=hf.get("pad_token_id") or 0,
            )
        except KeyError as error:
            raise UserError(f"{where}: field {error.args[0]} is missing; fetch the model folder again") from None
        if config.hidden_size % config.num_heads:
            raise UserError(f"{where}: hidden_size {config.hidden_size} is no multiple of num_attention_heads {config.num_heads}")
        return config

    def to_hf(self) -> dict:
        """The contents of config.json."""
        return {
            "architectures": ["BertModel"],
            "model_type": "bert",
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


# --- the module


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
    a "lora" collection is passed. A row without tokens gives the zero vector.
    """

    config: BertConfig
    dtype: Any = jnp.float32
    lora: LoRAConfig | None = None
    mesh: Mesh | None = None

    @nn.compact
    def __call__(self, tokens: jax.Array, mask: jax.Array) -> jax.Array:
        c = self.config
        length = tokens.shape[1]
        if length > c.max_positions:
            raise ValueError(f"{length} tokens, but the encoder has {c.max_positions} positions")
        if "lora" in self.variables:
            check_lora(self.variables["params"], self.variables["lora"])
        positions = self.param("positions", INIT, (c.max_positions, c.hidden_size))
        types = self.param("types", INIT, (c.type_vocab_size, c.hidden_size))
        x = Embed(c.vocab_size, c.hidden_size, self.dtype, self.mesh, name="embed")(tokens)
        x = x + types[0].astype(self.dtype) + positions[:length].astype(self.dtype)
        x = constrain(LayerNorm(c.layer_norm_eps, name="embed_norm")(x), self.mesh, P(BATCH))
        layers = nn.scan(
            Block,
            variable_axes={"params": 0, "lora": 0},
            split_rngs={"params": True},
            in_axes=nn.broadcast,
            length=c.num_layers,
        )(c, self.dtype, self.lora, self.mesh, name="layers")
        x, _ = layers(x, mask.astype(bool)[:, None, :])

        weights = mask.astype(jnp.float32)[..., None]
        mean = jnp.sum(x.astype(jnp.float32) * weights, axis=1) / jnp.maximum(weights.sum(axis=1), 1)
        return mean * jax.lax.rsqrt(jnp.maximum(jnp.sum(mean * mean, axis=-1, keepdims=True), 1e-24))


# --- loading and saving


@dataclass(frozen=True)
class Encoder:
    """A module with its parameters and everything that decides which vector a text gets."""

    module: Bert
    params: dict
    tokenizer: Any  # a transformers tokenizer
    name: str  # as given to `load`
    pooling: str  # "mean"
    query_prefix: str
    passage_prefix: str
    max_length: int  # tokens, special tokens included
    fingerprint: str  # of shape, weights and vocabulary

    @property
    def dim(self) -> int:
        return self.module.config.hidden_size


def load(
    id_or_folder: str | Path,
    dtype: Any = jnp.float32,
    mesh: Mesh | None = None,
    lora: LoRAConfig | None = None,
    query_prefix: str | None = None,
    passage_prefix: str | None = None,
    max_length: int = 256,
) -> Encoder:
    """An encoder, its parameters in `dtype` streamed onto `mesh` (None: the default device).

    `id_or_folder`: as `hub.resolve`. Prefixes default to E5's for models of that family (by name) and to none for others.
    Raises UserError for another architecture or pooling and for missing, left-over or misshapen tensors.
    """
    folder = hub.resolve(id_or_folder)
    where = folder / "config.json"
    hf = hub.read_json(where)
    config = BertConfig.from_hf(hf, str(where))
    _check_pooling(folder)
    if not 3 <= max_length <= config.max_positions:
        raise UserError(f"max_length {max_length}: {id_or_folder} takes 3 to {config.max_positions} tokens")
    tokenizer = _load_tokenizer(folder)
    tensors = hub.open_tensors(folder)
    prefix = "bert." if "bert.embeddings.word_embeddings.weight" in tensors else ""
    places = slots(config, prefix)
    ignored = [prefix + name for name in IGNORED] + (list(IGNORED_HEADS) if prefix else [])
    sharding = None if mesh is None else lambda path, shape: param_sharding(mesh, path, shape, config.units)
    params = hub.read_params(folder, places, abstract_params(config), np.dtype(dtype), sharding, ignored)
    e5 = is_e5(id_or_folder, hf.get("_name_or_path") or "")
    return Encoder(
        module=Bert(config, dtype, lora, mesh),
        params=params,
        tokenizer=tokenizer,
        name=str(id_or_folder),
        pooling="mean",
        query_prefix=("query: " if e5 else "") if query_prefix is None else query_prefix,
        passage_prefix=("passage: " if e5 else "") if passage_prefix is None else passage_prefix,
        max_length=max_length,
        fingerprint=_fingerprint(config, {name: tensors[prefix + name] for name in slots(config)}, tokenizer),
    )


def is_e5(*names: str | Path) -> bool:
    """Whether one of the names (ids, folders) is of the E5 family, as intfloat/e5-base-v2 and its folder in the hub's cache are."""
    parts = [part for name in names for part in Path(name).parts[-1:] + Path(name).parts[-3:-2]]
    return any(re.search(r"(^|[-_])e5([-_]|$)", part.lower()) for part in parts)


def save(folder: str | Path, encoder: Encoder) -> None:
    """Write a Hugging Face folder: config.json, model.safetensors, tokenizer files. `lora.merge_lora` puts an adapter in first."""
    folder, config = Path(folder), encoder.module.config
    hub.write_params(folder / "model.safetensors", slots(config), encoder.params)
    if jax.process_index():
        return
    dtype = jnp.dtype(encoder.params["embed"]["embedding"].dtype).name
    name = {"_name_or_path": encoder.name, "torch_dtype": dtype}  # the name keeps the family, hence the prefixes
    write_text(folder / "config.json", json.dumps(config.to_hf() | name, indent=2) + "\n")
    encoder.tokenizer.save_pretrained(folder)


def abstract_params(config: BertConfig) -> dict:
    """The parameter tree as float32 ShapeDtypeStructs."""
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    return jax.eval_shape(Bert(config).init, jax.random.key(0), tokens, tokens)["params"]


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


def _check_pooling(folder: Path) -> None:
    """Folders of sentence-transformers say how vectors are made; anything but the mean over tokens is refused."""
    pooling = folder / "1_Pooling" / "config.json"
    if pooling.is_file():
        modes = [key for key, value in hub.read_json(pooling).items() if key.startswith("pooling_mode_") and value is True]
        if modes != ["pooling_mode_mean_tokens"]:
            raise UserError(f"{pooling}: {', '.join(modes) or 'no pooling mode'}; only pooling_mode_mean_tokens is supported")
    if any(folder.glob("*_Dense")):
        raise UserError(f"{folder}: a Dense layer follows the pooling, which is not supported; give another encoder")


def _load_tokenizer(folder: Path):
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{folder}: no usable tokenizer ({str(error)[:200]}); fetch the folder again") from None


def _fingerprint(config: BertConfig, tensors: Mapping[str, hub.Tensor], tokenizer) -> str:
    """SHA-256 over the shape, the vocabulary and the weights as stored; the same however files are split or tensors prefixed."""
    head = [dataclasses.asdict(config), sorted(tokenizer.get_vocab().items())]
    digest = hashlib.sha256(json.dumps(head).encode())
    for name in sorted(tensors):
        digest.update(f"{name} {tensors[name].dtype} {tensors[name].shape}".encode())
        digest.update(tensors[name].data)
    return digest.hexdigest()


# --- texts to vectors


def tokenize(encoder: Encoder, texts: Sequence[str], kind: str) -> list[list[int]]:
    """Token ids of each text, the prefix of its kind ("query" or "passage") put before it, cut to `encoder.max_length`."""
    if kind not in ("query", "passage"):
        raise ValueError(f"kind={kind!r}: it is 'query' or 'passage'")
    if isinstance(texts, str):
        raise TypeError("texts is one string: give a list of strings")
    prefix = encoder.query_prefix if kind == "query" else encoder.passage_prefix
    if not texts:
        return []
    return encoder.tokenizer([prefix + text for text in texts], truncation=True, max_length=encoder.max_length)["input_ids"]


def pad(
    encoder: Encoder, ids: Sequence[Sequence[int]], rows: int | None = None, lengths: Sequence[int] = LENGTHS
) -> tuple[np.ndarray, np.ndarray]:
    """Id lists -> (tokens, mask), both [rows, T] int32: T is the bucket of the longest, rows beyond the lists are empty."""
    rows = len(ids) if rows is None else rows
    length = padded_length(max(map(len, ids)), encoder.max_length, lengths)
    tokens = np.full((rows, length), encoder.module.config.pad_token_id, np.int32)
    mask = np.zeros((rows, length), np.int32)
    for row, line in enumerate(ids):
        tokens[row, : len(line)] = line
        mask[row, : len(line)] = 1
    return tokens, mask


def padded_length(length: int, max_length: int, lengths: Sequence[int] = LENGTHS) -> int:
    """The smallest bucket that holds `length` tokens, at most `max_length`."""
    return min(max_length, next((n for n in lengths if n >= length), max_length))


@functools.partial(jax.jit, static_argnums=0)
def _apply(module: Bert, variables: dict, tokens: jax.Array, mask: jax.Array) -> jax.Array:
    return module.apply(variables, tokens, mask)


def embed(
    encoder: Encoder,
    texts: Sequence[str],
    kind: str = "query",
    lora: Mapping | None = None,
    batch_size: int = 64,
) -> np.ndarray:
    """Vectors [B, D] float32 of unit length, in the order of `texts`; with `lora`, those of the adapted encoder.

    Texts are sorted by length and padded to few shapes, so a handful of programs is compiled however many texts come.
    """
    ids = tokenize(encoder, texts, kind)
    by_length: dict[int, list[int]] = {}
    for row in sorted(range(len(ids)), key=lambda row: len(ids[row])):
        by_length.setdefault(padded_length(len(ids[row]), encoder.max_length), []).append(row)
    pending = []
    for members in by_length.values():
        full = len(members) // batch_size * batch_size
        few = min(FEW_ROWS, batch_size)
        batches = [(members[i : i + batch_size], batch_size) for i in range(0, full, batch_size)]
        batches += [(members[i : i + few], few) for i in range(full, len(members), few)]
        pending += [(batch, _dispatch(encoder, [ids[row] for row in batch], rows, LENGTHS, lora)) for batch, rows in batches]
    out = np.empty((len(ids), encoder.dim), np.float32)
    for batch, vectors in pending:
        out[batch] = np.asarray(vectors)[: len(batch)]
    return out


def dispatch_many(encoder: Encoder, ids: Sequence[Sequence[int]], batch_tokens: int) -> list[tuple[list[int], jax.Array]]:
    """Begins to encode very many texts -> (rows of `ids`, their vectors [at least so many, D]) for every batch; waits for nothing.

    Batches are cut from all texts in the order of their lengths, the longest first, and hold about `batch_tokens` tokens, padded to
    FINE_LENGTHS: one shape a length.
    """
    order = sorted(range(len(ids)), key=lambda row: -len(ids[row]))
    pending, at = [], 0
    while at < len(order):
        length = padded_length(len(ids[order[at]]), encoder.max_length, FINE_LENGTHS)
        rows = max(FEW_ROWS, batch_tokens // length // FEW_ROWS * FEW_ROWS)
        batch = order[at : at + rows]
        pending.append((batch, _dispatch(encoder, [ids[row] for row in batch], rows, FINE_LENGTHS)))
        at += rows
    return pending


def _dispatch(encoder: Encoder, ids, rows: int, lengths: Sequence[int], lora: Mapping | None = None) -> jax.Array:
    """One batch, not waited for: the host pads the next one meanwhile."""
    variables = {"params": encoder.params} if lora is None else {"params": encoder.params, "lora": lora}
    mesh = encoder.module.mesh
    ways = batch_ways(mesh)
    arrays = pad(encoder, ids, -(-rows // ways) * ways, lengths)
    if mesh is not None:
        arrays = jax.device_put(arrays, batch_sharding(mesh))
    return _apply(encoder.module, variables, *arrays)
