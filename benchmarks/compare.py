"""Engines side by side: each in a process of its own, in turns, so that a slow minute of the machine falls on all of them.

    engines = Engines(peers_python, root)
    found = engines.compare({"ours": "ours_rollout", "tunix": "tunix_rollout"}, job, rounds=5)

The workers are `peers/*.py`; peers run in the interpreter given as --peers-python. Workers start together; when all of them have
run the job once (compilation and other first-time work are in no figure) they take turns, another one first in every round.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import training_runs as runs
from arguments import at_least, interpreter
from machine import about

WORKERS = Path(__file__).parent / "peers"
OURS = "ours"
# What installs the peer of a column. `pip install 'bridge-jax[peers]'` installs them all.
REQUIREMENTS = {"tunix": "google-tunix==0.1.7", "hf": "torch==2.13.0 transformers", "trl": "trl==1.16.0 torch==2.13.0"}
REQUIREMENTS["sentence_transformers"] = "sentence-transformers torch==2.13.0"


def parser(description: str, rounds: int, peers: bool = True) -> argparse.ArgumentParser:
    """Flags of every script that compares: --quick --rounds --seed --root, and --peers-python where there are peers."""
    shown = argparse.RawDescriptionHelpFormatter
    made = argparse.ArgumentParser(description=description, formatter_class=shown, allow_abbrev=False)
    made.add_argument("--quick", action="store_true", help="small sizes, one round: does it run? (results lie under runs/)")
    made.add_argument("--rounds", type=at_least(1), default=rounds, help=f"measurements an engine and case (default {rounds})")
    made.add_argument("--seed", type=at_least(0), default=0)
    if peers:
        made.add_argument(
            "--peers-python", type=interpreter, default=sys.executable, help="the interpreter that the peers are installed in"
        )
    made.add_argument("--root", type=Path, help="where compiled programs lie (default runs/<the script's name>)")
    return made


class Failed(Exception):
    """A worker ended before it answered."""


class Missing(Exception):
    """A peer is not installed."""


class Engines:
    """Runs cases, and keeps what holds for all of them.

    versions: {engine: {package: version}}. left_out: {engine: what installs it}.
    """

    def __init__(self, peers_python: str, root: Path):
        """root: of the script; compiled programs lie beside it (`training_runs.programs`)."""
        self._python = peers_python
        self._environment = runs.environment(root)
        self.versions: dict[str, dict[str, str]] = {}
        self.left_out: dict[str, str] = {}

    def compare(self, scripts: Mapping[str, str], job: dict, rounds: int) -> dict[str, dict]:
        """One case: {engine: its ready line, with "rounds": [its measurements]}, or {"failed": why}; without missing engines.

        scripts: {engine: its worker in `peers/`}. `job` is what every worker gets.
        """
        found: dict[str, dict] = {}
        with contextlib.ExitStack() as stack:
            workers = {
                engine: stack.enter_context(Worker(self._command(engine, script), job, self._variables(engine)))
                for engine, script in scripts.items()
                if engine not in self.left_out
            }
            for engine, worker in workers.items():
                with self._noted(engine, found):
                    found[engine] = worker.answer() | {"rounds": []}
                    self.versions[engine] = found[engine].pop("versions")
            for number in range(rounds):
                names = [engine for engine in workers if "rounds" in found.get(engine, {})]
                for engine in [*names[number % len(names) :], *names[: number % len(names)]] if names else ():
                    with self._noted(engine, found):
                        workers[engine].ask("measure")
                        found[engine]["rounds"].append(workers[engine].answer())
        return found

    def conditions(self, args: argparse.Namespace, rounds: int) -> dict:
        """What a result says of how it was measured."""
        peers = {"peers": self.versions, "left_out": self.left_out}
        return {"machine": about(), **peers, "seed": args.seed, "rounds": rounds}

    @contextlib.contextmanager
    def _noted(self, engine: str, found: dict):
        try:
            yield
        except Missing as error:
            self.left_out[engine] = f"{self._python} -m pip install {REQUIREMENTS[engine]}"
            runs.say(f"no {engine} column, {error} is missing: {self.left_out[engine]} (or name another --peers-python)")
        except Failed as error:
            if engine == OURS:
                raise
            found[engine] = {"failed": str(error)}
            runs.say(f"{engine}: {error}")

    def _command(self, engine: str, script: str) -> list[str]:
        return [sys.executable if engine == OURS else self._python, str(WORKERS / f"{script}.py")]

    def _variables(self, engine: str) -> dict[str, str]:
        if engine == OURS or self._python == sys.executable:
            return self._environment
        return {name: value for name, value in self._environment.items() if name != "PYTHONPATH"}


class Worker:
    """One engine's process; see `peers/serve.py` for what is said."""

    def __init__(self, command: Sequence[str], job: dict, environment: Mapping[str, str]):
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 (__exit__ closes it)
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=self._errors, text=True, env=environment, cwd=runs.HOME
        )
        self.ask(json.dumps(job))

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *error) -> None:
        if error[0] is not None:
            self._process.terminate()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._errors.close()

    def ask(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # `answer` says why
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()

    def answer(self) -> dict:
        """The worker's next line.

        Raises:
          Missing: its peer is not installed. Failed: it has ended.
        """
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            self._errors.seek(0)
            said = self._errors.read().strip().splitlines()
            raise Failed(f"ended with {code}" + (f": {said[-1][:300]}" if said else ""))
        content = json.loads(line)
        if "missing" in content:
            raise Missing(content["missing"])
        return content


def spread(values: Sequence[float]) -> dict[str, float]:
    """{"median", "min", "max"} over rounds."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def speedup(found: Mapping[str, dict], peer: str) -> dict[str, float] | None:
    """Our speed over the peer's, round by round: above 1 we are faster. None where one of the two was not measured."""
    mine, other = ([row["seconds"] for row in found.get(engine, {}).get("rounds", ())] for engine in (OURS, peer))
    return spread([b / a for a, b in zip(mine, other)]) if mine and other else None


def peak(found: Mapping[str, dict], engine: str) -> int | None:
    """The most memory an engine took, over what its interpreter and libraries take; bytes."""
    rounds = found.get(engine, {}).get("rounds", ())
    return max(row["peak_bytes"] for row in rounds) if rounds else None
