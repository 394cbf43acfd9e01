"""An optimised HLO module read from its text (`compiled.as_text()`): computations, operations, arrays, how often loops run."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

BYTES = {"pred": 1, "s4": 0.5, "u4": 0.5, "bf16": 2, "f16": 2, "c64": 8, "c128": 16, "token": 0, "opaque": 0}
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


class Program:
    """computations: {name: {name: operation}}. entry: the name of the one that is called."""

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
        if limit is None or limit.kind != "constant" or not limit.argument.isdigit() or limit.arrays[0].dtype[0] not in "su":
            return None  # only an integer is counted up to
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


def operands(op: Op, ops: dict[str, Op]) -> Iterator[Array]:
    """The arrays that an operation reads. ops: its computation."""
    for name in op.operands:
        if name in ops:
            yield from ops[name].arrays


def group_size(op: Op) -> int:
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
