"""The text protocol of a rollout: tags, actions, observations (METHOD.md 2).

One generation ends at its **first** closing tag, ``</search>`` or ``</answer>``. The token that completes the tag is kept exactly
as it was sampled, even when it carries text behind the tag (``">\\n"`` may be one token): token ids are never rebuilt from
text. That trailing text is cut only where text is *read*: `cut`, `parse` and the trace. The same rule holds in training,
evaluation and the demo, because all three run `bridge_jax.rollout.episodes`.

Actions of a generation, and what follows (`S` = searches allowed, so at most `S + 1` generations):

=========================================================  ==========================================================
closed by ``</search>`` with a query, generations left      the search runs; its passages are the observation
``</search>`` with an empty query                           corrective observation `EMPTY_QUERY`
closing tag without its opening tag, or end of text         corrective observation `MALFORMED`
without a closing tag
the same in the last generation                             the rollout ends without an answer
``</search>`` in the last generation (search `S + 1`)       ends; `NO_SEARCHES_LEFT` is the last word of the trace
``</answer>`` with its opening tag                          ends, answered
=========================================================  ==========================================================

A corrective observation uses up one generation, so every rollout ends. As Search-R1 has it (`retry_invalid`), all three of these
get the same sentence, `RETRY`, in the first person and outside of a frame, and so does a generation that reached its length. Text
between ``<information>`` tags comes from the corpus and is untrusted: `inert` rewrites anything that looks like a protocol tag, and
`encode_untrusted` keeps the tokenizer's special tokens out.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from bridge_jax.data.prompts import TAGS, control_tokens

SEARCH_OPEN, SEARCH_CLOSE = "<search>", "</search>"
ANSWER_OPEN, ANSWER_CLOSE = "<answer>", "</answer>"
INFORMATION_OPEN, INFORMATION_CLOSE = "<information>", "</information>"
STOP_STRINGS = (SEARCH_CLOSE, ANSWER_CLOSE)

EMPTY_QUERY = "The query was empty. Search again or answer."
MALFORMED = "No valid action. Search or answer."
NO_SEARCHES_LEFT = "No searches left."
RETRY = (
    f"\nMy previous action is invalid. To search: {SEARCH_OPEN} query {SEARCH_CLOSE}. To answer: {ANSWER_OPEN} answer "
    f"{ANSWER_CLOSE}. Let me try again.\n"
)

# Of a title, a passage or a tool's reply more is never shown: one of a megabyte must not take a second each time it is found.
MOST_CHARACTERS = 1 << 16
# Wider than the exact tags on purpose: "< / Answer >" reads as a tag to a language model too.
_BRACKET = re.compile(rf"(<(?=(?:\s*/)?\s*(?:{'|'.join(TAGS)})\b))|[<>]", re.IGNORECASE)
# What shows nothing and what some tokenizers drop: control characters, and Unicode's Default_Ignorable_Code_Point.
_UNSEEN = (
    "\x00-\x08\x0e-\x1f\x7f-\x84\x86-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e"
    "\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
)
_INVISIBLE = re.compile(f"[{_UNSEEN}]")
# A tag, whichever of what shows nothing a tokenizer drops.
_HIDDEN = re.compile(
    rf"<(?:[{_UNSEEN}\s]*/)?[{_UNSEEN}\s]*(?:" + "|".join(f"[{_UNSEEN}]*".join(name) for name in TAGS) + rf")(?:\b|[{_UNSEEN}])",
    re.IGNORECASE,
)


class PassageLike(Protocol):
    """What a corpus row must offer (`bridge_jax.retrieval.corpus.Passage`)."""

    id: str
    title: str
    text: str


@dataclass(frozen=True)
class Action:
    """What a generation asks for. `content` is the query or the answer, white space collapsed; "" where there is none."""

    kind: Literal["search", "answer", "empty_query", "malformed"]
    content: str = ""


@dataclass(frozen=True)
class Observation:
    """An environment text as tokens [O] int32, and what the token budget did to it."""

    tokens: np.ndarray
    shown: int = 0  # passages shown, in whole or in part
    dropped: int = 0  # passages left out whole
    cut: int = 0  # passages of which only the beginning is shown


def cut(text: str) -> str:
    """The text up to and including its first closing tag (all of it when there is none)."""
    ends = [at + len(tag) for tag in STOP_STRINGS if (at := text.find(tag)) >= 0]
    return text[: min(ends)] if ends else text


def parse(text: str) -> Action:
    """The action of one generation: its first closing tag, and the last opening tag of the same kind before it."""
    text = cut(text)
    kind: Literal["search", "answer"]
    for kind, opening, closing in (("search", SEARCH_OPEN, SEARCH_CLOSE), ("answer", ANSWER_OPEN, ANSWER_CLOSE)):
        if text.endswith(closing):
            _, opened, content = text[: -len(closing)].rpartition(opening)
            content = " ".join(content.split())
            if not opened:
                return Action("malformed")
            return Action("empty_query") if kind == "search" and not content else Action(kind, content)
    return Action("malformed")


def inert(text: str) -> str:
    """`text` with every protocol tag, however spaced or cased, in parentheses instead of angle brackets.

    Nor does a tag appear when a tokenizer folds full-width brackets, or drops what cannot be seen, such as a zero-width space.
    Linear in the length of the text, which may be hostile.
    """
    text = _without_tags(text)
    if text.isprintable() and text.isascii():
        return text
    folded = unicodedata.normalize("NFKC", text)
    if not _HIDDEN.search(folded):
        return text
    return _without_tags(unicodedata.normalize("NFKC", _INVISIBLE.sub("", folded)))


def _without_tags(text: str) -> str:
    """Brackets are matched as they nest. The beginning of a tag goes also where the text does not close it: behind a cut, what is
    shown next could."""
    if "<" not in text:
        return text
    pieces, done = [], 0
    opened = 0  # tags that the next ">" closes
    for found in _BRACKET.finditer(text):
        pieces += [text[done : found.start()], found[0]]
        done = found.end()
        if found[1]:
            pieces[-1], opened = "(", opened + 1
        elif found[0] == "<":
            opened = 0
        elif opened:
            pieces[-1], opened = ")", opened - 1
    return "".join([*pieces, text[done:]])


def render_document(number: int, passage: PassageLike) -> str:
    """``Doc 1(Title: ...) text`` on one line, inert. Line breaks go: a passage must not start a document of its own."""
    title, text = passage.title[:MOST_CHARACTERS], passage.text[:MOST_CHARACTERS]
    return inert(" ".join(f"Doc {number}(Title: {title}) {text}".split()))


def render_information(passages: Sequence[PassageLike]) -> str:
    """The uncut observation text of these passages, as the policy reads it."""
    documents = "\n".join(render_document(n, passage) for n, passage in enumerate(passages, start=1))
    return f"\n\n{INFORMATION_OPEN}{documents}{INFORMATION_CLOSE}\n\n"


def encode(tokenizer, text: str) -> list[int]:
    """Token ids of trusted text, nothing added."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


