"""Does the device index of wiki-18 fit, and what does a search cost there? Compiled for the hardware, without the hardware.

    pip install "jax[tpu]==<the installed jax>"
    JAX_PLATFORMS=cpu python benchmarks/index_aot.py --targets=v5e:4x4
    pip install --no-deps jax-cuda13-plugin==<jax> jax-cuda13-pjrt==<jax> nvidia-cuda-nvcc nvidia-cuda-runtime nvidia-nvvm
    JAX_PLATFORMS=cpu python benchmarks/index_aot.py --targets=h200:8

Programs: `device_index.top_rows` over 21,015,324 x 768, a batch of 256 queries, 40 candidates (and the slack), exact and
approximate, bfloat16 and int8, rows split over all chips. Figures are a chip's: `arguments` holds the vectors, `temporaries` what a
search needs beside them, `flops` and `bytes` are XLA's (empty for GPUs); XLA counts the body of a loop once, so they are multiplied
by the number of blocks. Results of other targets in the file stay.
"""

from __future__ import annotations

import argparse
import json
import os

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")

import jax
import jax.numpy as jnp
import numpy as np
import training_runs as runs
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from machine import about

from bridge_jax.retrieval.device_index import layout, top_rows
from bridge_jax.retrieval.vectors import SLACK

NAME = "index_aot"
ROWS, DIM, BATCH, K = 21_015_324, 768, 256, 40
# XLA's GpuTargetConfigProto of an H200, from NVIDIA's data sheet and CUDA's device attributes.
H200 = """gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 memory_bandwidth: 4800000000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 150000000000 shared_memory_per_block_optin: 232448 cuda_compute_capability { major: 9 minor: 0 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 0 }
runtime_version { major: 13 minor: 0 }
device_description_str: "NVIDIA H200"
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--targets", default="v5e:4x4", help="v5e:4x4 and the like, h200:8; with commas")
    parser.add_argument("--quick", action="store_true", help="one program; the result lies under runs/")
    parser.set_defaults(root=None)
    args = parser.parse_args()
    path = runs.RESULTS / f"{NAME}.json"
    result = json.loads(path.read_text(encoding="utf-8")) if path.exists() and not args.quick else {}
    result |= {"rows": ROWS, "dim": DIM, "batch": BATCH, "k": K}
    for target in args.targets.split(","):
        cases = [(store, kind) for store in ("bfloat16", "int8") for kind in ("exact", "approx")][: 1 if args.quick else None]
        devices = devices_of(target)
        found = {f"{store} {kind}": compiled(devices, store, kind) for store, kind in cases}
        result[target] = {"chips": len(devices), "programs": found, "machine": about()}
        runs.say(f"{target}: {json.dumps(found)}")
    runs.save(NAME, result, args)
    print(json.dumps(result))


def devices_of(target: str) -> list:
    name, _, shape = target.partition(":")
    if name == "h200":
        return list(topologies.get_topology_desc(platform="cuda", target_config=H200, topology=f"1x1x{shape}").devices)
    return list(topologies.get_topology_desc(platform="tpu", topology_name=target).devices)


def compiled(devices, store: str, kind: str) -> dict:
    """Bytes and FLOPs a chip."""
    mesh = Mesh(np.asarray(devices), ("data",), axis_types=(AxisType.Auto,))
    block, padded = layout(ROWS, len(devices))

    def placed(width: int, dtype):
        return jax.ShapeDtypeStruct((padded, width), dtype, sharding=NamedSharding(mesh, P("data", None)))

    vectors = (placed(DIM, jnp.bfloat16),) if store == "bfloat16" else (placed(DIM, jnp.int8), placed(1, jnp.float32))
    queries = jax.ShapeDtypeStruct((BATCH, DIM), jnp.float32, sharding=NamedSharding(mesh, P()))
    program = top_rows.lower(vectors, queries, count=K + SLACK, rows=ROWS, block=block, mesh=mesh, split=True, kind=kind).compile()
    memory, cost = program.memory_analysis(), program.cost_analysis() or {}
    blocks = padded // len(devices) // block
    found = {
        "arguments": memory.argument_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "output": memory.output_size_in_bytes,
        "blocks": blocks,
    }
    if "flops" in cost:
        found |= {"flops": cost["flops"] * blocks, "bytes": cost["bytes accessed"] * blocks}
    return found


if __name__ == "__main__":
    main()
