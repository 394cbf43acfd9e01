"""An evaluation on disk: its settings, and a line a question as soon as it is answered. Killed, it goes on; changed, it is refused.

    <workdir>/eval/<name>.parts/settings.json        everything that affects a number
                                predictions.<p>of<n>.jsonl    records of shard p: questions p::n of each set
                                requests.<p>of<n>.jsonl       answers of an endpoint (`endpoint.py`)
    <workdir>/eval/<name>.json                       the result, written when every question has its record; the parts go then

Shards may run at the same time, on one machine or on several that share the folder; whoever finishes the last question writes the
result. How many shards there are is no setting: a run begun with eight goes on with one.

In memory a record is its numbers alone: what was searched, read and written (LONG) stays in the parts, and is copied from there
into the result line by line.
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
from typing import BinaryIO

from bridge_jax.data.formats import Question
from bridge_jax.errors import UserError
from bridge_jax.files import write_text, writing

Sets = Mapping[str, Sequence[Question]]
LONG = ("trace", "turns", "question", "golds", "gold_passage_ids", "options")


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
        self._known: dict[str, dict[str, dict]] = {name: {} for name in sets}  # set -> id -> the record without LONG
        self._places: dict[str, dict[str, tuple[Path, int]]] = {name: {} for name in sets}  # set -> id -> file, byte
        self._ends: dict[Path, int] = {}  # of what has been read of each file
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
        self._own = own = self.parts / f"predictions.{self.shard[0]}of{self.shard[1]}.jsonl"
        with own.open("ab") as self._file:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(f"another process is at work on {own}: wait for it, or give another --shard") from None
            _cut_last_line(own)
            self._read()
            self._last = time.monotonic()
            yield self

    def _read(self) -> None:
        """What has come to the files since the last time."""
        for path in sorted(self.parts.glob("predictions.*.jsonl")):
            at = self._ends.get(path, 0)
            with contextlib.suppress(FileNotFoundError), path.open("rb") as file:  # gone: another shard has written the result
                file.seek(at)
                for line in file:
                    if not line.endswith(b"\n"):  # another shard is writing it
                        break
                    try:
                        row = json.loads(line)
                        name, record, _ = row["set"], row["record"], row["record"]["id"]
                    except (ValueError, KeyError, TypeError) as error:
                        file.seek(0)
                        number = file.read(at).count(b"\n") + 1
                        raise UserError(
                            f"{path}, line {number}: is no prediction ({error}); delete the line, it is made again"
                        ) from None
                    if name in self._known:
                        self._keep(name, record, path, at)
                    at += len(line)
            self._ends[path] = at

    def _keep(self, name: str, record: Mapping, path: Path, at: int) -> None:
        self._known[name][record["id"]] = {key: value for key, value in record.items() if key not in LONG}
        self._places[name][record["id"]] = path, at

    def pending(self, name: str) -> list[Question]:
        """The questions of this shard without a record."""
        index, count = self.shard
        return [question for question in self.sets[name][index::count] if question.id not in self._known[name]]

    def append(self, name: str, record: dict) -> None:
        """Keep a record. Its "seconds" are those since the one before: their mean is the wall clock of a question."""
        now = time.monotonic()
        record = record | {"seconds": now - self._last}
        self._last = now
        line = json.dumps({"set": name, "record": record}, ensure_ascii=False).encode() + b"\n"
        with writing(self.parts):
            self._file.write(line)
            self._file.flush()
        at = self._ends[self._own]
        self._keep(name, record, self._own, at)
        self._ends[self._own] = at + len(line)

    def missing(self) -> int:
        """Questions without a record, over all shards; reads what the others have written meanwhile."""
        self._read()
        return sum(question.id not in self._known[name] for name, questions in self.sets.items() for question in questions)

    def records(self) -> dict[str, list[dict]]:
        """All records, in the order of the questions, without LONG."""
        return {name: [self._known[name][question.id] for question in questions] for name, questions in self.sets.items()}

    def whole(self, name: str) -> Iterator[dict]:
        """The records of a set one after another, as they were appended; FileNotFoundError once another shard has cleared up."""
        with contextlib.ExitStack() as stack:
            files: dict[Path, BinaryIO] = {}
            for question in self.sets[name]:
                path, at = self._places[name][question.id]
                if path not in files:
                    files[path] = stack.enter_context(path.open("rb"))
                files[path].seek(at)
                yield json.loads(files[path].readline())["record"]

    def write(self, result: Mapping) -> Path:
        """Write the result, with all predictions whole, and clear the parts away."""
        part = self.result_path.with_name(f"{self.result_path.name}.{self.shard[0]}of{self.shard[1]}.part")
        head = json.dumps({key: value for key, value in result.items() if key != "predictions"}, ensure_ascii=False)
        try:
            with writing(part), part.open("w", encoding="utf-8") as file:
                file.write(head[:-1] + ', "predictions": {')
                for number, name in enumerate(self.sets):
                    file.write(f"{', ' * bool(number)}{json.dumps(name, ensure_ascii=False)}: [")
                    for n, record in enumerate(self.whole(name)):
                        file.write(", " * bool(n) + json.dumps(record, ensure_ascii=False))
                    file.write("]")
                file.write("}}\n")
        except FileNotFoundError:
            if not self.result_path.exists():
                raise
            part.unlink()  # another shard, done at the same time, has written it and cleared up
            return self.result_path
        os.replace(part, self.result_path)
        shutil.rmtree(self.parts, ignore_errors=True)
        return self.result_path


def _cut_last_line(path: Path, block: int = 1 << 20) -> None:
    """A kill may have left half a line: it goes, and its question is answered again."""
    with path.open("r+b") as file:
        at = size = file.seek(0, os.SEEK_END)
        while at:
            begin = max(0, at - block)
            file.seek(begin)
            whole = file.read(at - begin).rfind(b"\n") + 1
            at = begin
            if whole:
                at += whole
                break
        if at < size:
            file.truncate(at)


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
