"""Low-rank adapters: a tree beside the parameters, passed to `apply` as the collection "lora".

    lora[..module path..] = {"a": [L, in, r], "b": [L, r, out]}          kernel [L, in, out] + (alpha / rank) * a @ b

Exported and imported in PEFT's format (adapter_config.json + adapter_model.safetensors).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from bridge_jax.errors import UserError
from bridge_jax.files import write_text
from bridge_jax.models import hub

E5_TARGETS = ("query", "key", "value", "attention_output")
TOWER_TARGETS = {"bert": E5_TARGETS, "embedder": ("q_proj", "k_proj", "v_proj", "o_proj")}  # a query tower's, by `hub.MODULES`


@dataclass(frozen=True)
class LoRAConfig:
    """`targets`: patterns (fnmatch) over module names, such as "q_proj" or "*_proj"."""

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def _modules(tree: Mapping, leaf: str, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Mapping]:
    """Module path -> its variables, for every module of `tree` that has a variable named `leaf`."""
    if leaf in tree and not isinstance(tree[leaf], Mapping):
        return {path: tree}
    found = {}
    for name in sorted(tree):
        if isinstance(tree[name], Mapping):
            found |= _modules(tree[name], leaf, (*path, name))
    return found


def _nest(flat: Mapping[tuple[str, ...], Mapping]) -> dict:
    tree: dict = {}
    for path, value in flat.items():
        node = tree
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = value
    return tree


def init_lora(key: jax.Array, params: Mapping, config: LoRAConfig) -> dict:
    """A fresh adapter of float32 factors: `a` uniform in +-1/sqrt(in) as in PEFT, `b` zero, so it starts exactly at the base model.

    Only the stacked modules under params["layers"] are targets. Raises UserError when a target matches none of them.
    """
    if config.rank < 1:
        raise UserError(f"LoRA rank {config.rank}: it must be at least 1")
    kernels = _modules({"layers": params["layers"]}, "kernel")
    chosen: dict[tuple[str, ...], dict] = {}
    for target in config.targets:
        matches = [path for path in kernels if fnmatchcase(path[-1], target)]
        if not matches:
            names = ", ".join(path[-1] for path in kernels)
            raise UserError(f"LoRA target {target!r} matches no layer of this model; its layers are {names}")
        chosen |= dict.fromkeys(matches)
    for index, path in enumerate(sorted(chosen)):
        *layers, fan_in, fan_out = kernels[path]["kernel"].shape
        bound = fan_in**-0.5
        a = jax.random.uniform(jax.random.fold_in(key, index), (*layers, fan_in, config.rank), jnp.float32, -bound, bound)
        chosen[path] = {"a": a, "b": jnp.zeros((*layers, config.rank, fan_out), jnp.float32)}
    return _nest(chosen)


def check_lora(params: Mapping, lora: Mapping) -> None:
    """Raises UserError when part of `lora` would act on nothing, or its shapes do not fit `params`."""
    kernels = _modules(params, "kernel")
    adapters = _modules(lora, "a")
    if not adapters:
        raise UserError("the LoRA tree is empty: it would train nothing; initialise it with init_lora")
    for path, factors in adapters.items():
        name = "/".join(path)
        if path not in kernels:
            raise UserError(f"the adapter has {name}, which is no layer of this model; was it made for another architecture?")
        *layers, fan_in, fan_out = kernels[path]["kernel"].shape
        a, b = factors["a"].shape, factors["b"].shape
        if a[:-1] != (*layers, fan_in) or b != (*layers, a[-1], fan_out):
            raise UserError(
                f"adapter {name}: a {a} and b {b} do not fit the kernel {(*layers, fan_in, fan_out)}; another model size?"
            )


def merge_lora(params: Mapping, lora: Mapping, config: LoRAConfig) -> dict:
    """Parameters of the plain model equal to `params` with the adapter; merged kernels are float32: bfloat16 loses deltas."""
    check_lora(params, lora)

    def merge(node: Mapping, adapter: Mapping) -> dict:
        if "a" in adapter:
            delta = jnp.einsum("...ir,...ro->...io", *(jnp.asarray(adapter[n], jnp.float32) for n in "ab"), precision="highest")
            return {**node, "kernel": node["kernel"].astype(jnp.float32) + config.scale * delta}
        return {name: merge(value, adapter[name]) if name in adapter else value for name, value in node.items()}

    return merge(params, lora)


def _peft_name(module: str, layer: int | str, factor: str) -> str:
    return f"base_model.model.{module.format(layer)}.lora_{factor}.weight"


def save_peft(folder: str | Path, lora: Mapping, config: LoRAConfig, arch: str, base_name: str) -> None:
    """Write the adapter as PEFT does. `arch`: a key of `hub.MODULES`; `base_name`: the base model's id or folder.

    With several processes all must call it; process 0 writes.
    """
    modules = hub.MODULES[arch]
    tensors, targets = {}, []
    for path, factors in _modules(lora, "a").items():
        module = modules[path]
        tail = module.split("{}.")[1]
        targets.append(tail if tail.endswith(".dense") else tail.split(".")[-1])
        a, b = (hub.to_host(factors[n]) for n in "ab")
        for layer in range(a.shape[0]):
            tensors[_peft_name(module, layer, "A")] = a[layer].T
            tensors[_peft_name(module, layer, "B")] = b[layer].T
    if jax.process_index():
        return
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if arch == "qwen2" else "FEATURE_EXTRACTION",
        "base_model_name_or_path": base_name,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    folder = Path(folder)
    hub.write_tensors(folder / "adapter_model.safetensors", tensors)
    write_text(folder / "adapter_config.json", json.dumps(settings, indent=2) + "\n")


# PEFT settings that change the computation, and the only value this module computes.
_PLAIN = {
    "peft_type": "LORA",
    "use_dora": False,
    "use_rslora": False,
    "bias": "none",
    "lora_bias": False,
    "fan_in_fan_out": False,
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "layers_to_transform": None,
}


def load_peft(folder: str | Path) -> tuple[dict, LoRAConfig]:
    """Read a PEFT LoRA adapter -> (lora tree of float32 arrays, config). Strict: UserError names what cannot be represented."""
    folder = Path(folder)
    settings = hub.read_json(folder / "adapter_config.json")
    for key, plain in _PLAIN.items():
        if settings.get(key, plain) != plain and not (settings[key] in (None, [], {}) and plain in (None, {})):
            raise UserError(f"{folder / 'adapter_config.json'}: {key} = {settings[key]!r} is not supported, only {plain!r}")
    for key in ("r", "lora_alpha"):
        if type(settings.get(key)) not in (int, float) or not 0 < settings[key] < math.inf or (key == "r" and settings[key] % 1):
            raise UserError(f"{folder / 'adapter_config.json'}: {key} is {settings.get(key)!r}; it must be a number above 0")
    path = folder / "adapter_model.safetensors"
    hub.refuse_pickles(path)
    tensors = hub.open_file(path)
    flat, used = {}, set()
    for modules in hub.MODULES.values():
        for module_path, module in modules.items():
            layers = 0
            while _peft_name(module, layers, "A") in tensors:
                layers += 1
            if not layers:
                continue
            factors = {}
            for name, factor in (("a", "A"), ("b", "B")):
                names = [_peft_name(module, layer, factor) for layer in range(layers)]
                missing = [n for n in names if n not in tensors]
                if missing:
                    raise UserError(f"{path}: tensor {missing[0]} is missing; the file is incomplete, fetch it again")
                used.update(names)
                factors[name] = jnp.asarray(np.stack([tensors[n].array().astype(np.float32).T for n in names]))
            flat[module_path] = factors
    extra = sorted(set(tensors) - used)
    if extra or not flat:
        name = extra[0] if extra else "(none)"
        raise UserError(f"{path}: tensor {name} belongs to no known layer; only LoRA of Qwen2, Llama and BERT layers is read")
    return _nest(flat), LoRAConfig(int(settings["r"]), float(settings["lora_alpha"]), tuple(sorted(p[-1] for p in flat)))
