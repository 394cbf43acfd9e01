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
SLACK = 1 / 16  # share of rows computed in vain for the sake of larger micro-batches, and of cost for the sake of narrow rows
# T at which attention, whose cost a token grows with T, is taken to cost as much as all else. It does in the mini policy; in larger
# models later, but their long rollouts fill rows of the longest.
ATTENTION_WIDTH = 512


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


def pack(lengths: Sequence[int], minibatch: int, microbatch: int, widths: Sequence[int], ways: int = 1) -> Packing:
    """Packs rollouts of `lengths` tokens; those of 0 tokens get no place.

    Args:
      minibatch: rollouts in one optimiser step, a divisor of their number.
      microbatch: a divisor of `minibatch`; a forward and backward take at most as many tokens as so many rows of the first width,
        and hence at most as many logits of attention (R T^2) as so many rows of the last.
      widths: those that rows may have, ascending; the first is no less than any length. Rollouts of little more than half of it
        would have its rows alone, and share wider ones.
      ways: devices that rows are split over; R is a multiple of it where `microbatch` is.
    """
    groups = np.asarray(lengths, int).reshape(-1, minibatch)
    ways = ways if microbatch % ways == 0 else 1
    tried = [_packed(groups, microbatch * widths[0] // width, minibatch // microbatch, width, ways) for width in widths]
    found = [packing for packing in tried if packing]
    costs = [packing.computed * (ATTENTION_WIDTH + packing.shape[2]) for packing in found]
    return next(packing for packing, cost in zip(found, costs, strict=True) if cost <= (1 + SLACK) * min(costs))


def _packed(groups: np.ndarray, most: int, parts: int, width: int, ways: int) -> Packing | None:
    """The packing at one width: R is the largest number up to `most` that computes few rows in vain, or the one with fewest.

    None when the rows are more than there is room for.
    """
    numbers = np.arange(groups.size).reshape(groups.shape)
    minibatches = tuple(
        tuple(tuple(sorted(int(own[i]) for i in row)) for row in best_fit(lengths.tolist(), width))
        for own, lengths in zip(numbers, groups, strict=True)
    )
    needed, most = [len(minibatch) for minibatch in minibatches], most // ways * ways
    step = max(1, -(-most // (HEIGHTS * ways))) * ways
    # Half of `most` and more, where there are so many rows.
    heights = [r for r in range(most, 0, -step) if 2 * r >= min(most, 2 * max(needed)) and r * parts >= max(needed)]

    def computed(rows: int) -> int:
        return sum(-(-count // rows) for count in needed) * rows

    close = [rows for rows in heights if computed(rows) <= (1 + SLACK) * sum(needed)]
    return Packing(minibatches, (parts, close[0] if close else min(heights, key=computed), width)) if heights else None


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
