"""Running other programs: for real, or only saying so (`--dry-run`)."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from bridge_jax.errors import UserError

T, R = TypeVar("T"), TypeVar("R")
TIMED_OUT = 124  # as timeout(1) says it
MISSING = {
    "gcloud": "install the Google Cloud CLI (https://cloud.google.com/sdk/docs/install) and run gcloud auth login",
    "git": "the code is shipped at a commit: install git",
    "srun": "run this on a login node of a SLURM cluster, or use --hosts",
}


@dataclasses.dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


class Runner:
    """Runs commands (lists of words, never through a shell of this machine).

    dry: print what would be run instead, one shell line each, and take it for done.
    """

    def __init__(self, dry: bool = False):
        self.dry = dry
        self._printing = threading.Lock()

    def run(self, words: Sequence[str], timeout: float | None = None) -> Result:
        if self.dry:
            with self._printing:
                print(shlex.join(words))
            return Result(0, "", "")
        return self.ask(words, timeout)

    def ask(self, words: Sequence[str], timeout: float | None = None) -> Result:
        """As `run`, in a dry run too: for questions to this machine that change nothing."""
        try:
            done = subprocess.run(
                words, capture_output=True, text=True, errors="replace", timeout=timeout, stdin=subprocess.DEVNULL, check=False
            )
        except FileNotFoundError:
            raise UserError(f"{words[0]} is not installed: {MISSING.get(words[0], 'install it')}") from None
        except subprocess.TimeoutExpired as error:
            return Result(TIMED_OUT, _text(error.stdout), f"no answer within {timeout:.0f} s")
        return Result(done.returncode, done.stdout, done.stderr)

    def need(self, words: Sequence[str], what: str) -> str:
        """Standard output of a command that must succeed; UserError with `what` and the command's own complaint."""
        result = self.run(words)
        if result.code:
            raise UserError(f"{what}: {complaint(result)}")
        return result.out

    def stream(self, words: Sequence[str], prefix: str = "") -> int:
        """Run with the output passed on line by line as it comes."""
        if self.dry:
            return self.run(words).code
        try:
            process = subprocess.Popen(
                words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True, errors="replace"
            )
        except FileNotFoundError:
            raise UserError(f"{words[0]} is not installed: {MISSING.get(words[0], 'install it')}") from None
        with process:
            for line in process.stdout:
                self.say(f"{prefix}{line.rstrip()}", sys.stdout)
        return process.returncode

    def attach(self, words: Sequence[str]) -> int:
        """Run with this terminal."""
        if self.dry:
            return self.run(words).code
        try:
            return subprocess.call(words)
        except FileNotFoundError:
            raise UserError(f"{words[0]} is not installed: {MISSING.get(words[0], 'install it')}") from None

    def say(self, text: str, file=None) -> None:
        """One line for the user, whole although others speak too."""
        with self._printing:
            print(text, file=file or sys.stderr, flush=True)


def _text(data: bytes | str | None) -> str:
    return data.decode(errors="replace") if isinstance(data, bytes) else data or ""


def complaint(result: Result) -> str:
    """What went wrong, in one line: gcloud's ERROR line, else the last one."""
    lines = [line.strip() for line in (result.err or result.out).splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    if errors:  # gcloud breaks its message into lines
        return " ".join(lines[lines.index(errors[0]) :])[:500]
    return lines[-1][:500] if lines else f"exit code {result.code}"


def parallel(function: Callable[[T], R], items: Iterable[T], at_once: int = 32) -> list[R]:
    """`function` of each item, several at a time, in order."""
    with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(function, items))
