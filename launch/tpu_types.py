"""TPU slices by the names that people use: what gcloud calls them, the runtime they need, and how many hosts they have."""

from __future__ import annotations

import dataclasses
import difflib

from bridge_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Generation:
    """A generation; the number in a slice's name counts cores (v4, v5p: two a chip) or chips (v5e, v6e)."""

    accelerator: str  # gcloud's name before the number
    runtime: str
    sizes: tuple[int, ...]
    per_host: int  # of what the number counts, on each of several hosts
    one_host: int  # the largest slice that is a single machine


_LITE = (1, 4, 8, 16, 32, 64, 128, 256)
GENERATIONS = {
    "v4": Generation("v4", "tpu-ubuntu2204-base", (8, 16, 32, 64, 128, 256, 512, 1024, 1536, 2048, 4096), 8, 8),
    "v5e": Generation("v5litepod", "v2-alpha-tpuv5-lite", _LITE, 4, 8),
    "v5p": Generation("v5p", "v2-alpha-tpuv5", (8, 16, 32, 64, *range(128, 12288 + 1, 128)), 8, 8),
    "v6e": Generation("v6e", "v2-alpha-tpuv6e", _LITE, 4, 8),
}
NAMES = {f"{name}-{size}": (name, size) for name, generation in GENERATIONS.items() for size in generation.sizes}
NAMES |= {f"v5litepod-{size}": ("v5e", size) for size in _LITE}


@dataclasses.dataclass(frozen=True)
class TpuType:
    accelerator: str  # gcloud's --accelerator-type
    runtime: str  # gcloud's --runtime-version
    hosts: int


def tpu_type(name: str) -> TpuType:
    """The slice called `name` ("v5e-16", "v5litepod-16", "v5p-64").

    Raises:
      UserError: there is none; names the nearest one.
    """
    if name.lower() not in NAMES:
        raise UserError(f"--accelerator={name}: no such TPU; {_nearest(name.lower())}")
    kind, size = NAMES[name.lower()]
    generation = GENERATIONS[kind]
    hosts = 1 if size <= generation.one_host else size // generation.per_host
    return TpuType(f"{generation.accelerator}-{size}", generation.runtime, hosts)


def _nearest(name: str) -> str:
    kind, _, number = name.partition("-")
    generation = GENERATIONS.get("v5e" if kind == "v5litepod" else kind)
    if generation is not None and number.isdigit():
        size = min(generation.sizes, key=lambda size: abs(size - int(number)))
        return f"did you mean {kind}-{size}?"
    close = difflib.get_close_matches(name, NAMES, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]}?"
    return f"known are {', '.join(GENERATIONS)}, as in v5e-16 (chips) or v5p-64 (cores); for GPUs use launch/gpu.py"
