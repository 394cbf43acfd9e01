"""Local relevance: what a judge says about each candidate of a sub-query, 0 to 100 (METHOD 8, step 3).

The judge is a language model: one behind an endpoint, or the policy itself. It is asked in two steps. First what the sub-query's
own answer would be, given the question, its gold answer and the episode so far: that, or "Not Sure", is the hint. Then for scores
of a *list* of passages, ten at a time, so that it compares. A reply without exactly one score for each passage cannot be read: its
turn is dropped, and counted, and the reply is kept for who wants to know what the judge said instead.

Without a judge the policy's likelihood of the gold answer after each passage takes its place (`utility.percent`).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence

from bridge_jax.data.prompts import fill
from bridge_jax.endpoint import Reply
from bridge_jax.objectives.scoring import Scorer
from bridge_jax.rollout.episodes import Episode, Turn
from bridge_jax.rollout.generators import Generator
from bridge_jax.training.utility import percent

LIST = 10  # passages in one question to the judge
STOPS = ("</scores>", "</sub_answer>")
SCORE_TOKENS, ANSWER_TOKENS = 128, 64
NOT_SURE = "Not Sure"
KEPT = 200  # characters of a reply that could not be read

SUB_ANSWER = """A search agent is answering a question step by step. You know the right final answer. Say what the right answer to
its latest sub-query is, in a few words. If the sub-query has no definite answer, or you cannot tell, say {not_sure}.

Question: {question}
Final answer: {answer}
What the agent did so far:
{history}
Sub-query: {query}

Reply with <sub_answer> ... </sub_answer> and nothing else."""

SCORES = """Rate how useful each passage is for answering a sub-query that came up while answering a question. Compare the
passages with each other, and use the whole scale:

81-100: states the answer to the sub-query outright.
61-80: holds most of the answer, or lets it be worked out.
41-60: about the right thing, but a part of the answer is missing.
21-40: touches the topic without helping to answer.
0-20: has nothing to do with the sub-query.

Question: {question}
Sub-query: {query}
Probable answer to the sub-query: {hint}

{passages}

Reply with <scores> ... </scores> and nothing else: {count} whole numbers from 0 to 100, separated by commas, in the order of the
passages."""


def read_scores(text: str, count: int) -> list[int] | None:
    """The `count` scores of a judge's reply: the last <scores> list, closed or not. None unless it is exactly that.

    (Some servers keep a part of the closing tag they stopped at to themselves.)
    """
    _, opened, rest = text.rpartition("<scores>")
    if not opened:
        return None
    parts = [part.strip() for part in rest.partition("</")[0].strip().strip("[]").split(",")]
    if len(parts) != count or not all(re.fullmatch(r"[0-9]{1,3}", part) for part in parts):
        return None
    scores = [int(part) for part in parts]
    return scores if max(scores) <= 100 else None


def read_sub_answer(text: str) -> str:
    """The hint in a judge's reply, on one line; "Not Sure" where it gave none."""
    _, opened, rest = text.rpartition("<sub_answer>")
    said = " ".join(rest.partition("</")[0].split()) if opened else ""
    return said or NOT_SURE


@dataclasses.dataclass(frozen=True)
class Candidates:
    """A turn to be judged: its episode (tokens, question), the turn (rows [C]), and what happened before it as text."""

    episode: Episode
    turn: Turn
    before: str


@dataclasses.dataclass(frozen=True)
class Local:
    """Scores [C] of 0 to 100, or None: the turn is dropped. hint: the sub-answer, "" without a judge.

    calls, prompt_tokens, tokens: made for it, read and written by the judge. lists: those of the calls that asked for scores;
    unread: how the replies that held none begin.
    """

    scores: list[int] | None
    hint: str = ""
    calls: int = 0
    lists: int = 0
    unread: tuple[str, ...] = ()
    prompt_tokens: int = 0
    tokens: int = 0


Relevance = Callable[[Sequence[Candidates]], list[Local]]


def judged(generator: Generator, corpus) -> Relevance:
    """Local relevance by a language model."""

    def ask(asked: Sequence[Candidates]) -> list[Local]:
        first = _replies(generator, map(_hint_prompt, asked), ANSWER_TOKENS)
        hints = [read_sub_answer(reply.text) for reply in first]
        lists = [(n, at) for n, one in enumerate(asked) for at in range(0, len(one.turn.rows), LIST)]
        prompts = [_scores_prompt(asked[n], hints[n], asked[n].turn.rows[at : at + LIST], corpus) for n, at in lists]
        replies: list[list[Reply]] = [[] for _ in asked]
        for (n, _), reply in zip(lists, _replies(generator, prompts, SCORE_TOKENS), strict=True):
            replies[n].append(reply)
        return [_local(*each) for each in zip(asked, hints, first, replies, strict=True)]

    return ask


def _local(one: Candidates, hint: str, first: Reply, replies: Sequence[Reply]) -> Local:
    sizes = [min(LIST, len(one.turn.rows) - at) for at in range(0, len(one.turn.rows), LIST)]
    found = [_scores_of(reply, size) for reply, size in zip(replies, sizes, strict=True)]
    said = tuple(_shown(reply) for reply, scores in zip(replies, found, strict=True) if scores is None)
    calls = [first, *replies]
    return Local(
        None if said else [score for scores in found for score in scores],
        hint,
        len(calls),
        len(replies),
        said,
        sum(reply.prompt_tokens for reply in calls),
        sum(reply.tokens for reply in calls),
    )


def _scores_of(reply: Reply, count: int) -> list[int] | None:
    """The last number of a list that was cut off may have lost a digit."""
    cut_off = reply.finish == "length" and "</scores" not in reply.text
    return None if cut_off else read_scores(reply.text, count)


def _shown(reply: Reply) -> str:
    return " ".join((reply.problem or reply.text).split())[:KEPT]


def _replies(generator: Generator, prompts, max_tokens: int):
    return generator.generate(list(prompts), stops=STOPS, max_tokens=max_tokens)


def _hint_prompt(one: Candidates) -> str:
    question = one.episode.question
    facts = {"question": question.question, "answer": question.golds[0], "query": one.turn.query}
    return fill(SUB_ANSWER, history=one.before or "(nothing yet)", not_sure=NOT_SURE, **facts)


def _scores_prompt(one: Candidates, hint: str, rows, corpus) -> str:
    passages = [corpus[int(row)] for row in rows]
    shown = "\n\n".join(f"Passage {n} ({p.title}): {' '.join(p.text.split())}" for n, p in enumerate(passages, start=1))
    facts = {"question": one.episode.question.question, "query": one.turn.query, "hint": hint}
    return fill(SCORES, passages=shown, count=str(len(passages)), **facts)


def by_likelihood(scorer: Scorer, variables: dict, between: Callable[[], None]) -> Relevance:
    """Local relevance without a judge: the policy's likelihood of the gold answer straight after each candidate."""

    def ask(asked: Sequence[Candidates]) -> list[Local]:
        requests = [scorer.answer(one.episode, one.turn) for one in asked]
        tokens = [len(request.targets[0]) if request.targets else 0 for request in requests]
        return [Local(percent(found, n)) for found, n in zip(scorer(variables, requests, between), tokens, strict=True)]

    return ask
