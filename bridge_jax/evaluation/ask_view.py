"""One episode for a reader: coloured text, and under each search what the retriever found, how it scored it, and what was shown."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bridge_jax.retrieval.corpus import Corpus
from bridge_jax.rollout import protocol
from bridge_jax.rollout.rows import Episode, Row, Turn
from bridge_jax.terminal import visible

_STYLES = {"think": "italic", "search": "bold cyan", "information": "dim", "answer": "bold green"}
_BLOCK = re.compile(rf"<({'|'.join(_STYLES)})>.*?(?:</\1>|$)", re.DOTALL)


def plain(text: str, style: str = "") -> Text:
    """Text from outside: no markup, and nothing that a terminal would obey."""
    return Text(visible(text), style)


def probabilities(scores: np.ndarray, tau: float) -> np.ndarray:
    """p_d = softmax(scores / tau) over the candidates, as in training. scores [C] -> [C] float64."""
    logits = np.asarray(scores, np.float64) / tau
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def documents(turn: Turn, corpus: Corpus, tau: float) -> list[dict]:
    """The candidates of a search, best first: rank, id, title, text, score, p, shown."""
    found = []
    for rank, (row, score, p) in enumerate(zip(turn.rows, turn.scores, probabilities(turn.scores, tau), strict=True), start=1):
        passage = corpus[int(row)]
        found.append(
            {
                "rank": rank,
                "id": passage.id,
                "title": passage.title,
                "text": passage.text,
                "score": float(score),
                "p": float(p),
                "shown": rank <= turn.shown,
            }
        )
    return found


def as_json(episode: Episode, corpus: Corpus, tau: float) -> dict:
    return {
        "question": episode.question.question,
        "answer": episode.answer,
        "status": episode.status,
        "turns": [{"query": turn.query, "documents": documents(turn, corpus, tau)} for turn in episode.turns],
        "trace": [{"kind": kind, "text": text} for kind, text in episode.trace],
    }


class Stream:
    """Prints a rollout as it comes: call it with the row at every look of the host, then `end` with the episode.

    What it prints does not depend on how often it is called.
    """

    def __init__(self, console: Console, corpus: Corpus, tau: float, decode: Callable[[Sequence[int]], str]):
        self._console, self._corpus, self._tau, self._decode = console, corpus, tau, decode
        self._parts = self._turns = self._written = 0  # of the trace, of the turns, of the generation under way
        self._over: int | None = None  # where the generation began that is in the trace already

    def __call__(self, row: Row) -> None:
        self._trace(row.trace, row.turns, row.start)
        if row.status is None and row.start != self._over:
            text = protocol.cut(self._decode(row.tokens[row.start :])).rstrip("\ufffd")
            self._generated(text.rstrip())

    def end(self, episode: Episode) -> None:
        """What has not been printed yet: searches whose passages did not fit into the context any more, and the answer."""
        self._trace(episode.trace, episode.turns, 0)
        for turn in episode.turns[self._turns :]:
            self._console.print(_table(turn, self._corpus, self._tau))
            self._console.print(plain(turn.error or "", "yellow"))
        if episode.answer is None:
            self._console.print(Text(f"no answer ({episode.status.replace('_', ' ')})", style="bold red"))
        else:
            self._console.print(Text("answer  ", style="bold") + plain(episode.answer, "bold green"))

    def _trace(self, trace: Sequence[tuple[str, str]], turns: Sequence[Turn], start: int) -> None:
        for kind, text in trace[self._parts :]:
            if kind == "generated":
                self._generated(text.rstrip())
                self._console.print()
                self._written, self._over = 0, start
            elif kind == "information":
                self._console.print(_table(turns[self._turns], self._corpus, self._tau))
                self._console.print(plain(text.strip(), "dim"))
                self._turns += 1
            else:
                self._console.print(plain(text.strip(), {"fault": "bold red", "tool": "dim"}.get(kind, "yellow")))
            self._parts += 1

    def _generated(self, text: str) -> None:
        """The rest of a generation's text so far."""
        begin = max(self._written, len(text) - len(text.lstrip()))
        if len(text) > begin:
            self._console.print(_colour(text)[begin:], end="", soft_wrap=True)
            self._written = len(text)


def show(console: Console, episode: Episode, corpus: Corpus, tau: float) -> None:
    """Print the question, the trace with a table behind each search, and the answer at the end."""
    console.print(Text("question  ", style="bold") + plain(episode.question.question))
    Stream(console, corpus, tau, lambda tokens: "").end(episode)


def show_documents(console: Console, turn: Turn, corpus: Corpus, tau: float) -> None:
    """The passages of a search: in whole where the policy was shown them, else as far as a line goes."""
    for found in documents(turn, corpus, tau):
        style = "bold" if found["shown"] else "dim"
        console.print(plain(f"{found['rank']}  {found['title']}", style) + plain(f"  ({found['id']}, p {found['p']:.3f})", "dim"))
        if found["shown"]:
            console.print(plain(f"{found['text']}\n"))
        else:
            console.print(plain(found["text"], "dim"), no_wrap=True, overflow="ellipsis")


def _colour(text: str) -> Text:
    coloured = plain(text)
    for match in _BLOCK.finditer(text):
        coloured.stylize(_STYLES[match[1]], *match.span())
    return coloured


def _table(turn: Turn, corpus: Corpus, tau: float) -> Table:
    table = Table(title=plain(f"search: {turn.query}"), title_justify="left", title_style="cyan", box=None, padding=(0, 2, 0, 0))
    for name in ("", "rank", "score", "p"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("id", no_wrap=True)
    table.add_column("title")
    for found in documents(turn, corpus, tau):
        cells = "*" if found["shown"] else "", str(found["rank"]), f"{found['score']:.3f}", f"{found['p']:.3f}"
        table.add_row(*cells, plain(found["id"]), plain(found["title"]), style="bold" if found["shown"] else "dim")
    table.caption = Text(f"* shown to the policy; p = softmax(score / {tau:g}) over the {len(turn.rows)} candidates")
    table.caption_justify = "left"
    return table
