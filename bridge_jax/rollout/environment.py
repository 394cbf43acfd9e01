"""The environment of a rollout: it reads the actions of rows that stopped, searches for all of them at once, and answers."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping

import numpy as np

from bridge_jax.retrieval.retriever import RetrievalFault
from bridge_jax.rollout import protocol
from bridge_jax.rollout import sampler as device
from bridge_jax.rollout.rows import RolloutConfig, Row, Turn
from bridge_jax.rollout.stopping import StopTable


class Environment:
    """The rules (METHOD.md 2) and the retriever; every call is told the rows it is about and changes only those.

    retriever: as in `episodes.RolloutEngine`. candidates: passages a search returns. counts: what `act` adds its counts to.
    """

    def __init__(self, config: RolloutConfig, tokenizer, table: StopTable, retriever, candidates: int, lora, counts: Counter):
        self.config = config
        self.tokenizer = tokenizer
        self.table = table
        self.retriever = retriever
        self.candidates = candidates
        self.lora = lora
        self.counts = counts

    def act(self, rows: Mapping[int, Row], reasons: np.ndarray) -> dict[int, np.ndarray]:
        """End the rollouts that are over, run the searches of the others.

        rows: the stopped rows by their place in the batch, whose generation has just ended. reasons [B]: why each stands still.
        Returns the observation ([O] int32) of every row that goes on.
        """
        observations: dict[int, np.ndarray] = {}
        searches: dict[int, str] = {}
        for index, row in rows.items():
            text = protocol.cut(self.table.decode(row.tokens[row.start :]))
            row.trace.append(("generated", text))
            row.generation += 1
            if reasons[index] == device.LIMIT:
                row.end("context_full" if len(row.tokens) >= self.config.max_response_tokens else "truncated")
                continue
            action = protocol.parse(text)
            last = row.generation > self.config.max_searches
            if action.kind == "answer":
                row.answer = action.content
                row.end("answered")
            elif last:
                if action.kind == "search":
                    row.trace.append(("corrective", protocol.NO_SEARCHES_LEFT))
                row.end("no_answer")
            elif action.kind == "search":
                searches[index] = action.content
            else:
                message = protocol.EMPTY_QUERY if action.kind == "empty_query" else protocol.MALFORMED
                self.counts["corrective"] += 1
                corrective = protocol.render_corrective(message, self.tokenizer)
                if self._observe(row, corrective, "corrective"):
                    observations[index] = corrective.tokens
        if searches:
            self._search(rows, searches, observations)
        return observations

    def _search(self, rows: Mapping[int, Row], searches: dict[int, str], observations: dict[int, np.ndarray]) -> None:
        """One batched search for the queries `searches` (row index -> query)."""
        began = time.monotonic()
        try:
            found = self.retriever.search(list(searches.values()), self.candidates, lora=self.lora)
        except RetrievalFault as fault:
            for index in searches:
                rows[index].trace.append(("fault", str(fault)))
                rows[index].end("environment_fault")
            return
        finally:
            self.counts["retrieval_microseconds"] += int(1e6 * (time.monotonic() - began))
        config, counts = self.config, self.counts
        for (index, query), scores, hits in zip(searches.items(), np.asarray(found.scores), np.asarray(found.rows)):
            row = rows[index]
            passages = [self.retriever.corpus[int(hit)] for hit in hits[: config.shown] if hit >= 0]
            observation = protocol.render_observation(
                passages, self.tokenizer, config.max_observation_tokens, config.max_passage_tokens
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

    def _observe(self, row: Row, observation: protocol.Observation, kind: str) -> bool:
        """Give a row its observation, or end it when no token could be generated behind it."""
        if len(row.tokens) + len(observation.tokens) >= self.config.max_response_tokens:
            row.end("context_full")
            return False
        row.write(observation.tokens.tolist())
        row.start = len(row.tokens)
        row.trace.append((kind, self.table.decode(observation.tokens)))
        return True
