"""One program compiled ahead of time, and what the compiler says of it: memory, FLOPs, bytes, collectives.

What was compiled once is not compiled again: the answer is kept in the cache, keyed by the program itself, the target, and the
versions of jax and the compiler.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.metadata
import importlib.util
import json
import re
import time
from pathlib import Path

import hlo
import jax
import targets
from programs import Program

from bridge_jax.data.cache import cache_dir
from bridge_jax.errors import UserError

FORM = 2  # of the kept answers: another number makes them anew
COMPILERS = {"tpu": ("libtpu",), "gpu": ("jax_cuda13_plugin", "jax_cuda12_plugin"), "cpu": ("jaxlib",)}
INSTALL = {"tpu": "pip install -e '.[tpu]'", "gpu": "pip install -e '.[cuda13]'"}
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def need_compiler(target: targets.Target) -> str:
    """Name and version of what compiles for the target.

    Raises:
      UserError: it is not installed, with the command that installs it.
    """
    platform = target.chip.platform
    for module in COMPILERS[platform]:
        if importlib.util.find_spec(module):
            name = module.replace("_", "-")
            try:
                return f"{name} {importlib.metadata.version(name)}"
            except importlib.metadata.PackageNotFoundError:
                return name
    what = {"tpu": "libtpu, the TPU compiler", "gpu": "the CUDA plugin of jax"}[platform]
    raise UserError(f"--target={target.name}: {what}, is not installed: {INSTALL[platform]} (no accelerator is needed)")


def compile_program(program: Program, target: targets.Target, flags: dict[str, str], keep: Path | None = None) -> dict:
    """What the compiler says: a chip's bytes, FLOPs and collectives, or how much memory is missing.

    flags: compiler options. keep: a folder for the optimised HLO.
    """
    lowered = _lowered(program, target)
    what = (FORM, str(target.chip), target.chips, sorted(flags.items()), jax.__version__, need_compiler(target), lowered.as_text())
    path = cache_dir() / "fit" / f"{hashlib.sha256(repr(what).encode()).hexdigest()[:32]}.json"
    text = path.with_suffix(".txt.gz")
    if not path.is_file():
        found, optimised = _compiled(lowered, flags)
        path.parent.mkdir(parents=True, exist_ok=True)
        text.write_bytes(gzip.compress(optimised.encode()))
        path.write_text(json.dumps(found))
    found, optimised = json.loads(path.read_text()), gzip.decompress(text.read_bytes()).decode()
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        (keep / f"{program.name}.txt").write_text(optimised)
    return found | (costs(optimised, program) if "argument_bytes" in found else read_shortage(optimised))


def _lowered(program: Program, target: targets.Target):
    try:
        return program.lower()
    except RuntimeError as error:
        if "cudnn" not in str(error).lower():
            raise
        raise UserError(f"config.policy.attention=cudnn for {target.name}: jax finds no cuDNN here: {INSTALL['gpu']}") from error


def _compiled(lowered, flags: dict[str, str]) -> tuple[dict, str]:
    """(what the compiler says, the optimised HLO); or the message that there is too little memory, in its place."""
    start = time.monotonic()
    try:
        compiled = lowered.compile(compiler_options={name: _typed(value) for name, value in flags.items()} or None)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error) and "out of memory" not in str(error).lower():
            raise
        return {"compile_seconds": round(time.monotonic() - start, 1)}, str(error)
    seconds, memory, own = time.monotonic() - start, compiled.memory_analysis(), compiled.cost_analysis() or {}
    return {
        "compile_seconds": round(seconds, 1),
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "code_bytes": memory.generated_code_size_in_bytes,
        "xla_flops": own.get("flops"),
        "xla_bytes": own.get("bytes accessed"),
    }, compiled.as_text()


def _typed(value: str) -> bool | int | str:
    """XLA's options for GPUs want Python's types."""
    return {"true": True, "false": False}.get(value, int(value) if value.isdigit() else value)


def costs(optimised: str, program: Program) -> dict:
    """A chip's FLOPs, bytes and collectives: of the whole program, or of one of its steps (`Program.steps`)."""
    module = hlo.Module(optimised)
    cost = module.cost()
    if program.steps > 1:  # one turn of the loop is in it; what is outside is shared by all
        turn = module.open_cost()
        whole, cost = cost, hlo.Cost()
        cost.add(turn, 1 - 1 / program.steps)
        cost.add(whole, 1 / program.steps)
    return {
        "flops": cost.flops,
        "bytes": cost.bytes,
        "open_loops": cost.open_loops,
        "collectives": {kind: {"count": cost.count[kind], "bytes": cost.wire[kind]} for kind in sorted(cost.count)},
        "foreground_bytes": cost.waited,
        "largest": [{"bytes": size, "what": what} for size, what in module.largest()],
    }


def read_shortage(message: str) -> dict:
    """From the compiler's message: bytes that the program needs and may have, and its largest arrays."""
    found = re.search(r"Used ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?) hbm", message)
    found = found or re.search(r"temporaries \(([\d.]+)([KMGT]?)\) exceeds available HBM \(([\d.]+)([KMGT]?)\)", message)
    if not found:
        return {"needed_bytes": None, "allowed_bytes": None, "largest": [{"bytes": 0, "what": " ".join(message.split())[:300]}]}
    largest = [
        {"bytes": float(size[1]) * _UNITS[size[2]], "what": _what(block)}
        for block in re.split(r"\n\s*\d+\. (?=Size: )", message)[1:6]
        if (size := re.match(r"Size: ([\d.]+)([KMGT]?)", block))
    ]
    needed, allowed = float(found[1]) * _UNITS[found[2]], float(found[3]) * _UNITS[found[4]]
    return {"needed_bytes": needed, "allowed_bytes": allowed, "largest": largest}


def _what(block: str) -> str:
    shape, operator = re.search(r"Shape: (\S+?)(\{|\s)", block), re.search(r'op_name="([^"]*)"', block)
    return f"{shape[1] if shape else ''} {operator[1] if operator else ''}".strip()
