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
_NEXT_OPEN = (
    "Doc {doc} is about {title}. I need to know more.",
    "I found {title}, but not yet the answer. I will search again.",
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
    """Words in their order; a possessive 's is not part of its word."""
    return [re.sub(r"['’]s$", "", word) for word in _WORD.findall(text)]


def clean(text: str) -> str:
    """One line without angle brackets (it can hold no protocol tag) and without a doubled full stop."""
    return re.sub(r"(?<!\.)\.\.(?!\.)", ".", " ".join(text.replace("<", " ").replace(">", " ").split()))


def keywords(question: str, limit: int = 8, leave_out: str = "") -> str:
    """The question's content words in their order, e.g. "seat county Van Hook Township located"."""
    skip = {word.lower() for word in words(leave_out)}
    kept = [word for word in words(question) if word.lower() not in _SMALL and word.lower() not in skip]
    return " ".join(kept[:limit])


def seen_part(title: str, seen: str) -> str:
    """The longest run of the title's words that occurs in `seen`, or "" when that names nothing.

    The whole title may differ in case; a part of it must be spelt alike and hold a capitalised word ("Farnsworth", not "Song" for
    "song"). A title's parenthesis ("Lilu (mythology)") does not count as part of its name.
    """
    name = words(re.sub(r"\s*\([^)]*\)\s*$", "", title))
    text = f" {' '.join(words(seen))} "
    if name and f" {' '.join(name).lower()} " in text.lower():
        return " ".join(name)
    for length in range(len(name) - 1, 0, -1):
        for start in range(len(name) - length + 1):
            run = name[start : start + length]
            named = run[-1].lower() not in _SMALL and any(
                word[0].isupper() and len(word) > 2 and word.lower() not in _SMALL for word in run
            )
            if named and f" {' '.join(run)} " in text:
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


def next_query(question: str, title: str, seen: str, before: Sequence[str], known: str, rng: random.Random) -> tuple[str, str]:
    """-> (query, focus or "") of a later search: the next title as far as it has been read, else words of the question and a title.

    Args:
      title: of the passage wanted next.
      seen: the question and all that has been shown so far.
      before: the queries of this trace so far (not repeated).
      known: a title shown in the last observation.
    """
    part = seen_part(title, seen)
    rest = keywords(question, 5, leave_out=part or known)
    unnamed = [f"{known} {rest}", keywords(question), clean(question).rstrip(" ?.!")]
    options = [part, part, f"{part} {rest}"] if part else unnamed
    used = {query.lower() for query in before}
    options = [option for option in (clean(option) for option in options) if option and option.lower() not in used]
    return rng.choice(options or [clean(f"{known} {part} {rest}")]), clean(part)


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
    """How a passage begins, its parentheses left out, in at most `limit` words, all of which must have been shown; else ""."""
    sentence = re.split(r"(?<=[.!?])\s+(?=[A-Z])", re.sub(r"\s*\([^()]*\)", "", text))[0]
    quote = clean(" ".join(sentence.split()[:limit])).rstrip(" .,;:(")
    return quote if set(words(quote)) <= set(words(shown)) else ""


def first_thought(focus: str, rng: random.Random) -> str:
    return rng.choice(_FIRST).format(focus=focus)


def next_thought(passage: Passage, doc: int | None, shown: str, focus: str, limit: int, rng: random.Random) -> str:
    """Between two searches. `doc`: the number under which `passage` was shown, None when it was not. `limit`: words quoted."""
    quote = snippet(passage.text, focus, shown, limit) if focus and doc else ""
    if doc is None:
        template = "I need to search again."
    elif not focus:
        template = rng.choice(_NEXT_OPEN)
    else:
        template = rng.choice(_NEXT_QUOTED if quote else _NEXT_PLAIN)
    return clean(template.format(title=passage.title, doc=doc, snippet=quote, focus=focus))


def last_thought(
    question: str, found: Sequence[tuple[Passage, int]], answer: str, shown: str, limit: int, rng: random.Random
) -> str:
    """Before the answer. `found`: the gold passages that were shown, with their numbers, in order. `limit`: words quoted."""
    comparison = answer.lower() in YES_NO or find_answer(question, [answer])
    if comparison and len(found) > 1:
        quotes = [opening(passage.text, shown, limit) for passage, _ in found[:2]]
        if limit >= 5 and all(quotes):
            return clean(rng.choice(_LAST_BOTH).format(first=quotes[0], second=quotes[1], answer=answer))
    elif not comparison:
        for passage, doc in reversed(found):
            if quote := snippet(passage.text, answer, shown, limit):
                return clean(rng.choice(_LAST_QUOTED).format(title=passage.title, doc=doc, snippet=quote, answer=answer))
    return clean(rng.choice(_LAST_PLAIN).format(answer=answer))
