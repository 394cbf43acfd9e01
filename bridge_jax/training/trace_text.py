"""What a supervised trace says: hop order, queries and thoughts, from templates. Pure string functions.

A query or thought only uses words that a policy has read by then: the question, and the passages shown so far. A title that has
not been seen is never typed; the part of it that has been seen may be ("Mountrail County" of "Mountrail County Courthouse").
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Sequence

from bridge_jax.retrieval.corpus import Passage

_WORD = re.compile(r"[^\W_]+(?:[.'’&-][^\W_]+)*")
_SMALL = frozenset(
    """a an the of in on at to for from by with and or but as is are was were be been being do does did has have had who whom whose
    what which when where why how many much that this these those it its he she his her him they their them there than then so if
    not no both same also between during into about after before over under out up one two""".split()
)
YES_NO = ("yes", "no")

_FIRST = (
    "I need to find out about {focus}.",
    "I should look up {focus} first.",
    "The question is about {focus}, so I will search for it.",
    "I do not know this. Let me search for {focus}.",
    "First I need information about {focus}.",
)
_NEXT_QUOTED = (
    "{title}: {snippet}. Now I need to look up {focus}.",
    "Doc {doc} says: {snippet}. Next I need {focus}.",
    "Doc {doc} ({title}) says {snippet}. I should search for {focus} now.",
)
_NEXT_PLAIN = (
    "Doc {doc} is about {title}. Now I need to look up {focus}.",
    "I found {title}. I still need {focus}.",
    "Now I should search for {focus}.",
)
_LAST_QUOTED = (
    "{title}: {snippet}. So the answer is {answer}.",
    "Doc {doc} says: {snippet}. The answer is {answer}.",
    "Doc {doc} ({title}) says {snippet}. So it is {answer}.",
)
_LAST_BOTH = (
    "{first}. {second}. So the answer is {answer}.",
    "{first}, and {second}. The answer is {answer}.",
)
_LAST_PLAIN = ("So the answer is {answer}.", "From the documents, the answer is {answer}.")


def words(text: str) -> list[str]:
    return _WORD.findall(text)


def clean(text: str) -> str:
    """One line without angle brackets: it can hold no protocol tag."""
    return " ".join(text.replace("<", " ").replace(">", " ").split())


def keywords(question: str, limit: int = 8, leave_out: str = "") -> str:
    """The question's content words in their order, e.g. "seat county Van Hook Township located"."""
    skip = {word.lower() for word in words(leave_out)}
    kept = [word for word in words(question) if word.lower() not in _SMALL and word.lower() not in skip]
    return " ".join(kept[:limit])


def seen_part(title: str, seen: str) -> str:
    """The longest run of the title's words that occurs in `seen` (case aside), or "" when that is only small words.

    A title's parenthesis ("Lilu (mythology)") does not count as part of its name.
    """
    name = words(re.sub(r"\s*\([^)]*\)\s*$", "", title))
    text = f" {' '.join(words(seen)).lower()} "
    for length in range(len(name), 0, -1):
        for start in range(len(name) - length + 1):
            run = name[start : start + length]
            # A lone word of a longer title is a link only when it is a name ("Farnsworth"), not a common noun of the title.
            telling = [
                word for word in run if word.lower() not in _SMALL and len(word) > 2 and (length == len(name) or word[0].isupper())
            ]
            if telling and f" {' '.join(run).lower()} " in text:
                return " ".join(run)
    return ""


def _share(title: str, seen: str) -> float:
    name = words(re.sub(r"\s*\([^)]*\)\s*$", "", title))
    return len(words(seen_part(title, seen))) / max(1, len(name))


def order_hops(question: str, golds: Sequence[str], passages: Sequence[Passage], limit: int) -> list[Passage]:
    """The gold passages in the order in which a reader would look them up, at most `limit` of them.

    The first is named in the question; each next one is named in the passage before it, or in the question; the last one holds
    the answer. The given order decides ties.
    """
    count = min(limit, len(passages))

    def score(order: tuple[Passage, ...]) -> float:
        value = 2.0 * _share(order[0].title, question)
        for before, after in itertools.pairwise(order):
            value += 2.0 * max(_share(after.title, before.text), _share(after.title, question))
        return value + (1.0 if find_answer(f"{order[-1].title} {order[-1].text}", golds) else 0.0)

    return list(max(itertools.permutations(passages, count), key=score)) if count else []


