"""What a job is made of: the command in a script, the files that go to a machine, and what its `job.sh` answers."""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from bridge_jax.errors import UserError
from bridge_jax.overrides import split_overrides

SCRIPT = Path(__file__).with_name("job.sh")


def parsed(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """A launcher's command line, with the `--config.*` overrides as `overrides`. UserError where its command takes none."""
    overrides, rest = split_overrides(sys.argv[1:] if argv is None else argv)
    args = parser.parse_args(rest)
    if overrides and args.command != "run":
        raise UserError(f"--config.{overrides[0]}: only run takes overrides")
    args.overrides = overrides
    return args


def cache() -> Path:
    """Where the launcher keeps what it sends."""
    return Path(os.environ.get("BRIDGE_JAX_CACHE") or Path.home() / ".cache" / "bridge_jax").expanduser() / "launch"


def folder(name: str, machine: int) -> str:
    """The job's folder on a machine, below its home. Numbered: machines of a cluster may share a home."""
    return f"bridge_jax_jobs/{name}-{machine}"


def verb(name: str, machine: int, *words: str) -> str:
    """The shell command for `job.sh VERB ...` on a machine, whether or not anything was sent there."""
    script = f"{folder(name, machine)}/job.sh"
    return f"if [ -f {script} ]; then bash {script} {shlex.join(words)}; else echo 'job: state=none'; fi"


def train_words(python: str, config: str, workdir: str, overrides: Sequence[str], distributed: bool) -> list[str]:
    """The training command. overrides: "group.field=value", any text."""
    words = [python, "-m", "bridge_jax.train", *(["--distributed"] if distributed else [])]
    return [*words, f"--config={config}", f"--workdir={workdir}", *(f"--config.{override}" for override in overrides)]


def run_id(commit: str, dry: bool) -> str:
    """Tells one start of a job from another."""
    return f"{commit[:12]}-{'TIME' if dry else format(time.time_ns(), 'x')}"


def script(words: Sequence[str], env: Mapping[str, str], where: Path | None = None) -> str:
    """run.sh: the command with its environment, in the folder `where` (None: that of the code that was sent)."""
    folder = '"$(dirname "$0")"/code' if where is None else shlex.quote(str(where))
    lines = ["#!/usr/bin/env bash", f"cd {folder} || exit 1", "export PYTHONUTF8=1 PYTHONUNBUFFERED=1"]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in env.items()]
    return "\n".join([*lines, f"exec {shlex.join(words)}", ""])


def write_script(path: Path, text: str, dry: bool) -> None:
    """Write run.sh for its owner alone (its environment may hold keys); dry: show it."""
    if dry:
        print(f"# {path}:", *(f"#   {line}" for line in text.splitlines()), sep="\n")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)


def environment(given: Sequence[str], dry: bool) -> dict[str, str]:
    """{name: value} of `--env=NAME=VALUE` and `--env=NAME` (the value it has here, which may be a key: a dry run does not show it).

    Raises:
      UserError: not a name, or one without a value here.
    """
    env = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            raise UserError(f"--env={text}: write --env=NAME=VALUE, or --env=NAME to pass on the value it has here")
        if not equals and name not in os.environ:
            raise UserError(f"--env={name}: {name} is not set here; write --env={name}=VALUE")
        env[name] = value if equals else f"({name} as it is here)" if dry else os.environ[name]
    return env


@dataclasses.dataclass(frozen=True)
class Status:
    """What a machine says of its job."""

    state: str  # none, installed, running, ended, lost (the machine was restarted), failed (to do as told), unreachable
    run: str = "-"
    code: int | None = None
    finished: bool = False  # it came to its last step
    stopped: bool = False  # it was told to stop by a launcher
    said: str = ""  # the last line of its log, or what is wrong


def parse(output: str) -> Status | None:
    """Of what came out of `job.sh`; None when it has not answered (the connection failed before)."""
    lines = output.splitlines()
    for number, line in enumerate(lines):
        if line.startswith("job: state="):
            words = line.removeprefix("job: ").split(" ")
            if words[0] == "state=failed":
                return Status("failed", said=" ".join(words[1:]))
            fields = dict(word.partition("=")[::2] for word in words)
            code = int(fields["code"]) if fields.get("code", "-").isdigit() else None
            said = next((line.strip() for line in lines[number + 1 :] if line.strip()), "")
            flags = (fields.get("finished") == "1", fields.get("stopped") == "1")
            return Status(fields["state"], fields.get("run", "-"), code, *flags, said)
    return None


def describe(status: Status) -> str:
    """One line for a person."""
    what = {
        "none": "no job was started here",
        "installed": "installed, not started",
        "lost": "ended without an exit code: the machine was restarted or ran out of memory",
        "unreachable": "does not answer",
    }.get(status.state, status.state)
    if status.state == "ended":
        what = "finished" if status.finished else f"ended with exit code {status.code}"
        what = "stopped on request" if status.stopped and status.code == 0 and not status.finished else what
    return f"{what}: {status.said}" if status.said else what
