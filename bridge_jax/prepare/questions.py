"""Questions as people keep them (a table, JSON lines) -> checked `Question`s; duplicates, the split, where the answers are."""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import io
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from bridge_jax.data.formats import Question, RowError, parse_flashrag
from bridge_jax.data.qa import read_file
from bridge_jax.errors import UserError
from bridge_jax.objectives.rewards import normalize_answer
from bridge_jax.retrieval.passages import Passage

ANSWERS = ("answer", "answers", "golden_answers")
SEPARATOR = "|"  # between the answers of a table's cell
FAULTS = 8  # rows named in one message


@dataclasses.dataclass(frozen=True)
class Row:
    """A question as its file has it. `question.gold_passage_ids` are documents or passages until `resolve_golds`."""

    question: Question
    line: int


def read_questions(path: Path) -> list[Row]:
    """All rows of a .csv, .tsv or .jsonl file, or of a .parquet file in a public format.

    Columns: `question`; `answer` (one), or `answers` or `golden_answers` (a list; in a table separated by |); and if you have them
    `id`, and `gold`: the documents or passages that hold the answer.

    Raises:
      UserError: naming file, line, field and mend.
    """
    if not path.is_file():
        raise UserError(f"--questions={path}: no such file; give a .csv, .tsv or .jsonl file with columns question and answer")
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        return [Row(question, number) for number, question in enumerate(read_file(path, path.stem), start=1)]
    if suffix not in (".csv", ".tsv", ".jsonl"):
        raise UserError(f"--questions={path}: not one of .csv, .tsv, .jsonl, .parquet; convert it or rename it")
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 at byte {error.start}; save the file as UTF-8") from None
    rows, first, faults = [], {}, []
    for line, record in _objects(text, path) if suffix == ".jsonl" else _table(text, path):
        try:
            question = _question(record, path.stem.lower(), line, in_table=suffix != ".jsonl")
            if question.id in first:
                raise RowError("id", f"'{question.id}' was used on line {first[question.id]} already", "make the ids different")
        except RowError as error:
            faults.append(f"line {line}: {error}")
            continue
        first[question.id] = line
        rows.append(Row(question, line))
    if faults:
        more = f" (and {len(faults) - 1:,} more; {'; '.join(faults[1:FAULTS])})" if len(faults) > 1 else ""
        raise UserError(f"{path}, {faults[0]}{more}")
    if not rows:
        raise UserError(f"{path}: holds no question; give a file with at least two")
    return rows


def _objects(text: str, path: Path) -> Iterator[tuple[int, Mapping]]:
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UserError(f"{path}, line {number}: not JSON ({error}); write one JSON object a line") from None
            if not isinstance(record, dict):
                raise UserError(f"{path}, line {number}: a {type(record).__name__}, not an object; write one JSON object a line")
            yield number, record


def _table(text: str, path: Path) -> Iterator[tuple[int, Mapping]]:
    """Comma, semicolon or tab: whichever gives the first line a column `question`."""
    head = text.split("\n", 1)[0].removesuffix("\r")
    if "\r" in head:
        raise UserError(f"{path}, line 1: lines end with \\r alone; save the file with line ends of Unix or Windows")
    for delimiter in (",", ";", "\t"):
        columns = [name.strip().lower() for name in next(csv.reader([head], delimiter=delimiter), [])]
        if "question" in columns:
            break
    else:
        raise UserError(f"{path}, line 1: no column 'question' in {head.strip()[:80]!r}; name the columns: question,answer")
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        next(reader)
        line = reader.line_num + 1  # a quoted cell may hold line breaks: a row is named by its first line
        for cells in reader:
            if cells:
                if len(cells) != len(columns):
                    mend = "give every column a cell, an empty one where there is nothing"
                    if len(cells) > len(columns):
                        mend = f"put text that holds {delimiter!r} in double quotes"
                    names = f"{len(cells)} cells where the first line names {len(columns)} columns"
                    raise UserError(f"{path}, line {line}: {names}; {mend}")
                yield line, {name: cell for name, cell in zip(columns, cells) if cell.strip()}
            line = reader.line_num + 1
    except csv.Error as error:
        raise UserError(f"{path}, line {reader.line_num}: not a table ({error}); mend the quotes of this line") from None


