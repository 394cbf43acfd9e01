"""MIRAGE: five medical multiple-choice sets (METHOD.md 10).

    load("mirage")                     every set of $BRIDGE_JAX_DATA/mirage/benchmark.json (or $BRIDGE_JAX_DATA/benchmark.json)
    load("mirage/medqa")               one of them
    load("data/benchmark.json")        the same by file; "data/benchmark.json/medqa" for one set

The file is MIRAGE's own: {set: {id: {"question", "options": {"A": text, ..}, "answer": letter [, "PMID": [..]]}}}. The options are
shown to whoever answers (`asked`) and never reach a retriever of ours: a query of ours is `question.question` alone.
"""

from __future__ import annotations

import difflib
import json
import os
from dataclasses import dataclass
from pathlib import Path

from bridge_jax.data.formats import Question
from bridge_jax.errors import UserError

# In the order of the benchmark's own evaluator, with its sizes.
TASKS = {"mmlu": 1089, "medqa": 1273, "medmcqa": 4183, "pubmedqa": 500, "bioasq": 618}
FILE = "benchmark.json"
NAME = "mirage"


@dataclass(frozen=True)
class MedicalQuestion(Question):
    """`golds` holds the text of the right option, `letter` its letter; `options` are (letter, text), in the file's order."""

    options: tuple[tuple[str, str], ...] = ()
    letter: str = ""


def asked(question: Question) -> str:
    """What is put before the one who answers: the question, and its options where it has some."""
    if not isinstance(question, MedicalQuestion):
        return question.question
    options = "\n".join(f"{letter}. {text}" for letter, text in question.options)
    return f"{question.question}\nOptions:\n{options}\nThe answer is the letter of one option."


# ---- reading ---------------------------------------------------------------------------------------------------------------------


def is_spec(spec: str) -> bool:
    """Whether `load` reads it: "mirage[/set]", or a .json file with an optional /set behind it."""
    head, _, tail = spec.rpartition("/")
    return spec == NAME or head == NAME or spec.endswith(".json") or (head.endswith(".json") and tail in TASKS)


def load(spec: str, limit: int | None = None) -> dict[str, list[MedicalQuestion]]:
    """{set: its questions, the first `limit` in the order of their ids (MIRAGE's own)}.

    Raises:
      UserError: no such file or set, or an entry that is not such a question, named by file, set, id and field.
    """
    path, wanted = _locate(spec)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; check the file and its permissions") from error
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}); give MIRAGE's benchmark.json") from error
    if not isinstance(content, dict) or not content or not all(isinstance(entries, dict) for entries in content.values()):
        raise UserError(f"{path} is not of MIRAGE's layout {{set: {{id: question}}}}; give its benchmark.json")
    if wanted and wanted not in content:
        raise UserError(f"{path} has no set '{wanted}'; it has {', '.join(content)}")
    known = [name for name in TASKS if name in content] or list(content)
    names = [wanted] if wanted else known
    sets = {}
    for name in names:
        ids = sorted(content[name])[: limit or None]
        sets[name] = [_question(content[name][id], id, name, f"{path}, {name} {id}") for id in ids]
        if not sets[name]:
            raise UserError(f"{path}: set '{name}' is empty; leave it out")
    return sets


def _locate(spec: str) -> tuple[Path, str]:
    head, _, tail = spec.rpartition("/")
    if spec == NAME or head == NAME:
        name = tail if head == NAME else ""
        if name and name not in TASKS:
            near = difflib.get_close_matches(name, TASKS, n=1)
            hint = f"did you mean '{NAME}/{near[0]}'" if near else f"its sets are {', '.join(TASKS)}"
            raise UserError(f"no set '{spec}'; {hint}")
        root = os.environ.get("BRIDGE_JAX_DATA")
        places = [Path(root).expanduser() / part for part in (f"{NAME}/{FILE}", FILE)] if root else []
        found = [path for path in places if path.is_file()]
        if not found:
            where = f"neither {places[0]} nor {places[1]} is there" if root else "BRIDGE_JAX_DATA is not set"
            raise UserError(f"'{spec}': {where}; put MIRAGE's {FILE} there, or name the file")
        return found[0], name
    path, name = (Path(head), tail) if head.endswith(".json") else (Path(spec), "")
    path = path.expanduser()
    if not path.is_file():
        raise UserError(f"no question file {path}; give MIRAGE's {FILE}")
    return path, name


def _question(entry: object, id: str, dataset: str, where: str) -> MedicalQuestion:
    if not isinstance(entry, dict):
        raise UserError(f"{where}: is no object; each question needs 'question', 'options' and 'answer'")
    question, options, answer = (entry.get(field) for field in ("question", "options", "answer"))
    if not isinstance(question, str) or not question.strip():
        raise UserError(f"{where}: field 'question' is {question!r}; write it as a string")
    if not isinstance(options, dict) or len(options) < 2 or not all(
        isinstance(text, str) and text.strip() and len(letter) == 1 and letter.isupper() for letter, text in options.items()
    ):  # fmt: skip
        raise UserError(f"{where}: field 'options' is {str(options)[:60]}; write it as an object of letters and texts")
    if answer not in options:
        raise UserError(f"{where}: field 'answer' is {answer!r}, not one of {', '.join(options)}")
    sources = entry.get("PMID") or []
    if not isinstance(sources, list):
        raise UserError(f"{where}: field 'PMID' is {sources!r}; write it as a list of numbers")
    return MedicalQuestion(
        id=id,
        question=question,
        golds=(options[answer],),
        gold_passage_ids=tuple(f"PMID{source}" for source in sources),
        dataset=dataset,
        options=tuple(options.items()),
        letter=answer,
    )
