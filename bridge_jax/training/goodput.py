"""Where the time of a run goes, and what share of the devices' peak it uses: `goodput/*`, `mfu`.

Of the time between two rows of `metrics.jsonl` (`time/wall`) these shares are lost to the step's own work:

    goodput/compile       lowering and compiling programs, or reading them from the cache (evaluations' are counted as evaluation)
    goodput/checkpoint    saving after the step before, as far as the loop waits for it: the writing itself goes on beside the step
    goodput/evaluation    the evaluation after this step
    goodput/retrieval     searches while rollouts wait for them
    goodput/idle          publishing the weights, waiting for other processes, and the host's work on episodes between the phases
    goodput/useful        the rest

`mfu` is the model FLOPs of the step (`training.flops`) over what the devices could have done in its time, `mfu/policy` those of the
policy's update over its time alone; neither is there for a kind of device whose peak is not in the table (a CPU).
"""

from __future__ import annotations

import time

import jax

from bridge_jax import distributed
from bridge_jax.training.flops import peak

_COMPILING = ("/jax/core/compile/jaxpr_to_mlir_module_duration", "/jax/core/compile/backend_compile_duration")

_compiled = 0.0


def _listen(event: str, seconds: float, **_) -> None:
    global _compiled
    if event in _COMPILING:
        _compiled += max(seconds, 0.0)  # jax reads the machine's clock, which may be set meanwhile


jax.monitoring.register_event_duration_secs_listener(_listen)


def compiled() -> float:
    """Seconds of compilation in this process so far."""
    return _compiled


class Clock:
    """Seconds between laps, as metrics `time/<name>`. What was spent waiting for other processes is `time/wait` and in no lap."""

    def __init__(self):
        self._start = self._last = time.monotonic()
        self._waited = self._waited_before = distributed.waited()
        self._compiled_before = compiled()
        self._laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now, waited = time.monotonic(), distributed.waited()
        self._laps[f"time/{name}"] = self._laps.get(f"time/{name}", 0.0) + now - self._last - (waited - self._waited)
        self._last, self._waited = now, waited

    def seconds(self) -> dict[str, float]:
        """All laps, and the whole."""
        whole = time.monotonic() - self._start
        return {
            **self._laps,
            "time/wait": distributed.waited() - self._waited_before,
            "time/compile": min(compiled() - self._compiled_before, whole),
            "time/step": whole,
        }


class Goodput:
    """The shares of every row's time. Made when the loop starts; `row` is called once a step, when its row is written."""

    def __init__(self):
        self._last = time.monotonic()

    def row(self, metrics: dict[str, float]) -> dict[str, float]:
        """`time/wall` and `goodput/*` from a row's `time/*`."""
        now = time.monotonic()
        wall, self._last = now - self._last, now

        def share(*names: str) -> float:
            return sum(metrics.get(f"time/{name}", 0.0) for name in names) / max(wall, 1e-9)

        lost = {name: share(name) for name in ("compile", "checkpoint", "evaluation", "retrieval")}
        lost["idle"] = share("publish", "wait", "host")
        found = {f"goodput/{name}": value for name, value in lost.items()}
        return {"time/wall": wall, **found, "goodput/useful": max(0.0, 1.0 - sum(lost.values()))}


def utilisation(metrics: dict[str, float]) -> dict[str, float]:
    """`mfu` and `mfu/policy` from a row's `flops/*` and `time/*`; {} where the devices' peak is unknown."""
    most = peak(jax.local_devices()[0].device_kind)
    if most is None:
        return {}
    most *= jax.device_count()
    total = sum(value for name, value in metrics.items() if name.startswith("flops/"))
    found = {"mfu": total / (metrics["time/step"] * most)}
    if "flops/policy" in metrics:
        found["mfu/policy"] = metrics["flops/policy"] / (metrics["time/policy"] * most)
    return found
