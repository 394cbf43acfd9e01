"""An evaluation on disk: its settings, and a line a question as soon as it is answered. Killed, it goes on; changed, it is refused.

    <workdir>/eval/<name>.parts/settings.json        everything that affects a number
                                predictions.<p>of<n>.jsonl    records of shard p: questions p::n of each set
                                requests.<p>of<n>.jsonl       answers of an endpoint (`endpoint.py`)
    <workdir>/eval/<name>.json                       the result, written when every question has its record; the parts go then

Shards may run at the same time, on one machine or on several that share the folder; whoever finishes the last question writes the
result. How many shards there are is no setting: a run begun with eight goes on with one.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from bridge_jax.data.formats import Question
from bridge_jax.errors import UserError
from bridge_jax.files import write_text, writing

Sets = Mapping[str, Sequence[Question]]


def parts_folder(folder: Path, name: str) -> Path:
    return folder / f"{name}.parts"


def differing(old: Mapping, new: Mapping, prefix: str = "") -> list[tuple[str, object, object]]:
    """(name.of.the.field, old, new) of every leaf that differs; what is missing on one side is None there."""
    found = []
    for key in dict.fromkeys([*old, *new]):
        a, b, name = old.get(key), new.get(key), f"{prefix}{key}"
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            found += differing(a, b, f"{name}.")
        elif a != b:
            found.append((name, a, b))
    return found


def refuse_change(old: Mapping, new: Mapping, where: Path) -> None:
    """UserError naming the settings in which two evaluations of one name differ."""
    changed = differing(old, new)
    if changed:
        shown = "; ".join(f"{name} was {_short(a)}, now {_short(b)}" for name, a, b in changed[:3])
        raise UserError(f"{where} was made with other settings ({shown}): give another --name, or delete it")


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


class Store:
    """The parts of one evaluation, opened for one shard.

    settings: JSON values that affect a number. shard: (p, n).
    Raises UserError: other settings there; another process is at work on this shard.
    """

    def __init__(self, folder: Path, name: str, settings: Mapping, sets: Sets, shard: tuple[int, int] = (0, 1)):
        self.result_path = folder / f"{name}.json"
        self.parts = parts_folder(folder, name)
        self.settings = json.loads(json.dumps(settings))  # as it will be read back
        self.sets, self.shard = sets, shard
        self._known: dict[str, dict[str, dict]] = {name: {} for name in sets}
        self._last = time.monotonic()
        self._file = None

    def finished(self) -> dict | None:
        """The result, if it is there already; UserError when it was made with other settings."""
        if not self.result_path.exists():
            return None
        result = read_result(self.result_path)
        refuse_change(result.get("settings", {}), self.settings, self.result_path)
        return result

    @contextlib.contextmanager
    def open(self) -> Iterator[Store]:
        """Hold the shard, with what it and the others have answered so far."""
        self.parts.mkdir(parents=True, exist_ok=True)
        path = self.parts / "settings.json"
        if path.exists():
            refuse_change(json.loads(path.read_text(encoding="utf-8")), self.settings, self.parts)
        else:
            write_text(path, json.dumps(self.settings, ensure_ascii=False, indent=1) + "\n")
        own = self.parts / f"predictions.{self.shard[0]}of{self.shard[1]}.jsonl"
        with own.open("a", encoding="utf-8") as self._file:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(f"another process is at work on {own}: wait for it, or give another --shard") from None
            _cut_last_line(own)
            self._read()
            self._last = time.monotonic()
            yield self

    def _read(self) -> None:
        for path in sorted(self.parts.glob("predictions.*.jsonl")):
            for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
                try:
                    row = json.loads(line)
                    name, record = row["set"], row["record"]
                    id = record["id"]
                except (ValueError, KeyError, TypeError) as error:
                    raise UserError(
                        f"{path}, line {number}: is no prediction ({error}); delete the line, it is made again"
                    ) from None
                if name in self._known:
                    self._known[name][id] = record

    def pending(self, name: str) -> list[Question]:
        """The questions of this shard without a record."""
        index, count = self.shard
        return [question for question in self.sets[name][index::count] if question.id not in self._known[name]]

    def append(self, name: str, record: dict) -> None:
        """Keep a record. Its "seconds" are those since the one before: their mean is the wall clock of a question."""
        now = time.monotonic()
        record = record | {"seconds": now - self._last}
        self._last = now
        with writing(self.parts):
            self._file.write(json.dumps({"set": name, "record": record}, ensure_ascii=False) + "\n")
            self._file.flush()
        self._known[name][record["id"]] = record

    def missing(self) -> int:
        """Questions without a record, over all shards; reads what the others have written meanwhile."""
        self._read()
        return sum(question.id not in self._known[name] for name, questions in self.sets.items() for question in questions)

    def records(self) -> dict[str, list[dict]]:
        """All records, in the order of the questions."""
        return {name: [self._known[name][question.id] for question in questions] for name, questions in self.sets.items()}

    def write(self, result: Mapping) -> Path:
        """Write the result and clear the parts away."""
        write_text(self.result_path, json.dumps(result, ensure_ascii=False) + "\n")
        shutil.rmtree(self.parts, ignore_errors=True)
        return self.result_path


def _cut_last_line(path: Path) -> None:
    """A kill may have left half a line: it goes, and its question is answered again."""
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        os.truncate(path, whole)


def read_result(path: Path) -> dict:
    """A result file. UserError when it is not one."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(result["predictions"], dict) and isinstance(result["datasets"], dict):
            return result
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; give the result file of an evaluation") from error
    except (ValueError, KeyError, TypeError):
        pass
    raise UserError(f"{path} is not the result of an evaluation; give a file of <workdir>/eval")


def find_result(run: str, like: str) -> Path:
    """--against=RUN: a result file, or a workdir that has one of the name `like` or exactly one.

    Raises:
      UserError: none there, or several that it could be.
    """
    path = Path(run)
    if path.is_file():
        return path
    folder = path / "eval" if (path / "eval").is_dir() else path
    files = sorted(folder.glob("*.json")) if folder.is_dir() else []
    if not files:
        raise UserError(f"--against={run}: no result there; give the result file of an evaluation, or a run's folder")
    same = [file for file in files if file.stem == like]
    if len(same or files) == 1:
        return (same or files)[0]
    raise UserError(f"--against={run}: several results ({', '.join(file.name for file in files[:5])}); name the file")
