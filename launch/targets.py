"""Machines by the names users give them: chips, memory, peaks, and the topology the compiler is asked for.

    parse("v5e-16")      16 chips, 4 hosts of 4        parse("v5e:4x4")     the same by its shape
    parse("v5p-64")      32 chips: Cloud TPU counts two cores a chip of v4 and v5p in such names; parse("v5p:2x4x4")
    parse("h200x8")      one machine of 8 GPUs         parse("cpu x4")      virtual devices of this machine, to try things out

Sources: Cloud TPU's documentation (chips, hosts, HBM, peaks, interconnect a chip, slice shapes), NVIDIA's data sheets (dense
bfloat16, or float16 for the T4, which has no bfloat16 units; NVLink, both directions together).
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re

from bridge_jax.errors import UserError

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """One accelerator.

    memory: bytes a program's arguments, results and temporaries may take together: of a TPU what its compiler allows (HBM less what
    the runtime reserves), of a GPU `GPU_SHARE` of what the driver reports. flops: bfloat16 matrix FLOP/s. bandwidth: bytes/s of the
    memory. link: bytes/s to other chips of the slice or machine, 0 for none. per_host: chips that one host of several has.
    """

    name: str
    platform: str  # tpu | gpu | cpu
    title: str
    memory: int
    flops: float
    bandwidth: float
    link: float
    per_host: int
    cores_in_name: int = 1  # what "-64" counts: this many a chip
    gpu: tuple[int, int, int, int, int, int] = ()  # SMs, compute capability, shared memory an SM, L2, reported memory


GPU_SHARE = 0.92  # launch/gpu.py lets XLA have so much of the memory; the rest is CUDA's context, NCCL's and cuBLAS's

_A100 = (108, 8, 0, 167_936, 41_943_040)
CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v4", "tpu", "TPU v4", int(30.75 * GIB), 275e12, 1228e9, 300e9, 4, 2),
        Chip("v5e", "tpu", "TPU v5e", int(15.75 * GIB), 197e12, 819e9, 200e9, 4),
        Chip("v5p", "tpu", "TPU v5p", int(95.74 * GIB), 459e12, 2765e9, 600e9, 4, 2),
        Chip("v6e", "tpu", "TPU v6e", int(31.25 * GIB), 918e12, 1640e9, 448e9, 4),
        Chip("t4", "gpu", "NVIDIA T4", 0, 65e12, 320e9, 0, 1, gpu=(40, 7, 5, 65_536, 4_194_304, 15_843_721_216)),
        Chip("a100", "gpu", "NVIDIA A100 80GB", 0, 312e12, 2039e9, 600e9, 8, gpu=(*_A100, 85_100_068_864)),
        Chip("a100-40", "gpu", "NVIDIA A100 40GB", 0, 312e12, 1555e9, 600e9, 8, gpu=(*_A100, 42_298_834_944)),
        Chip("h100", "gpu", "NVIDIA H100 80GB", 0, 989e12, 3350e9, 900e9, 8, gpu=(132, 9, 0, 233_472, 52_428_800, 84_929_347_584)),
        Chip("h200", "gpu", "NVIDIA H200", 0, 989e12, 4800e9, 900e9, 8, gpu=(132, 9, 0, 233_472, 52_428_800, 150_000_000_000)),
        Chip("cpu", "cpu", "virtual CPU device", 4 * GIB, 1e11, 2e10, 1e10, 64),
    )
}
CHIPS = {
    name: dataclasses.replace(chip, memory=int(GPU_SHARE * chip.gpu[-1])) if chip.gpu else chip for name, chip in CHIPS.items()
}
_ALIASES = {"v5litepod": "v5e", "v5lite": "v5e", "trillium": "v6e", "a100-80": "a100", "a100-80gb": "a100", "a100-40gb": "a100-40"}

# Slice shapes by chips. A host of v5e or v6e in a larger slice has 2 x 2 chips, one of v4 or v5p 2 x 2 x 1.
_FLAT = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
_CUBES = {4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4", 128: "4x4x8", 256: "4x8x8", 512: "8x8x8", 1024: "8x8x16"}
SHAPES = {"v5e": _FLAT, "v6e": _FLAT, "v4": _CUBES, "v5p": _CUBES}

EXAMPLES = "v5e-16, v5e:4x4, v5p-64, v6e-16, v4-32, a100x8, h100x8, h200x8, h200x1, t4x1"


@dataclasses.dataclass(frozen=True)
class Target:
    """What a run would have: `chips` chips, `hosts` processes of `local` chips each; `shape`: of the whole, for the compiler."""

    name: str
    chip: Chip
    shape: str
    chips: int
    hosts: int

    @property
    def local(self) -> int:
        return self.chips // self.hosts

    @property
    def local_shape(self) -> str:
        """The shape of one host's chips."""
        if self.hosts == 1 or self.chip.platform != "tpu":
            return self.shape if self.hosts == 1 else _machine(self.local)
        return "2x2" if SHAPES[self.chip.name] is _FLAT else "2x2x1"

    def __str__(self) -> str:
        hosts = f", {self.hosts} hosts of {self.local}" if self.hosts > 1 else ""
        chips = f"{self.chips} x {self.chip.title}" if self.chips > 1 else f"one {self.chip.title}"
        return f"{self.name}: {chips}{hosts}"


