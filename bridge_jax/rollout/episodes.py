"""Multi-turn episodes: the one rollout function of training, evaluation and `ask` (METHOD.md 2).

The host acts between chunks of decoding (`flight.py`): it reads the actions of the rows that have stopped, searches for all of them
in one batch, and appends the observations to the cache. What a row writes is kept as the ids that were sampled, next to their
log-probs; text is only ever derived from ids, never the other way round. Shapes are few: a batch is always batch_groups x
group_size rows (idle where questions run out), prompts and observations are padded to a handful of lengths, the cache has a few
widths.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from bridge_jax.data.qa import Question
from bridge_jax.errors import UserError
from bridge_jax.rollout import protocol
from bridge_jax.rollout import sampler as device
from bridge_jax.rollout.environment import Environment
from bridge_jax.rollout.flight import Flight, bucket, length_buckets, private_widths
from bridge_jax.rollout.rows import Episode, Opening, RolloutConfig, Row, Turn
from bridge_jax.rollout.stopping import stop_table

__all__ = ["Episode", "Opening", "Played", "RolloutConfig", "RolloutEngine", "Turn", "summarise"]


class Played(NamedTuple):
    """What one process played: its episodes, what was counted on the way, how long it took, programs compiled."""

    episodes: list[Episode]
    counts: Counter
    seconds: float
    compilations: int


class RolloutEngine:
    """Samples episodes. Holds programs and settings, never weights: those come with each `run`.

    retriever: `search(queries, k, lora=None)` -> object with scores [B, k] and rows [B, k]; `corpus[row]` -> a passage.
    tool: given each query first; text it returns is the observation, None leaves the query to the retriever. A reply is no search:
      it gets no credit, and uses up one generation as a corrective observation does. It must be fast: rows wait for it.
    """

    def __init__(
        self,
        model,
        tokenizer,
        eos_ids: Sequence[int],
        config: RolloutConfig,
        retriever,
        tool: Callable[[str], str | None] | None = None,
    ):
        least = protocol.least_observation_tokens(tokenizer, config.retry_invalid)
        if config.max_observation_tokens < least:
            raise UserError(f"rollout.max_observation_tokens = {config.max_observation_tokens}: this tokenizer needs {least}")
        self.tokenizer = tokenizer
        self.config = config
        self.retriever, self.tool = retriever, tool
        self.candidates = min(config.candidates, len(retriever.corpus))
        self._known_ids, self._vocabulary = len(tokenizer), model.config.vocab_size
        self._table = stop_table(tokenizer, model.config.vocab_size)
        self._sampler = device.Sampler(
            model,
            self._table,
            eos_ids,
            top_p=config.top_p,
            top_k=config.top_k,
            min_new_tokens=config.min_new_tokens,
        )
        self._widths = private_widths(config)
        self._prompt_width = 0  # the widest so far: a run of shorter prompts needs no programs of its own

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of generated ids, special tokens spelled out; a character of which bytes are missing yet is U+FFFD."""
        return self._table.decode(tokens)

    def run(self, *args, **settings) -> tuple[list[Episode], dict[str, float]]:
        """`play`, summarised: the episodes ordered by question, then sample, and the metrics."""
        return summarise([self.play(*args, **settings)])

    def play(
        self,
        policy_variables: dict[str, Any],
        questions: Sequence[Question],
        *,
        prompts: Sequence[np.ndarray],
        group_size: int,
        key: jax.Array,
        temperature: float,
        retriever_lora=None,
        numbers: Sequence[int] | None = None,
        advance: Callable[[int], None] = lambda questions: None,
        finished: Callable[[Episode], None] | None = None,
        openings: Sequence[Opening] | None = None,
        watch: Callable[[Row], None] | None = None,
    ) -> Played:
        """Roll out `group_size` samples of each question.

        prompts: the token ids of each question's prompt ([P] int32). numbers: of each question in its step, where this is a part of
        one; the groups of the episodes. Sample s of question number i draws from the key fold_in(key, i * group_size + s), whatever
        else is in the batch. temperature 0 is greedy. advance: told on the way how many more questions are done, often none; it may
        raise to break off. finished: given each episode once, soon after its end. openings: one a question, whose samples then go
        on with an episode; its text so far is the prompt, which is read once for all of them. watch: given each row at every look
        of the host, most often in the middle of a generation, and once when it has ended. A prompt beyond max_prompt_tokens is
        never cut: its episodes are "context_full", without tokens of their own.

        Raises:
          ValueError: another number of prompts than questions, no sample a question, a temperature that is none, a prompt's token
            id that the policy does not have, an opening that no episode can have.
        """
        _check_request(questions, prompts, group_size, temperature, self._vocabulary)
        numbers = range(len(questions)) if numbers is None else numbers
        asked = dict(zip(numbers, questions, strict=True))
        began, compiled, counts = time.monotonic(), self._sampler.compilations(), Counter()
        rows = [
            Row(number, sample, np.asarray(prompt, np.int32))
            for number, prompt in zip(numbers, prompts, strict=True)
            for sample in range(group_size)
        ]
        groups = [rows[at : at + group_size] for at in range(0, len(rows), group_size)]
        for group, opening in zip(groups, openings or (), strict=bool(openings)):
            for row, observation in zip(group, opening.observations, strict=True):
                if opening.generations < 1 or len(observation) > self.config.max_observation_tokens:
                    raise ValueError("an opening comes behind a generation and has at most max_observation_tokens")
                row.open(opening.generations, observation)
        for group in groups:
            if not 0 < len(group[0].prompt) <= self.config.max_prompt_tokens:
                for row in group:
                    row.end("context_full")
        # Prompts of like length together: less padding. Results do not depend on the order.
        waiting = sorted((group for group in groups if group[0].status is None), key=lambda group: len(group[0].prompt))
        advance(len(groups) - len(waiting))
        longest = max((len(group[0].prompt) for group in waiting), default=0)
        self._prompt_width = max(self._prompt_width, bucket(length_buckets(self.config.max_prompt_tokens), longest))
        parts = self.config, self.tokenizer, self._table, self.retriever, self.candidates, retriever_lora, counts, asked
        environment = Environment(*parts, self.tool)
        settings = {"group_size": group_size, "key": key, "temperature": temperature, "counts": counts}
        settings["prompt_width"] = self._prompt_width
        going = list(rows)

        def look(done: int) -> None:
            nonlocal going
            for row in going if watch else ():
                watch(row)
            for row in going if finished else ():
                if row.status is not None:
                    finished(row.episode(asked))
            going = [row for row in going if row.status is None]
            advance(done)

        Flight(self._sampler, environment, self._widths, policy_variables, **settings).run(waiting, look)
        look(0)  # those whose prompt was too long, where nobody else was under way
        counts["outside_vocabulary"] = sum(token >= self._known_ids for row in rows for token in row.tokens)
        episodes = [row.episode(asked) for row in rows]
        return Played(episodes, counts, time.monotonic() - began, self._sampler.compilations() - compiled)


