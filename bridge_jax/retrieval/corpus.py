"""The passages of a run: one memory-mapped file of JSON lines, with an offsets table so that any row is read in O(1).

A single plain JSON-lines file is mapped as it is. Anything else that passages.py reads (gzip, DPR's table, several files) is first
streamed into one such file in the cache. The rows are read once, checked one by one, and their offsets are cached: then a corpus
of any size opens at once and holds no Python object per row. Reading takes the same memory whatever the corpus.
"""

from __future__ import annotations

import array
import contextlib
import hashlib
import json
import mmap
import operator
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from bridge_jax.data.cache import cache_dir
from bridge_jax.errors import UserError
from bridge_jax.retrieval.mapped import FileChanged, Watch
from bridge_jax.retrieval.passages import BOM, Passage, contents_of, expand, is_plain, parse, passage_of, read_records
from bridge_jax.retrieval.progress import track

FORMAT = 2
HEADER_BYTES = 4096
SHOW_PROGRESS_ABOVE = 256 << 20
RUN_ROWS = 1 << 20  # ids sorted at a time

Source = str | os.PathLike | Sequence[str | os.PathLike]


class Corpus:
    """Read-only sequence of passages. Use `Corpus.open`.

    Attributes:
      path: what `open` was given, absolute: a file, or a list of files; together with `limit` it opens the same corpus again.
      limit: of `open`.
      fingerprint: sha256 over the (id, contents) of all rows, in order; independent of spacing, other fields and the files' form.
    """

    def __init__(self, files: Sequence[Path], limit: int | None, text: Path, table: _Table):
        self.path: Path | list[Path] = files[0].absolute() if len(files) == 1 else [file.absolute() for file in files]
        self.limit = limit
        self.fingerprint: str = table.fingerprint
        self._text, self._table = text, table
        with open(text, "rb") as file:
            self._watch = Watch(file, text)
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    @classmethod
    def open(cls, source: Source, limit: int | None = None) -> Corpus:
        """Opens the first `limit` passages (all by default) of a file, a folder, a pattern or a list of these (`passages.expand`).

        Raises:
          UserError: missing file, a row that is not such a record (file, line and field are named), a duplicate id, no row at all.
        """
        if limit is not None and limit < 1:
            raise UserError(f"limit is {limit}: the corpus needs at least 1 passage")
        files = expand(source)
        state = [FORMAT, *(number for file in files for number in _state(file))]
        key = "\0".join([*(str(file.resolve()) for file in files), str(limit)])
        folder, name = cache_dir() / "corpora", hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()[:24]
        mapped = len(files) == 1 and is_plain(files[0])
        text, offsets = files[0] if mapped else folder / f"{name}.passages.jsonl", folder / f"{name}.offsets"
        table = _load_table(offsets, state) if text.exists() else None
        if table is None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                _scan(files, limit, offsets, state, None if mapped else text)
            except OSError as error:
                where = error.filename or folder
                raise UserError(
                    f"{where}: cannot be written ({error.strerror}); set BRIDGE_JAX_CACHE to a writable folder"
                ) from None
            table = _load_table(offsets, state)
            if table is None:
                raise UserError(
                    f"{source}: the offsets cache {offsets} cannot be read back; set BRIDGE_JAX_CACHE to another folder"
                )
        corpus = cls(files, limit, text, table)
        if mapped and [*corpus._watch.stamp] != state[1:3]:  # the table is of the file as it was before
            raise FileChanged(f"{text}: was changed while it was read; run the same command again when it is whole")
        return corpus

    def __len__(self) -> int:
        return len(self._table.starts)

    def __getitem__(self, row: int) -> Passage:
        return passage_of(self._record(row))

    def __iter__(self) -> Iterator[Passage]:
        return (self[row] for row in range(len(self)))

    def contents(self, row: int) -> str:
        """What the passage tower embeds: the record's `contents`, unchanged, quoted title included, as Search-R1's index does."""
        return contents_of(self._record(row))

    def document(self, row: int) -> dict[str, str]:
        """{"id", "contents"}: what a retrieval server returns."""
        record = self._record(row)
        return {"id": str(record["id"]), "contents": contents_of(record)}

    def row_of(self, passage_id: str) -> int:
        """The row of an id; KeyError when the corpus has no such passage."""
        wanted = _id_hash(passage_id)
        at = int(np.searchsorted(self._table.hashes, wanted))
        while at < len(self) and self._table.hashes[at] == wanted:
            row = int(self._table.order[at])
            if str(self._record(row)["id"]) == passage_id:
                return row
            at += 1
        raise KeyError(passage_id)

    def _record(self, row: int) -> dict:
        row = operator.index(row)
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of a corpus of {len(self)} passages")
        self._watch.check()
        start = int(self._table.starts[row])
        end = self._data.find(b"\n", start)
        try:
            return parse(self._data[start : end if end >= 0 else None], f"row {row}")
        except UserError as error:  # changed, with the old time put back
            where = f"{self._text}, line {_line_of(self._text, start)}"
            raise FileChanged(f"{where}: was changed while it was read ({error}); put the old file back") from None