def parse(name: str) -> Target:
    """The target of a name.

    Raises:
      UserError: an unknown chip or a shape that does not exist, with the known ones.
    """
    text = name.strip().lower().replace(" ", "")
    for kind in sorted((*CHIPS, *_ALIASES), key=len, reverse=True):  # longest first: a100-40 is not 40 of a100
        match = re.fullmatch(r"(?:([:x-])(\d+(?:x\d+)*))?", text.removeprefix(kind)) if text.startswith(kind) else None
        if match:
            break
    else:
        close = difflib.get_close_matches(re.split(r"[:x-]", text)[0], CHIPS, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise UserError(f"--target={name}: no such target{hint}; known are {', '.join(CHIPS)}, as in {EXAMPLES}")
    kind, separator, given = _ALIASES.get(kind, kind), *match.groups()
    chip = CHIPS[kind]
    if chip.platform != "tpu":
        return _machines(name, chip, separator, given or "1")
    shapes = SHAPES[kind]
    if separator == "-" and given.isdigit():
        chips, rest = divmod(int(given), chip.cores_in_name)
        if rest or chips not in shapes:
            sizes = ", ".join(f"{kind}-{count * chip.cores_in_name}" for count in shapes)
            raise UserError(f"--target={name}: {chip.title} has no slice of that size; sizes are {sizes}")
        shape = shapes[chips]
    elif given is None:
        shape = shapes[min(shapes)]
    else:
        shape = given
        if shape.count("x") != next(iter(shapes.values())).count("x") or separator != ":":
            raise UserError(f"--target={name}: shapes of {chip.title} are like {kind}:{', '.join(list(shapes.values())[:4])}")
    chips = math.prod(map(int, shape.split("x")))
    whole = chips <= (8 if shapes is _FLAT else 4)  # one machine may have up to 8 chips of v5e or v6e
    if not whole and chips % chip.per_host:
        raise UserError(f"--target={name}: {chips} chips are no whole number of hosts of {chip.per_host}")
    return Target(name, chip, shape, chips, 1 if whole else chips // chip.per_host)


def _machines(name: str, chip: Chip, separator: str | None, given: str) -> Target:
    numbers = [int(n) for n in given.split("x")]
    if separator == ":" or len(numbers) > 2 or 0 in numbers:
        raise UserError(f"--target={name}: say how many, {chip.name}x8, or how many machines of how many, {chip.name}x2x8")
    hosts, local = numbers if len(numbers) == 2 else (1, numbers[0])
    if len(numbers) == 1 and local > chip.per_host:
        if local % chip.per_host:
            raise UserError(f"--target={name}: {local} are no whole number of machines of {chip.per_host}")
        hosts, local = local // chip.per_host, chip.per_host
    return Target(name, chip, f"1x{hosts}x{local}", hosts * local, hosts)


def _machine(local: int) -> str:
    return f"1x1x{local}"


def gpu_description(chip: Chip) -> str:
    """XLA's GpuTargetConfigProto in text form, which stands for the device where there is none."""
    cores, major, minor, shared, cache, memory = chip.gpu
    threads = 1024 if major == 7 else 2048
    return f"""gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: {shared}
  threads_per_core_limit: {threads} core_count: {cores} fpus_per_core: {128 if major >= 9 else 64}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {int(chip.bandwidth)} l2_cache_size: {cache} clock_rate_ghz: 1.5 device_memory_size: {memory}
  shared_memory_per_block_optin: {shared - (0 if major == 7 else 1024)}
  cuda_compute_capability {{ major: {major} minor: {minor} }} registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
runtime_version {{ major: 13 minor: 0 }}
device_description_str: "{chip.title}"
"""
