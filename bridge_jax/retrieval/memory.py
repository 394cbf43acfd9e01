"""Bytes are said before they are taken, and refused where they are not there."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import jax

from bridge_jax.errors import UserError

log = logging.getLogger(__name__)


def refuse_too_big(what: str, needed: int, devices: Sequence[jax.Device] = ()) -> None:
    """UserError when the memory (of the devices, if these are not the host) is not there. Unknown free memory refuses nothing."""
    if devices and devices[0].platform != "cpu":
        stats = [device.memory_stats() or {} for device in devices if device.process_index == jax.process_index()]
        known = [s["bytes_limit"] - s.get("bytes_in_use", 0) for s in stats if "bytes_limit" in s]
        free = min(known) * len(devices) if known else None
    else:
        free = free_memory()
    if free is not None and needed > free:
        raise UserError(
            f"{what} needs {shown_size(needed)} of memory and {shown_size(free)} are free; use --limit, --store int8, or a larger "
            "machine"
        )
    log.info("%s needs %s of memory", what, shown_size(needed))


def free_memory() -> int | None:
    """Bytes the host can give, None where that is not known."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    except OSError:
        pass
    return None


def shown_size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
