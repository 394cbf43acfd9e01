"""Text encoders as retrievers: E5, BGE, MiniLM, multilingual E5 (`models.bert`), Qwen3-Embedding (`models.embedder`).

    encoder = e5.load("intfloat/e5-base-v2")                                # or a folder, or "minilm-l6-v2"
    vectors = e5.embed(encoder, ["who founded it"], kind="query")           # [B, D] float32, unit length
    vectors = encoder.module.apply({"params": encoder.params, "lora": adapter}, tokens, mask)     # differentiable

Queries and passages are told apart by a prefix that is part of the text (E5 was trained with "query: " and "passage: ");
`tokenize` is the only place that adds it, and `models.recipe` the one that knows it. Source: Wang et al. 2022 (E5); checked against
`transformers` in tests/models/test_e5.py and test_encoders.py.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from bridge_jax.errors import UserError
from bridge_jax.files import write_text
from bridge_jax.mesh import batch_sharding, batch_ways, param_sharding
from bridge_jax.models import bert, embedder, hub, recipe
from bridge_jax.models.bert import Bert, BertConfig
from bridge_jax.models.decoder_config import Qwen2Config
from bridge_jax.models.embedder import DecoderEmbedder
from bridge_jax.models.lora import TOWER_TARGETS, LoRAConfig
from bridge_jax.models.pooling import POOLINGS
from bridge_jax.models.qwen2 import load_tokenizer

LENGTHS = (16, 32, 64, 96, 128, 192, 256, 512)  # padded lengths: one compilation each
FINE_LENGTHS = (*range(16, 257, 16), *range(320, 513, 64))  # less padding, for many texts: more compilations pay
FEW_ROWS = 8  # what does not fill a batch goes in batches of this size: two batch shapes, little padding

Shape = BertConfig | Qwen2Config


# --- shapes and modules


def read_config(hf: Mapping, where: str = "config.json") -> Shape:
    """The encoder's shape from the contents of config.json. UserError for another architecture."""
    if hf.get("model_type") in ("qwen2", "qwen3", "llama"):
        return embedder.config_from_hf(hf, where)
    return BertConfig.from_hf(hf, where)


def architecture(shape: Shape) -> str:
    """The key of `hub.MODULES` and `lora.TOWER_TARGETS`."""
    return "bert" if isinstance(shape, BertConfig) else "embedder"


def tower_lora(shape: Shape, rank: int, alpha: float) -> LoRAConfig:
    """The adapter of a query tower of this shape: on the attention's projections."""
    return LoRAConfig(rank, alpha, TOWER_TARGETS[architecture(shape)])


def make_module(
    shape: Shape, pooling: str, dtype: Any = jnp.float32, lora: LoRAConfig | None = None, mesh: Mesh | None = None
) -> Bert | DecoderEmbedder:
    """(tokens [B, T], mask [B, T]) -> vectors [B, D]."""
    if isinstance(shape, BertConfig):
        return Bert(shape, dtype, lora, mesh, pooling)
    return DecoderEmbedder(shape, dtype, lora, remat=True, mesh=mesh, pooling=pooling)


def abstract_params(shape: Shape) -> dict:
    """The parameter tree as float32 ShapeDtypeStructs."""
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    return jax.eval_shape(make_module(shape, "mean").init, jax.random.key(0), tokens, tokens)["params"]


# --- loading and saving


@dataclass(frozen=True)
class Encoder:
    """A module with its parameters and everything that decides which vector a text gets."""

    module: Bert | DecoderEmbedder
    params: dict
    tokenizer: Any  # a transformers tokenizer
    name: str  # as given to `load`
    pooling: str  # of `pooling.POOLINGS`
    query_prefix: str
    passage_prefix: str
    max_length: int  # tokens, special tokens included
    fingerprint: str  # of shape, weights and vocabulary
    append_eos: bool = False  # the model's end token is the last one of every text

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
    pooling: str | None = None,
) -> Encoder:
    """An encoder, its parameters in `dtype` streamed onto `mesh` (None: the default device).

    `id_or_folder`: as `hub.resolve`. What is None of prefixes and pooling is found out by `recipe.read`.
    Raises UserError for another architecture or pooling and for missing, left-over or misshapen tensors.
    """
    folder = hub.resolve(id_or_folder)
    where = folder / "config.json"
    hf = hub.read_json(where)
    shape = read_config(hf, str(where))
    found = recipe.read(folder, id_or_folder, hf.get("_name_or_path") or "")
    pooling = pooling or found.pooling or ("mean" if isinstance(shape, BertConfig) else None)
    if pooling is None:
        raise UserError(
            f"{folder}: a {shape.model_type} decoder whose pooling neither a 1_Pooling/config.json nor its name tells; is it an "
            "encoder? Then give the pooling, such as last (config.retriever.pooling, --pooling)"
        )
    if pooling not in POOLINGS:
        raise UserError(f"pooling {pooling!r}: allowed are {', '.join(POOLINGS)}")
    most = shape.max_tokens if isinstance(shape, BertConfig) else shape.max_positions
    if not 3 <= max_length <= most:
        raise UserError(f"max_length {max_length}: {id_or_folder} takes 3 to {most} tokens")
    tokenizer = load_tokenizer(folder)
    _refuse_lower_case(folder, tokenizer)
    params, stored = _read_params(folder, shape, np.dtype(dtype), mesh)
    return Encoder(
        module=make_module(shape, pooling, dtype, lora, mesh),
        params=params,
        tokenizer=tokenizer,
        name=str(id_or_folder),
        pooling=pooling,
        query_prefix=found.query_prefix if query_prefix is None else query_prefix,
        passage_prefix=found.passage_prefix if passage_prefix is None else passage_prefix,
        max_length=max_length,
        fingerprint=_fingerprint(shape, stored, tokenizer),
        append_eos=_appends_eos(folder, shape, tokenizer, found.append_eos),
    )


