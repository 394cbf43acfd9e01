r"""The passages: a JSON-lines file, memory-mapped, with an offsets table so that any row is read in O(1).

One line is one passage in Search-R1's wiki-18 record, `{"id": "...", "contents": "\"Title\"\ntext"}`. The file is read once,
checked row by row, and the offsets are cached; afterwards a corpus of any size opens at once and holds no Python object per row.

Lines end at `\n` and nowhere else: U+2028, U+0085 or form feeds inside a passage are part of its text.
"""

from __future__ import annotations

import array
import contextlib
import hashlib
import json
import mmap
import operator
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bridge_jax.errors import UserError
from bridge_jax.retrieval.progress import track

FORMAT = 1
HEADER_BYTES = 4096
BOM = b"\xef\xbb\xbf"
SHOW_PROGRESS_ABOVE = 256 << 20


@dataclass(frozen=True)
class Passage:
    """One passage. `title` is empty when the record carries none."""

    id: str
    title: str
    text: str


class Corpus:
    """Read-only sequence of passages. Use `Corpus.open`.

    Attributes:
      path: the JSON-lines file.
      fingerprint: sha256 over the (id, contents) of all rows, in order; independent of spacing and of other fields.
    """

    def __init__(self, path: Path, data: mmap.mmap, table: _Table):
        self.path = path
        self.fingerprint: str = table.fingerprint
        self._data = data
        self._table = table

    @classmethod
    def open(cls, path: str | os.PathLike, limit: int | None = None) -> Corpus:
        """Opens the first `limit` passages (all by default) of a JSON-lines file.

        Raises:
          UserError: missing file, a row that is not such a record (file, line and field are named), a duplicate id, no row at all.
        """
        path = Path(path).expanduser()
        if limit is not None and limit < 1:
            raise UserError(f"limit is {limit}: the corpus needs at least 1 passage")
        try:
            with open(path, "rb") as file:
                stat = os.fstat(file.fileno())
                if stat.st_size == 0:
                    raise UserError(f"{path}: holds no passage; give a JSON-lines file with one passage a line")
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except IsADirectoryError:
            raise UserError(f"{path}: is a folder; give the JSON-lines file of the passages") from None
        except FileNotFoundError:
            raise UserError(f"{path}: no such corpus file; give a JSON-lines file with one passage a line") from None
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror}); give a readable JSON-lines file") from None
        state = [FORMAT, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]
        cached = _cache_file(path, limit)
        table = _load_table(cached, state)
        if table is None:
            _save_table(cached, state, _scan(path, limit))
            table = _load_table(cached, state)
            if table is None:
                raise UserError(f"{path}: the offsets cache {cached} cannot be read back; set BRIDGE_JAX_CACHE to another folder")
        return cls(path, data, table)

    def __len__(self) -> int:
        return len(self._table.starts)

    def __getitem__(self, row: int) -> Passage:
        record = self._record(row)
        title, text = split_contents(record["contents"])
        return Passage(str(record["id"]), title, text)

    def __iter__(self) -> Iterator[Passage]:
        return (self[row] for row in range(len(self)))

    def contents(self, row: int) -> str:
        """The record's `contents`, unchanged: what the passage tower embeds, quoted title included, as Search-R1's index does."""
        return self._record(row)["contents"]

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
        start = int(self._table.starts[row])
        end = self._data.find(b"\n", start)
        return json.loads(self._data[start : end if end >= 0 else None].decode("utf-8"))


def split_contents(contents: str) -> tuple[str, str]:
    r"""`'"Title"\ntext'` -> (title, text). Contents that do not begin with a quoted line have no title."""
    first, _, rest = contents.partition("\n")
    first = first.removesuffix("\r")
    if len(first) >= 2 and first[0] == first[-1] == '"':
        return first[1:-1], rest
    return "", contents


# The table of a corpus ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Table:
    """starts [n] int64: byte offset of each row. hashes [n] uint64, sorted, and order [n] int64: the row of each hash."""

    starts: np.ndarray
    hashes: np.ndarray
    order: np.ndarray
    fingerprint: str


def _id_hash(passage_id: str) -> np.uint64:
    digest = hashlib.blake2b(passage_id.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return np.uint64(int.from_bytes(digest, "little"))


def _parse(raw: bytes, where: str) -> tuple[bytes, bytes]:
    """One line -> (id, contents) as UTF-8. `where` is `file, line n`."""
    try:
        record = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not UTF-8 at byte {error.start}; convert the file to UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f'{where}: not JSON ({error}); every line must be {{"id": ..., "contents": ...}}') from None
    if not isinstance(record, dict):
        raise UserError(f'{where}: not a JSON object; every line must be {{"id": ..., "contents": ...}}')
    values = []
    for field in ("id", "contents"):
        if field not in record:
            raise UserError(f"{where}: field {field!r} is missing; every passage needs 'id' and 'contents'")
        value = record[field]
        if field == "id" and type(value) is int:
            value = str(value)
        if not isinstance(value, str):
            raise UserError(f"{where}: field {field!r} is {json.dumps(value)[:40]}; it must be a string")
        if not value.strip():
            raise UserError(f"{where}: field {field!r} is empty; fill it or delete the line")
        try:
            values.append(value.encode("utf-8"))
        except UnicodeEncodeError:
            raise UserError(f"{where}: field {field!r} holds half a surrogate pair; write real Unicode characters") from None
    return values[0], values[1]


