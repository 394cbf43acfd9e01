"""Several processes of one run: starting them, what each knows of the others, and agreeing. With one process nothing of it costs.

Every process runs the same program. What a process does alone (its rollouts, its share of scoring) may take as long as it likes and
may fail; the others learn of it where results are gathered: `share` gives every process all results, or raises in all of them what
went wrong in one, so that none waits for one that has left. A process that dies without a word is missed by the coordinator's
heartbeat, which ends the others.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import numpy as np

from bridge_jax.errors import UserError, one_line

T = TypeVar("T")

# jax reads the first by itself; the other two are ours, named likewise. On TPU pods, SLURM, Kubernetes and Open MPI none is needed.
COORDINATOR, PROCESSES, PROCESS = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
HEARTBEAT = 100  # seconds, jax's own default

# XLA's CPU runtime otherwise lets the collectives of a loop, such as that over layers, run beside ones that come after it, in
# another order on every device, and these wait for each other for ever. TPUs and GPUs start collectives in the program's order.
CPU_FLAG = "--xla_cpu_enable_concurrency_optimized_scheduler=false"

_waited = 0.0


class Preempted(Exception):
    """The run is to stop as soon as it can (`preemption`). Raised where nothing is lost by it."""


def add_flags(parser) -> None:
    """`--distributed` and `--heartbeat` on an argparse parser."""
    parser.add_argument(
        "--distributed",
        action="store_true",
        help="one of several processes of this run, all started with the same command on a TPU pod or by SLURM; elsewhere "
        f"{COORDINATOR}=host:port, {PROCESSES} and {PROCESS} tell each who it is",
    )
    parser.add_argument(
        "--heartbeat",
        type=int,
        default=HEARTBEAT,
        metavar="SECONDS",
        help=f"with --distributed: a process that is silent for so long is lost, and the others end (default {HEARTBEAT})",
    )


@contextlib.contextmanager
def processes(distributed: bool, heartbeat: int = HEARTBEAT) -> Iterator[None]:
    """Around a whole command: join the other processes, and leave them in a way that they notice.

    An error that all of them have is passed on. One that this process has alone ends it here and now, with its message: to leave in
    good order is to wait until the others are done, and they may be waiting for this one.

    Raises:
      UserError: the environment does not say who this process is; the others cannot be reached.
    """
    order_cpu_collectives(distributed)
    if not distributed:
        yield
        return
    initialize(heartbeat)
    try:
        yield
    except BaseException as error:
        if not getattr(error, "everywhere", False):
            _leave(error)
        jax.distributed.shutdown()
        raise
    jax.distributed.shutdown()


def order_cpu_collectives(distributed: bool) -> None:
    """Set `CPU_FLAG` where a program runs on several CPU devices; to be called before anything is computed."""
    flags = os.environ.get("XLA_FLAGS", "")
    on_cpu = distributed and (jax.config.jax_platforms or "").startswith("cpu")
    if (on_cpu or "xla_force_host_platform_device_count" in flags) and CPU_FLAG.partition("=")[0] not in flags:
        os.environ["XLA_FLAGS"] = f"{CPU_FLAG} {flags}"


def initialize(heartbeat: int = HEARTBEAT) -> None:
    """`jax.distributed.initialize`, from the environment; to be called before anything is computed.

    heartbeat: seconds after which a silent process counts as lost; all others then end with a message.

    Raises:
      UserError: as `processes`.
    """
    given = {name: os.environ.get(name, "") for name in (COORDINATOR, PROCESSES, PROCESS)}
    missing = [name for name, value in given.items() if not value]
    if 0 < len(missing) < len(given):
        raise UserError(f"--distributed: {', '.join(missing)} not set beside the others; set all of {', '.join(given)}, or none")
    settings: dict[str, Any] = {}
    if not missing:
        host, _, port = given[COORDINATOR].rpartition(":")
        if not host or not port.isdigit():
            raise UserError(f"{COORDINATOR}={given[COORDINATOR]}: must be host:port of process 0, such as 10.0.0.1:8476")
        count, number = (_number(name, given[name]) for name in (PROCESSES, PROCESS))
        if not 0 <= number < count:
            raise UserError(f"{PROCESS}={number}: must be below {PROCESSES}={count}, counted from 0")
        settings = {"coordinator_address": given[COORDINATOR], "num_processes": count, "process_id": number}
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(**settings, heartbeat_timeout_seconds=heartbeat)
    except (ValueError, TypeError) as error:
        raise UserError(
            f"--distributed: not on a TPU pod, and not started by SLURM, Kubernetes or Open MPI ({_first_line(error)}): set "
            f"{', '.join(given)}, or leave the flag out to run as one process"
        ) from error
    except (RuntimeError, TimeoutError) as error:
        raise UserError(
            f"--distributed: the other processes were not reached ({_first_line(error)}): is process 0 running, and its port open?"
        ) from error
    if settings and jax.process_count() != settings["num_processes"]:
        raise UserError(f"--distributed: {jax.process_count()} processes came together, {PROCESSES}={settings['num_processes']}")
    if not is_main():
        logging.getLogger("bridge_jax").setLevel(logging.WARNING)  # remarks are the same everywhere: once is enough


def _number(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UserError(f"{name}={text}: must be a number") from None


def _lost(error: BaseException) -> bool:
    """Whether an error of the runtime says that another process is gone (and not, say, that memory ran out)."""
    signs = ("gloo", "nccl", "connection", "heartbeat", "coordination", "unavailable", "barrier", "distributed service", "preempt")
    text = str(error).lower()
    return isinstance(error, jax.errors.JaxRuntimeError) and count() > 1 and any(sign in text for sign in signs)


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0][:200]


def _leave(error: BaseException) -> None:
    """End the process with the message that `errors.main_guard` would give, and without any clearing up."""
    if _lost(error):
        error = UserError(
            f"process {index()} lost contact with another process of the run ({_first_line(error)}), whose log says why it ended: "
            "start all of them again with the same command to go on from the newest checkpoint"
        )
    if isinstance(error, UserError):
        print(f"error: {one_line(error)}", file=sys.stderr)
    else:
        sys.excepthook(type(error), error, error.__traceback__)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(2 if isinstance(error, UserError) else 1)


def count() -> int:
    return jax.process_count()


def index() -> int:
    return jax.process_index()


def is_main() -> bool:
    """The process that writes files and speaks."""
    return index() == 0


def waited() -> float:
    """Seconds this process has spent waiting for others, and for what they sent, so far."""
    return _waited


def gather_objects(value: T) -> list[T]:
    """What every process gave (anything that pickles), by process number. All must call it."""
    if count() == 1:
        return [value]
    from jax.experimental.multihost_utils import process_allgather

    global _waited
    began = time.monotonic()
    data = np.frombuffer(pickle.dumps(value, protocol=5), np.uint8)
    sizes = process_allgather(np.asarray([data.size], np.int32))[:, 0]
    padded = np.zeros(_width(int(sizes.max())), np.uint8)
    padded[: data.size] = data
    gathered = process_allgather(padded)
    values = [pickle.loads(row[:size].tobytes()) for row, size in zip(gathered, sizes, strict=True)]
    _waited += time.monotonic() - began
    return values


def _width(size: int) -> int:
    """`size` rounded up to a quarter of a power of two: each width is a program of its own."""
    step = 1 << max(10, (size - 1).bit_length() - 2)
    return -(-size // step) * step


def any_process(flag: bool) -> bool:
    """Whether one of the processes says so. All must call it."""
    return any(gather_objects(bool(flag)))


def share(work: Callable[[], T]) -> list[T]:
    """Each process does its `work`; all get all results, by process number.

    Raises:
      Preempted, UserError: in every process, when the work of one raised it.
    """
    result, error = _attempt(work)
    parts = gather_objects((result, error))
    _raise_first([error for _, error in parts])
    return [result for result, _ in parts]


def together(work: Callable[[], T]) -> T:
    """`work` in every process -> this one's own result, when all went well. Raises as `share`."""
    result, error = _attempt(work)
    _raise_first(gather_objects(error))
    return result


def on_main(work: Callable[[], T]) -> T:
    """`work` in the main process alone -> its result in all of them. Raises as `share`."""
    return share(lambda: work() if is_main() else None)[0]


def _attempt(work):
    try:
        return work(), None
    except (Preempted, UserError) as error:
        return None, error


def _raise_first(errors) -> None:
    for error in errors:
        if error is not None:
            error.everywhere = True  # for `processes`
            raise error


def tell(what: str) -> None:
    """A note to the other processes, which read it with `told` whenever they like: no meeting, as `gather_objects` is one."""
    client = _client()
    if client is not None:
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # told already
            client.key_value_set(f"bridge_jax/{what}", "1", True)


def told(what: str) -> bool:
    client = _client()
    if client is None:
        return False
    try:
        return client.key_value_try_get(f"bridge_jax/{what}") == "1"
    except jax.errors.JaxRuntimeError:  # nobody has said it
        return False


def _client():
    """The coordinator's store of notes, of which jax has no public name (Orbax and jax's own helpers use it too)."""
    if count() == 1:
        return None
    from jax._src.distributed import global_state

    return global_state.client
