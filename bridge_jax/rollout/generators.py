"""One generation after one user message, for many messages at once: by a policy in our own sampler, or by an endpoint; or,
to try everything else, by nobody.

    replies = generator.generate(["Who wrote ...?", ...], stops=("</answer>", "\n\n"), max_tokens=64)

A generator has `width` (messages worth having under way together) and `fit` (documents cut to a budget of tokens). Stop strings end
a generation at the token that completes one of them; the text is cut there.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import jax
import numpy as np

from bridge_jax.data.prompts import encode_message, harmless
from bridge_jax.endpoint import Endpoint, Reply
from bridge_jax.rollout import sampler as device
from bridge_jax.rollout.flight import Flight, bucket, length_buckets, private_widths
from bridge_jax.rollout.rows import RolloutConfig, Row
from bridge_jax.rollout.stopping import stop_table


class Generator(Protocol):
    width: int

    def generate(self, messages: Sequence[str], *, stops: tuple[str, str], max_tokens: int) -> list[Reply]: ...

    def fit(self, documents: Sequence[str], budget: int) -> tuple[str, int]:
        """(the documents, a line each, in at most `budget` tokens (0: no limit), how many of them are shown in whole or part)."""
        ...


def cut_at(text: str, stops: Sequence[str]) -> str:
    """The text up to the first stop string, and with it if it is a closing tag (which readers look for)."""
    ends = [at + len(stop) * stop.startswith("</") for stop in stops if (at := text.find(stop)) >= 0]
    return text[: min(ends)] if ends else text


def fit_characters(documents: Sequence[str], budget: int) -> tuple[str, int]:
    """`fit` where the model's tokens are not known: four characters count as one."""
    shown: list[str] = []
    room = 4 * budget
    for document in documents:
        if budget and len(document) + 1 > room:
            if not shown:
                shown.append(document[:room])
            break
        shown.append(document)
        room -= len(document) + 1
    return "\n".join(shown), len(shown)


class PolicyGenerator:
    """Greedy generations of a policy: the rollout's sampler and places, one generation a row.

    prompt_tokens: a longer message is not cut: it is not answered. One program a pair of stop strings is kept.
    """

    def __init__(self, policy, tokenizer, eos_ids: Sequence[int], variables, *, width: int, prompt_tokens: int, chunk: int = 16):
        self.policy, self.tokenizer, self.eos_ids, self.variables = policy, tokenizer, eos_ids, variables
        self.width, self.prompt_tokens, self.chunk = width, prompt_tokens, chunk
        self._samplers: dict[tuple[str, str], tuple] = {}
        self._prompt_width = 0

    def generate(self, messages: Sequence[str], *, stops: tuple[str, str], max_tokens: int) -> list[Reply]:
        table, sampler = self._sampler(stops)
        rows = [Row(n, 0, np.asarray(self.encode(message), np.int32)) for n, message in enumerate(messages)]
        for row in rows:
            if len(row.prompt) > self.prompt_tokens:
                row.end("context_full")
        waiting = sorted(([row] for row in rows if row.status is None), key=lambda group: len(group[0].prompt))
        longest = max((len(group[0].prompt) for group in waiting), default=1)
        # As wide as the longest message so far: programs follow the shapes.
        self._prompt_width = max(self._prompt_width, bucket(length_buckets(self.prompt_tokens), longest))
        config = RolloutConfig(
            max_searches=0, max_prompt_tokens=self.prompt_tokens, max_new_tokens=max_tokens, max_observation_tokens=1,
            max_response_tokens=max_tokens, chunk=min(self.chunk, max_tokens), batch_groups=self.width,
        )  # fmt: skip
        settings = {"prompt_width": self._prompt_width, "group_size": 1, "key": jax.random.key(0), "temperature": 0.0}
        flight = Flight(sampler, _Once(config), private_widths(config), self.variables, counts=Counter(), **settings)
        flight.run(waiting, lambda done: None)
        return [self._reply(row, table, stops) for row in rows]

    def encode(self, message: str) -> list[int]:
        return encode_message(harmless(message, self.tokenizer), self.tokenizer)

    def fit(self, documents: Sequence[str], budget: int) -> tuple[str, int]:
        shown: list[str] = []
        room = budget
        for document in documents:
            encoded = self.tokenizer(document, add_special_tokens=False, return_offsets_mapping=True)
            size = len(encoded["input_ids"]) + 1  # its line break
            if budget and size > room:
                if not shown and room > 1:  # the first one is shown in part rather than not at all
                    shown.append(document[: encoded["offset_mapping"][room - 2][1]])
                break
            shown.append(document)
            room -= size
        return "\n".join(shown), len(shown)

    def _sampler(self, stops: tuple[str, str]):
        if stops not in self._samplers:
            table = stop_table(self.tokenizer, self.policy.config.vocab_size, stops)
            self._samplers[stops] = table, device.Sampler(self.policy, table, self.eos_ids)
        return self._samplers[stops]

    def _reply(self, row: Row, table, stops: tuple[str, str]) -> Reply:
        if row.status == "context_full":
            problem = f"{len(row.prompt)} tokens, the limit {self.prompt_tokens}"
            return Reply("", "too_long", len(row.prompt), problem=problem)
        written = row.tokens[:-1] if row.tokens and row.tokens[-1] in self.eos_ids else row.tokens
        text = cut_at(table.decode(written), stops)
        return Reply(text, "length" if row.status == "truncated" else "stop", len(row.prompt), len(row.tokens), row.seconds)


class _Once:
    """The environment of a single generation: whoever stops is done (see `rollout.environment.Environment`)."""

    def __init__(self, config: RolloutConfig):
        self.config = config

    def act(self, rows, reasons):
        for index, row in rows.items():
            row.end("truncated" if reasons[index] == device.LIMIT else "answered")
        return {}, {}


class EndpointGenerator:
    """Generations of a model behind an OpenAI-compatible endpoint, several requests at a time.

    A reasoning model's own <think> block is no part of its reply. Line breaks are no stop strings there, since they would end it in
    that block: the text is cut at them afterwards.
    """

    def __init__(self, endpoint: Endpoint):
        self.endpoint = endpoint
        self.width = 2 * endpoint.concurrency  # so that nobody waits while the last ones of a round are written

    def generate(self, messages: Sequence[str], *, stops: tuple[str, str], max_tokens: int) -> list[Reply]:
        sent = tuple(stop for stop in stops if stop.strip())
        asked = [{"messages": [{"role": "user", "content": text}], "max_tokens": max_tokens, "stop": sent} for text in messages]
        replies = self.endpoint.complete_many(asked)
        return [dataclasses.replace(reply, text=_reply_of(reply.text, stops)) for reply in replies]

    def fit(self, documents: Sequence[str], budget: int) -> tuple[str, int]:
        return fit_characters(documents, budget)


class DryGenerator:
    """No model: the answer is the title of the first passage that a message shows. It costs nothing, so that everything around it
    can be tried at full length: questions, index, what is stored."""

    width = 64

    def generate(self, messages: Sequence[str], *, stops: tuple[str, str], max_tokens: int) -> list[Reply]:
        titles = (re.search(r"Doc 1\(Title: (.*?)\) ", message) for message in messages)
        return [Reply(cut_at(f"So the answer is: {title[1] if title else 'nothing'}", stops)) for title in titles]

    def fit(self, documents: Sequence[str], budget: int) -> tuple[str, int]:
        return fit_characters(documents, budget)


def _reply_of(text: str, stops: tuple[str, str]) -> str:
    return cut_at(text.rpartition("</think>")[2].lstrip(), stops)
