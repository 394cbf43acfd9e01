"""What a compiled program does, read from its optimised HLO: FLOPs of matrix products, bytes of memory, collectives.

XLA's own cost analysis counts the body of a loop once, and comes back empty for GPUs. Here a loop counts as often as it runs (what
the compiler noted, or the constant in its condition); one whose count depends on data, as the decoding loop's, counts once and is
reported as `open_loops`. Of the branches of a conditional the costliest counts. Rules:

FLOPs     2 a multiply-add of dot, convolution (positions in the padding are no work), and calls of libraries for products and
          attention.
bytes     what a top-level operation, or a fusion as a whole, reads and writes: a slice, gather or update in place counts what it
          touches, not the array. Buffers in a TPU's on-chip memory (memory space S(1)) count nothing.
wire      bytes a chip receives in a collective over n chips: (n - 1) / n of the gathered array, twice that for all-reduce.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter

import hlo_ops
from hlo_text import Op, Program, operands

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "ragged-all-to-all",
    "collective-broadcast",
)
_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id", "iota",
    "opt-barrier", "add-dependency", "domain", "while", "conditional", "call", "get-dimension-size", "copy-done", "async-update",
}  # fmt: skip


@dataclasses.dataclass
class Cost:
    """Of one chip. collectives: kind -> number, and bytes on the wire; waited: those of them that run in the foreground."""

    flops: float = 0.0
    bytes: float = 0.0
    count: Counter = dataclasses.field(default_factory=Counter)
    wire: Counter = dataclasses.field(default_factory=Counter)
    waited: float = 0.0
    open_loops: int = 0

    def add(self, other: Cost, times: float = 1) -> None:
        self.flops += times * other.flops
        self.bytes += times * other.bytes
        self.waited += times * other.waited
        self.open_loops += other.open_loops
        for mine, theirs in ((self.count, other.count), (self.wire, other.wire)):
            for kind, value in theirs.items():
                mine[kind] += times * value


class Module(Program):
    """A program and what it costs."""

    def __init__(self, text: str):
        super().__init__(text)
        self._costs: dict[str, Cost] = {}

    def cost(self, computation: str | None = None) -> Cost:
        """Of the whole program, or of one computation."""
        name = self.entry if computation is None else computation
        if name not in self._costs:
            total, channels = Cost(), set()
            ops = self.computations.get(name, {})
            for op in ops.values():
                total.add(self._op(op, ops, channels))
            self._costs[name] = total
        return self._costs[name]

    def open_cost(self) -> Cost:
        """One turn of the program's own loops whose number of turns depends on data."""
        total = Cost()
        for op in self.computations[self.entry].values():
            if op.kind == "while" and self.trips(op) is None:
                total.add(self.cost(op.called[0]))
        return total

    def _op(self, op: Op, ops: dict[str, Op], channels: set[str]) -> Cost:
        """channels: of the collectives met so far. A TPU's fused collective runs behind several fusions and stands in each."""
        cost, kind = Cost(), op.kind
        if kind == "while":
            trips = self.trips(op)
            cost.add(self.cost(op.called[0]), 1 if trips is None else trips)
            cost.open_loops += trips is None
            return cost
        if kind == "conditional":
            cost.add(max((self.cost(name) for name in op.called), key=lambda c: (c.flops, c.bytes), default=Cost()))
            return cost
        if kind in ("call", "async-start"):
            for name in op.called:
                cost.add(self.cost(name))
            return cost
        if kind == "fusion":
            inner = self.computations.get(op.called[0], {}) if op.called else {}
            for each in inner.values():  # products and collectives inside; its bytes are its own
                part = self._op(each, inner, channels)
                part.bytes = part.waited = 0.0  # a fused collective runs behind what it is fused with
                cost.add(part)
            cost.bytes = self._fusion_bytes(op, ops)
            return cost
        base = next((c for c in COLLECTIVES if kind in (c, f"{c}-start")), None)
        if base:
            channel = op.attribute("channel_id")
            if channel in channels:
                return cost
            channels |= {channel} - {None}
            wire = hlo_ops.wire(base, op, ops)
            cost.count[base], cost.wire[base] = 1, wire
            cost.waited = 0.0 if kind.endswith("-start") else wire
            cost.bytes = sum(a.bytes for a in operands(op, ops)) + wire
            return cost
        if kind in _FREE or kind.endswith("-done"):
            return cost
        cost.flops = hlo_ops.flops(op, ops)
        cost.bytes = hlo_ops.op_bytes(op, ops)
        return cost

    def _fusion_bytes(self, op: Op, ops: dict[str, Op]) -> float:
        """Operands as far as they are read, results as far as they are written."""
        inner = self.computations.get(op.called[0], {}) if op.called else {}
        given = [ops[name] for name in op.operands if name in ops]
        total = 0.0
        for number, outside in enumerate(given):
            if not all(a.on_chip for a in outside.arrays):
                total += min(self._read_parameter(inner, number), sum(a.bytes for a in outside.arrays))
        written = self._written(next((each for each in inner.values() if each.root), None), inner)
        kept = [a for a in op.arrays if not a.on_chip]
        return total + (min(written, sum(a.bytes for a in kept)) if kept else 0.0)

    def _read_parameter(self, inner: dict[str, Op], number: int) -> float:
        """Bytes of a fusion's operand number `number` that its inside reads."""
        parameter = next((op for op in inner.values() if op.kind == "parameter" and op.argument == str(number)), None)
        return 0.0 if parameter is None else self._read(parameter, inner)

    def _read(self, source: Op, inner: dict[str, Op]) -> float:
        total, whole = 0.0, sum(a.bytes for a in source.arrays)
        for user in inner.values():
            for place, name in enumerate(user.operands):
                if name != source.name:
                    continue
                first = place == 0
                if user.kind in ("dynamic-slice", "slice", "gather") and first:
                    total += sum(a.bytes for a in user.arrays)
                elif user.kind == "dynamic-update-slice" and first:
                    pass  # in place: what is replaced is not read
                elif user.kind == "fusion" and user.called:
                    total += self._read_parameter(self.computations.get(user.called[0], {}), place)
                elif user.kind in ("bitcast", "copy", "convert", "get-tuple-element", "reshape", "transpose") and not user.root:
                    total += self._read(user, inner) * whole / max(1.0, sum(a.bytes for a in user.arrays))
                elif user.kind not in ("dynamic-slice", "dynamic-update-slice"):  # there it is an index, or the update
                    return whole
                else:
                    total += whole
        return min(total, whole)

    def _written(self, root: Op | None, inner: dict[str, Op]) -> float:
        if root is None:
            return math.inf
        if root.kind == "tuple":
            return sum(self._written(inner.get(name), inner) for name in root.operands)
        while root.kind in ("bitcast", "copy", "convert") and root.operands and root.operands[0] in inner:
            root = inner[root.operands[0]]
        if root.kind == "dynamic-update-slice" and root.operands[1] in inner:
            return sum(a.bytes for a in inner[root.operands[1]].arrays)
        if root.kind == "fusion" and root.called:
            nested = self.computations.get(root.called[0], {})
            return self._written(next((each for each in nested.values() if each.root), None), nested)
        return sum(a.bytes for a in root.arrays)

    def largest(self, count: int = 5) -> list[tuple[float, str]]:
        """The largest arrays that operations outside fusions make: (bytes, shape and where in the program)."""
        fused = {name for ops in self.computations.values() for op in ops.values() if op.kind == "fusion" for name in op.called}
        found: dict[tuple[float, str], str] = {}
        for ops in (ops for name, ops in self.computations.items() if name not in fused):
            for op in (op for op in ops.values() if op.kind not in _FREE):
                for array in op.arrays:
                    found.setdefault((array.bytes, f"{array.dtype}{list(array.dims)}"), op.where)
        best = sorted(found.items(), key=lambda item: -item[0][0])[:count]
        return [(size, f"{shape} {where}".strip()) for (size, shape), where in best]
