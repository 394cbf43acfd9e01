"""The mini world: a closed encyclopaedia of 12,190 short passages with questions, for experiments that take minutes.

    corpus_path()                       the passages as jsonl ({id, contents}), written to the cache on first use
    questions_path("two_hop", "test")   a set's split as jsonl in FlashRAG's columns

Everything is generated: the same bytes on every machine (`questions.SETS` says what the sets are). The policy and the encoder that
go with it, `mini-policy` and `mini-encoder`, were trained by tools/build_mini.py on worlds of other seeds: they know the language
and no fact of this world.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path

from bridge_jax.data.cache import atomic_folder, cache_dir
from bridge_jax.data.mini.questions import MULTI_HOP, SETS, SIZES, questions
from bridge_jax.data.mini.world import make_world
from bridge_jax.errors import UserError

__all__ = ["MULTI_HOP", "SETS", "corpus_path", "questions_path"]

VERSION = 1  # of the generator: a change of world or questions gets a new number, hence new files


def corpus_path() -> Path:
    """The corpus as jsonl, one passage a line."""
    return _written("corpus.jsonl", lambda: ({"id": p.id, "contents": f'"{p.title}"\n{p.text}'} for p in make_world().passages))


def questions_path(name: str, split: str | None = None) -> Path:
    """The question file of a set; split None is "test".

    Raises:
      UserError: an unknown set, or a split that the set does not have.
    """
    split = split or "test"
    if name not in SETS:
        near = difflib.get_close_matches(name, SETS, n=1)
        hint = f"did you mean 'mini/{near[0]}'" if near else f"take one of {', '.join('mini/' + s for s in SETS)}"
        raise UserError(f"no mini question set '{name}'; {hint}")
    if split not in SIZES[name]:
        raise UserError(f"'mini/{name}' has no split '{split}'; its splits are {', '.join(SIZES[name])}")

    def rows() -> Iterable[dict]:
        for n, q in enumerate(questions(make_world(), name, split)):
            metadata = {"gold_ids": list(q.gold_passages), "form": q.form}
            yield {"id": f"{name}-{split}-{n:04d}", "question": q.question, "golden_answers": [q.answer], "metadata": metadata}

    return _written(f"{name}_{split}.jsonl", rows)


def _written(name: str, rows: Callable[[], Iterable[dict]]) -> Path:
    """<cache>/mini/v1/<name>/<name>, generated when it is not there whole (its hash lies beside it)."""
    folder = cache_dir() / "mini" / f"v{VERSION}" / name
    path, mark = folder / name, folder / "sha256"
    if mark.is_file() and path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == mark.read_text():
        return path
    data = "".join(json.dumps(row) + "\n" for row in rows()).encode()
    if folder.exists():
        raise UserError(f"{path} is damaged; delete the folder {folder} and run again")
    with atomic_folder(folder) as fresh:
        (fresh / name).write_bytes(data)
        (fresh / "sha256").write_text(hashlib.sha256(data).hexdigest())
    return path
