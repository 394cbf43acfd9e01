r"""Passages as files hold them: one record a line of JSON, or a DPR table; plain or gzip-compressed; one file or many.

A record is a JSON object of one of three forms. `contents` is what the passage tower embeds, as Search-R1's index does:

    {"id", "contents": "\"Title\"\ntext"}      wiki-18; contents without a quoted first line have no title
    {"id", "title", "content"}                 a MedRAG chunk (PubMed, Textbooks, StatPearls, Wikipedia); its "contents" is not read
    {"id", "title", "text"}                    DPR's columns, and what corpora of several files are kept as

Lines end at `\n` and nowhere else: U+2028, U+0085 or form feeds inside a passage are part of its text.
"""

from __future__ import annotations

import csv
import glob
import gzip
import io
import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bridge_jax.errors import UserError

BOM = b"\xef\xbb\xbf"
SUFFIXES = (".jsonl", ".jsonl.gz", ".tsv", ".tsv.gz")
COLUMNS = ["id", "text", "title"]  # of DPR's psgs_w100.tsv

csv.field_size_limit(1 << 30)  # the default, 128 kB, is less than a long passage


@dataclass(frozen=True)
class Passage:
    """One passage. `title` is empty when the record carries none."""

    id: str
    title: str
    text: str


def passage_of(record: Mapping) -> Passage:
    """A checked record -> its passage."""
    if (text := _own_text(record)) is not None:
        return Passage(str(record["id"]), record["title"], text)
    return Passage(str(record["id"]), *split_contents(record["contents"]))


def contents_of(record: Mapping) -> str:
    r"""A checked record -> what is embedded: wiki-18's contents unchanged, others in its form (without a title the text alone)."""
    if (text := _own_text(record)) is not None:
        return f'"{record["title"]}"\n{text}' if record["title"] else text
    return record["contents"]


def _own_text(record: Mapping) -> str | None:
    """The text of a record that keeps title and text apart, else None."""
    if "title" in record and "content" in record:
        return record["content"]
    return record["text"] if "text" in record and "contents" not in record else None


def split_contents(contents: str) -> tuple[str, str]:
    r"""`'"Title"\ntext'` -> (title, text). Contents that do not begin with a quoted line have no title."""
    first, _, rest = contents.partition("\n")
    first = first.removesuffix("\r")
    if len(first) >= 2 and first[0] == first[-1] == '"':
        return first[1:-1], rest
    return "", contents


def parse(raw: bytes, where: str) -> dict:
    """One line -> a checked record, its id a string. `where` is `file, line n`.

    Raises:
      UserError: not UTF-8, not a JSON object, a field that is missing, empty or no string.
    """
    try:
        record = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not UTF-8 at byte {error.start}; convert the file to UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f'{where}: not JSON ({error}); every line must be {{"id": ..., "contents": ...}}') from None
    if not isinstance(record, dict):
        raise UserError(f'{where}: not a JSON object; every line must be {{"id": ..., "contents": ...}}')
    return _check(record, where)


def _check(record: dict, where: str) -> dict:
    fields: tuple[str, ...]
    if "title" in record and "content" in record:
        fields = ("id", "title", "content")
    elif "text" in record and "contents" not in record:
        fields = ("id", "title", "text")
    else:
        fields = ("id", "contents")
    for field in fields:
        if field not in record:
            raise UserError(f"{where}: field {field!r} is missing; every passage needs 'id' and 'contents' (or 'title' and 'text')")
        value = record[field]
        if field == "id" and type(value) is int:
            value = record[field] = str(value)
        if not isinstance(value, str):
            raise UserError(f"{where}: field {field!r} is {json.dumps(value)[:40]}; it must be a string")
        if field != "title" and not value.strip() and not (len(fields) == 3 and field != "id" and record["title"]):
            raise UserError(f"{where}: field {field!r} is empty; fill it or delete the line")
        if not value.isascii():
            try:
                value.encode("utf-8")
            except UnicodeEncodeError:
                raise UserError(f"{where}: field {field!r} holds half a surrogate pair; write real Unicode characters") from None
    return record