def _scan(path: Path, limit: int | None) -> _Table:
    """Reads and checks the file once. Memory: 16 bytes a row."""
    starts, hashes, content = array.array("q"), array.array("Q"), hashlib.sha256()
    size = path.stat().st_size
    quiet = contextlib.nullcontext(lambda n: None)
    with open(path, "rb") as file, track("reading", size >> 20, "MiB") if size > SHOW_PROGRESS_ABOVE else quiet as advance:
        at = shown = 0
        for line, raw in enumerate(file, 1):
            skip = len(BOM) if line == 1 and raw.startswith(BOM) else 0
            if line == 1 and raw.startswith(b"\x1f\x8b"):
                raise UserError(f"{path}: is gzip-compressed; unpack it with gunzip first")
            if raw[skip:].strip(b" \t\r\n"):
                passage_id, contents = _parse(raw[skip:], f"{path}, line {line}")
                starts.append(at + skip)
                hashes.append(int.from_bytes(hashlib.blake2b(passage_id, digest_size=8).digest(), "little"))
                content.update(b"%d %d " % (len(passage_id), len(contents)))
                content.update(passage_id)
                content.update(contents)
            at += len(raw)
            if (at >> 20) > shown:
                advance((at >> 20) - shown)
                shown = at >> 20
            if limit is not None and len(starts) >= limit:
                break
    if not starts:
        raise UserError(f"{path}: holds no passage; give a JSON-lines file with one passage a line")
    starts, hashes = np.frombuffer(starts, np.int64), np.frombuffer(hashes, np.uint64)
    order = np.argsort(hashes, kind="stable")
    table = _Table(starts, hashes[order], order, content.hexdigest())
    _refuse_duplicates(path, table)
    return table


def _refuse_duplicates(path: Path, table: _Table) -> None:
    same = table.hashes[1:] == table.hashes[:-1]
    suspects = np.unique(np.concatenate([table.order[1:][same], table.order[:-1][same]]))
    seen: dict[str, int] = {}
    with open(path, "rb") as file:
        for row in suspects:
            start = int(table.starts[row])
            file.seek(start)
            passage_id = str(json.loads(file.readline().decode("utf-8"))["id"])
            if passage_id in seen:
                first, second = (_line_of(path, s) for s in (seen[passage_id], start))
                raise UserError(f"{path}, line {second}: field 'id' {passage_id!r} is that of line {first} too; make ids unique")
            seen[passage_id] = start


def _line_of(path: Path, offset: int) -> int:
    line = 1
    with open(path, "rb") as file:
        while offset > 0 and (block := file.read(min(1 << 20, offset))):
            line += block.count(b"\n")
            offset -= len(block)
    return line


# Its cache: one file, replaced atomically -----------------------------------------------------------------------------


def _cache_file(path: Path, limit: int | None) -> Path:
    home = Path(os.environ.get("BRIDGE_JAX_CACHE") or "~/.cache/bridge_jax").expanduser()
    key = hashlib.sha256(f"{path.resolve()}\0{limit}".encode("utf-8", "surrogateescape")).hexdigest()[:24]
    return home / "corpora" / f"{key}.offsets"


def _load_table(file: Path, state: list[int]) -> _Table | None:
    """None when there is no cached table of the file in exactly this state."""
    try:
        with open(file, "rb") as stream:
            header = json.loads(stream.read(HEADER_BYTES).rstrip(b"\0"))
        rows = header["rows"]
        if header["state"] != state or file.stat().st_size != HEADER_BYTES + 24 * rows:
            return None
        parts = [np.memmap(file, dtype, "r", HEADER_BYTES + 8 * rows * i, (rows,)) for i, dtype in enumerate(("<i8", "<u8", "<i8"))]
        return _Table(*parts, header["fingerprint"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _save_table(file: Path, state: list[int], table: _Table) -> None:
    header = json.dumps({"state": state, "rows": len(table.starts), "fingerprint": table.fingerprint}).encode()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=file.parent, prefix=file.name)
        try:
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(header.ljust(HEADER_BYTES, b"\0"))
                for part, dtype in ((table.starts, "<i8"), (table.hashes, "<u8"), (table.order, "<i8")):
                    stream.write(np.ascontiguousarray(part, dtype).data)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(temporary, file)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise UserError(f"{file.parent}: cannot be written ({error.strerror}); set BRIDGE_JAX_CACHE to a writable folder") from None
