"""Documents -> passages of about so many words, cut between sentences."""

from __future__ import annotations

import re
from collections.abc import Sequence

from bridge_jax.prepare.documents import Document
from bridge_jax.retrieval.passages import Passage

_SENTENCE = re.compile(r"(?<=[.!?。！？])[\"')\]]*\s+")


def passages_of(document: Document, words: int) -> list[Passage]:
    """The passages of one document; a section starts a new one, and gives the title its heading.

    A passage of a JSON-lines corpus stays whole, with its id, unless it has more than twice as many words.
    """
    if document.kind == "passage":
        text = "\n".join(document.sections[0].paragraphs) if document.sections else ""
        if text and len(text.split()) <= 2 * words:
            return [Passage(document.name, document.title, text)]
    pieces = [
        (f"{document.title}: {section.heading}" if section.heading else document.title, text)
        for section in document.sections
        for text in cut(section.paragraphs, words)
    ]
    return [Passage(f"{document.name}#{number}", title, text) for number, (title, text) in enumerate(pieces, start=1)]


def cut(paragraphs: Sequence[str], words: int) -> list[str]:
    """Texts of nearly equal length, about `words` words each; a sentence is cut only where it is longer than that."""
    sentences = [part for paragraph in paragraphs for part in _SENTENCE.split(paragraph) if part]
    units = [unit for sentence in sentences for unit in _pieces(sentence.split(), words)]
    total = sum(map(len, units))
    share = total / max(1, round(total / words))
    texts, current, done = [], [], 0
    for unit in units:
        # To the passage whose share of the words the middle of the sentence lies in.
        if current and (done + len(unit) / 2) // share > len(texts):
            texts.append(" ".join(current))
            current = []
        current += unit
        done += len(unit)
    return [*texts, " ".join(current)] if current else texts


def _pieces(sentence: list[str], words: int) -> list[list[str]]:
    return [sentence[at : at + words] for at in range(0, len(sentence), words)]
