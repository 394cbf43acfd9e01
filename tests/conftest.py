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

# The programs are many and run for milliseconds. LLVM's optimisations and XLA's newer code generator of fused loops cost more than
# half of the time of a whole run of the tests; what is compiled stays the same up to there.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
PLAIN_LOOPS = "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
if PLAIN_LOOPS not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{PLAIN_LOOPS} {os.environ.get('XLA_FLAGS', '')}".strip()

MAPS = Path("/proc/self/maps")


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(autouse=True, scope="module")
def room_for_programs():
    """Each compiled CPU program takes some twenty memory maps, of which Linux gives a process 65,530: beyond, XLA crashes.

    And memory, which the two processes of a run of the tests share.
    """
    yield
    if MAPS.exists() and (MAPS.read_bytes().count(b"\n") > 40_000 or resident_bytes() > 4e9):
        import jax

        jax.clear_caches()
        gc.collect()
