"""Hugging Face folders: finding them, streaming safetensors into a parameter tree, and writing them.

Tensors are read through memory maps, each in its own dtype, and only the part a device needs is copied: a model larger than the
host's memory can be placed on a mesh. No torch. Format: https://github.com/huggingface/safetensors (8-byte little-endian header
length, JSON header name -> dtype, shape, byte offsets, then the data).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np

from bridge_jax.errors import UserError
from bridge_jax.files import writing
from bridge_jax.mesh import tree_path

SHIPPED = ("mini-policy", "mini-encoder")  # models of the mini world, in the package

# Module of the stacked tree -> its name in Hugging Face checkpoints, layer by layer.
_DECODER = {
    ("layers", "input_norm"): "model.layers.{}.input_layernorm",
    ("layers", "q_proj"): "model.layers.{}.self_attn.q_proj",
    ("layers", "k_proj"): "model.layers.{}.self_attn.k_proj",
    ("layers", "v_proj"): "model.layers.{}.self_attn.v_proj",
    ("layers", "q_norm"): "model.layers.{}.self_attn.q_norm",  # Qwen3 alone
    ("layers", "k_norm"): "model.layers.{}.self_attn.k_norm",
    ("layers", "o_proj"): "model.layers.{}.self_attn.o_proj",
    ("layers", "post_norm"): "model.layers.{}.post_attention_layernorm",
    ("layers", "gate_proj"): "model.layers.{}.mlp.gate_proj",
    ("layers", "up_proj"): "model.layers.{}.mlp.up_proj",
    ("layers", "down_proj"): "model.layers.{}.mlp.down_proj",
}
_ENCODER = {
    ("layers", "query"): "encoder.layer.{}.attention.self.query",
    ("layers", "key"): "encoder.layer.{}.attention.self.key",
    ("layers", "value"): "encoder.layer.{}.attention.self.value",
    ("layers", "attention_output"): "encoder.layer.{}.attention.output.dense",
    ("layers", "attention_norm"): "encoder.layer.{}.attention.output.LayerNorm",
    ("layers", "intermediate"): "encoder.layer.{}.intermediate.dense",
    ("layers", "output"): "encoder.layer.{}.output.dense",
    ("layers", "output_norm"): "encoder.layer.{}.output.LayerNorm",
}
MODULES = {  # Qwen3 and Llama checkpoints use the names of qwen2, XLM-RoBERTa's those of bert
    "qwen2": _DECODER,
    "embedder": {path: name.removeprefix("model.") for path, name in _DECODER.items()},  # a decoder without a head
    "bert": _ENCODER,
}

_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
LONGEST_HEADER = 100 << 20  # bytes, that of the reference library
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
CONVERT = (
    'convert it: python -c "import torch, safetensors.torch as s; s.save_file({{k: v.clone().contiguous() for f in {sources} '
    "for k, v in torch.load(f, map_location='cpu', weights_only=True).items()}}, '{target}', {{'format': 'pt'}})\""
)


def resolve(id_or_folder: str | Path) -> Path:
    """A local folder for a folder, a shipped or pocket model's name, or a hub id (downloaded into its cache); else UserError."""
    from bridge_jax.models import pocket_models  # here, because it writes its folders with this module

    name = str(id_or_folder)
    if pocket_models.is_known(name):
        return Path(pocket_models.fetch(name))
    if name in SHIPPED:
        return Path(__file__).parent / "shipped" / name
    folder, fetched = Path(name).expanduser(), ", ".join(pocket_models.MODELS)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise UserError(f"{folder} has no config.json: it is not a Hugging Face model folder")
        return folder
    if folder.exists() or folder.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1:
        raise UserError(
            f"model folder {name} does not exist; give a folder with config.json, a hub id owner/name, or one of {fetched}"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    wanted = {
        "allow_patterns": ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"],
        "ignore_patterns": ["onnx/*", "openvino/*", "original/*"],
    }
    try:
        return Path(snapshot_download(name, **wanted))
    except LocalEntryNotFoundError:
        raise UserError(
            f"model {name} is not in the cache and the hub cannot be reached; give a local folder, or one of {fetched}"
        ) from None
    except Exception as error:  # the client raises many kinds: bad id, gated, not found, connection
        why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise UserError(f"model {name} cannot be fetched from the hub ({why}); check the id, or give a local folder") from None


def read_json(path: Path, kind: type = dict) -> Any:
    """The JSON object (or, for `kind` list, array) in `path`; UserError when missing or malformed."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} is missing; the model folder is incomplete, fetch it again") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); give a folder of files that you may read") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON ({error}); fetch it again") from None
    if not isinstance(value, kind):
        raise UserError(f"{path} does not hold a JSON {'object' if kind is dict else 'array'}; fetch it again")
    return value


@dataclass(frozen=True)
class Tensor:
    """A tensor in a memory-mapped safetensors file."""

    file: Path
    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    data: np.ndarray  # uint8, a view of the map

    def array(self) -> np.ndarray:
        return self.data.view(self.dtype).reshape(self.shape)


def open_file(path: Path) -> dict[str, Tensor]:
    """Name -> Tensor for one safetensors file. Nothing is read but the header; UserError when the file is damaged."""
    if not path.is_file():
        raise UserError(f"{path} is missing; the model folder is incomplete, fetch it again")
    damaged = f"{path} is not a whole safetensors file (cut off or damaged); fetch it again"
    raw = np.memmap(path, np.uint8, mode="r") if path.stat().st_size else np.zeros(0, np.uint8)
    if raw.size < 8:
        raise UserError(damaged)
    start = 8 + struct.unpack("<Q", raw[:8].tobytes())[0]
    if start > min(raw.size, LONGEST_HEADER):
        raise UserError(damaged)
    tensors, places = {}, []
    try:
        header = json.loads(raw[8:start].tobytes())
        header.pop("__metadata__", None)
        for name, entry in header.items():
            if entry["dtype"] not in _DTYPES:
                raise UserError(
                    f"{path}: tensor {name} has dtype {entry['dtype']}; only unquantised weights (F32, F16, BF16) are read"
                )
            dtype, shape, (begin, end) = _DTYPES[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"]
            if not all(type(size) is int and size >= 0 for size in (*shape, begin, end)):
                raise UserError(damaged)
            if start + end > raw.size or end - begin != dtype.itemsize * math.prod(shape):
                raise UserError(damaged)
            tensors[name] = Tensor(path, name, dtype, shape, raw[start + begin : start + end])
            places.append((begin, end))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UserError(damaged) from None
    # As the format asks: every byte behind the header is of one tensor, and of one only.
    places.sort()
    if [0, *(end for _, end in places)] != [*(begin for begin, _ in places), raw.size - start]:
        raise UserError(damaged)
    return tensors


def refuse_pickles(path: Path) -> None:
    """UserError when `path` is missing beside weights as pickles, which may run anything when they are read."""
    pickles = sorted(file for end in PICKLES for file in path.parent.glob(f"*_model*{end}")) if not path.is_file() else []
    if pickles:
        raise UserError(
            f"{path} is missing, and {pickles[0].name} is a pickle, which is never read: it can run any code. If you trust it, "
            + CONVERT.format(sources=[str(file) for file in pickles], target=path)
        )


def open_tensors(folder: Path) -> dict[str, Tensor]:
    """Name -> Tensor for a model folder: model.safetensors, or the shards of model.safetensors.index.json."""
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file() or not index.is_file():
        refuse_pickles(folder / "model.safetensors")
        return open_file(folder / "model.safetensors")
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict):
        raise UserError(f"{index}: field 'weight_map' is missing or no object; fetch the folder again")
    for file in places.values():
        if not isinstance(file, str) or file != Path(file).name:
            raise UserError(f"{index}: {file!r} is no name of a file in this folder; fetch the folder from where you trust it")
    shards = {file: open_file(folder / file) for file in sorted(set(places.values()))}
    tensors = {name: tensor for shard in shards.values() for name, tensor in shard.items()}
    for name, file in places.items():
        if name not in shards[file]:
            raise UserError(f"{folder / file}: tensor {name} is missing though {index.name} lists it there; fetch the folder again")
    return tensors


def weights_fingerprint(folder: Path) -> str:
    """Identifies a folder's weights without reading them whole: sha256 over every tensor's name, shape, dtype and first 4 KiB.

    Training changes every tensor everywhere, so two trained models differ in it.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(open_tensors(folder).items()):
        digest.update(f"{name} {tensor.shape} {tensor.dtype}".encode() + tensor.data.reshape(-1)[:4096].tobytes())
    return digest.hexdigest()


class Slot(NamedTuple):
    """Where a checkpoint tensor goes: the parameter at `path`, of which it is layer `layer`; `transpose` for [out, in] kernels."""

    path: tuple[str, ...]
    transpose: bool = False
    layer: int | None = None


def layer_slots(arch: str, layers: int, leaves: Callable[[str], Iterable[str]]) -> dict[str, Slot]:
    """Slots of the stacked modules of `arch`. `leaves(module name)` gives its variables: kernel, bias, scale."""
    slots = {}
    for path, module in MODULES[arch].items():
        for leaf in leaves(path[-1]):
            suffix = "bias" if leaf == "bias" else "weight"
            for layer in range(layers):
                slots[f"{module.format(layer)}.{suffix}"] = Slot((*path, leaf), leaf == "kernel", layer)
    return slots


def _pick(tensor: Tensor, transpose: bool, index: tuple[slice, ...]) -> np.ndarray:
    array = tensor.array()
    return (array.T if transpose else array)[index]


def read_params(
    folder: Path,
    slots: Mapping[str, Slot],
    shapes: Any,
    dtype: Any,
    sharding: Callable[[tuple[str, ...], tuple[int, ...]], jax.sharding.Sharding] | None = None,
    ignored: Iterable[str] = (),
) -> dict:
    """Stream a checkpoint into a tree of parameters, strict both ways.

    Args:
      slots: checkpoint tensor name -> Slot.    shapes: tree of arrays or ShapeDtypeStructs of the model's parameters.
      dtype: of the result.    sharding: (path, shape) -> where the parameter lives; None: the default device.
      ignored: patterns (fnmatch) of tensors that may be there and mean nothing.

    Raises UserError naming tensor and file when a tensor is missing, left over, of another shape, or not of floating point.
    """
    tensors = open_tensors(folder)
    missing = [name for name in slots if name not in tensors]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UserError(
            f"{folder}: tensor {missing[0]}{more} missing from the safetensors; config.json and weights do not belong together"
        )
    for name, tensor in tensors.items():
        if name not in slots and not any(fnmatchcase(name, pattern) for pattern in ignored):
            raise UserError(f"{tensor.file}: tensor {name} has no place in the model of config.json; do they belong together?")

    parts: dict[tuple[str, ...], dict[int | None, tuple[Tensor, bool]]] = {}
    for name, slot in slots.items():
        parts.setdefault(slot.path, {})[slot.layer] = (tensors[name], slot.transpose)

    def read(key_path, abstract) -> jax.Array:
        path, shape = tree_path(key_path), tuple(abstract.shape)
        sources = parts.pop(path)
        stacked = None not in sources
        for tensor, transpose in sources.values():
            found, want = tensor.shape[::-1] if transpose else tensor.shape, shape[1:] if stacked else shape
            if found != want:
                want = want[::-1] if transpose else want
                raise UserError(f"{tensor.file}: tensor {tensor.name} has shape {tensor.shape}, config.json asks for {want}")
            if tensor.dtype.kind not in "fV":  # ml_dtypes' bfloat16 is of kind V
                raise UserError(
                    f"{tensor.file}: tensor {tensor.name} is {tensor.dtype}, not floating point; give unquantised weights"
                )

        def block(index: tuple[slice, ...]) -> np.ndarray:
            if not stacked:
                return np.ascontiguousarray(_pick(*sources[None], index).astype(dtype))
            layers = range(*index[0].indices(shape[0]))
            sizes = [len(range(*s.indices(n))) for s, n in zip(index[1:], shape[1:])]
            out = np.empty((len(layers), *sizes), dtype)
            for row, layer in enumerate(layers):
                out[row] = _pick(*sources[layer], index[1:])
            return out

        if sharding is None:
            return jax.device_put(block((slice(None),) * len(shape)))
        return jax.make_array_from_callback(shape, sharding(path, shape), block)

    params = jax.tree_util.tree_map_with_path(read, shapes)
    assert not parts, f"slots without a parameter: {list(parts)}"
    return params


def to_host(x: jax.Array | np.ndarray) -> np.ndarray:
    """The whole array on this host, gathered from all processes when it is spread over several."""
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        from jax.experimental import multihost_utils

        return multihost_utils.process_allgather(x, tiled=True)
    return np.asarray(x)


def _write_safetensors(path: Path, entries: Mapping[str, tuple[np.dtype, tuple[int, ...]]], values: Iterable[np.ndarray]) -> None:
    """Write a file of `entries` (name -> dtype, shape) whose `values` come one by one, in the same order. Atomic."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, shape) in entries.items():
        size = dtype.itemsize * int(np.prod(shape))
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # readers want aligned data
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    with writing(path), open(part, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for value in values:
            file.write(np.ascontiguousarray(value).view(np.uint8).data)
        assert file.tell() == 8 + len(text) + offset
    os.replace(part, path)


def write_tensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write a safetensors file from host arrays."""
    _write_safetensors(path, {name: (t.dtype, t.shape) for name, t in tensors.items()}, tensors.values())


def write_params(path: Path, slots: Mapping[str, Slot], params: Mapping) -> None:
    """Write `params` under their checkpoint names, each in its own dtype; one stacked parameter at a time is on the host.

    With several processes all must call it; process 0 writes.
    """
    leaves = {tree_path(p): x for p, x in jax.tree_util.tree_leaves_with_path(params)}
    order = sorted(slots, key=lambda name: (slots[name].path, slots[name].layer or 0))
    assert {slot.path for slot in slots.values()} == set(leaves), "slots and parameters differ"

    def shape(slot: Slot) -> tuple[int, ...]:
        full = leaves[slot.path].shape
        full = full if slot.layer is None else full[1:]
        return full[::-1] if slot.transpose else full

    def values():
        held, whole = None, None
        for slot in (slots[name] for name in order):
            if slot.path != held:
                held, whole = slot.path, to_host(leaves[slot.path])
            value = whole if slot.layer is None else whole[slot.layer]
            yield value.T if slot.transpose else value

    if jax.process_index():
        for path_ in sorted(leaves):
            to_host(leaves[path_])  # takes part in the gathering, in the same order
        return
    _write_safetensors(path, {n: (np.dtype(leaves[slots[n].path].dtype), shape(slots[n])) for n in order}, values())
