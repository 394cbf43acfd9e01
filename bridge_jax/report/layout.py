"""Episodes in the layout that the page reads: one small index of all, and blocks of details, unpacked when one is looked at.

    index    {"datasets", "reasons": names; "questions": [[id, dataset, text, [golds]]]; a list for each of COLUMNS; "block": size}
    block    {"documents": [[id, title]], "texts": [..], "episodes": [{"trace": [[kind, text]], "searches": [[..]]}]}

A question, a passage's title and a text are there once in the index or in a block, and referred to by number. Index and blocks are
JSON, gzipped, in base64: no text of them can be markup.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterable

from bridge_jax.report.episodes import Episode

BLOCK = 32  # episodes
# run: number of the run; source: 0 training, 1 evaluation; queries: of its searches, for finding
COLUMNS = ("run", "source", "step", "question", "sample", "reason", "reward", "advantage", "answer", "queries")


def pack(value: object) -> str:
    """What the page's `unpack` reads. A lone surrogate of a broken text becomes a question mark."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode("utf-8", "replace"), 6, mtime=0)).decode("ascii")


class _Pool:
    """Values by number, each once."""

    def __init__(self):
        self.numbers: dict = {}

    def __call__(self, value) -> int:
        return self.numbers.setdefault(value, len(self.numbers))

    def values(self) -> list:
        return list(self.numbers)


class Layout:
    """Takes episodes in the order of the page's list; `blocks` are packed as they fill, so memory holds one unpacked."""

    def __init__(self):
        self.blocks: list[str] = []
        self._columns: dict[str, list] = {name: [] for name in COLUMNS}
        self._datasets, self._reasons, self._questions = _Pool(), _Pool(), _Pool()
        self._open()

    def __len__(self) -> int:
        return len(self._columns["run"])

    def add(self, run: int, source: int, step: int, episode: Episode) -> None:
        question = episode.id, self._datasets(episode.dataset), episode.question, tuple(episode.golds)
        row = {
            "run": run,
            "source": source,
            "step": step,
            "question": self._questions(question),
            "sample": episode.sample,
            "reason": self._reasons(episode.reason),
            "reward": episode.reward,
            "advantage": episode.advantage,
            "answer": episode.answer,
            "queries": [search.query for search in episode.searches],
        }
        for name, column in self._columns.items():
            column.append(row[name])
        self._episodes.append(
            {
                "trace": [[kind, self._texts(text)] for kind, text in episode.trace],
                "searches": [[*s[:5], [self._documents(found) for found in s.documents], *s[6:]] for s in episode.searches],
            }
        )
        if len(self._episodes) == BLOCK:
            self._close()

    def finish(self) -> tuple[str, list[str]]:
        """(index, blocks), packed."""
        if self._episodes:
            self._close()
        names = {"datasets": self._datasets.values(), "reasons": self._reasons.values(), "questions": self._questions.values()}
        return pack(names | self._columns | {"block": BLOCK}), self.blocks

    def _open(self) -> None:
        self._documents, self._texts, self._episodes = _Pool(), _Pool(), []

    def _close(self) -> None:
        block = {"documents": self._documents.values(), "texts": self._texts.values(), "episodes": self._episodes}
        self.blocks.append(pack(block))
        self._open()


def packed_bytes(index: str, blocks: Iterable[str]) -> int:
    return len(index) + sum(map(len, blocks))
