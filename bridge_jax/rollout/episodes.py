"""Multi-turn episodes: the one rollout function of training, evaluation and `ask` (METHOD.md 2).

The host acts between decoding rounds: it reads the action each stopped row asks for, searches for all of them in one batch, and
appends every observation to the cache at once. What a row writes is kept as the ids that were sampled, next to their log-probs;
text is only ever derived from ids, never the other way round. Shapes are few: a batch is always batch_groups x group_size rows
(idle rows where questions run out), prompts and observations are padded to a handful of lengths, the cache has one capacity.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import numpy as np

from bridge_jax.data.qa import Question
from bridge_jax.errors import UserError
from bridge_jax.retrieval.retriever import RetrievalFault
from bridge_jax.rollout import protocol
from bridge_jax.rollout import sampler as device
from bridge_jax.rollout.drawing import SLICE
from bridge_jax.rollout.stopping import stop_table

Status = Literal["answered", "no_answer", "truncated", "context_full", "environment_fault"]


@dataclass(frozen=True)
class RolloutConfig:
    """Lengths are in tokens.

    max_searches: executed searches a rollout may make; there are at most max_searches + 1 generations.
    shown / candidates: passages in an observation / passages logged for credit.
    max_new_tokens: of one generation; reaching it ends the rollout as "truncated".
    max_observation_tokens: of one observation, tags included. max_passage_tokens: show only the beginning of each passage (0: all).
    max_response_tokens: everything after the prompt; what would not fit ends the rollout as "context_full".
    chunk: tokens decoded between two looks of the host. batch_groups: questions in flight.
    top_p, top_k: sample from the most likely tokens only (`drawing.draw_top`; 1 and 0: from all). The recorded log-probs stay those
    of the full softmax, which training recomputes: with these options its importance ratios are biased.
    min_new_tokens: of one generation; until then it can neither end its text nor complete a tag (see `sampler.Sampler`).
    """

    max_searches: int = 2
    shown: int = 3
    candidates: int = 40
    max_prompt_tokens: int = 512
    max_new_tokens: int = 256
    max_observation_tokens: int = 512
    max_passage_tokens: int = 0
    max_response_tokens: int = 2048
    chunk: int = 16
    batch_groups: int = 4
    top_p: float = 1.0
    top_k: int = 0
    min_new_tokens: int = 0

    def __post_init__(self):
        for name, value in dataclasses.asdict(self).items():
            least = 0 if name in ("max_searches", "max_passage_tokens", "top_p", "top_k", "min_new_tokens") else 1
            if value < least:
                raise UserError(f"rollout.{name} = {value}: must be at least {least}")
        if not 0 < self.top_p <= 1:
            raise UserError(f"rollout.top_p = {self.top_p}: must be above 0 and at most 1 (1: all tokens)")
        if self.top_k > SLICE:
            raise UserError(f"rollout.top_k = {self.top_k}: must be at most {SLICE} (0: all tokens)")
        if self.min_new_tokens > self.max_new_tokens:
            raise UserError(
                f"rollout.min_new_tokens = {self.min_new_tokens} is above rollout.max_new_tokens = {self.max_new_tokens}; lower it"
            )
        if self.shown > self.candidates:
            raise UserError(f"rollout.shown = {self.shown} is above rollout.candidates = {self.candidates}; lower it")


@dataclass
class Turn:
    """One executed search. tokens[:history] of its episode end with the </search> that asked for it."""

    query: str
    history: int
    rows: np.ndarray  # [C] int32 corpus rows, best first; -1 where the index found fewer
    scores: np.ndarray  # [C] float32
    shown: int  # passages in the observation
    observation: tuple[int, int]  # tokens[start:end]
    error: str | None = None  # why its passages could not be shown


@dataclass
class Episode:
    """One rollout. T = tokens after the prompt; `generated` tells the policy's own from the environment's."""

    question: Question
    group: int
    sample: int
    prompt: np.ndarray  # [P] int32
    tokens: np.ndarray  # [T] int32
    generated: np.ndarray  # [T] bool
    logps: np.ndarray  # [T] float32, 0 where not generated
    turns: list[Turn]
    status: Status
    answer: str | None
    trace: list[tuple[str, str]]  # ("generated" | "information" | "corrective" | "fault", text) in order, for display


@dataclass
class _Row:
    """A rollout under way."""

    group: int
    sample: int
    prompt: np.ndarray
    status: Status | None = None
    answer: str | None = None
    generation: int = 0  # how many generations have ended
    start: int = 0  # where the current generation begins
    tokens: list[int] = field(default_factory=list)
    generated: list[bool] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    trace: list[tuple[str, str]] = field(default_factory=list)

    def write(self, tokens: Sequence[int], logps: Sequence[float] | None = None) -> None:
        self.tokens.extend(tokens)
        self.generated.extend([logps is not None] * len(tokens))
        self.logps.extend([0.0] * len(tokens) if logps is None else logps)

    def end(self, status: Status) -> None:
        self.status = status

    def episode(self, questions: Sequence[Question]) -> Episode:
        return Episode(
            question=questions[self.group],
            group=self.group,
            sample=self.sample,
            prompt=self.prompt,
            tokens=np.asarray(self.tokens, np.int32),
            generated=np.asarray(self.generated, bool),
            logps=np.asarray(self.logps, np.float32),
            turns=self.turns,
            status=self.status,
            answer=self.answer,
            trace=self.trace,
        )


def length_buckets(longest: int, smallest: int = 32) -> tuple[int, ...]:
    """Padded lengths: doubling from `smallest`, the last one exactly `longest`."""
    buckets = []
    while smallest < longest:
        buckets.append(smallest)
        smallest *= 2
    return (*buckets, longest)


def _bucket(buckets: Sequence[int], length: int) -> int:
    return next(bucket for bucket in buckets if bucket >= length)


def _pad(rows: Sequence[Sequence[int]], width: int) -> tuple[np.ndarray, np.ndarray]:
    """(tokens [B, width] int32 right-padded with 0, lengths [B] int32)."""
    tokens = np.zeros((len(rows), width), np.int32)
    for row, ids in zip(tokens, rows):
        row[: len(ids)] = ids
    return tokens, np.asarray([len(ids) for ids in rows], np.int32)


class RolloutEngine:
    """Samples episodes. Holds programs and settings, never weights: those come with each `run`.

    retriever: `search(queries, k, lora=None)` -> object with scores [B, k] and rows [B, k]; `corpus[row]` -> a passage.
    """

    def __init__(self, model, tokenizer, eos_ids: Sequence[int], config: RolloutConfig, retriever):
        least = protocol.least_observation_tokens(tokenizer)
        if config.max_observation_tokens < least:
            raise UserError(f"rollout.max_observation_tokens = {config.max_observation_tokens}: this tokenizer needs {least}")
        self.tokenizer = tokenizer
        self.config = config
        self.retriever = retriever
        self.candidates = min(config.candidates, len(retriever.corpus))
        self._known_ids = len(tokenizer)
        self._table = stop_table(tokenizer, model.config.vocab_size)
        self._sampler = device.Sampler(
            model,
            self._table,
            eos_ids,
            top_p=config.top_p,
            top_k=config.top_k,
            min_new_tokens=config.min_new_tokens,
        )
        self._prompt_buckets = length_buckets(config.max_prompt_tokens)
        self._observation_buckets = length_buckets(config.max_observation_tokens)
        # Columns never run out: after compaction the longest live row leaves room for a chunk or an observation.
        everything = (config.max_searches + 1) * config.max_new_tokens + config.max_searches * self._observation_buckets[-1]
        self._capacity = min(everything, config.max_response_tokens + max(config.chunk, self._observation_buckets[-1]))

    def run(
        self,
        policy_variables: dict[str, Any],
        questions: Sequence[Question],
        *,
        prompts: Sequence[np.ndarray],
        group_size: int,
        key: jax.Array,
        temperature: float,
        retriever_lora=None,
    ) -> tuple[list[Episode], dict[str, float]]:
        """Roll out `group_size` samples of each question.

        prompts: the token ids of each question's prompt ([P] int32). Sample s of question i draws from the key
        fold_in(key, i * group_size + s), whatever else is in the batch. temperature 0 is greedy. Returns the episodes ordered by
        question, then sample, and the metrics. A prompt beyond max_prompt_tokens is never cut: its episodes are "context_full",
        without tokens.
        """
        if len(prompts) != len(questions):
            raise ValueError(f"{len(questions)} questions but {len(prompts)} prompts")
        began, compiled, counts = time.monotonic(), self._sampler.compilations(), Counter()
        rows = [
            _Row(group, sample, np.asarray(prompts[group], np.int32))
            for group in range(len(questions))
            for sample in range(group_size)
        ]
        groups = [rows[at : at + group_size] for at in range(0, len(rows), group_size)]
        for group in groups:
            if not 0 < len(group[0].prompt) <= self.config.max_prompt_tokens:
                for row in group:
                    row.end("context_full")
        # Prompts of like length together: less padding. Results do not depend on the order.
        waiting = sorted((group for group in groups if group[0].status is None), key=lambda group: len(group[0].prompt))
        size = self.config.batch_groups
        for at in range(0, len(waiting), size):
            self._run_batch(policy_variables, waiting[at : at + size], group_size, key, temperature, retriever_lora, counts)
        metrics = _metrics(rows, counts, time.monotonic() - began, self._known_ids)
        metrics["rollout/compilations"] = self._sampler.compilations() - compiled
        return [row.episode(questions) for row in rows], metrics

    def _run_batch(self, variables, groups: list[list[_Row]], group_size: int, key, temperature, lora, counts: Counter) -> None:
        config, sampler = self.config, self._sampler
        rows = [row for group in groups for row in group]
        total = config.batch_groups * group_size
        prompts = [group[0].prompt for group in groups] + [[]] * (config.batch_groups - len(groups))
        padded = _pad(prompts, _bucket(self._prompt_buckets, max(map(len, prompts))))
        sample_ids = np.zeros(total, np.int32)
        sample_ids[: len(rows)] = [row.group * group_size + row.sample for row in rows]
        state = sampler.prefill(variables, *padded, sample_ids, self._room(rows, total), capacity=self._capacity)
        column = 0
        while True:
            state, column, reasons = self._generate(variables, state, column, rows, total, key, temperature)
            observations = self._act(rows, reasons, lora, counts)
            width = max((len(observation.tokens) for observation in observations.values()), default=0)
            if width == 0:
                break
            width = _bucket(self._observation_buckets, width)
            if column + width > self._capacity:
                state, column = self._make_room(state, rows, total, width)
            blocks = [observations[index].tokens if index in observations else [] for index in range(total)]
            state = sampler.append(variables, state, *_pad(blocks, width), self._room(rows, total))
            column += width
        forwarded, computed = jax.device_get((state.forwarded, state.computed))
        counts["forwarded"] += int(forwarded)
        counts["computed"] += int(computed)
        counts["prompt"] += sum(map(len, prompts))

    def _generate(self, variables, state, column: int, rows: list[_Row], total: int, key, temperature: float):
        """Decode until every row has stopped. Returns (state, next column, reason of each row)."""
        config = self.config
        room = self._room(rows, total)
        while True:
            steps = min(config.chunk, int(room.max()))
            if column + steps > self._capacity:
                state, column = self._make_room(state, rows, total, steps)
            state, *written = self._sampler.decode_chunk(variables, state, key, temperature, steps=config.chunk)
            tokens, logps, counts, reasons, column = jax.device_get((*written, state.reason, state.column))
            column = int(column)
            for index, row in enumerate(rows):
                n = int(counts[index])
                row.write(tokens[index, :n].tolist(), logps[index, :n].tolist())
            room = np.where(reasons == device.RUNNING, room - counts, 0)
            if not room.any():
                return state, column, reasons

    def _room(self, rows: list[_Row], total: int) -> np.ndarray:
        """[total] int32: how many tokens the next generation of each row may take; 0 for ended and idle rows."""
        room = np.zeros(total, np.int32)
        for index, row in enumerate(rows):
            if row.status is None:
                room[index] = min(self.config.max_new_tokens, self.config.max_response_tokens - len(row.tokens))
        return room

    def _make_room(self, state, rows: list[_Row], total: int, width: int):
        keep = np.zeros(total, bool)
        keep[: len(rows)] = [row.status is None for row in rows]
        state = self._sampler.compact(state, keep)
        column = int(state.column)
        assert column + width <= self._capacity, (column, width, self._capacity)
        return state, column

    def _act(self, rows: list[_Row], reasons: np.ndarray, lora, counts: Counter) -> dict[int, protocol.Observation]:
        """End the rollouts that are over, run the searches of the others. Returns the observation of every row that goes on."""
        observations: dict[int, protocol.Observation] = {}
        searches: dict[int, str] = {}
        for index, row in enumerate(rows):
            if row.status is not None:
                continue
            text = protocol.cut(self._table.decode(row.tokens[row.start :]))
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
                counts["corrective"] += 1
                self._observe(row, protocol.render_corrective(message, self.tokenizer), "corrective", observations, index)
        if searches:
            self._search(rows, searches, lora, observations, counts)
        return observations

    def _search(self, rows, searches: dict[int, str], lora, observations, counts: Counter) -> None:
        """One batched search for the queries `searches` (row index -> query)."""
        began = time.monotonic()
        try:
            found = self.retriever.search(list(searches.values()), self.candidates, lora=lora)
        except RetrievalFault as fault:
            for index in searches:
                rows[index].trace.append(("fault", str(fault)))
                rows[index].end("environment_fault")
            return
        finally:
            counts["retrieval_microseconds"] += int(1e6 * (time.monotonic() - began))
        config = self.config
        for (index, query), scores, hits in zip(searches.items(), np.asarray(found.scores), np.asarray(found.rows)):
            row = rows[index]
            passages = [self.retriever.corpus[int(hit)] for hit in hits[: config.shown] if hit >= 0]
            observation = protocol.render_observation(
                passages, self.tokenizer, config.max_observation_tokens, config.max_passage_tokens
            )
            history = len(row.tokens)
            fits = self._observe(row, observation, "information", observations, index)
            span = history, len(row.tokens)
            turn = Turn(query, history, hits.astype(np.int32), scores.astype(np.float32), observation.shown, span)
            if fits:
                counts["dropped"] += observation.dropped
                counts["cut"] += observation.cut
            else:
                turn.shown, turn.error = 0, "the observation did not fit into the context"
            row.turns.append(turn)

    def _observe(self, row: _Row, observation: protocol.Observation, kind: str, observations: dict, index: int) -> bool:
        """Give a row its observation, or end it when no token could be generated behind it."""
        if len(row.tokens) + len(observation.tokens) >= self.config.max_response_tokens:
            row.end("context_full")
            return False
        row.write(observation.tokens.tolist())
        row.start = len(row.tokens)
        row.trace.append((kind, self._table.decode(observation.tokens)))
        observations[index] = observation
        return True


def _metrics(rows: list[_Row], counts: Counter, seconds: float, known_ids: int) -> dict[str, float]:
    """Means are over rollouts. prefill_ratio: real tokens put through the model / distinct tokens of prompts and responses.
    padding_ratio: positions computed, padding included / real tokens."""
    rollouts = max(1, len(rows))
    generated = sum(sum(row.generated) for row in rows)
    distinct = counts["prompt"] + sum(len(row.tokens) for row in rows)
    ended = Counter(row.status for row in rows)
    metrics = {
        "rollout/searches": sum(len(row.turns) for row in rows) / rollouts,
        "rollout/corrective": counts["corrective"] / rollouts,
        "rollout/generated_tokens": generated / rollouts,
        "rollout/response_tokens": sum(len(row.tokens) for row in rows) / rollouts,
        "rollout/response_tokens_max": max((len(row.tokens) for row in rows), default=0),
        "rollout/tokens_per_second": generated / max(seconds, 1e-9),
        "rollout/prefill_ratio": counts["forwarded"] / max(1, distinct),
        "rollout/padding_ratio": counts["computed"] / max(1, counts["forwarded"]),
        "rollout/passages_dropped": counts["dropped"],
        "rollout/passages_cut": counts["cut"],
        "rollout/outside_vocabulary": sum(token >= known_ids for row in rows for token in row.tokens),
        "time/rollout": seconds,
        "time/retrieval": counts["retrieval_microseconds"] / 1e6,
    }
    for status in ("answered", "no_answer", "truncated", "context_full", "environment_fault"):
        metrics[f"rollout/{status}"] = ended[status] / rollouts
    return metrics