def _check_request(
    questions: Sequence, prompts: Sequence[np.ndarray], group_size: int, temperature: float, vocabulary: int
) -> None:
    """What XLA would take without a word, and answer with nonsense."""
    if len(prompts) != len(questions):
        raise ValueError(f"{len(questions)} questions but {len(prompts)} prompts")
    if group_size < 1:
        raise ValueError(f"group_size={group_size}: must be at least 1")
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature={temperature}: must be a finite number of at least 0")
    for number, prompt in enumerate(prompts):
        ids = np.asarray(prompt)
        if ids.size and not 0 <= ids.min() <= ids.max() < vocabulary:
            raise ValueError(f"prompt {number} has token ids from {ids.min()} to {ids.max()}: must be in [0, {vocabulary})")


def summarise(parts: Sequence[Played]) -> tuple[list[Episode], dict[str, float]]:
    """What several processes played of one step, each some of its questions -> its episodes in order, and metrics.

    Means are over rollouts. prefill_ratio: real tokens put through the model / distinct tokens of prompts and responses.
    padding_ratio: positions computed, padding included / real tokens. Times are the slowest process'; retrieval is their mean.
    """
    episodes = sorted((e for part in parts for e in part.episodes), key=lambda e: (e.group, e.sample))
    counts, seconds = sum((part.counts for part in parts), Counter()), max(part.seconds for part in parts)
    rollouts = max(1, len(episodes))
    generated = sum(int(e.generated.sum()) for e in episodes)
    distinct = counts["prompt"] + sum(len(e.tokens) for e in episodes)
    ended = Counter(e.status for e in episodes)
    metrics = {
        "rollout/searches": sum(len(e.turns) for e in episodes) / rollouts,
        "rollout/corrective": counts["corrective"] / rollouts,
        "rollout/generated_tokens": generated / rollouts,
        "rollout/response_tokens": sum(len(e.tokens) for e in episodes) / rollouts,
        "rollout/response_tokens_max": max((len(e.tokens) for e in episodes), default=0),
        "rollout/tokens_per_second": generated / max(seconds, 1e-9),
        "rollout/prefill_ratio": counts["forwarded"] / max(1, distinct),
        "rollout/padding_ratio": counts["computed"] / max(1, counts["forwarded"]),
        "rollout/passages_dropped": counts["dropped"],
        "rollout/passages_cut": counts["cut"],
        "rollout/outside_vocabulary": counts["outside_vocabulary"],
        "rollout/compilations": max(part.compilations for part in parts),
        "time/rollout": seconds,
        "time/retrieval": counts["retrieval_microseconds"] / 1e6 / len(parts),
    }
    for status in ("answered", "no_answer", "truncated", "context_full", "environment_fault"):
        metrics[f"rollout/{status}"] = ended[status] / rollouts
    return episodes, metrics