@functools.lru_cache(maxsize=8)
def _special_tokens(tokenizer) -> tuple[frozenset[int], tuple[str, ...]]:
    """(ids that text must never turn into, their literal spellings, longest first)."""
    spelled = control_tokens(tokenizer) | dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens))
    # An unknown word is <unk> by right; only the literal spelling of <unk> is rewritten.
    return frozenset(spelled) - {tokenizer.unk_token_id}, tuple(sorted(set(spelled.values()), key=len, reverse=True))


def encode_untrusted(tokenizer, text: str) -> list[int]:
    """Token ids of text from outside: a spelled-out special token (``<|im_end|>``) becomes ordinary text, never its id."""
    forbidden, spellings = _special_tokens(tokenizer)
    if not text.isascii():  # half a surrogate pair is no text to a tokenizer
        text = text.encode("utf-8", "replace").decode()
    for spelling in spellings:
        if spelling in text:
            harmless = spelling.replace("<", "(").replace(">", ")")
            text = text.replace(spelling, harmless if harmless != spelling else f"{spelling[:1]} {spelling[1:]}")
    return [token for token in encode(tokenizer, text) if token not in forbidden]


def render_observation(
    passages: Sequence[PassageLike], tokenizer, max_tokens: int, max_passage_tokens: int | None = None, cut_inside: bool = False
) -> Observation:
    """``\\n\\n<information>Doc 1(Title: ...) text\\nDoc 2(...) ...</information>\\n\\n`` in at most `max_tokens` tokens.

    The frame and each document are tokenised apart, so a document has the same tokens whatever its neighbours, and cuts fall
    between documents: the last passages are dropped whole; only a first passage that does not fit alone is cut, at its end. With
    `cut_inside` the first tokens stay, whichever document they end in. The closing tag is always kept. `max_passage_tokens` shows
    no more than the beginning of each passage (None or 0: no limit of its own).
    """
    opening, closing = _frame(tokenizer)
    body: list[int] = []
    shown = cuts = 0
    for number, passage in enumerate(passages, start=1):
        document = encode_untrusted(tokenizer, ("\n" if number > 1 else "") + render_document(number, passage))
        room = max_tokens - len(opening) - len(body) - len(closing)
        limit = min(len(document), max_passage_tokens or len(document))
        if limit > room and ((shown and not cut_inside) or room <= 0):
            break
        keep = min(limit, room)
        body += document[:keep]
        shown += 1
        cuts += keep < len(document)
    return Observation(np.asarray([*opening, *body, *closing], np.int32), shown, len(passages) - shown, cuts)


