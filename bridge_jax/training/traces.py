"""Supervised search traces: the rollouts of a good policy, token for token, built from gold passages and real retrieval.

A trace is the token stream that the rollout engine would produce and condition on: the same prompt, generated segments (each
tokenised apart), and between them observations rendered by `rollout.protocol` from what the index returned for the trace's own
query. When the gold passage of a hop is not among the passages shown, it takes the place of one of them.

    prompt | <think> .. </think> <search> q </search> | <information> .. </information> | <think> .. <answer> a </answer> <eos>
             generated: trained                         environment: not trained          generated: trained

Only generated tokens carry a loss. The end-of-text token after the answer is trained too, so that the policy also stops in
engines that do not know the tags; the rollout engine itself stops at `</answer>`.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from bridge_jax.data.prompts import build_prompt
from bridge_jax.data.qa import Question
from bridge_jax.retrieval.corpus import Corpus, Passage
from bridge_jax.retrieval.retriever import Retriever
from bridge_jax.rollout import protocol
from bridge_jax.rollout.episodes import RolloutConfig
from bridge_jax.training import trace_text

BLOCK = 64  # questions whose hops are retrieved together
# Words quoted in a thought: the first that fits into one generation. Short, so that a policy that quotes a bit more still fits.
QUOTES = (9, 6, 4, 0)


@dataclasses.dataclass(frozen=True)
class TraceTurn:
    """One search. rows: the passages shown, in order. found: the gold was retrieved, not put there. observation: token span."""

    query: str
    rows: tuple[int, ...]
    gold_id: str
    found: bool
    observation: tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Trace:
    """prompt [P] int32; tokens [T] int32 after it; generated [T] bool (False: observation); text: (kind, text) pieces in order."""

    question: Question
    prompt: np.ndarray
    tokens: np.ndarray
    generated: np.ndarray
    turns: tuple[TraceTurn, ...]
    answer: str
    text: tuple[tuple[str, str], ...]


class Skip(Exception):
    """This question gives no usable trace; the message is the reason that is counted."""


@dataclasses.dataclass(frozen=True)
class TraceBuilder:
    """What all traces of a run share.

    Args:
      eos_id: closes the trace.
      distractors: retrieved passages shown beside a gold passage that was not retrieved (`config.warmstart.distractors`).
      prompt_style: `config.rollout.prompt`.
    """

    corpus: Corpus
    retriever: Retriever
    tokenizer: object
    eos_id: int
    rollout: RolloutConfig
    distractors: int
    prompt_style: str
    seed: int

    def build(
        self, questions: Iterable[Question], count: int, advance: Callable[[int], None] = lambda n: None
    ) -> tuple[list[Trace], Counter]:
        """-> (up to `count` traces, one a question, in the questions' order; why the other questions were skipped)."""
        traces, skipped, pending = [], Counter(), []
        for question in questions:
            pending.append(question)
            if len(pending) == BLOCK:
                self._block(pending, count, traces, skipped, advance)
                pending = []
            if len(traces) == count:
                break
        self._block(pending, count, traces, skipped, advance)
        return traces, skipped

    def _block(self, questions, count, traces, skipped, advance) -> None:
        drafts = []
        for question in questions:
            try:
                drafts.append(_Draft(self, question))
            except Skip as reason:
                skipped[str(reason)] += 1
        k = min(self.rollout.candidates, len(self.corpus))
        for hop in range(self.rollout.max_searches):
            going = [draft for draft in drafts if hop < len(draft.hops)]
            if going:
                rows = self.retriever.search([draft.next_query() for draft in going], k).rows
                for draft, candidates in zip(going, rows, strict=True):
                    draft.observe([int(row) for row in candidates])
        for draft in drafts:
            if len(traces) == count:
                return
            try:
                traces.append(draft.finish())
                advance(1)
            except Skip as reason:
                skipped[str(reason)] += 1


class _Draft:
    """A trace while it is written: all of its choices come from a generator of its own, so traces do not depend on each other."""

    def __init__(self, builder: TraceBuilder, question: Question):
        self.builder, self.question = builder, question
        self.rng = random.Random(f"{builder.seed} {question.dataset} {question.id}")
        golds = [gold.strip(" .,;") for gold in question.golds]
        self.answer = trace_text.clean(next((gold for gold in golds if gold), ""))
        if not self.answer:
            raise Skip("no answer")
        self.hops = trace_text.order_hops(question.question, golds, self._gold_passages(), builder.rollout.max_searches)
        self.prompt = build_prompt(question.question, builder.tokenizer, builder.prompt_style)
        if len(self.prompt) > builder.rollout.max_prompt_tokens:
            raise Skip("prompt too long")
        self.pieces: list[tuple[str, str]] = []
        self.tokens: list[int] = []
        self.generated: list[bool] = []
        self.turns: list[TraceTurn] = []
        self.found: list[tuple[Passage, int]] = []  # gold passages shown, with their document numbers
        self.shown = ""  # all observation text so far
        self.problem = ""  # why this draft cannot become a trace

    def _gold_passages(self) -> list[Passage]:
        corpus = self.builder.corpus
        try:
            rows = [corpus.row_of(passage_id) for passage_id in dict.fromkeys(self.question.gold_passage_ids)]
        except KeyError:
            raise Skip("gold passage not in the corpus") from None
        if not rows:
            raise Skip("no gold passages")
        return [corpus[row] for row in rows]

    def next_query(self) -> str:
        """Write the thought and the search of the next hop; returns the query."""
        hop, question = len(self.turns), self.question.question
        wanted = self.hops[hop].title
        if not hop:
            self.query, focus = trace_text.first_query(question, wanted, self.rng)
        else:
            seen, before = f"{question} {self.shown}", [turn.query for turn in self.turns]
            self.query, focus = trace_text.next_query(question, wanted, seen, before, self._last_title(), self.rng)
        if not self.query:
            self.problem = "no query"
        choice = self.rng.random()

        def thought(limit: int) -> str:
            rng = random.Random(choice)
            if not hop:
                return trace_text.first_thought(focus, rng)
            doc = self.found[-1][1] if self.found and self.found[-1][0] is self.hops[hop - 1] else None
            return trace_text.next_thought(self.hops[hop - 1], doc, self.shown, focus, limit, rng)

        self._generate(thought, f"{protocol.SEARCH_OPEN} {self.query} {protocol.SEARCH_CLOSE}")
        return self.query

    def _last_title(self) -> str:
        return self.builder.corpus[self.turns[-1].rows[0]].title if self.turns[-1].rows else ""

    def _generate(self, thought: Callable[[int], str], action: str) -> None:
        """Append one generation: the longest quotation that one generation has room for."""
        for limit in QUOTES:
            text = f"<think> {thought(limit)} </think>\n{action}"
            tokens = protocol.encode(self.builder.tokenizer, text)
            if len(tokens) <= self.builder.rollout.max_new_tokens:
                break
        else:
            self.problem = "generation too long"
        self._append("generated", text, tokens, True)

    def observe(self, candidates: Sequence[int]) -> None:
        """Append what the search showed, the gold passage among it."""
        builder, gold = self.builder, self.hops[len(self.turns)]
        gold_row = builder.corpus.row_of(gold.id)
        rows = list(candidates[: builder.rollout.shown])
        observation = self._render(rows)
        found = gold_row in rows[: observation.shown]
        if not found:
            others = [row for row in candidates if row != gold_row][: min(builder.distractors, builder.rollout.shown - 1)]
            at = self.rng.randint(0, len(others))
            rows = [*others[:at], gold_row, *others[at:]]
            observation = self._render(rows)
            if gold_row not in rows[: observation.shown]:
                rows = [gold_row, *others]
                observation = self._render(rows)
        start = len(self.tokens)
        text = builder.tokenizer.decode(observation.tokens)
        self._append("observation", text, observation.tokens.tolist(), False)
        self.shown = f"{self.shown} {text}"
        rows = rows[: observation.shown]
        if gold_row in rows:
            self.found.append((gold, rows.index(gold_row) + 1))
        self.turns.append(TraceTurn(self.query, tuple(rows), gold.id, found, (start, len(self.tokens))))

    def _render(self, rows: Sequence[int]) -> protocol.Observation:
        rollout = self.builder.rollout
        passages = [self.builder.corpus[row] for row in rows]
        limits = rollout.max_observation_tokens, rollout.max_passage_tokens or None, rollout.cut_inside
        return protocol.render_observation(passages, self.builder.tokenizer, *limits)

    def finish(self) -> Trace:
        """Append the last thought, the answer and the end of text.

        Raises:
          Skip: the shown passages lack the answer (such a trace would teach guessing), or a limit of the rollout is exceeded.
        """
        question = self.question.question
        known = self.answer.lower() in trace_text.YES_NO or trace_text.find_answer(f"{question} {self.shown}", [self.answer])
        if not known:
            raise Skip("answer not in the shown passages")
        choice = self.rng.random()

        def thought(limit: int) -> str:
            return trace_text.last_thought(question, self.found, self.answer, self.shown, limit, random.Random(choice))

        self._generate(thought, f"{protocol.ANSWER_OPEN} {self.answer} {protocol.ANSWER_CLOSE}")
        if self.problem:
            raise Skip(self.problem)
        if len(self.tokens) > self.builder.rollout.max_response_tokens:
            raise Skip("response too long")
        self._append("eos", "", [self.builder.eos_id], True)
        return Trace(
            self.question,
            np.asarray(self.prompt, np.int32),
            np.asarray(self.tokens, np.int32),
            np.asarray(self.generated, bool),
            tuple(self.turns),
            self.answer,
            tuple(self.pieces),
        )

    def _append(self, kind: str, text: str, tokens: list[int], generated: bool) -> None:
        self.pieces.append((kind, text))
        self.tokens += tokens
        self.generated += [generated] * len(tokens)


def trace_row(trace: Trace) -> dict:
    """A trace as one JSON object of `warmstart_traces.jsonl`, for reading."""
    return {
        "id": trace.question.id,
        "dataset": trace.question.dataset,
        "question": trace.question.question,
        "golds": list(trace.question.golds),
        "answer": trace.answer,
        "trace": [{"kind": kind, "text": text} for kind, text in trace.text if text],
        "turns": [
            {"query": turn.query, "rows": list(turn.rows), "gold_id": turn.gold_id, "retrieved": turn.found} for turn in trace.turns
        ],
        "prompt_tokens": len(trace.prompt),
        "tokens": len(trace.tokens),
        "trained_tokens": int(trace.generated.sum()),
    }