def _state(file: Path) -> list[int]:
    try:
        with open(file, "rb") as stream:
            stat = os.fstat(stream.fileno())
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror}); give a readable JSON-lines file") from None
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


# Reading once ---------------------------------------------------------------------------------------------------------


def _id_hash(passage_id: str) -> np.uint64:
    digest = hashlib.blake2b(passage_id.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return np.uint64(int.from_bytes(digest, "little"))


def _scan(files: Sequence[Path], limit: int | None, offsets: Path, state: list[int], copy: Path | None) -> None:
    """Reads and checks the files once; writes the table to `offsets`, and the rows to `copy` unless the file is mapped as it is.

    Both appear whole, the table last.
    """
    size = sum(file.stat().st_size for file in files)
    quiet = contextlib.nullcontext(lambda n: None)
    content, rows = hashlib.sha256(), 0
    with contextlib.ExitStack() as stack:
        advance = _in_mebibytes(stack.enter_context(track("reading", size >> 20, "MiB") if size > SHOW_PROGRESS_ABOVE else quiet))
        table = stack.enter_context(_TableWriter(offsets, state))
        text = stack.enter_context(_whole_file(copy)) if copy else None
        for start, passage_id, contents, line in _rows(files, copy is None, advance):
            table.add(start, int(_id_hash(passage_id)))
            one, two = passage_id.encode(), contents.encode()
            content.update(b"%d %d " % (len(one), len(two)))
            content.update(one)
            content.update(two)
            if text is not None:
                text.write(line)
            rows += 1
            if limit is not None and rows >= limit:
                break
        if not rows:
            raise UserError(f"{files[0]}: holds no passage; give a JSON-lines file with one passage a line")
        suspects = table.finish(content.hexdigest())
        if text is not None:
            text.flush()
        _refuse_duplicates(files, Path(text.name) if text is not None else files[0], table.starts(suspects), suspects, copy is None)


def _in_mebibytes(advance):
    """`advance` told bytes, which hears of whole MiB."""
    left = 0

    def add(count: int) -> None:
        nonlocal left
        left += count
        if left >= 1 << 20:
            advance(left >> 20)
            left &= (1 << 20) - 1

    return add


def _rows(files: Sequence[Path], mapped: bool, advance) -> Iterator[tuple[int, str, str, bytes]]:
    """-> (byte offset of the row in the mapped file, id, contents, the row as a line of the copy)."""
    at = 0
    if mapped:
        with open(files[0], "rb") as stream:
            for number, raw in enumerate(stream, 1):
                skip = len(BOM) if number == 1 and raw.startswith(BOM) else 0
                if raw[skip:].strip(b" \t\r\n"):
                    record = parse(raw[skip:], f"{files[0]}, line {number}")
                    yield at + skip, record["id"], contents_of(record), b""
                at += len(raw)
                advance(len(raw))
        return
    for file in files:
        for _, record in read_records(file, advance):
            contents = contents_of(record)
            if "contents" in record and contents is record["contents"]:
                kept = {"id": record["id"], "contents": contents}
            else:
                passage = passage_of(record)
                kept = {"id": passage.id, "title": passage.title, "text": passage.text}
            line = json.dumps(kept, ensure_ascii=False).encode() + b"\n"
            yield at, record["id"], contents, line
            at += len(line)


def _refuse_duplicates(files, text: Path, starts: np.ndarray, rows: np.ndarray, mapped: bool) -> None:
    """UserError when two of the suspect rows (those whose ids have the same hash) have the same id."""
    seen: dict[str, tuple[int, int]] = {}
    with open(text, "rb") as file:
        for start, row in zip(starts.tolist(), rows.tolist()):
            file.seek(start)
            passage_id = str(json.loads(file.readline().decode("utf-8"))["id"])
            if passage_id in seen:
                if mapped:
                    first, second = (f"line {_line_of(text, s)}" for s in (seen[passage_id][0], start))
                    raise UserError(f"{text}, {second}: field 'id' {passage_id!r} is that of {first} too; make ids unique")
                where = ", ".join(dict.fromkeys([str(files[0]), str(files[-1])]))
                raise UserError(
                    f"{where}: field 'id' {passage_id!r} is that of passages {seen[passage_id][1] + 1:,} and {row + 1:,}, counted "
                    "over the files; make ids unique"
                )
            seen[passage_id] = start, row


def _line_of(path: Path, offset: int) -> int:
    line = 1
    with open(path, "rb") as file:
        while offset > 0 and (block := file.read(min(1 << 20, offset))):
            line += block.count(b"\n")
            offset -= len(block)
    return line


# The table: one file, replaced atomically -----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Table:
    """starts [n] int64: byte offset of each row. hashes [n] uint64, sorted, and order [n] int64: the row of each hash."""

    starts: np.ndarray
    hashes: np.ndarray
    order: np.ndarray
    fingerprint: str


def _load_table(file: Path, state: list[int]) -> _Table | None:
    """None when there is no cached table of the files in exactly this state."""
    try:
        with open(file, "rb") as stream:
            header = json.loads(stream.read(HEADER_BYTES).rstrip(b"\0"))
        rows = header["rows"]
        if header["state"] != _digest(state) or file.stat().st_size != HEADER_BYTES + 24 * rows:
            return None
        parts = [np.memmap(file, dtype, "r", HEADER_BYTES + 8 * rows * i, (rows,)) for i, dtype in enumerate(("<i8", "<u8", "<i8"))]
        return _Table(*parts, header["fingerprint"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _digest(state: list[int]) -> str:
    return hashlib.sha256(repr(state).encode()).hexdigest()


class _TableWriter:
    """Writes a table as its rows come. Ids are sorted in runs of RUN_ROWS, then merged by ranges of their hashes."""

    def __init__(self, file: Path, state: list[int]):
        self._file, self._state = file, state
        self._starts, self._hashes = array.array("q"), array.array("Q")
        self._rows = 0
        self._runs: list[int] = []  # rows of each

    def __enter__(self) -> _TableWriter:
        self._stack = contextlib.ExitStack()
        self._out = self._stack.enter_context(_whole_file(self._file))
        self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(dir=self._file.parent)))
        self._sorted = self._stack.enter_context(open(self._folder / "hashes", "w+b"))
        self._order = self._stack.enter_context(open(self._folder / "rows", "w+b"))
        self._out.write(b"\0" * HEADER_BYTES)
        return self

    def __exit__(self, *error) -> None:
        self._stack.__exit__(*error)

    def add(self, start: int, id_hash: int) -> None:
        self._starts.append(start)
        self._hashes.append(id_hash)
        if len(self._starts) == RUN_ROWS:
            self._flush()

    def _flush(self) -> None:
        hashes = np.frombuffer(self._hashes, np.uint64)
        order = np.argsort(hashes, kind="stable")
        self._out.write(self._starts.tobytes())
        self._sorted.write(hashes[order].tobytes())
        self._order.write((order + self._rows).tobytes())
        self._rows += len(hashes)
        self._runs.append(len(hashes))
        self._starts, self._hashes = array.array("q"), array.array("Q")

    def finish(self, fingerprint: str) -> np.ndarray:
        """-> the rows whose hashes another row has too, in order."""
        if self._starts:
            self._flush()
        for stream in (self._sorted, self._order, self._out):
            stream.flush()
        runs = [np.memmap(self._folder / name, dtype, "r") for name, dtype in (("hashes", "<u8"), ("rows", "<i8"))]
        ends = np.cumsum(self._runs)
        cuts = np.linspace(0, 2.0**64, len(ends) + 1)[1:-1].astype(np.uint64)
        places = [[0, *np.searchsorted(runs[0][end - n : end], cuts), n] for end, n in zip(ends, self._runs)]
        suspects = []
        with open(self._folder / "order", "w+b") as merged:
            for i in range(len(ends)):
                pieces = [slice(end - n + p[i], end - n + p[i + 1]) for end, n, p in zip(ends, self._runs, places)]
                hashes, rows = (np.concatenate([part[piece] for piece in pieces]) for part in runs)
                order = np.argsort(hashes, kind="stable")
                hashes, rows = hashes[order], rows[order]
                same = hashes[1:] == hashes[:-1]
                suspects += [rows[1:][same], rows[:-1][same]]
                self._out.write(hashes.tobytes())
                merged.write(rows.tobytes())
            merged.seek(0)
            shutil.copyfileobj(merged, self._out, 1 << 20)
        self._out.seek(0)
        header = {"state": _digest(self._state), "rows": self._rows, "fingerprint": fingerprint}
        self._out.write(json.dumps(header).encode().ljust(HEADER_BYTES, b"\0"))
        self._out.flush()
        return np.unique(np.concatenate(suspects))

    def starts(self, rows: np.ndarray) -> np.ndarray:
        """The offsets of some rows of a finished table."""
        return np.memmap(self._out.name, "<i8", "r", HEADER_BYTES, (self._rows,))[rows]


@contextlib.contextmanager
def _whole_file(file: Path) -> Iterator[BinaryIO]:
    """A file that replaces `file` when all went well and is deleted otherwise."""
    descriptor, temporary = tempfile.mkstemp(dir=file.parent, prefix=file.name)
    os.close(descriptor)
    try:
        with open(temporary, "w+b") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, file)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