def _question(record: Mapping, dataset: str, line: int, in_table: bool) -> Question:
    column = next((name for name in ANSWERS if record.get(name) is not None), None)
    if column is None:
        raise RowError(
            "answer", "is missing or empty", f"add a column {', '.join(ANSWERS[:-1])} or {ANSWERS[-1]}, or delete the row"
        )
    answers = _listed(record[column], in_table and column != "answer")
    metadata = record.get("metadata")
    gold = record.get("gold", metadata.get("gold_ids", ()) if isinstance(metadata, Mapping) else ())
    gold = _listed(gold, in_table)
    row = {"id": record.get("id", f"line_{line}"), "question": record.get("question"), "golden_answers": answers}
    try:
        return parse_flashrag(row | {"metadata": {"gold_ids": gold}}, dataset, line)
    except RowError as error:
        names = {"golden_answers": column, "metadata.gold_ids": "gold"}
        field = next((error.field.replace(a, b) for a, b in names.items() if error.field.startswith(a)), error.field)
        raise RowError(field, error.problem, error.mend) from None


def _listed(value, separated: bool):
    """A lone string or number is a list of one; in a table's cell | separates."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(SEPARATOR) if part.strip()] if separated else [value.strip()]
    if isinstance(value, int | float) and not isinstance(value, bool):
        empty = isinstance(value, float) and not math.isfinite(value)  # NaN is a table's empty cell, not an answer
        return value if empty else [str(value)]
    return value


def merge_duplicates(rows: Sequence[Row]) -> tuple[list[Row], list[tuple[int, int]]]:
    """Questions that say the same are one, with the answers of all. -> (rows, [(line, line of the first)])."""
    first: dict[str, Row] = {}
    duplicates = []
    for row in rows:
        key = normalize_answer(row.question.question)
        if key not in first:
            first[key] = row
            continue
        kept, other = first[key].question, row.question
        golds = tuple(dict.fromkeys((*kept.golds, *other.golds)))
        ids = tuple(dict.fromkeys((*kept.gold_passage_ids, *other.gold_passage_ids)))
        first[key] = Row(dataclasses.replace(kept, golds=golds, gold_passage_ids=ids), first[key].line)
        duplicates.append((row.line, first[key].line))
    return list(first.values()), duplicates


def split(rows: Sequence[Row], dev: int) -> tuple[list[Row], list[Row]]:
    """-> (train, dev), each in the file's order. The dev questions are those with the smallest SHA-256 of their text: the same ones
    whatever the order of the rows, and a question is in one part only."""

    def place(row: Row) -> str:
        return hashlib.sha256(normalize_answer(row.question.question).encode()).hexdigest()

    chosen = {row.line for row in sorted(rows, key=place)[:dev]}
    return [row for row in rows if row.line not in chosen], [row for row in rows if row.line in chosen]


class AnswerFinder:
    """Which passages hold an answer, as whole words after the normalisation of the exact match."""

    def __init__(self, passages: Sequence[Passage], rows: Sequence[Row]):
        wanted = {word for row in rows for gold in row.question.golds for word in normalize_answer(gold).split()}
        self._texts = [f" {normalize_answer(f'{passage.title} {passage.text}')} " for passage in passages]
        self._places: dict[str, list[int]] = {word: [] for word in wanted}
        self._in = Counter()  # passages a word occurs in
        for place, text in enumerate(self._texts):
            words = set(text.split())
            self._in.update(words)
            for word in words & wanted:
                self._places[word].append(place)

    def holding(self, question: Question) -> list[int] | None:
        """Rows of the passages; None for an answer that says nothing there (yes, no, or nothing but punctuation)."""
        golds = [gold for gold in map(normalize_answer, question.golds) if gold]
        if not golds or set(golds) <= {"yes", "no"}:
            return None
        found = set()
        for gold in golds:
            rarest = min(gold.split(), key=lambda word: len(self._places[word]))
            found.update(place for place in self._places[rarest] if f" {gold} " in self._texts[place])
        return sorted(found)

    def likeliest(self, question: Question) -> int | None:
        """Of the passages that hold an answer, the one with the most of the question's words, rare words first."""
        held = self.holding(question)
        if not held:
            return None
        words = set(normalize_answer(question.question).split())
        return max(held, key=lambda place: (sum(1 / self._in[w] for w in words if f" {w} " in self._texts[place]), -place))


def resolve_golds(
    row: Row, path: Path, parts: Mapping[str, Sequence[int]], ids: Sequence[str], held: Sequence[int] | None
) -> Question:
    """The gold documents of a row become passages: those of the document that hold an answer, else all of it.

    parts: rows of the passages by document name and by passage id. ids: of all passages. held: rows that hold an answer.
    """
    golds = []
    for name in row.question.gold_passage_ids:
        if name not in parts:
            raise UserError(
                f"{path}, line {row.line}: field 'gold' names {name!r}, which the corpus does not hold; write a file's name below "
                "the corpus folder, or a passage's id"
            )
        golds += [place for place in parts[name] if place in (held or ())] or parts[name]
    return dataclasses.replace(row.question, gold_passage_ids=tuple(dict.fromkeys(ids[place] for place in golds)))
