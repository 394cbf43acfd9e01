"""Are driver, JAX and its CUDA plugin fit for each other? `python launch/gpu_check.py`; the launcher runs it on every machine.

JAX silently computes on the CPU when its plugin is of another version, and a job that was meant for eight GPUs crawls. Standard
library alone: it runs wherever a JAX is looked for.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import re
import subprocess
import sys
from collections.abc import Mapping

# CUDA generation -> the oldest driver it runs on (https://docs.jax.dev/en/latest/installation.html), newest first.
DRIVERS = {13: 580, 12: 525}
PACKAGES = ("jax", "jaxlib", *(f"jax-cuda{cuda}-{part}" for cuda in DRIVERS for part in ("plugin", "pjrt")))
NO_DRIVER = "no NVIDIA driver: nvidia-smi is not here or finds no GPU; install the driver, or run on a machine with a GPU"


@dataclasses.dataclass(frozen=True)
class Gpus:
    driver: str
    names: tuple[str, ...]


def gpus() -> Gpus | None:
    """What nvidia-smi sees; None without a driver or a GPU."""
    query = ["nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=60, check=False)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    rows = [line.partition(",") for line in done.stdout.splitlines() if re.match(r"\d+\.", line)]
    return Gpus(rows[0][0].strip(), tuple(row[2].strip() for row in rows)) if done.returncode == 0 and rows else None


def versions() -> dict[str, str]:
    """Package -> version, of those that are installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def cuda_for(driver: str) -> int | None:
    """The newest CUDA generation that a driver runs; None: it is too old for any."""
    major = int(driver.split(".")[0])
    return next((cuda for cuda, oldest in DRIVERS.items() if major >= oldest), None)


def problem(found: Gpus | None, packages: Mapping[str, str]) -> str | None:
    """What is wrong and the command that mends it; None when all is well."""
    if found is None:
        return NO_DRIVER
    best = cuda_for(found.driver)
    if best is None:
        return (
            f"driver {found.driver} is too old: JAX needs {DRIVERS[12]} or newer for CUDA 12, {DRIVERS[13]} for CUDA 13; update it"
        )
    install = f"pip install -e '.[cuda{best}]'"
    if "jaxlib" not in packages:
        return f"JAX is not installed: {install}"
    installed = [cuda for cuda in DRIVERS if f"jax-cuda{cuda}-plugin" in packages or f"jax-cuda{cuda}-pjrt" in packages]
    if not installed:
        return f"JAX has no CUDA plugin and would compute on the CPU: {install}"
    if len(installed) > 1:
        other = next(cuda for cuda in installed if cuda != best)
        return f"two CUDA plugins are installed: pip uninstall jax-cuda{other}-plugin jax-cuda{other}-pjrt"
    cuda = installed[0]
    if int(found.driver.split(".")[0]) < DRIVERS[cuda]:
        return (
            f"driver {found.driver} is too old for CUDA {cuda} (needs {DRIVERS[cuda]}): update it, or "
            f"pip uninstall jax-cuda{cuda}-plugin jax-cuda{cuda}-pjrt and {install}"
        )
    wanted = packages["jaxlib"]
    for part in ("plugin", "pjrt"):
        name = f"jax-cuda{cuda}-{part}"
        if packages.get(name) != wanted:
            return (
                f"{name} is {packages.get(name, 'missing')}, jaxlib {wanted}: JAX would compute on the CPU; "
                f"pip install 'jax[cuda{cuda}]=={packages.get('jax', wanted)}'"
            )
    return None


def unknown_flags(flags: str) -> list[str]:
    """Those of XLA_FLAGS that this jaxlib does not know; it would abort on them."""
    if not flags:
        return []
    env = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", "import jax; jax.devices()"], env=env, capture_output=True, text=True, check=False)
    said = re.search(r"Unknown flags? in XLA_FLAGS:(.*)", done.stderr)
    return said.group(1).split() if said else []


def main() -> int:
    found = gpus()
    wrong = problem(found, versions())
    if wrong is None:
        unknown = unknown_flags(os.environ.get("XLA_FLAGS", ""))
        wrong = f"this jaxlib does not know {' '.join(unknown)}: take it out of XLA_FLAGS" if unknown else None
    if wrong:
        print(f"error: {wrong}", file=sys.stderr)
        return 2
    packages = versions()
    shown = ", ".join(f"{name} {packages[name]}" for name in packages)
    print(f"{len(found.names)} x {found.names[0]}, driver {found.driver}; {shown}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