# Files ----------------------------------------------------------------------------------------------------------------


def expand(corpus: str | os.PathLike | Sequence[str | os.PathLike]) -> list[Path]:
    """The files of a corpus: a file, a folder of them, a pattern such as `chunk/*.jsonl.gz`, or several of these, in that order.

    Files of a folder or a pattern come in the order of their names.

    Raises:
      UserError: nothing there.
    """
    if not isinstance(corpus, str | os.PathLike):
        files = [file for part in corpus for file in expand(part)]
        if not files:
            raise UserError("the corpus names no file; give a JSON-lines file with one passage a line")
        return files
    path = Path(corpus).expanduser()
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.name.endswith(SUFFIXES) and file.is_file())
        if not files:
            raise UserError(f"{path}: is a folder without a {', '.join(SUFFIXES)} file; give the files of the passages")
        return files
    if not path.exists() and any(c in str(path) for c in "*?["):
        files = sorted(file for file in map(Path, glob.glob(str(path))) if file.is_file())
        if not files:
            raise UserError(f"{path}: no file matches; give a JSON-lines file with one passage a line")
        return files
    if not path.exists():
        raise UserError(f"{path}: no such corpus file; give a JSON-lines file with one passage a line")
    return [path]


def is_plain(file: Path) -> bool:
    """Whether the file holds records as they are: it can be mapped, and needs no copy."""
    return file.suffix != ".tsv" and not _is_gzip(file)


def _is_gzip(file: Path) -> bool:
    with open(file, "rb") as stream:
        return stream.read(2) == b"\x1f\x8b"


def read_records(file: Path, advance=lambda n: None) -> Iterator[tuple[str, dict]]:
    """Streams a file's checked records as (where, record). `advance(bytes)` is told how far the file has been read.

    Raises:
      UserError: as `parse`; a table without the right columns; a damaged gzip file.
    """
    table = file.name.removesuffix(".gz").endswith(".tsv")
    with open(file, "rb") as raw:
        stream = gzip.GzipFile(fileobj=raw) if _is_gzip(file) else raw
        at = 0
        try:
            for where, record in _table(stream, file) if table else _lines(stream, file):
                yield where, record
                if (now := raw.tell()) - at >= 1 << 20:
                    advance(now - at)
                    at = now
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise UserError(f"{file}: damaged gzip file ({error}); fetch it again") from None
        advance(file.stat().st_size - at)


def _lines(stream, file: Path) -> Iterator[tuple[str, dict]]:
    for number, raw in enumerate(stream, 1):
        if number == 1:
            raw = raw.removeprefix(BOM)
        if raw.strip(b" \t\r\n"):
            where = f"{file}, line {number}"
            yield where, parse(raw, where)


def _table(stream, file: Path) -> Iterator[tuple[str, dict]]:
    """DPR's table: tab-separated, quoted as csv does, columns id, text, title unless its first line says otherwise."""
    reader = csv.reader(io.TextIOWrapper(stream, encoding="utf-8-sig", newline="\n"), delimiter="\t")
    columns = COLUMNS
    try:
        for number, row in enumerate(reader):
            where = f"{file}, line {reader.line_num}"
            if number == 0 and sorted(row) == sorted(COLUMNS):
                columns = row
                continue
            if not row:
                continue
            if len(row) != len(columns):
                raise UserError(f"{where}: {len(row)} columns where {len(columns)} belong ({', '.join(columns)}); mend the line")
            yield where, _check(dict(zip(columns, row)), where)
    except csv.Error as error:
        raise UserError(f"{file}, line {reader.line_num}: not a tab-separated table ({error}); mend the line") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: not UTF-8 after line {reader.line_num} ({error.reason}); convert the file to UTF-8") from None
