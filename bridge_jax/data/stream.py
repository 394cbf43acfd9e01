"""The order of training questions: a pure function of (questions, batch, seed, step), so a resumed run needs no saved position.

Every source is walked in epochs: epoch e is the permutation `epoch_order(n, seed, e)`, so within an epoch each question comes once.
A mixture is a schedule of `PERIOD` slots, shuffled anew each period, in which source j owns its share exactly:

    position p = step * batch + i  ->  (period, slot) = divmod(p, PERIOD)  ->  source j, and how many of j's slots came before
                                   ->  j's own position -> (epoch, offset) -> question
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bridge_jax.data.formats import Question
from bridge_jax.errors import UserError

PERIOD = 1000  # weights are honoured to 1 / PERIOD, exactly over each period


@functools.lru_cache(maxsize=16)
def _permutation(n: int, seed: tuple[int, ...], epoch: int) -> np.ndarray:
    # The closing 1 keeps keys of different lengths apart: numpy pads them with zeros.
    order = np.random.Generator(np.random.PCG64(np.random.SeedSequence([*seed, epoch, 1]))).permutation(n)
    order.flags.writeable = False  # shared by the cache
    return order


def epoch_order(n: int, seed: int, epoch: int) -> np.ndarray:
    """The order of n questions in an epoch: a permutation, int64 [n], read-only; pure in its arguments."""
    return _permutation(n, (seed,), epoch)


@dataclass(frozen=True)
class Mixture:
    """Sources and the share of training positions each of them gets. `weights` need not sum to 1."""

    names: tuple[str, ...]
    parts: tuple[Sequence[Question], ...]
    weights: tuple[float, ...]

    def __len__(self) -> int:
        return sum(map(len, self.parts))


def slot_counts(weights: Sequence[float], names: Sequence[str]) -> tuple[int, ...]:
    """How many of PERIOD slots each source gets (largest remainders). UserError for a weight that is not positive or too small."""
    for name, weight in zip(names, weights, strict=True):
        if not (math.isfinite(weight) and weight > 0):
            raise UserError(f"mixture weight of '{name}' is {weight}; give a number above 0 or leave the source out")
    exact = np.asarray(weights, np.float64) / sum(weights) * PERIOD
    counts = np.floor(exact).astype(int)
    rest = np.argsort(-(exact - counts), kind="stable")[: PERIOD - counts.sum()]
    counts[rest] += 1
    for name, count in zip(names, counts, strict=True):
        if count == 0:
            raise UserError(f"mixture weight of '{name}' is under 1/{PERIOD} of the whole; raise it or leave the source out")
    return tuple(int(c) for c in counts)


@functools.lru_cache(maxsize=8)
def _schedule(counts: tuple[int, ...], seed: int, period: int) -> tuple[np.ndarray, np.ndarray]:
    """For each slot of a period: its source, and how many earlier slots of the period belong to the same source."""
    slots = np.repeat(np.arange(len(counts)), counts)[_permutation(PERIOD, (seed, 1), period)]
    rank = np.empty_like(slots)
    for j, count in enumerate(counts):
        rank[slots == j] = np.arange(count)
    return slots, rank


class QuestionStream:
    """An endless stream of training questions. `batch_at(step)` is pure: a step gives the same batch in any order and any process.

    questions: a sequence (then every question comes once per epoch) or a `Mixture`. batch: questions a step.
    A batch may span two epochs; when it does, it can hold a question of the old epoch's end and the new one's beginning.
    """

    def __init__(self, questions: Sequence[Question] | Mixture, batch: int, seed: int):
        if batch < 1:
            raise UserError(f"questions per step is {batch}; give at least 1")
        if seed < 0:
            raise UserError(f"data seed is {seed}; give a number of at least 0")
        mixed = questions if isinstance(questions, Mixture) else Mixture(("questions",), (questions,), (1.0,))
        for name, part in zip(mixed.names, mixed.parts, strict=True):
            if len(part) == 0:
                raise UserError(f"question source '{name}' is empty; give it at least one question or leave it out")
        self._parts, self._batch, self._seed = mixed.parts, batch, seed
        self._counts = slot_counts(mixed.weights, mixed.names)

    def batch_at(self, step: int) -> list[Question]:
        if step < 0:
            raise ValueError(f"step {step} is negative")
        return [self._at(step * self._batch + i) for i in range(self._batch)]

    def epoch_at(self, step: int) -> float:
        """Epochs of the smallest-lived source finished before this step; for the progress display."""
        position = step * self._batch
        return max(position * count / PERIOD / len(part) for count, part in zip(self._counts, self._parts, strict=True))

    def _at(self, position: int) -> Question:
        if len(self._parts) == 1:
            source, index = 0, position
        else:
            period, slot = divmod(position, PERIOD)
            slots, rank = _schedule(self._counts, self._seed, period)
            source = int(slots[slot])
            index = period * self._counts[source] + int(rank[slot])
        part = self._parts[source]
        epoch, offset = divmod(index, len(part))
        # Source 0 alone follows epoch_order itself; others get their own keys, so that equal sizes do not walk in step.
        seed = (self._seed,) if source == 0 else (self._seed, 2, source)
        return part[int(_permutation(len(part), seed, epoch)[offset])]
