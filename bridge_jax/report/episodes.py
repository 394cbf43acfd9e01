"""A line of `rollouts/step_*.jsonl`, or a prediction of `eval/step_*.json`, as an episode of the report: checked and rounded.

Other tools may have touched both kinds of file: a line that lacks something, or holds something else there, is no episode, and the
error says why.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

KINDS = ("generated", "information", "corrective", "fault", "tool")  # of the parts of a trace


class Search(NamedTuple):
    """One executed search; C candidates, best first."""

    query: str
    error: str | None  # why its passages could not be shown
    credit: str | None  # which likelihood l is: "answer", "next_action"; None: not scored
    span: int | None  # the sample whose action was scored, for "next_action"
    shown: int  # the first so many candidates were read by the policy
    documents: list[tuple[str, str]]  # C (id, title); title "" where it is not known
    gold: list[int]  # ranks from 0 of gold passages
    score: list[float | None]
    p: list[float | None]
    l: list[float | None] | None  # noqa: E741 - the method's name
    w: list[float | None] | None


class Episode(NamedTuple):
    id: str
    dataset: str
    question: str
    golds: list[str]
    sample: int
    reason: str
    reward: float
    advantage: float | None  # None in an evaluation
    answer: str | None
    trace: list[tuple[int, str]]  # (number of its kind in KINDS, text)
    searches: list[Search]


def from_rollout(row: Any) -> Episode:
    """Raises ValueError, in a few words, where the row is no rollout."""
    turns = [_turn(turn) for turn in _field(row, "turns", list)]
    return Episode(
        *_head(row),
        sample=_field(row, "sample", int),
        reason=_field(row, "reason", str),
        reward=_number(row, "reward"),
        advantage=_number(row, "advantage"),
        answer=_maybe(row, "answer", str),
        trace=_trace(row),
        searches=turns,
    )


def from_prediction(row: Any, tau: float, titles: Mapping[str, str]) -> Episode:
    """The same of an evaluation, which keeps no p: that is softmax(scores / tau). titles: of passages by id, where known."""
    turns, all_turns = [], _field(row, "turns", list)
    golds = set(map(str, _maybe(row, "gold_passage_ids", list) or ()))
    for turn in all_turns:
        ids = [str(id) for id in _field(turn, "ids", list)]
        scores = [_finite(score) for score in _field(turn, "scores", list)]
        if len(ids) != len(scores):
            raise ValueError("a search has more ids than scores, or fewer")
        turns.append(
            Search(
                query=_field(turn, "query", str),
                error=_maybe(turn, "error", str),
                credit=None,
                span=None,
                shown=_field(turn, "shown", int),
                documents=[(id, titles.get(id, "")) for id in ids],
                gold=[rank for rank, id in enumerate(ids) if id in golds],
                score=_rounded(scores),
                p=_rounded(_softmax(scores, tau)),
                l=None,
                w=None,
            )
        )
    return Episode(
        *_head(row),
        sample=0,
        reason=_field(row, "reason", str),
        reward=_number(row, "em"),
        advantage=None,
        answer=_maybe(row, "prediction", str),
        trace=_trace(row),
        searches=turns,
    )


def _head(row: Any) -> tuple[str, str, str, list[str]]:
    golds = [gold for gold in _field(row, "golds", list) if isinstance(gold, str)]
    return str(row.get("id", "")), str(row.get("dataset", "")), _field(row, "question", str), golds


def _trace(row: Any) -> list[tuple[int, str]]:
    """An evaluation of another generator keeps none."""
    parts = []
    for part in _maybe(row, "trace", list) or ():
        kind = _field(part, "kind", str)
        if kind not in KINDS:
            raise ValueError(f"kind {kind!r} is none of {', '.join(KINDS)}")
        parts.append((KINDS.index(kind), _field(part, "text", str)))
    return parts


def _turn(turn: Any) -> Search:
    documents = _field(turn, "documents", list)
    scored = bool(turn.get("scored")) and all(isinstance(found, dict) and "w" in found for found in documents)

    def column(name: str, digits: int) -> list[float | None]:
        return _rounded([_finite(found.get(name)) for found in documents], digits)

    named = [(str(_field(found, "id", (str, int))), _field(found, "title", str)) for found in documents]
    return Search(
        query=_field(turn, "query", str),
        error=_maybe(turn, "error", str),
        credit=(_maybe(turn, "credit", str) or "answer") if scored else None,
        span=_maybe(turn, "span", int) if scored else None,
        shown=sum(bool(found.get("shown")) for found in documents),
        documents=named,
        gold=[rank for rank, found in enumerate(documents) if found.get("gold")],
        score=column("score", 3),
        p=column("p", 3),
        l=column("l", 1) if scored else None,
        w=column("w", 3) if scored else None,
    )


def _field(row: Any, name: str, kind: type | tuple[type, ...]) -> Any:
    if not isinstance(row, dict):
        raise ValueError(f"{type(row).__name__} instead of an object with {name!r}")
    if name not in row:
        raise ValueError(f"{name!r} is missing")
    if not isinstance(row[name], kind):
        raise ValueError(f"{name!r} is a {type(row[name]).__name__}")
    return row[name]


def _maybe(row: Mapping, name: str, kind: type) -> Any:
    return None if row.get(name) is None else _field(row, name, kind)


def _number(row: Any, name: str) -> float:
    value = _finite(_field(row, name, (int, float)))
    return 0.0 if value is None else round(value, 4)


def _finite(value: Any) -> float | None:
    try:
        return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
    except OverflowError:  # a whole number of 400 digits
        return None


def _rounded(values: list[float | None], digits: int = 3) -> list[float | None]:
    """Whole numbers without a point: `0` is a third of `0.0`."""
    found = [None if value is None else round(value, digits) for value in values]
    return [int(value) if value is not None and value == int(value) else value for value in found]


def _softmax(scores: list[float | None], tau: float) -> list[float | None]:
    known = [score for score in scores if score is not None]
    if not known:
        return scores
    top = max(known)
    weights = [None if score is None else math.exp((score - top) / tau) for score in scores]
    total = sum(weight for weight in weights if weight is not None)
    return [None if weight is None else weight / total for weight in weights]
