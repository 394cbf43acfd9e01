"""The machines of a job, reached by some ssh: sending it to them, starting it on all or none, asking, stopping."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import commands
import job
from job import Status

from bridge_jax.errors import UserError

ASK, START, INSTALL = 90, 120, 3600  # seconds to wait for an answer
TRIES = 4  # for a start whose answer is lost


@dataclasses.dataclass(frozen=True)
class Fleet:
    """ssh(machine, command), scp(machine, files, folder): the words of a command of this machine that does so there.

    names: what the machines are called.
    pause: seconds before a lost connection is tried again; doubled each time.
    """

    names: tuple[str, ...]
    ssh: Callable[[int, str], list[str]]
    scp: Callable[[int, Sequence[str], str], list[str]]
    runner: commands.Runner
    pause: float = 5.0

    def all(self) -> range:
        return range(len(self.names))

    def tell(self, machine: int, command: str, seconds: float) -> Status:
        """Run a shell command that ends in an answer of `job.sh`."""
        result = self.runner.run(self.ssh(machine, command), seconds)
        if self.runner.dry:
            return Status("none")
        return job.parse(result.out) or Status("unreachable", said=commands.complaint(result))


def tell_status(fleet: Fleet, name: str, machine: int) -> Status:
    return fleet.tell(machine, job.verb(name, machine, "status"), ASK)


def status(fleet: Fleet, name: str) -> list[Status]:
    return commands.parallel(lambda i: tell_status(fleet, name, i), fleet.all())


def prepare(fleet: Fleet, name: str) -> None:
    """Make the job's folder everywhere.

    Raises:
      UserError: a machine does not answer, or a job runs there.
    """

    def make(machine: int) -> Status:
        return fleet.tell(machine, f"mkdir -p -m 700 {job.folder(name, machine)}; {job.verb(name, machine, 'status')}", ASK)

    # One first: gcloud makes and spreads its ssh key on the first connection, which others must not do at the same time.
    found = [make(0), *commands.parallel(make, fleet.all()[1:])]
    _refuse(fleet, found, {"none", "installed", "ended", "lost"}, "the job cannot be sent")
    running = [fleet.names[i] for i, answer in enumerate(found) if answer.state == "running"]
    if running:
        raise UserError(f"a job runs already on {', '.join(running)}: stop it first, or give another --name")


def copy(fleet: Fleet, name: str, files: Callable[[int], Sequence[Path]]) -> None:
    """Copy `files(machine)` into the job's folder of each machine.

    Raises:
      UserError: one does not answer.
    """

    def ship(machine: int) -> Status:
        result = fleet.runner.run(fleet.scp(machine, [str(path) for path in files(machine)], job.folder(name, machine)), INSTALL)
        return Status("unreachable", said=commands.complaint(result)) if result.code else Status("none")

    _refuse(fleet, commands.parallel(ship, fleet.all()), {"none"}, "the job cannot be sent")


def install(fleet: Fleet, name: str, extras: str) -> None:
    """Unpack the code that was copied and install it with its extras.

    Raises:
      UserError: a machine does not answer, or pip fails there.
    """
    found = commands.parallel(lambda i: fleet.tell(i, job.verb(name, i, "install", extras), INSTALL), fleet.all())
    _refuse(fleet, found, {"installed"}, "the job cannot be installed")


def start(fleet: Fleet, name: str, run: str) -> None:
    """Start the job everywhere. An answer that is lost is asked for again: starting the same `run` twice does nothing.

    Raises:
      UserError: a machine could not be reached; the others were stopped, which would wait for it.
    """

    def begin(machine: int) -> Status:
        answer = Status("unreachable")
        for attempt in range(TRIES):
            answer = fleet.tell(machine, job.verb(name, machine, "start", run), START)
            if answer.state != "unreachable":
                break
            if attempt + 1 < TRIES:
                fleet.runner.say(f"{fleet.names[machine]}: connection lost ({answer.said}); trying again")
                time.sleep(fleet.pause * 2**attempt)
        return answer

    found = commands.parallel(begin, fleet.all())
    try:
        _refuse(fleet, found, {"running", "ended"}, "the job was not started")
    except UserError:
        stop(fleet, name, 0, [i for i in fleet.all() if found[i].state == "running"])
        raise


def stop(fleet: Fleet, name: str, seconds: int, machines: Sequence[int] | None = None) -> list[Status]:
    """SIGTERM to the job, which then saves a checkpoint; waits for it for so long."""
    machines = fleet.all() if machines is None else machines
    return commands.parallel(lambda i: fleet.tell(i, job.verb(name, i, "stop", str(seconds)), ASK + seconds), machines)


def report_stop(fleet: Fleet, found: Sequence[Status]) -> int:
    """Print what `stop` found; 1 when a job still runs or a machine was not reached."""
    if fleet.runner.dry:
        return 0
    for name, answer in zip(fleet.names, found):
        print(f"{name}: {'still ending' if answer.state == 'running' else job.describe(answer)}")
    return int(any(answer.state in ("running", "unreachable") for answer in found))


def chosen(fleet: Fleet, worker: str) -> list[int]:
    """The machines that `--worker` means.

    Raises:
      UserError: none of them.
    """
    if worker == "all":
        return list(fleet.all())
    if not worker.isdecimal() or int(worker) >= len(fleet.names):
        raise UserError(f"--worker={worker}: must be all, or 0 to {len(fleet.names) - 1}")
    return [int(worker)]


def logs(fleet: Fleet, name: str, machines: Sequence[int], lines: int, follow: bool) -> int:
    """Print the end of the log of each machine, with its name before each line if there are several; 1 if one was not reached."""

    def show(machine: int) -> int:
        prefix = f"[{fleet.names[machine]}] " if len(machines) > 1 else ""
        code = fleet.runner.stream(fleet.ssh(machine, job.verb(name, machine, "log", str(lines), *["follow"] * follow)), prefix)
        if code:
            fleet.runner.say(f"{fleet.names[machine]}: the connection ended with exit code {code}")
        return code

    return int(any(commands.parallel(show, machines, at_once=max(len(machines), 1))))


def _refuse(fleet: Fleet, found: Sequence[Status], good: set[str], what: str) -> None:
    """UserError that names the machines that are not well, each with its reason."""
    if fleet.runner.dry:
        return
    bad = [f"{fleet.names[i]}: {job.describe(found[i])}" for i in fleet.all() if found[i].state not in good | {"running"}]
    if bad:
        raise UserError(f"{what} ({len(found) - len(bad)} of {len(found)} machines are well): {'; '.join(bad[:4])}")
