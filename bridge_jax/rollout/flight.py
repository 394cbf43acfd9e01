"""Rollouts in flight: which group of rows is in which place of the batch, who decodes, who is answered, who is replaced.

    waiting groups -> [ enter -> decode chunks -> act -> append ] -> ended rows
                        free places   until rows     observations
                                      have stopped   of those that go on

The batch is always N = batch_groups places of G rows. A group whose rows have all ended leaves its place to one that waits. Work on
part of the batch has one static size, a quarter of it: groups enter by quarters of the places, observations are appended by
quarters of the rows, in order of length. So nothing is computed for rows that have nothing to do, and there is one program.

What is decided here never depends on how long something took: the same questions and keys give the same rounds, programs and bits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import jax
import numpy as np

from bridge_jax.rollout import sampler as device
from bridge_jax.rollout.environment import Environment
from bridge_jax.rollout.rows import RolloutConfig, Row


def length_buckets(longest: int, smallest: int = 32) -> tuple[int, ...]:
    """Padded lengths: doubling from `smallest`, the last one exactly `longest`."""
    buckets = []
    while smallest < longest:
        buckets.append(smallest)
        smallest *= 2
    return (*buckets, longest)


def bucket(buckets: Sequence[int], length: int) -> int:
    """The smallest bucket that holds `length`."""
    return next(bucket for bucket in buckets if bucket >= length)


def pad(rows: Sequence[Sequence[int]], width: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """(tokens [count, width] int32 right-padded with 0, lengths [count] int32); rows that are not given have length 0."""
    tokens, lengths = np.zeros((count, width), np.int32), np.zeros(count, np.int32)
    for n, ids in enumerate(rows):
        tokens[n, : len(ids)] = ids
        lengths[n] = len(ids)
    return tokens, lengths


def private_widths(config: RolloutConfig) -> tuple[int, ...]:
    """Column counts of the rows' own cache block, smallest first: decoding attends over as many columns as are in use.

    Columns never run out: once compacted, the longest live row leaves room for a chunk or an observation.
    """
    everything = (config.max_searches + 1) * config.max_new_tokens + config.max_searches * config.max_observation_tokens
    longest = min(everything, config.max_response_tokens)
    smallest = max(256, -(-longest // 8))
    return (*length_buckets(longest, smallest), longest + max(config.chunk, config.max_observation_tokens))


class Flight:
    """The rollouts of one run. See the module's text."""

    def __init__(
        self,
        sampler: device.Sampler,
        environment: Environment,
        widths: Sequence[int],
        variables,
        *,
        group_size: int,
        key: jax.Array,
        temperature: float,
        counts: Counter,
    ):
        self.sampler = sampler
        self.environment = environment
        self.config = config = environment.config
        self.variables = variables
        self.key = key
        self.temperature = temperature
        self.counts = counts
        self.widths = widths
        self.prompt_buckets = length_buckets(config.max_prompt_tokens)
        self.observation_buckets = length_buckets(config.max_observation_tokens)
        self.group_size = group_size
        self.groups = config.batch_groups
        self.entering = -(-self.groups // 4)
        self.appended = -(-self.groups * group_size // 4)
        total = self.groups * group_size
        self.rows: list[Row | None] = [None] * total
        self.room = np.zeros(total, np.int64)  # tokens the present generation may still take; 0: the row stands still
        self.filled = np.zeros(total, np.int64)  # valid columns
        self.reasons = np.full(total, device.IDLE)
        self.column = 0
        self.state: device.DecodeState | None = None

    def run(self, waiting: list[list[Row]]) -> None:
        """Roll out every group of `waiting` (G rows of one prompt, none ended) to its end. Like lengths should stand together."""
        if not waiting:
            return
        waiting = list(waiting)
        self.prompt_width = bucket(self.prompt_buckets, max(len(group[0].prompt) for group in waiting))
        while waiting or self._live():
            self._enter(waiting)
            self._decode()
            stopped = {index: self.rows[index] for index in self._live() if self.reasons[index] != device.RUNNING}
            self._append(self.environment.act(stopped, self.reasons))
        forwarded, computed = jax.device_get((self.state.forwarded, self.state.computed))
        self.counts["forwarded"] += int(forwarded)
        self.counts["computed"] += int(computed)

    def _live(self) -> list[int]:
        return [index for index, row in enumerate(self.rows) if row is not None and row.status is None]

    def _room(self, row: Row) -> int:
        return min(self.config.max_new_tokens, self.config.max_response_tokens - len(row.tokens))

    def _enter(self, waiting: list[list[Row]]) -> None:
        """Give free places to the first groups of `waiting`, by quarters, if there is a quarter of them (or nobody is live)."""
        size, live = self.group_size, self._live()
        taken = {index // size for index in live}
        free = [place for place in range(self.groups) if place not in taken]
        count = min(len(free), len(waiting))
        if live and len(free) < self.entering:
            return
        if count < len(waiting):
            count -= count % self.entering
        entering, waiting[:count] = waiting[:count], []
        for at in range(0, count, self.entering):
            self._prefill(entering[at : at + self.entering], free[at : at + self.entering])

    def _prefill(self, groups: list[list[Row]], places: list[int]) -> None:
        size = self.group_size
        prompts = [group[0].prompt for group in groups]
        tokens, lengths = pad(prompts, bucket(self.prompt_buckets, max(map(len, prompts))), self.entering)
        slots = np.full(self.entering, self.groups, np.int32)  # beyond the last place: nobody
        sample_ids, left = np.zeros((2, self.entering * size), np.int32)
        for n, (group, place) in enumerate(zip(groups, places)):
            slots[n] = place
            for m, row in enumerate(group):
                index = place * size + m
                self.rows[index] = row
                self.room[index] = left[n * size + m] = self._room(row)
                self.filled[index] = 0
                sample_ids[n * size + m] = row.group * size + row.sample
        arrays = tokens, lengths, slots, sample_ids, left
        if self.state is None:
            shape = {"groups": self.groups, "prompt_width": self.prompt_width, "width": bucket(self.widths, self.config.chunk)}
            self.state = self.sampler.start(self.variables, *arrays, **shape)
        else:
            self.state = self.sampler.enter(self.variables, self.state, *arrays)
        self.counts["prompt"] += int(lengths.sum())

    def _decode(self) -> None:
        """Decode until all rows have stopped."""
        while True:
            self._make_room(min(self.config.chunk, int(self.room.max())))
            self.state, *written = self.sampler.decode_chunk(
                self.variables, self.state, self.key, self.temperature, steps=self.config.chunk
            )
            tokens, logps, counts, self.reasons, column = jax.device_get((*written, self.state.reason, self.state.column))
            self.column = int(column)
            for index in np.flatnonzero(counts):
                n = counts[index]
                self.rows[index].write(tokens[index, :n].tolist(), logps[index, :n].tolist())
            self.filled += counts
            self.room = np.where(self.reasons == device.RUNNING, self.room - counts, 0)
            if not any(self.reasons[index] == device.RUNNING for index in self._live()):
                return

    def _append(self, observations: dict[int, np.ndarray]) -> None:
        """Append the observations (row index -> tokens): all at the same columns, a quarter of the rows at a time."""
        if not observations:
            return
        order = sorted(observations, key=lambda index: len(observations[index]))
        wide = bucket(self.observation_buckets, len(observations[order[-1]]))
        self._make_room(wide)
        for at in range(0, len(order), self.appended):
            part = order[at : at + self.appended]
            blocks = [observations[index] for index in part]
            tokens, lengths = pad(blocks, bucket(self.observation_buckets, len(blocks[-1])), self.appended)
            indices = np.full(self.appended, len(self.rows), np.int32)  # beyond the last row: nobody
            indices[: len(part)] = part
            left = np.zeros(self.appended, np.int32)
            left[: len(part)] = [self._room(self.rows[index]) for index in part]
            self.room[part] = left[: len(part)]
            self.filled[part] += lengths[: len(part)]
            advance = wide if at + len(part) == len(order) else 0
            self.state = self.sampler.append(self.variables, self.state, indices, tokens, lengths, left, advance)
        self.column += wide

    def _make_room(self, need: int) -> None:
        """See to it that `need` columns can be written.

        Columns that no live row needs are given up when the block is too narrow, or when they are half of those in use and a
        narrower block would do. Twice the columns must be written before the same happens again, so this costs little.
        """
        live = self._live()
        longest = int(self.filled[live].max(initial=0))
        width = self.state.private.valid.shape[1]
        half_empty = 2 * longest <= self.column
        if self.column + need > width or (half_empty and bucket(self.widths, longest + need) < width):
            kept = longest if half_empty or self.column + need > self.widths[-1] else self.column
            keep = np.zeros(len(self.rows), bool)
            keep[live] = True
            self.state = self.sampler.compact(self.state, keep, width=bucket(self.widths, kept + need))
            self.column = longest
            self.filled[~keep] = 0
