"""Does it fit? Compiles every program of a run for a machine that is not here, and says what each takes of a chip.

    python launch/fit.py --config=configs/qwen2_5_3b.py --target=v5e-16
    python launch/fit.py --config=configs/qwen2_5_7b.py --target=h200x8 --config.grpo.microbatch=8 --json
    python launch/fit.py --config=configs/qwen2_5_3b.py --target=v5p:2x4x4 --programs=decode,policy_step

The programs are the run's own, at the configuration's greatest lengths; neither weights nor accelerators are needed. Memory is what
a chip holds while the program runs: its arguments, results and temporaries, and all that stays on the chip meanwhile. The time is
a bound from below: the longest of FLOPs, bytes and collective bytes over the chip's peaks.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # the checkout this script is of

import targets
import xla_flags
from rich.console import Console
from rich.table import Table

from bridge_jax import config as configuration
from bridge_jax.errors import UserError, main_guard
from bridge_jax.files import write_text

GIB = 2**30


@main_guard
def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="python launch/fit.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    configuration.add_config_flag(parser)
    parser.add_argument("--target", required=True, metavar="NAME", help=f"chips to compile for: {targets.EXAMPLES}")
    parser.add_argument("--programs", default="", metavar="A,B", help="some of them only; see the table for their names")
    parser.add_argument("--flags", default="", metavar="A=B,..", help="more XLA options to compile with, without the leading --")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the JSON object there as well")
    parser.add_argument("--hlo", type=Path, metavar="FOLDER", help="keep each program's optimised HLO there")
    args, config = configuration.parse_args(parser, argv)
    target = targets.parse(args.target)
    result = fit(config, target, _names(args.programs), launcher_flags(target) | _flags(args.flags), args.hlo)
    result = {"command": shlex.join(["python", "launch/fit.py", *argv]), **result}
    if args.out:
        write_text(args.out, json.dumps(result, indent=1) + "\n")
    if args.json:
        print(json.dumps(result))
    else:
        show(result)
    return 0 if result["fits"] else 1


def _names(given: str) -> list[str] | None:
    return [name.strip() for name in given.split(",") if name.strip()] or None


def launcher_flags(target: targets.Target) -> dict[str, str]:
    """What launch/gpu.py compiles with. What launch/tpu.py sets are the defaults of libtpu: the same programs without."""
    return {name: value for name, (value, _) in xla_flags.GPU.items()} if target.chip.platform == "gpu" else {}


def _flags(given: str) -> dict[str, str]:
    flags = {}
    for part in filter(None, (part.strip() for part in given.split(","))):
        name, _, value = part.removeprefix("--").partition("=")
        flags[name] = value or "true"
    return flags


def fit(
    config, target: targets.Target, names: list[str] | None = None, flags: dict[str, str] | None = None, keep: Path | None = None
):
    """-> the JSON object: `fits`, and of every program its figures.

    Raises:
      UserError: a compiler that is not installed, a program's name that does not exist, a configuration that cannot run there.
    """
    prepare(target)
    import compiling  # jax is set up by now
    import programs

    compiler = compiling.need_compiler(target)
    plan = programs.plan(config, target)
    unknown = [name for name in names or () if name not in programs.NAMES]
    if unknown:
        raise UserError(f"--programs={unknown[0]}: no such program; there are {', '.join(programs.NAMES)}")
    entries = {}
    for name, make in plan.programs.items():
        if names and name not in names:
            continue
        program = make()
        print(f"compiling {name} for {target.name} ...", file=sys.stderr, flush=True)
        entries[name] = assess(plan, program, compiling.compile_program(program, target, flags or {}, keep))
    return {
        "fits": all(entry["fits"] for entry in entries.values()),
        "target": target.name,
        "chip": target.chip.title,
        "chips": target.chips,
        "hosts": target.hosts,
        "memory_bytes": target.chip.memory,
        "mesh": {"train": dict(plan.train_mesh.shape), "rollout": dict(plan.rollout_mesh.shape)},
        "policy": config.policy.model,
        "resident_bytes": plan.resident,
        "notes": plan.notes,
        "programs": entries,
        "flags": flags or {},
        "versions": {"jax": importlib.metadata.version("jax"), "compiler": compiler},
    }


def prepare(target: targets.Target) -> None:
    """Before jax wakes up: nothing but the CPU is looked for, and that has as many devices as the target."""
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # libtpu would ask a metadata server whether this is a TPU machine
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # no chip to share: several of us may compile at once
    os.environ["JAX_PLATFORMS"] = "cpu"
    if target.chip.platform == "cpu":
        flag = f"--xla_force_host_platform_device_count={target.chips}"
        if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
            os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
    import jax

    jax.config.update("jax_platforms", "cpu")


def assess(plan, program, found: dict) -> dict:
    """A program's figures beside the chip's: what it holds, whether that fits, what to change, how long it takes at least."""
    import advice
    import programs

    chip = plan.target.chip
    elsewhere = sum(plan.resident[name] for name in program.live) - program.passed
    entry = {"chips": program.chips, **found, "elsewhere_bytes": elsewhere, "resident": list(program.live)}
    if "temp_bytes" in found:
        own = found["argument_bytes"] + found["temp_bytes"] + max(0, found["output_bytes"] - found["alias_bytes"])
        entry["peak_bytes"] = own
    else:  # the compiler gave up
        own = found["needed_bytes"] or chip.memory
        entry["temp_bytes"] = max(0.0, own - programs.shard_bytes((program.args, dict(program.static))))
    entry["phase_bytes"] = own + elsewhere
    entry["missing_bytes"] = max(0.0, own + elsewhere - chip.memory)
    entry["fits"] = entry["missing_bytes"] == 0 and "peak_bytes" in entry
    if "flops" in found:
        links = sum(each["bytes"] for each in found["collectives"].values())
        seconds = {"flops": found["flops"] / chip.flops, "bytes": found["bytes"] / chip.bandwidth}
        seconds["links"] = links / chip.link if chip.link else 0.0
        entry["roofline_seconds"] = max(seconds.values())
        entry["bound_by"] = max(seconds, key=seconds.get)
        own_model = program.model_flops / program.chips
        entry["model_flops"] = own_model
        entry["flops_ratio"] = found["flops"] / own_model if own_model else None
        entry["least_bytes"] = program.least_bytes or None
        entry["bytes_ratio"] = found["bytes"] / program.least_bytes if program.least_bytes else None
    entry["shape"] = dict(program.shape)
    if not entry["fits"]:
        entry["advice"] = advice.advise(plan, program.name, program.shape, entry)
    return entry


COLUMNS = (
    "arguments",
    "temporary",
    "elsewhere",
    "together",
    "FLOPs",
    "x model",
    "bytes",
    "x least",
    "links",
    "at least",
    "by",
    "compiled",
)


def show(result: dict) -> None:
    """The table, what stays on a chip, the collectives, and what does not fit."""
    console = Console()
    memory = result["memory_bytes"]
    title = (
        f"{result['policy']} on {result['target']}: {result['chips']} x {result['chip']} ({_meshes(result['mesh'])}); GiB a chip"
    )
    table = Table(title=title, title_justify="left")
    for name in ("program", *COLUMNS):
        table.add_column(name, justify="left" if name == "program" else "right")
    for name, entry in result["programs"].items():
        table.add_row(*_row(name, entry, memory))
    console.print(table)
    held = ", ".join(f"{name} {size / GIB:.2f}" for name, size in result["resident_bytes"].items())
    console.print(f"{memory / GIB:.2f} GiB of a chip for programs. On it: {held}", highlight=False)
    for name, entry in result["programs"].items():
        found = [f"{each['count']:.0f} {kind} {_gib(each['bytes'])}" for kind, each in entry.get("collectives", {}).items()]
        if found:
            console.print(f"  {name}: {', '.join(found)} GiB received", highlight=False)
    for line in (*(f"note: {note}" for note in result["notes"]), *shortages(result)):
        console.print(line, highlight=False, soft_wrap=True)
    console.print("fits" if result["fits"] else "does not fit")


def _meshes(mesh: dict[str, dict[str, int]]) -> str:
    def sizes(axes: dict[str, int]) -> str:
        return " x ".join(f"{name}={size}" for name, size in axes.items() if size > 1) or "one chip"

    return ", ".join(f"{name} {sizes(axes)}" for name, axes in mesh.items())


def shortages(result: dict) -> list[str]:
    """Of each program that does not fit: how much is missing, what to change, and what takes most."""
    lines, memory = [], result["memory_bytes"]
    for name, entry in result["programs"].items():
        if entry["fits"]:
            continue
        need = f"needs {_gib(entry['phase_bytes'])} of {_gib(memory)} GiB a chip, {_gib(entry['elsewhere_bytes'])} held by others"
        missing = f"{name} does not fit {result['target']}: {_gib(entry['missing_bytes'])} GiB missing ({need})"
        lines.append(f"{missing}; try {'; or '.join(entry['advice'])}")
        lines += [f"    {_gib(each['bytes'])} GiB {each['what']}" for each in entry.get("largest", ())[:3]]
    return lines


def _gib(size: float | None) -> str:
    return "-" if size is None else f"{size / GIB:.2f}"


def _row(name: str, entry: dict, memory: float) -> list[str]:
    def number(key: str, form: str) -> str:
        return f"{entry[key]:{form}}" if entry.get(key) else ""

    links = sum(each["bytes"] for each in entry.get("collectives", {}).values())
    return [
        name,
        _gib(entry.get("argument_bytes")),
        _gib(entry["temp_bytes"]),
        _gib(entry["elsewhere_bytes"]),
        f"[{'green' if entry['fits'] else 'red'}]{_gib(entry['phase_bytes'])} / {_gib(memory)}[/]",
        number("flops", ".2e"),
        number("flops_ratio", ".2f"),
        number("bytes", ".2e"),
        number("bytes_ratio", ".2f"),
        f"{links:.1e}" if links else "",
        f"{entry['roofline_seconds']:.3g} s" if "roofline_seconds" in entry else "",
        entry.get("bound_by", ""),
        f"{entry['compile_seconds']:.0f} s",
    ]


if __name__ == "__main__":
    raise SystemExit(main())
