"""A cloud on this machine: gcloud, ssh, scp, srun and nvidia-smi on PATH that record their calls and play what a test says.

A worker is a folder that serves as its home; what is sent to it over ssh runs there for real, `job.sh` included. Its python3.13 is
a fake that makes a fake venv, whose `python -m bridge_jax.train` is the test's `train.sh`.
"""

import json
import shlex
import sys
import time
from pathlib import Path

TOOLS = ("gcloud", "ssh", "scp", "srun", "nvidia-smi")
PYTHON = """#!/bin/bash
# The interpreter of a worker: suitable, makes venvs of itself, installs nothing, and trains as the test says.
root={root}
case "$1 $2" in
  "-c import sys, venv"*) exit 0 ;;
  "-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  "-m pip") [ "$3" = --version ] || {{ echo "$@" >>"$root/pip-$WORKER"; [ ! -f "$root/pip-fails" ]; }} ;;
  "-m bridge_jax.train") printf '%s\\0' "$@" >"$root/argv-$WORKER"; export -p >"$root/env-part-$WORKER"
    mv "$root/env-part-$WORKER" "$root/environment-$WORKER"; . "$root/train.sh" ;;
  *gpu_check.py*) echo "8 x H200"; [ ! -f "$root/unfit" ] || {{ echo "error: $(cat "$root/unfit")" >&2; exit 2; }} ;;
  *) exit 1 ;;
esac
"""


def wait_for(condition, seconds: float = 30.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it has not come"
        time.sleep(0.02)


class Cloud:
    """The folder `root`, with the fakes in `root/bin`."""

    def __init__(self, root: Path):
        self.root = root
        (root / "bin").mkdir(parents=True)
        (root / "worker-bin").mkdir()
        tool = Path(__file__).with_name("fake_tool.py")
        for name in TOOLS:
            self.script(f"bin/{name}", f'#!/bin/sh\nexec {shlex.join([sys.executable, "-IS", str(tool), str(root), name])} "$@"\n')
        (root / "worker-bin" / "nvidia-smi").symlink_to(root / "bin" / "nvidia-smi")
        self.script("worker-bin/python3.13", PYTHON.format(root=shlex.quote(str(root))))
        self.play(plays="ACTIVE\nACTIVE\nACTIVE", train="sleep 30")

    def script(self, name: str, text: str) -> None:
        (self.root / name).write_text(text)
        (self.root / name).chmod(0o755)

    def play(self, train: str | None = None, **files: str) -> None:
        """train: what training does, in bash ($WORKER says where, $root is the cloud). Other files: see fake_tool.py."""
        if train is not None:
            (self.root / "train.sh").write_text(train + "\n")
        for name, text in files.items():
            (self.root / name).write_text(text)

    def calls(self) -> list[list[str]]:
        path = self.root / "calls.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def verbs(self) -> list[str]:
        """What was done with the queued resource, in order, questions left out."""
        return [call[4] for call in self.calls() if "queued-resources" in call and "describe" not in call]

    def argv(self, worker: str) -> list[str]:
        """What the training on a worker was called with."""
        self.environment(worker)
        return (self.root / f"argv-{worker}").read_text().split("\0")[:-1]

    def environment(self, worker: str) -> str:
        """What it found there, as `export -p` says it."""
        path = self.root / f"environment-{worker}"
        wait_for(path.exists)
        return path.read_text()

    def heard(self, worker: str, text: str, number: int = 0) -> None:
        """Wait until the training on a worker has said something: a start returns before that."""
        log = self.folder(worker, number) / "log"
        wait_for(lambda: log.exists() and text in log.read_text())

    def folder(self, worker: str, number: int = 0) -> Path:
        return self.root / f"worker-{worker}" / "bridge_jax_jobs" / f"bridge-{number}"
