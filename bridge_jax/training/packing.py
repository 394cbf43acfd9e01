"""Which rollouts share a row of tokens, how wide rows are, and how many make a micro-batch. On the host, and deterministic.

A minibatch keeps its rollouts, which are packed among themselves. Arrays have the shape [S, P, R, T]: S minibatches of P
micro-batches of R rows. P is fixed, T and R come from few values, so that few programs are compiled; a micro-batch without a
rollout is skipped.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence

import numpy as np

HEIGHTS = 8  # numbers of rows a micro-batch may have, at a given width
SLACK = 1 / 16  # rows computed in vain for the sake of larger micro-batches, as a share of those needed
ATTENTION_WIDTH = 4096  # T at which attention, whose cost a token grows with T, costs as much as the rest of a layer


@dataclasses.dataclass(frozen=True)
class Packing:
    """The rows of a step.

    minibatches: of each, its rows; of a row, the numbers of its rollouts, in order. The rows fill the micro-batches one by one.
    shape: (P, R, T). Up to P * R rows a minibatch, each up to T tokens.
    """

    minibatches: tuple[tuple[tuple[int, ...], ...], ...]
    shape: tuple[int, int, int]

    @property
    def computed(self) -> int:
        """Tokens that go through the model, padding included."""
        _, rows, width = self.shape
        return sum(-(-len(minibatch) // rows) for minibatch in self.minibatches) * rows * width


def pack(lengths: Sequence[int], minibatch: int, microbatch: int, longest: int, ways: int = 1) -> Packing:
    """Packs rollouts of `lengths` tokens; those of 0 tokens get no place.

    Args:
      minibatch: rollouts in one optimiser step, a divisor of their number.
      microbatch: a divisor of `minibatch`; a forward and backward may take as many rollouts of `longest` tokens: R * T is no more.
      longest: the smallest row width, no less than any length. Rows of twice that are tried too: rollouts of little more than half
        a row would otherwise have it alone.
      ways: devices that rows are split over; R is a multiple of it where `microbatch` is.
    """
    groups = np.asarray(lengths, int).reshape(-1, minibatch)
    ways = ways if microbatch % ways == 0 else 1
    widths = [longest * many for many in (1, 2) if microbatch % (many * ways) == 0]
    found = [_packed(groups, microbatch * longest // width, minibatch // microbatch, width, ways) for width in widths]
    return min(found, key=lambda packing: packing.computed * (ATTENTION_WIDTH + packing.shape[2]))


def _packed(groups: np.ndarray, most: int, parts: int, width: int, ways: int) -> Packing:
    """The packing at one width: R is the largest number up to `most` that computes few rows in vain, or the one with fewest."""
    numbers = np.arange(groups.size).reshape(groups.shape)
    minibatches = tuple(
        tuple(tuple(sorted(int(own[i]) for i in row)) for row in best_fit(lengths.tolist(), width))
        for own, lengths in zip(numbers, groups, strict=True)
    )
    needed = [len(minibatch) for minibatch in minibatches]
    step = -(-most // (HEIGHTS * ways)) * ways
    # Half of `most` and more, where there are so many rows; and no more micro-batches than there is room for.
    heights = [rows for rows in range(most, 0, -step) if 2 * rows >= min(most, 2 * max(needed)) and rows * parts >= max(needed)]

    def computed(rows: int) -> int:
        return sum(-(-count // rows) for count in needed) * rows

    close = [rows for rows in heights if computed(rows) <= (1 + SLACK) * sum(needed)]
    return Packing(minibatches, (parts, close[0] if close else min(heights, key=computed), width))


def best_fit(lengths: Sequence[int], width: int) -> list[list[int]]:
    """Best fit, longest first: rows of indices into `lengths`, each row's sum at most `width`; lengths of 0 are left out.

    Of rows with room the fullest is taken. At most one row is less than half full, so there are at most 2 sum / width + 1.
    """
    rows, room = [], []  # room: (free tokens, number of the row), ascending
    for index in sorted(np.flatnonzero(lengths).tolist(), key=lambda i: -lengths[i]):
        fitting = bisect.bisect_left(room, (lengths[index], 0))
        free, row = room.pop(fitting) if fitting < len(room) else (width, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(index)
        bisect.insort(room, (free - lengths[index], row))
    return rows
