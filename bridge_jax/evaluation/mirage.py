"""Predictions in MIRAGE's own file layout, so that its evaluator can read them.

    <folder>/<set>/rag_<k>/<llm>/<corpus>/<retriever>/test_<id>.json     (dev_<id>.json for medmcqa)
    <folder>/<set>/cot/<llm>/test_<id>.json                              where nothing is searched

Each file holds a list of one text, JSON of {"step_by_step_thinking", "answer_choice"}. Its evaluator reads an answer that names no
option as "A"; ours counts it as wrong. Its accuracy is therefore higher by the unparseable answers whose right option is A.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

SPLITS = {"medmcqa": "dev"}  # the others: test


def write(
    folder: Path, predictions: Mapping[str, Iterable[Mapping]], llm: str, search: tuple[int, str, str] | None = None
) -> list[Path]:
    """Write the multiple-choice predictions.

    Args:
      predictions: {set: records}; other sets are left out.
      llm: the evaluator's --llm_name. search: (snippets shown, its --corpus_name, its --retriever_name); None: without retrieval.

    Returns:
      One folder a set.
    """
    written = []
    for each in predictions.values():
        records = iter(each)
        first = next(records, None)
        if first is None or "choice" not in first:
            continue
        kind = [f"rag_{search[0]}", *_parts(llm), _part(search[1]), _part(search[2])] if search else ["cot", *_parts(llm)]
        place = Path(folder, first["dataset"], *kind)
        place.mkdir(parents=True, exist_ok=True)
        split = SPLITS.get(first["dataset"], "test")
        for record in itertools.chain([first], records):
            path = place / f"{split}_{_part(record['id'])}.json"
            path.write_text(json.dumps([_answer(record)]), encoding="utf-8")
        written.append(place)
    return written


def _answer(record: Mapping) -> str:
    thinking = " ".join(step["text"].strip() for step in record["trace"] if step["kind"] == "generated")
    choice = record["choice"] or record["prediction"] or ""
    return json.dumps({"step_by_step_thinking": thinking, "answer_choice": choice}, ensure_ascii=False)


def _parts(name: str) -> list[str]:
    """ "OpenAI/gpt-4" is two folders, as in MIRAGE's own results."""
    return [_part(part) for part in name.split("/") if part] or ["model"]


def _part(name: str) -> str:
    """A name as one part of a path."""
    return re.sub(r"[^\w.@+-]+", "_", name).lstrip(".") or "_"
