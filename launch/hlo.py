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
import functools
import math
import re
from collections import Counter
from collections.abc import Iterator

import numpy as np

BYTES = {"pred": 1, "s4": 0.5, "u4": 0.5, "bf16": 2, "f16": 2, "c64": 8, "c128": 16, "token": 0, "opaque": 0}
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
_SHAPE = re.compile(r"([a-z][a-z0-9]*)\[([0-9,<=]*)\](\{[^{}]*\})?")
_NAME = re.compile(r"%?([\w.\-]+)")


@dataclasses.dataclass(frozen=True)
class Array:
    dtype: str
    dims: tuple[int, ...]
    layout: str = ""

    @property
    def bytes(self) -> float:
        return self.size * BYTES.get(self.dtype, _width(self.dtype))

    @property
    def size(self) -> int:
        return math.prod(self.dims)

    @property
    def on_chip(self) -> bool:
        return "S(1)" in self.layout


def _width(dtype: str) -> float:
    digits = re.match(r"[a-z]+(\d+)", dtype)
    return int(digits[1]) / 8 if digits else 0


@dataclasses.dataclass(frozen=True)
class Op:
    """One instruction. arrays: of its result, a tuple's elements one after another."""

    name: str
    kind: str
    arrays: tuple[Array, ...]
    operands: tuple[str, ...]
    text: str  # everything behind the operands
    argument: str  # what stands between the parentheses
    root: bool

    def attribute(self, name: str) -> str | None:
        found = re.search(rf"\b{name}=(\{{[^{{}}]*\}}|[^\s,{{}}]+)", self.text)
        return found[1] if found else None

    def integers(self, name: str) -> tuple[int, ...]:
        return tuple(map(int, re.findall(r"\d+", self.attribute(name) or "")))

    @functools.cached_property
    def called(self) -> tuple[str, ...]:
        """Names of the computations it calls, a while loop's body first."""
        names = []
        for attribute in ("body", "calls", "to_apply", "true_computation", "false_computation", "branch_computations"):
            value = self.attribute(attribute)
            names += re.findall(r"%?([\w.\-]+)", value) if value else []
        return tuple(names)

    @property
    def where(self) -> str:
        found = re.search(r'op_name="([^"]*)"', self.text)
        return found[1] if found else ""


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