def first_query(question: str, title: str, rng: random.Random) -> tuple[str, str]:
    """-> (query, focus of the thought), from the question alone."""
    part = seen_part(title, question)
    plain = clean(question).rstrip(" ?.!")
    options = [plain, plain, keywords(question) or plain]
    if part:
        rest = keywords(question, 5, leave_out=part)
        options += [part, f"{part} {rest}".strip(), f"{part} {rest}".strip()]
    query = clean(rng.choice(options))
    return query, clean(part or keywords(question, 5) or plain)


def next_query(question: str, title: str, seen: str, before: Sequence[str], rng: random.Random) -> tuple[str, str]:
    """-> (query, focus) of a later search: the next title as far as it has been read, else words of the question and a shown title.

    Args:
      seen: question and shown passages, as shown.
      before: queries of this trace so far (not repeated) and titles already found.
    """
    part = seen_part(title, seen)
    rest = keywords(question, 5, leave_out=part)
    if part:
        options = [part, part, f"{part} {rest}".strip()]
    else:
        options = [f"{known} {rest}".strip() for known in before[-1:]] + [keywords(question), clean(question).rstrip(" ?.!")]
    used = {query.lower() for query in before}
    fresh = [option for option in options if option and clean(option).lower() not in used] or [f"{part} {rest}".strip()]
    query = clean(rng.choice(fresh))
    return query, clean(part or query)


def find_answer(text: str, golds: Sequence[str]) -> str | None:
    """The first gold that occurs in `text` as whole words (case aside)."""
    flat = f" {' '.join(words(text)).lower()} "
    return next((gold for gold in golds if words(gold) and f" {' '.join(words(gold)).lower()} " in flat), None)


def snippet(text: str, target: str, shown: str, limit: int) -> str:
    """At most `limit` white-space words of `text` around `target`, which must be readable in `shown`; else ""."""
    if limit < 1:
        return ""
    for sentence in re.split(r"(?<=[.!?])\s+", text):
        at = sentence.lower().find(target.lower())
        if at < 0:
            continue
        parts = sentence.split()
        begin = len(sentence[:at].split())
        size = max(len(target.split()), min(limit, len(parts)))
        start = max(0, min(begin - size // 2, len(parts) - size))
        # Prefer to begin with the sentence: its subject says what the quoted fact is about.
        start = 0 if begin + len(target.split()) <= size else start
        quote = clean(" ".join(parts[start : start + size])).rstrip(" .,;:")
        return quote if quote and " ".join(quote.split()) in " ".join(shown.split()) else ""
    return ""


def opening(text: str, shown: str, limit: int) -> str:
    """The first `limit` words of a passage, as far as `shown` has them."""
    quote = clean(" ".join(text.split()[:limit])).rstrip(" .,;:")
    return quote if quote and quote in " ".join(shown.split()) else ""


def first_thought(focus: str, rng: random.Random) -> str:
    return rng.choice(_FIRST).format(focus=focus)


def next_thought(passage: Passage, doc: int | None, shown: str, focus: str, limit: int, rng: random.Random) -> str:
    """Between two searches. `doc`: the number under which `passage` was shown, None when it was not."""
    if doc is None:
        return _NEXT_PLAIN[-1].format(focus=focus)
    quote = snippet(passage.text, focus, shown, limit)
    template = rng.choice(_NEXT_QUOTED if quote else _NEXT_PLAIN)
    return clean(template.format(title=passage.title, doc=doc, snippet=quote, focus=focus))


def last_thought(found: Sequence[tuple[Passage, int]], answer: str, shown: str, limit: int, rng: random.Random) -> str:
    """Before the answer. `found`: the gold passages that were shown, with their numbers, latest last."""
    plain = clean(rng.choice(_LAST_PLAIN).format(answer=answer))
    if answer.lower() in YES_NO:
        quotes = [opening(passage.text, shown, limit // 2) for passage, _ in found[:2]]
        if len(quotes) == 2 and all(quotes):
            return clean(rng.choice(_LAST_BOTH).format(first=quotes[0], second=quotes[1], answer=answer))
        return plain
    for passage, doc in reversed(found):
        if quote := snippet(passage.text, answer, shown, limit):
            return clean(rng.choice(_LAST_QUOTED).format(title=passage.title, doc=doc, snippet=quote, answer=answer))
    return plain