def render_corrective(message: str, tokenizer) -> Observation:
    """A short message of the environment in the frame of an observation; `RETRY` stands alone."""
    opening, closing = ([], []) if message == RETRY else _frame(tokenizer)
    return Observation(np.asarray([*opening, *encode(tokenizer, message), *closing], np.int32))


def render_reply(text: str, tokenizer, max_tokens: int) -> Observation:
    """A tool's text in the frame of an observation, inert, cut at its end to `max_tokens` in all."""
    opening, closing = _frame(tokenizer)
    body = encode_untrusted(tokenizer, inert(text[:MOST_CHARACTERS]))[: max_tokens - len(opening) - len(closing)]
    return Observation(np.asarray([*opening, *body, *closing], np.int32))


def _frame(tokenizer) -> tuple[list[int], list[int]]:
    return encode(tokenizer, f"\n\n{INFORMATION_OPEN}"), encode(tokenizer, f"{INFORMATION_CLOSE}\n\n")


def least_observation_tokens(tokenizer, retry_invalid: bool = False) -> int:
    """The smallest sensible observation budget: every corrective message and one passage's beginning fit."""
    messages = (RETRY,) if retry_invalid else (EMPTY_QUERY, MALFORMED)
    corrective = max(len(render_corrective(message, tokenizer).tokens) for message in messages)
    return max(corrective, sum(map(len, _frame(tokenizer))) + 8)


def document_tokens(
    passage: PassageLike, tokenizer, max_passage_tokens: int | None = None, max_tokens: int = 1 << 30
) -> np.ndarray:
    """``<information>Doc 1(Title: ...) text</information>`` as tokens [T] int32.

    The text document scoring conditions on (METHOD.md 3), token for token what a rollout shows as its first document in an
    observation of `max_tokens` and `max_passage_tokens` (`render_observation`).
    """
    opening, closing = _frame(tokenizer)
    shown = render_observation([passage], tokenizer, max_tokens, max_passage_tokens).tokens
    document = shown[len(opening) : len(shown) - len(closing)]
    return np.asarray([*encode(tokenizer, INFORMATION_OPEN), *document, *encode(tokenizer, INFORMATION_CLOSE)], np.int32)
