"""Its being here puts tests/ on the import path: `import two_hop_world` works in every test.

Programs compiled by one test serve the others, subprocesses included: whole runs in miniature are mostly compilation.
"""

import atexit
import gc
import os
import shutil
import tempfile
from pathlib import Path

import pytest

if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="bridge-jax-tests-")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)

MAPS = Path("/proc/self/maps")


@pytest.fixture(autouse=True, scope="module")
def room_for_programs():
    """Each compiled CPU program takes some twenty memory maps, of which Linux gives a process 65,530: beyond, XLA crashes."""
    yield
    if MAPS.exists() and MAPS.read_bytes().count(b"\n") > 40_000:
        import jax

        jax.clear_caches()
        gc.collect()
