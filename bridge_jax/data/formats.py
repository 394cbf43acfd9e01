"""One question row, and the pure parsers from each public file format to it.

    flashrag    {id, question, golden_answers: [..], metadata: {gold_ids: [..]}}                jsonl (or parquet)
    search_r1   {question, data_source, reward_model: {ground_truth: {target: [..]}}, ..}       parquet
    verl        {prompt: [{role, content}], reward_model: {ground_truth: "a<|answer_split|>b"}} parquet (DeepResearcher)
    r1_searcher {idx, question, answer}                                                         jsonl

A parser takes a dict and gives a `Question`, or raises `RowError` (field, what is wrong, the mend); the reader in `qa.py` adds file
and line. Golds come as a list, a numpy array (what parquet makes of a list) or one joined string; inside they are a tuple.
Sources: METHOD.md 2 and 7; the file formats of FlashRAG, Search-R1, DeepResearcher and R1-Searcher.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

ANSWER_SEPARATOR = "<|answer_split|>"

# Every spelling of a set's name met in the public files -> the name used in configs, metrics and tables.
ALIASES = {"2wiki": "2wikimultihopqa", "2wikimultihop": "2wikimultihopqa", "tq": "triviaqa", "natural_questions": "nq"}


@dataclass(frozen=True)
class Question:
    """A question with its accepted answers. `gold_passage_ids` is empty where the source does not name the passages."""

    id: str
    question: str
    golds: tuple[str, ...]
    gold_passage_ids: tuple[str, ...]
    dataset: str


class RowError(ValueError):
    """A row cannot be used: `field` has `problem`; `mend` says what to do."""

    def __init__(self, field: str, problem: str, mend: str):
        problem = problem.encode("utf-8", "replace").decode()  # it may quote half a surrogate pair
        super().__init__(f"field '{field}' {problem}; {mend}")
        self.field, self.problem, self.mend = field, problem, mend


def canonical_name(name: str) -> str:
    """'2Wiki' -> '2wikimultihopqa', 'Bamboogle' -> 'bamboogle'; other names stay, in lower case."""
    lower = name.strip().lower()
    return ALIASES.get(lower, lower)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _get(row: Mapping, path: str) -> object:
    """row['a']['b'] for 'a.b'; RowError when a step is missing or is not a mapping."""
    value: object = row
    for key in path.split("."):
        if not isinstance(value, Mapping) or value.get(key) is None:
            raise RowError(path, "is missing", "add it to the row")
        value = value[key]
    return value


def _text(value: object, field: str) -> str:
    if not isinstance(value, str):
        raise RowError(field, f"is {_shown(value)}, not a string", "write it as a string")
    if not value.strip():
        raise RowError(field, "is empty", "fill it or delete the row")
    if any("\ud800" <= char <= "\udfff" for char in value):  # JSON allows a lone surrogate, no file or tokenizer does
        raise RowError(field, "holds half of a surrogate pair", "write the character itself, as UTF-8")
    return value


def _identifier(value: object, field: str) -> str:
    """Ids are strings inside; whole numbers are accepted, since several files number their rows."""
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        return str(value)
    return _text(value, field)


def _items(value: object, field: str) -> list:
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if not isinstance(value, list | tuple):
        raise RowError(field, f"is {_shown(value)}, not a list", 'write it as a list of strings, ["..."]')
    return list(value)


def _golds(value: object, field: str) -> tuple[str, ...]:
    items = _items(value, field)
    if not items:
        raise RowError(field, "is an empty list", "give at least one answer or delete the row")
    return tuple(_text(item, f"{field}[{i}]") for i, item in enumerate(items))


def _question_of(row: Mapping) -> str:
    """The `question` column, else the last user message; of an instruction prompt only what follows 'Question:'."""
    if row.get("question") is not None:
        return _text(row["question"], "question")
    messages = _items(_get(row, "prompt"), "prompt")
    users = [m for m in messages if isinstance(m, Mapping) and m.get("role") == "user"]
    if not users:
        raise RowError("prompt", "has no message of role 'user'", "add one, or a column 'question'")
    content = _text(users[-1].get("content"), "prompt.content")
    if "<answer>" not in content:
        return content
    _, marker, question = content.rpartition("Question:")
    if not marker:
        raise RowError("prompt", "is an instruction without 'Question:'", "add a column 'question'")
    return _text(question.strip(), "prompt.content")


def _row_id(row: Mapping, number: int) -> str:
    if row.get("id") is not None:
        return _identifier(row["id"], "id")
    extra = row.get("extra_info")
    if isinstance(extra, Mapping) and extra.get("index") is not None:
        return _identifier(extra["index"], "extra_info.index")
    return f"row_{number}"


def _dataset_of(row: Mapping, dataset: str) -> str:
    if row.get("data_source") is None:
        return canonical_name(dataset)
    return canonical_name(_text(row["data_source"], "data_source"))


def parse_flashrag(row: Mapping, dataset: str, number: int) -> Question:
    """`dataset` names the set the file belongs to; `number` is the row's number (unused: this format has ids)."""
    metadata = row.get("metadata")
    gold_ids: tuple[str, ...] = ()
    if isinstance(metadata, Mapping) and metadata.get("gold_ids") is not None:
        items = _items(metadata["gold_ids"], "metadata.gold_ids")
        gold_ids = tuple(_identifier(item, f"metadata.gold_ids[{i}]") for i, item in enumerate(items))
    return Question(
        id=_identifier(_get(row, "id"), "id"),
        question=_text(_get(row, "question"), "question"),
        golds=_golds(_get(row, "golden_answers"), "golden_answers"),
        gold_passage_ids=tuple(dict.fromkeys(gold_ids)),  # two gold paragraphs can be one passage
        dataset=_dataset_of(row, dataset),
    )


