"""Rollouts in flight: which group of rows is in which place of the batch, who decodes, who is answered, who is replaced.

    waiting groups -> [ enter -> decode chunks -> act -> append ] -> ended rows
                        free places   until some     observations
                                      have stopped   of those that go on

The batch is always N = batch_groups places of G rows. After a chunk, as soon as a share of the live rows has stopped, those are
acted on while the others stay in the middle of their generations; a group whose rows have all ended leaves its place to a new one.
Work on a part of the batch has one static size, a sixteenth of it: groups enter by sixteenths of the places, observations are
appended by sixteenths of the rows, in order of length. A row that stands still costs a decode step like one that writes; a prefill
or an append computes its part only.

Programs follow the shapes, each compiled when it is first needed: with W widths of the private block, W that decode, one a width
and bucket of prompts for entering, one a width and bucket of observations for appending, one a pair of widths for moving the block.
All but the last depend on the width of the shared block, too: the engine keeps the greatest that it has needed.

What is decided here never depends on how long something took: the same questions and keys give the same rounds, programs and bits.

The constants were chosen by playing ragged workloads through this module with a device that only counts, whose counts are weighed
as a 3B model would (`benchmarks/flight_play.py`). At the defaults of `config.py` 35 % of the rows decode in a step, against 8 % by
batches of which nobody is answered before all have stopped; with one width of the cache, too, those would take 3.4 times as long.

With `overlap_search` the passages of rows that stopped are searched for in a thread while the others decode one more chunk, for
which the rows that searched stand idle: it is for an index on another machine, whose searches take about as long as a chunk.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np

from bridge_jax.mesh import batch_ways
from bridge_jax.rollout import sampler as device
from bridge_jax.rollout.environment import Environment
from bridge_jax.rollout.rows import RolloutConfig, Row

ACT_SHARE = 1 / 4  # of the live rows: so many must have stopped before they are acted on
PARTS = 16  # of the batch
LEAST_ROWS = 4  # in a part: fewer would read all weights for hardly any tokens
NARROW = 192  # columns: a block is not made narrower


def length_buckets(longest: int, smallest: int = 32) -> tuple[int, ...]:
    """Padded lengths: doubling from `smallest`, the last one exactly `longest`."""
    buckets = []
    while smallest < longest:
        buckets.append(smallest)
        smallest *= 2
    return (*buckets, longest)


def observation_buckets(longest: int) -> tuple[int, ...]:
    """Padded lengths of observations, which are many and alike: quarters of the longest, short ones together."""
    return tuple(sorted({min(longest, max(32, -(-longest * n // 4))) for n in (1, 2, 3, 4)}))


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


def a_part(whole: int, ways: int, least: int = 1) -> int:
    """How many of `whole` make a part: at least `least`, and a multiple of `ways` so that a part splits over the mesh."""
    return min(whole, -(-max(least, -(-whole // PARTS)) // ways) * ways)


def private_widths(config: RolloutConfig) -> tuple[int, ...]:
    """Column counts of the rows' own cache block, smallest first: decoding attends over about as many columns as are in use.

    Quarters of the longest response (a narrow block is not cut further), and one that never runs out: once the columns that no live
    row needs are given up, the longest live row leaves room for a chunk or an observation.
    """
    everything = (config.max_searches + 1) * config.max_new_tokens + config.max_searches * config.max_observation_tokens
    longest = min(everything, config.max_response_tokens)
    quarters = {-(-longest * n // 4) for n in (1, 2, 3)}
    return (
        *sorted(width for width in quarters if width >= NARROW),
        longest,
        longest + max(config.chunk, config.max_observation_tokens),
    )


class Flight:
    """The rollouts of one run. See the module's text."""

    def __init__(
        self,
        sampler: device.Sampler,
        environment: Environment,
        widths: Sequence[int],
        variables,
        *,
        prompt_width: int,
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
        self.prompt_width = prompt_width
        self.prompt_buckets = length_buckets(config.max_prompt_tokens)
        self.observation_buckets = observation_buckets(config.max_observation_tokens)
        self.most_needed = max(config.chunk, config.max_observation_tokens)
        self.group_size = group_size
        self.groups = config.batch_groups
        total, ways = self.groups * group_size, batch_ways(sampler.mesh)
        self.entering = a_part(self.groups, ways)
        self.appended = a_part(total, ways, LEAST_ROWS)
        self.rows: list[Row | None] = [None] * total
        self.room = np.zeros(total, np.int64)  # tokens the present generation may still take; 0: the row stands still
        self.filled = np.zeros(total, np.int64)  # valid columns
        self.reasons = np.full(total, device.IDLE)
        self.column = 0
        self.state: device.DecodeState | None = None
        self.advance: Callable[[int], None] = lambda groups: None

    def run(self, waiting: list[list[Row]], advance: Callable[[int], None]) -> None:
        """Roll out every group of `waiting` (G rows of one prompt, none ended) to its end. Like lengths should stand together.

        advance: told after each look of the host how many groups have ended since the last. It may raise to break off.
        """
        self.advance = advance
        if not waiting:
            return
        waiting, under_way = list(waiting), len(waiting)
        with ThreadPoolExecutor(1) as pool:
            asked, search = {}, None  # row index -> query of the search under way
            while waiting or self._live():
                self._enter(waiting)
                self._append(self._openings())
                if self.room.any():
                    self._decode(one_chunk=bool(asked))
                observations = self.environment.answer(self.rows, asked, search.result()) if asked else {}
                asked = {}
                live = self._live()
                stopped = {n: self.rows[n] for n in live if self.reasons[n] != device.RUNNING and n not in observations}
                if stopped and len(stopped) >= ACT_SHARE * len(live):
                    told, asked = self.environment.act(stopped, self.reasons)
                    observations |= told
                if asked and self.config.overlap_search:
                    search = pool.submit(self.environment.search, self.rows, asked)
                elif asked:
                    found = self.environment.search(self.rows, asked)
                    observations |= self.environment.answer(self.rows, asked, found)
                    asked = {}
                self._append(observations)
                still = len(waiting) + len(self._taken())
                advance(under_way - still)
                under_way = still
        forwarded, computed = jax.device_get((self.state.forwarded, self.state.computed))
        self.counts["forwarded"] += int(forwarded)
        self.counts["computed"] += int(computed)

    def _live(self) -> list[int]:
        return [index for index, row in enumerate(self.rows) if row is not None and row.status is None]

    def _taken(self) -> set[int]:
        """The places of the groups that have live rows."""
        return {index // self.group_size for index in self._live()}

    def _room(self, row: Row) -> int:
        return min(self.config.max_new_tokens, self.config.max_response_tokens - len(row.tokens))

    def _enter(self, waiting: list[list[Row]]) -> None:
        """Give free places to the first groups of `waiting`: whole parts, and a partial one if nobody is live or waits then."""
        taken = self._taken()
        free = [place for place in range(self.groups) if place not in taken]
        count = min(len(free), len(waiting))
        if taken and count < len(waiting):
            count -= count % self.entering
        entering, waiting[:count] = waiting[:count], []
        for at in range(0, count, self.entering):
            self._prefill(entering[at : at + self.entering], free[at : at + self.entering])

    def _openings(self) -> dict[int, np.ndarray]:
        """The observations that rows which have just entered begin with."""
        opened = {}
        for index in self._live():
            row = self.rows[index]
            if row.opening is not None:
                opened[index], row.opening = row.opening, None
        return opened

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
                row.began = time.monotonic()
                # A row with an opening stands still until that is appended.
                self.room[index] = left[n * size + m] = self._room(row) if row.opening is None else 0
                self.filled[index] = 0
                sample_ids[n * size + m] = row.group * size + row.sample
        arrays = tokens, lengths, slots, sample_ids, left
        if self.state is None:
            shape = {"groups": self.groups, "prompt_width": self.prompt_width, "width": bucket(self.widths, self.config.chunk)}
            self.state = self.sampler.start(self.variables, *arrays, **shape)
        else:
            self.state = self.sampler.enter(self.variables, self.state, *arrays)
        self.counts["prompt"] += int(lengths.sum())

    def _decode(self, one_chunk: bool) -> None:
        """Decode until enough rows have stopped, or one chunk."""
        while True:
            self._make_room(self.column, min(self.config.chunk, int(self.room.max())))
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
            self.advance(0)
            live = self._live()
            if one_chunk or (self.reasons[live] != device.RUNNING).sum() >= ACT_SHARE * len(live):
                return

    def _append(self, observations: dict[int, np.ndarray]) -> None:
        """Append the observations (row index -> tokens), a part of the rows at a time."""
        order = sorted(observations, key=lambda index: len(observations[index]))
        for at in range(0, len(order), self.appended):
            part = order[at : at + self.appended]
            blocks = [observations[index] for index in part]
            tokens, lengths = pad(blocks, bucket(self.observation_buckets, len(blocks[-1])), self.appended)
            self._make_room(int(self.filled[part].max()), tokens.shape[1])
            indices = np.full(self.appended, len(self.rows), np.int32)  # beyond the last row: nobody
            indices[: len(part)] = part
            left = np.zeros(self.appended, np.int32)
            left[: len(part)] = [self._room(self.rows[index]) for index in part]
            self.state = self.sampler.append(self.variables, self.state, indices, tokens, lengths, left)
            self.column = max(self.column, int(self.filled[part].max() + lengths.max()))
            self.room[part] = left[: len(part)]
            self.filled[part] += lengths[: len(part)]

    def _make_room(self, start: int, need: int) -> None:
        """See to it that `need` columns can be written from `start` on: give up those that no live row needs, or widen the block.

        Behind the longest live row, the block gets room for what is needed or an eighth of that row's columns: writing those costs
        far more than moving the block does. It is made narrower only where the longest observation would fit as well: observations
        beside a row near the end of a width would move the block to and fro.
        """
        live = self._live()
        longest = int(self.filled[live].max(initial=0))
        width = self.state.private.valid.shape[1]
        assert longest + need <= self.widths[-1], (longest, need, self.widths)

        def holds(more: int) -> int:
            return bucket(self.widths, min(longest + max(more, longest // 8), self.widths[-1]))

        enough, for_a_while = holds(need), holds(self.most_needed)
        if start + need > width or for_a_while < width:
            keep = np.zeros(len(self.rows), bool)
            keep[live] = True
            self.state = self.sampler.compact(self.state, keep, width=int(np.clip(width, enough, for_a_while)))
            self.column = longest
            self.filled[~keep] = 0
