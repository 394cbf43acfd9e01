"""Saying who a process is, and SIGTERM, without other processes; with them: tests/training/test_processes.py."""

import os
import signal
import time

import jax
import pytest

from bridge_jax import distributed, evaluate, preemption, train
from bridge_jax.errors import UserError

NAMES = (distributed.COORDINATOR, distributed.PROCESSES, distributed.PROCESS)


@pytest.mark.parametrize(
    "given, wanted",
    [
        (("10.0.0.1:80", "", ""), "JAX_NUM_PROCESSES, JAX_PROCESS_ID not set beside the others"),
        (("", "2", "0"), "JAX_COORDINATOR_ADDRESS not set beside the others"),
        (("10.0.0.1", "2", "0"), "JAX_COORDINATOR_ADDRESS=10.0.0.1: must be host:port"),
        (("10.0.0.1:80", "two", "0"), "JAX_NUM_PROCESSES=two: must be a number"),
        (("10.0.0.1:80", "2", "2"), "JAX_PROCESS_ID=2: must be below JAX_NUM_PROCESSES=2"),
    ],
)
def test_half_set_environments_are_refused(monkeypatch, given, wanted):
    for name, value in zip(NAMES, given):
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=wanted), distributed.processes(True):
        pass


def test_both_commands_have_the_flag(capsys):
    for command in (train, evaluate):
        with pytest.raises(SystemExit):
            command.main(["--help"])
        assert "--distributed" in capsys.readouterr().out


def test_one_process_agrees_with_itself():
    def fails():
        raise UserError("broken")

    assert distributed.gather_objects({"a": 1}) == [{"a": 1}]
    assert distributed.share(lambda: 3) == [3] and distributed.on_main(lambda: 4) == 4 and distributed.together(lambda: 5) == 5
    assert distributed.any_process(True) and not distributed.any_process(False)
    for meeting in (distributed.share, distributed.together, distributed.on_main):
        with pytest.raises(UserError, match="broken"):
            meeting(fails)


def test_an_error_of_the_runtime_is_told_from_a_lost_process(monkeypatch):
    monkeypatch.setattr(distributed, "count", lambda: 2)
    lost = "UNKNOWN: Gloo all-reduce failed: Connection closed by peer", "UNAVAILABLE: The following tasks are unhealthy"
    assert all(distributed._lost(jax.errors.JaxRuntimeError(text)) for text in lost)
    assert not distributed._lost(jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 5 bytes"))
    assert not distributed._lost(ValueError("connection"))


@pytest.mark.parametrize("size", [1, 1024, 1025, 5000, 1 << 20, (1 << 20) + 1])
def test_gathered_widths_are_few_and_close(size):
    width = distributed._width(size)
    assert size <= width <= max(2048, 1.5 * size)
    assert len({distributed._width(n) for n in range(1 << 16, 1 << 17, 997)}) <= 5


def test_sigterm_is_noted_and_obeyed_where_it_is_asked_for():
    said = []
    before = signal.getsignal(signal.SIGTERM)
    with preemption.listening(said.append):
        preemption.check()
        os.kill(os.getpid(), signal.SIGTERM)
        deadline = time.monotonic() + 5
        while not preemption.noted():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with pytest.raises(distributed.Preempted):
            preemption.check()
    assert len(said) == 1 and "SIGTERM" in said[0]
    assert signal.getsignal(signal.SIGTERM) == before
    with preemption.listening(said.append):
        preemption.check()  # a note is of one run