def parse_search_r1(row: Mapping, dataset: str, number: int) -> Question:
    target = _get(row, "reward_model.ground_truth.target")
    golds = [target] if isinstance(target, str) else target
    return Question(
        _row_id(row, number), _question_of(row), _golds(golds, "reward_model.ground_truth.target"), (), _dataset_of(row, dataset)
    )


def parse_verl(row: Mapping, dataset: str, number: int) -> Question:
    truth = _text(_get(row, "reward_model.ground_truth"), "reward_model.ground_truth")
    golds = _golds(truth.split(ANSWER_SEPARATOR), "reward_model.ground_truth")
    return Question(_row_id(row, number), _question_of(row), golds, (), _dataset_of(row, dataset))


def parse_r1_searcher(row: Mapping, dataset: str, number: int) -> Question:
    answer = _get(row, "answer")
    golds = [answer] if isinstance(answer, str) else answer
    return Question(
        id=_identifier(_get(row, "idx"), "idx"),
        question=_text(_get(row, "question"), "question"),
        golds=_golds(golds, "answer"),
        gold_passage_ids=(),
        dataset=canonical_name(dataset),
    )


PARSERS: dict[str, Callable[[Mapping, str, int], Question]] = {
    "flashrag": parse_flashrag,
    "search_r1": parse_search_r1,
    "verl": parse_verl,
    "r1_searcher": parse_r1_searcher,
}


def detect_format(row: Mapping) -> str:
    """The format of a file, from the columns of its first row."""
    if row.get("reward_model") is not None:
        model = row["reward_model"]
        joined = isinstance(model, Mapping) and isinstance(model.get("ground_truth"), str)
        return "verl" if joined else "search_r1"
    if "golden_answers" in row:
        return "flashrag"
    if "answer" in row:
        return "r1_searcher"
    found = ", ".join(sorted(map(str, row))) or "none"
    raise RowError("golden_answers", f"is missing (columns: {found})", "give 'golden_answers', 'answer' or 'reward_model'")
