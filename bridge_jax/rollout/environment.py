"""The environment of a rollout: it reads the actions of rows that stopped, searches for all of them at once, and answers.

Which rows are acted on together depends on the batch, so what a query finds should not depend on the others it is searched with. It
does up to rounding only: `e5.embed` encodes queries in batches whose number of rows follows how many there are, so a query's vector
is the same to float rounding; equal vectors find the same passages with the same scores (`retrieval.vectors`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from bridge_jax.data.qa import Question
from bridge_jax.retrieval.retriever import RetrievalFault
from bridge_jax.rollout import protocol
from bridge_jax.rollout import sampler as device
from bridge_jax.rollout.rows import RolloutConfig, Row, Turn
from bridge_jax.rollout.stopping import StopTable


class Found(NamedTuple):
    """scores [B, C] float32 and hits [B, C] int32 of a search (None: it failed), how long it took, and why it failed."""

    scores: np.ndarray | None
    hits: np.ndarray | None
    seconds: float
    fault: RetrievalFault | None = None


def searched_text(question: str, query: str, separator: str) -> str:
    """What an encoder reads that was trained on questions and queries together (METHOD 8)."""
    return f"{question}{separator}{query}"


class Environment:
    """The rules (METHOD.md 2) and the retriever; every call is told the rows it is about and changes only those.

    retriever, tool: as in `episodes.RolloutEngine`. candidates: passages a search returns. counts: what is counted is added here.
    questions: by the rows' group; read with `question_separator` alone.
    """

    def __init__(
        self,
        config: RolloutConfig,
        tokenizer,
        table: StopTable,
        retriever,
        candidates: int,
        lora,
        counts: Counter,
        questions: Mapping[int, Question],
        tool: Callable[[str], str | None] | None = None,
    ):
        self.config = config
        self.tokenizer = tokenizer
        self.table = table
        self.retriever = retriever
        self.candidates = candidates
        self.lora = lora
        self.counts = counts
        self.questions = questions
        self.tool = tool or (lambda query: None)

    def act(self, rows: Mapping[int, Row], reasons: np.ndarray) -> tuple[dict[int, np.ndarray], dict[int, str]]:
        """End the rollouts that are over and read what the others want.

        rows: the stopped rows by their place in the batch, whose generation has just ended. reasons [B]: why each stands still.
        Returns the observations that need no search ([O] int32: a tool's replies, corrections) and the queries, by place.
        """
        observations: dict[int, np.ndarray] = {}
        searches: dict[int, str] = {}
        for index, row in rows.items():
            text = protocol.cut(self.table.decode(row.tokens[row.start :]))
            row.trace.append(("generated", text))
            row.generation += 1
            last = row.generation > self.config.max_searches
            if reasons[index] == device.LIMIT:
                full = len(row.tokens) >= self.config.max_response_tokens
                if full or last or not self.config.retry_invalid:
                    row.end("context_full" if full else "truncated")
                    continue
            action = protocol.parse(text)
            if action.kind == "answer":
                row.answer = action.content
                row.end("answered")
            elif last:
                if action.kind == "search":
                    row.trace.append(("corrective", protocol.NO_SEARCHES_LEFT))
                row.end("no_answer")
            elif action.kind == "search":
                reply = self.tool(action.content)
                if reply is None:
                    searches[index] = action.content
                else:
                    told = protocol.render_reply(reply, self.tokenizer, self.config.max_observation_tokens)
                    if self._observe(row, told, "tool"):
                        observations[index] = told.tokens
            else:
                message = protocol.EMPTY_QUERY if action.kind == "empty_query" else protocol.MALFORMED
                message = protocol.RETRY if self.config.retry_invalid else message
                self.counts["corrective"] += 1
                corrective = protocol.render_corrective(message, self.tokenizer)
                if self._observe(row, corrective, "corrective"):
                    observations[index] = corrective.tokens
        return observations, searches

    def search(self, rows: Sequence[Row], searches: Mapping[int, str]) -> Found:
        """One batched search for the queries by place. Changes nothing, so it may run in a thread."""
        began = time.monotonic()
        separator = self.config.question_separator
        texts = list(searches.values())
        if separator:
            asked = [self.questions[rows[index].group].question for index in searches]
            texts = [searched_text(question, query, separator) for question, query in zip(asked, texts, strict=True)]
        try:
            found = self.retriever.search(texts, self.candidates, lora=self.lora)
        except RetrievalFault as fault:
            return Found(None, None, time.monotonic() - began, fault)
        return Found(np.asarray(found.scores), np.asarray(found.rows), time.monotonic() - began)

    def answer(self, rows: Mapping[int, Row], searches: Mapping[int, str], found: Found) -> dict[int, np.ndarray]:
        """The observations of the rows whose `searches` were `found`, in the same order; a row they do not fit into ends."""
        self.counts["retrieval_microseconds"] += int(1e6 * found.seconds)
        if found.fault is not None:
            for index in searches:
                rows[index].trace.append(("fault", str(found.fault)))
                rows[index].end("environment_fault")
            return {}
        assert found.scores is not None and found.hits is not None
        observations: dict[int, np.ndarray] = {}
        config, counts = self.config, self.counts
        for (index, query), scores, hits in zip(searches.items(), found.scores, found.hits):
            row = rows[index]
            passages = [self.retriever.corpus[int(hit)] for hit in hits[: config.shown] if hit >= 0]
            observation = protocol.render_observation(
                passages, self.tokenizer, config.max_observation_tokens, config.max_passage_tokens, config.cut_inside
            )
            history = len(row.tokens)
            fits = self._observe(row, observation, "information")
            span = history, len(row.tokens)
            turn = Turn(query, history, hits.astype(np.int32), scores.astype(np.float32), observation.shown, span)
            if fits:
                observations[index] = observation.tokens
                counts["dropped"] += observation.dropped
                counts["cut"] += observation.cut
            else:
                turn.shown, turn.error = 0, "the observation did not fit into the context"
            row.turns.append(turn)
        return observations

    def _observe(self, row: Row, observation: protocol.Observation, kind: str) -> bool:
        """Give a row its observation, or end it when no token could be generated behind it."""
        if len(row.tokens) + len(observation.tokens) >= self.config.max_response_tokens:
            row.end("context_full")
            return False
        row.write(observation.tokens.tolist())
        row.start = len(row.tokens)
        row.trace.append((kind, self.table.decode(observation.tokens)))
        return True
