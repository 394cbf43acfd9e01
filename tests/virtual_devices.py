"""Scripts on several virtual CPU devices: their number is fixed when a process starts, so each runs in one of its own."""

import os
import subprocess
import sys
from pathlib import Path

from bridge_jax.distributed import CPU_FLAG


def run_on_devices(count: int, script: str, here: Path, *arguments: str, timeout: int = 600) -> subprocess.CompletedProcess:
    """The finished process of a Python script that can import the project and the modules in `here` and beside this one."""
    tests = Path(__file__).parent
    environment = os.environ | {
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count} {CPU_FLAG}",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(map(str, (here, tests, tests.parent))),
    }
    return subprocess.run(
        [sys.executable, "-c", script, *arguments], env=environment, capture_output=True, text=True, timeout=timeout
    )