def save(folder: str | Path, encoder: Encoder) -> None:
    """Write a folder of sentence-transformers: config.json, model.safetensors, tokenizer files, pooling, prefixes.

    `lora.merge_lora` puts an adapter in first.
    """
    folder, shape = Path(folder), encoder.module.config
    family = bert if isinstance(shape, BertConfig) else embedder
    hub.write_params(folder / "model.safetensors", family.slots(shape), encoder.params)
    if jax.process_index():
        return
    dtype = jnp.dtype(encoder.params["embed"]["embedding"].dtype).name
    hf = shape.to_hf() if isinstance(shape, BertConfig) else embedder.config_to_hf(shape)
    files: dict[str, object] = {"config.json": hf | {"_name_or_path": encoder.name, "torch_dtype": dtype}}
    files |= recipe.write(encoder.pooling, encoder.query_prefix, encoder.passage_prefix, encoder.dim)
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        write_text(folder / name, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    encoder.tokenizer.save_pretrained(folder)


def _read_params(folder: Path, shape: Shape, dtype: np.dtype, mesh: Mesh | None) -> tuple[dict, dict[str, hub.Tensor]]:
    """-> (parameters, the stored tensors by their names without a prefix)."""
    tensors = hub.open_tensors(folder)
    if isinstance(shape, BertConfig):
        family, prefix, marker = bert, bert.PREFIXES[shape.model_type], "embeddings.word_embeddings.weight"
    else:
        family, prefix, marker = embedder, embedder.PREFIX, "embed_tokens.weight"
    prefix = prefix if prefix + marker in tensors else ""
    ignored = [prefix + name for name in family.IGNORED] + list(family.HEADS if prefix else ())
    sharding = None if mesh is None else lambda path, size: param_sharding(mesh, path, size, shape.units)
    params = hub.read_params(folder, family.slots(shape, prefix), abstract_params(shape), dtype, sharding, ignored)
    return params, {name: tensors[prefix + name] for name in family.slots(shape)}


def _refuse_lower_case(folder: Path, tokenizer) -> None:
    where = folder / "sentence_bert_config.json"
    wanted = where.is_file() and hub.read_json(where).get("do_lower_case")
    if wanted and tokenizer("A b")["input_ids"] != tokenizer("a b")["input_ids"]:
        raise UserError(f"{where}: do_lower_case = true is left to the tokenizer, and this one tells cases apart; set it to false")


def _appends_eos(folder: Path, shape: Shape, tokenizer, wanted: bool) -> bool:
    """Whether every text ends with the model's end token: its family says so, or the tokenizer puts one there. Decoders alone."""
    if isinstance(shape, BertConfig):
        return False
    if wanted and not shape.eos_token_ids:
        raise UserError(f"{folder / 'config.json'}: eos_token_id is missing, which ends every text of this encoder; add it")
    return wanted or tokenizer("a")["input_ids"][-1:] == list(shape.eos_token_ids[:1])


def _fingerprint(shape: Shape, tensors: Mapping[str, hub.Tensor], tokenizer) -> str:
    """SHA-256 over the shape, the vocabulary and the weights as stored; the same however files are split or tensors prefixed."""
    fields = dataclasses.asdict(shape)
    if fields["model_type"] == "bert":
        del fields["model_type"]  # indexes are older than this field
    digest = hashlib.sha256(json.dumps([fields, sorted(tokenizer.get_vocab().items())]).encode())
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
    ids = encoder.tokenizer([prefix + text for text in texts], truncation=True, max_length=encoder.max_length)["input_ids"]
    if not encoder.append_eos:
        return ids
    eos = encoder.module.config.eos_token_ids[0]
    return [line if line[-1:] == [eos] else [*line[: encoder.max_length - 1], eos] for line in ids]


def pad(
    encoder: Encoder, ids: Sequence[Sequence[int]], rows: int | None = None, lengths: Sequence[int] = LENGTHS
) -> tuple[np.ndarray, np.ndarray]:
    """Id lists -> (tokens, mask), both [rows, T] int32: T is the bucket of the longest, rows beyond the lists are empty."""
    rows = len(ids) if rows is None else rows
    length = padded_length(max(map(len, ids)), encoder.max_length, lengths)
    tokens = np.full((rows, length), encoder.module.config.pad_token_id or 0, np.int32)
    mask = np.zeros((rows, length), np.int32)
    for row, line in enumerate(ids):
        tokens[row, : len(line)] = line
        mask[row, : len(line)] = 1
    return tokens, mask


def padded_length(length: int, max_length: int, lengths: Sequence[int] = LENGTHS) -> int:
    """The smallest bucket that holds `length` tokens, at most `max_length`."""
    return min(max_length, next((n for n in lengths if n >= length), max_length))


@functools.partial(jax.jit, static_argnums=0)
def _apply(module: Bert | DecoderEmbedder, variables: dict, tokens: jax.Array, mask: jax.Array) -> jax.Array:
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
