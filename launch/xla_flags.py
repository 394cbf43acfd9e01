"""Compiler flags that a launcher sets: what each is for. A flag that the user sets wins over ours.

An unknown flag ends the process: jaxlib aborts on one in XLA_FLAGS, libtpu on one in LIBTPU_INIT_ARGS. Each flag here is therefore
one that jaxlib 0.10 to 0.12, or libtpu, has (docs/launch.md says how that was checked).
"""

from __future__ import annotations

import re

# name -> (value, what for)
TPU = {
    "xla_tpu_enable_latency_hiding_scheduler": ("true", "orders the program so that transfers run behind computation"),
    "xla_enable_async_all_gather": ("true", "all-gathers (the FSDP gathers of a layer) start early and are awaited late"),
    "xla_enable_async_collective_permute": ("true", "the same for collective permutes"),
    "xla_tpu_enable_async_collective_fusion": ("true", "a collective and the computation that hides it become one program"),
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": ("true", "also for all-gathers"),
    "xla_tpu_enable_async_collective_fusion_multiple_steps": ("true", "one collective may hide behind several computations"),
    "xla_tpu_overlap_compute_collective_tc": ("true", "computation and collectives share the tensor core's time"),
}
GPU = {
    "xla_gpu_enable_latency_hiding_scheduler": ("true", "orders the program so that transfers run behind computation"),
    "xla_gpu_all_gather_combine_threshold_bytes": (str(256 * 2**20), "one gather for the parameters of a layer, not one each"),
    "xla_gpu_reduce_scatter_combine_threshold_bytes": (str(256 * 2**20), "the same for its gradients"),
    "xla_gpu_all_reduce_combine_threshold_bytes": (str(256 * 2**20), "the same over the data axis"),
    "xla_gpu_collective_permute_combine_threshold_bytes": (str(256 * 2**20), "the same for collective permutes"),
    "xla_gpu_enable_pipelined_all_gather": ("true", "the next layer's parameters are gathered during this layer"),
    "xla_gpu_enable_pipelined_reduce_scatter": ("true", "the last layer's gradients are scattered during this layer"),
}


def merged(ours: dict[str, tuple[str, str]], users: str = "") -> str:
    """The value of XLA_FLAGS or LIBTPU_INIT_ARGS: ours that the user does not set, then the user's as they are."""
    theirs = {name.replace("-", "_") for name in re.findall(r"--([\w-]+)", users)}
    theirs |= {name.removeprefix("no") for name in theirs}  # --noxla_... is false
    flags = [f"--{name}={value}" for name, (value, _) in ours.items() if name not in theirs]
    return " ".join([*flags, *users.split()])
