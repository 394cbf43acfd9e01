"""Runs of several processes on this machine's CPU, over gloo."""

import os
import socket
import subprocess
import sys


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(command: list[str], processes: int, devices: int, **environment: str) -> list[subprocess.Popen]:
    """`command` (of a Python module, with its flags) once a process, each with its own virtual devices."""
    port, running = free_port(), []
    for number in range(processes):
        own = {
            "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}",
            "JAX_PLATFORMS": "cpu",
            "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
            "JAX_NUM_PROCESSES": str(processes),
            "JAX_PROCESS_ID": str(number),
        }
        arguments = [sys.executable, "-m", *command, "--distributed"]
        running.append(
            subprocess.Popen(
                arguments, env=os.environ | own | environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
    return running


def finish(running: list[subprocess.Popen], timeout: float = 300) -> list[tuple[int, str]]:
    """(exit code, what it wrote to stderr) of each."""
    ended = []
    try:
        for process in running:
            _, err = process.communicate(timeout=timeout)
            ended.append((process.returncode, err))
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
    return ended