class Module:
    """Computations of an optimised HLO module in text form (`compiled.as_text()`)."""

    def __init__(self, text: str):
        self.computations: dict[str, dict[str, Op]] = {}
        self.entry = ""
        current: dict[str, Op] | None = None
        for line in text.splitlines():
            if current is None:
                start = re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line)
                if start and not line.startswith("HloModule"):
                    current = self.computations.setdefault(start[2], {})
                    self.entry = start[2] if start[1] else self.entry
            elif line.rstrip() == "}":
                current = None
            elif op := _parse(line):
                current[op.name] = op
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

    def trips(self, loop: Op) -> int | None:
        """How often a loop runs; None where data decide."""
        noted = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.text)
        if noted:
            return int(noted[1])
        condition = self.computations.get((loop.attribute("condition") or "").lstrip("%"), {})
        compare = next((op for op in condition.values() if op.root), None)
        if compare is None or compare.kind != "compare" or compare.attribute("direction") != "LT":
            return None
        counter, limit = (condition.get(name) for name in compare.operands)
        if limit is None or limit.kind != "constant" or not limit.argument.isdigit():
            return None
        return -(-int(limit.argument) // self._stride(loop, counter))

    def _stride(self, loop: Op, counter: Op | None) -> int:
        """What a loop's body adds to its counter: more than 1 where the compiler has unrolled it."""
        body = self.computations.get(loop.called[0], {})
        result = next((op for op in body.values() if op.root), None)
        index = counter.attribute("index") if counter is not None else None
        if result is None or index is None or result.kind != "tuple":
            return 1
        add = body.get(result.operands[int(index)])
        if add is None or add.kind != "add":
            return 1
        constants = [body[name].argument for name in add.operands if name in body and body[name].kind == "constant"]
        return int(constants[0]) if constants and constants[0].isdigit() else 1

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
            wire = _wire(base, op, ops)
            cost.count[base], cost.wire[base] = 1, wire
            cost.waited = 0.0 if kind.endswith("-start") else wire
            cost.bytes = sum(a.bytes for a in _operands(op, ops)) + wire
            return cost
        if kind in _FREE or kind.endswith("-done"):
            return cost
        cost.flops = _flops(op, ops)
        cost.bytes = _op_bytes(op, ops)
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


def _parse(line: str) -> Op | None:
    head = re.match(r"\s+(ROOT )?%?([\w.\-]+) = ", line)
    if not head:
        return None
    at = head.end()
    end = _closing(line, at) if line[at] == "(" else line.index(" ", at)
    kind = re.match(r"\s*([a-z][a-z0-9\-]*)\(", line[end:])
    if not kind:
        return None
    opening = end + kind.end() - 1
    closing = _closing(line, opening)
    argument = line[opening + 1 : closing - 1]
    operands = tuple(
        found[1] for part in _split(argument) if (found := re.search(r"%([\w.\-]+)\s*$", part) or re.fullmatch(_NAME, part))
    )
    return Op(head[2], kind[1], tuple(_arrays(line[at:end])), operands, line[closing:], argument, bool(head[1]))


def _closing(line: str, at: int) -> int:
    """Behind the parenthesis that closes the one at `at`."""
    depth = 0
    for i in range(at, len(line)):
        depth += (line[i] == "(") - (line[i] == ")")
        if not depth:
            return i + 1
    return len(line)


def _split(text: str) -> Iterator[str]:
    depth, start = 0, 0
    for i, c in enumerate(text):
        depth += (c in "([{") - (c in ")]}")
        if c == "," and not depth:
            yield text[start:i].strip()
            start = i + 1
    if text[start:].strip():
        yield text[start:].strip()


def _arrays(shape: str) -> Iterator[Array]:
    for dtype, dims, layout in _SHAPE.findall(shape):
        yield Array(dtype, tuple(int(d.lstrip("<=")) for d in dims.split(",") if d), layout)


def _operands(op: Op, ops: dict[str, Op]) -> Iterator[Array]:
    for name in op.operands:
        if name in ops:
            yield from ops[name].arrays


def _moved(arrays) -> float:
    return sum(a.bytes for a in arrays if not a.on_chip)


def _op_bytes(op: Op, ops: dict[str, Op]) -> float:
    """Of an operation by itself."""
    kind, out = op.kind, _moved(op.arrays)
    if kind in ("dynamic-slice", "slice", "gather"):
        return out + (out if not all(a.on_chip for a in _operands(op, ops)) else 0)
    if kind in ("dynamic-update-slice", "scatter"):
        changed = ops.get(op.operands[1 if kind == "dynamic-update-slice" else -1])
        return 2 * _moved(changed.arrays) if changed else 0.0
    if kind == "copy-start":  # (destination, source, context)
        return _moved(op.arrays[:2])
    if kind in ("broadcast", "rng-bit-generator"):
        return out
    return out + _moved(_operands(op, ops))


def _flops(op: Op, ops: dict[str, Op]) -> float:
    if op.kind == "dot":
        left = ops[op.operands[0]].arrays[0].dims
        return 2.0 * op.arrays[0].size * math.prod(left[d] for d in op.integers("lhs_contracting_dims"))
    if op.kind == "convolution":
        return _convolution(op, *(ops[name].arrays[0].dims for name in op.operands[:2]))
    if op.kind == "custom-call":
        return _library(op, ops)
    return 0.0


def _convolution(op: Op, left: tuple[int, ...], right: tuple[int, ...]) -> float:
    """TPUs compute every product as a convolution, batch dimensions as windows over padding: only real positions are work."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", op.text)
    first, second, result = labels[1], labels[2], labels[3]
    out = op.arrays[0].dims
    window = re.search(r"window=\{([^{}]*)\}", op.text)
    settings = dict(part.split("=") for part in window[1].split()) if window else {}
    spatial = sorted(c for c in first if c.isdigit())

    def numbers(name: str, default: int) -> list[int]:
        return [int(n) for n in settings[name].split("x")] if name in settings else [default] * len(spatial)

    sizes, strides, stretch, dilation = numbers("size", 1), numbers("stride", 1), numbers("lhs_dilate", 1), numbers("rhs_dilate", 1)
    pads = [tuple(map(int, pad.split("_"))) for pad in settings["pad"].split("x")] if "pad" in settings else [(0, 0)] * len(spatial)
    valid = 1
    for i, axis in enumerate(spatial):
        at = np.arange(out[result.index(axis)])[:, None] * strides[i] - pads[i][0] + np.arange(sizes[i])[None] * dilation[i]
        span = (left[first.index(axis)] - 1) * stretch[i] + 1
        valid *= int(((at >= 0) & (at < span) & (at % stretch[i] == 0)).sum())
    groups = int(op.attribute("batch_group_count") or 1)
    # The kernel's input features are those of one feature group already.
    return 2.0 * valid * right[second.index("i")] * right[second.index("o")] * left[first.index("b")] / groups


def _library(op: Op, ops: dict[str, Op]) -> float:
    """Products and attention that are calls of a library or a hand-written kernel."""
    target = op.attribute("custom_call_target") or ""
    operands = list(_operands(op, ops))
    if "cublas" in target or "gemm" in target.lower() or "matmul" in target.lower():
        config = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', op.text)
        axes = [int(n) for n in re.findall(r"\d+", config[1])] if config else [len(operands[0].dims) - 1]
        return 2.0 * op.arrays[0].size * math.prod(operands[0].dims[d] for d in axes)
    if "fmha" in target or "tpu_custom_call" in target:
        return _attention(op, operands)
    return 0.0


def _attention(op: Op, operands: list[Array]) -> float:
    """Causal attention: 2 products over half of T^2 forward; backward in cuDNN 5, in splash 3 for dq and 4 for dk and dv."""
    heads = [a for a in operands if len(a.dims) >= 3 and a.dtype in ("bf16", "f16", "f32")]
    if not heads:
        return 0.0
    query = heads[0]  # before keys and values; a mask may be larger
    where = f"{op.where} {op.attribute('custom_call_target')} {op.name}".lower()
    backward = "bwd" in where or "backward" in where or "transpose" in where
    products = (3 if "dq" in where else 4 if "dkv" in where else 5) if backward else 2
    length = _length(op, query)
    return products * query.size * length  # 2 (multiply, add) x size x length / 2 (causal)


def _length(op: Op, query: Array) -> int:
    """T of a query array: [..., N, T, H] in splash, [B, T, N, H] in cuDNN."""
    return query.dims[1] if "fmha" in (op.attribute("custom_call_target") or "") else query.dims[-2]


def _wire(kind: str, op: Op, ops: dict[str, Op]) -> float:
    operands = sum(a.bytes for a in _operands(op, ops))
    n = _group(op)
    share = (n - 1) / n
    if kind == "all-gather":
        return operands * (n - 1)
    if kind == "all-reduce":
        return 2 * operands * share
    if kind in ("reduce-scatter", "all-to-all", "ragged-all-to-all"):
        return operands * share
    return operands


def _group(op: Op) -> int:
    """Chips that take part in one group of a collective."""
    found = re.search(r"replica_groups=\[(\d+),(\d+)\]", op.text)
    if found:
        return int(found[2])
    found = re.search(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}", op.text)
    if found:  # sizes of named axes, and the axes of a group
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", found[1])}
        return math.prod(sizes[name] for name in re.findall(r"'(\w+)'", found[2]))
    found = re.search(r"replica_groups=\{\{([\d,]*)\}", op.text)
    if found:
        return max(1, found[1].count(",") + 1)
    return 2 if "source_target_pairs" in op.text else 1
