"""One episode for a reader: coloured text, and under each search what the retriever found, how it scored it, and what was shown."""

from __future__ import annotations

import re

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bridge_jax.retrieval.corpus import Corpus
from bridge_jax.rollout.episodes import Episode, Turn

_STYLES = {"think": "italic", "search": "bold cyan", "information": "dim", "answer": "bold green"}
_BLOCK = re.compile(r"<(think|search|information|answer)>.*?(?:</\1>|$)", re.DOTALL)


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


def show(console: Console, episode: Episode, corpus: Corpus, tau: float) -> None:
    """Print the question, the trace with a table behind each search, and the answer at the end."""
    console.print(Text("question  ", style="bold") + Text(episode.question.question))
    turns = iter(episode.turns)
    for kind, text in episode.trace:
        if kind == "information":
            turn = next(turns)
            console.print(_table(turn, corpus, tau))
            console.print(Text(text.strip(), style="dim"))
        elif kind == "generated":
            console.print(_colour(text.strip()))
        else:
            console.print(Text(text.strip(), style="bold red" if kind == "fault" else "yellow"))
    for turn in turns:  # a search whose passages did not fit into the context any more
        console.print(_table(turn, corpus, tau))
        console.print(Text(turn.error or "", style="yellow"))
    if episode.answer is None:
        console.print(Text(f"no answer ({episode.status.replace('_', ' ')})", style="bold red"))
    else:
        console.print(Text("answer  ", style="bold") + Text(episode.answer, style="bold green"))


def _colour(text: str) -> Text:
    coloured = Text(text)
    for match in _BLOCK.finditer(text):
        coloured.stylize(_STYLES[match[1]], *match.span())
    return coloured


def _table(turn: Turn, corpus: Corpus, tau: float) -> Table:
    table = Table(title=Text(f"search: {turn.query}"), title_justify="left", title_style="cyan", box=None, padding=(0, 2, 0, 0))
    for name in ("", "rank", "score", "p"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("id", no_wrap=True)
    table.add_column("title")
    for found in documents(turn, corpus, tau):
        cells = ("*" if found["shown"] else "", str(found["rank"]), f"{found['score']:.3f}", f"{found['p']:.3f}", found["id"])
        # Text, not str: a title in square brackets is no markup
        table.add_row(*cells, Text(found["title"]), style="bold" if found["shown"] else "dim")
    table.caption = Text(f"* shown to the policy; p = softmax(score / {tau:g}) over the {len(turn.rows)} candidates")
    table.caption_justify = "left"
    return table
