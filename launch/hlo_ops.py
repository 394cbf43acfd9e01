"""What one operation costs by itself: FLOPs of products, bytes of memory, bytes on the wire. (`hlo.py` has the rules.)"""

from __future__ import annotations

import math
import re

import numpy as np
from hlo_text import Array, Op, group_size, operands


def _moved(arrays) -> float:
    return sum(a.bytes for a in arrays if not a.on_chip)


def op_bytes(op: Op, ops: dict[str, Op]) -> float:
    """What it reads and writes. ops: its computation, here and below."""
    kind, out = op.kind, _moved(op.arrays)
    if kind in ("dynamic-slice", "slice", "gather"):
        return out + (out if not all(a.on_chip for a in operands(op, ops)) else 0)
    if kind in ("dynamic-update-slice", "scatter"):
        changed = ops.get(op.operands[1 if kind == "dynamic-update-slice" else -1])
        return 2 * _moved(changed.arrays) if changed else 0.0
    if kind == "copy-start":  # (destination, source, context)
        return _moved(op.arrays[:2])
    if kind in ("broadcast", "rng-bit-generator"):
        return out
    return out + _moved(operands(op, ops))


def flops(op: Op, ops: dict[str, Op]) -> float:
    """Of a product, or of a library's call; 0 for all else."""
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
    given = list(operands(op, ops))
    if "cublas" in target or "gemm" in target.lower() or "matmul" in target.lower():
        config = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', op.text)
        axes = [int(n) for n in re.findall(r"\d+", config[1])] if config else [len(given[0].dims) - 1]
        return 2.0 * op.arrays[0].size * math.prod(given[0].dims[d] for d in axes)
    if "fmha" in target or "tpu_custom_call" in target:
        return _attention(op, given)
    return 0.0


def _attention(op: Op, given: list[Array]) -> float:
    """Causal attention: 2 products over half of T^2 forward; backward in cuDNN 5, in splash 3 for dq and 4 for dk and dv."""
    heads = [a for a in given if len(a.dims) >= 3 and a.dtype in ("bf16", "f16", "f32")]
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


def wire(kind: str, op: Op, ops: dict[str, Op]) -> float:
    """Bytes that a chip receives in a collective. kind: without -start."""
    given = sum(a.bytes for a in operands(op, ops))
    n = group_size(op)
    share = (n - 1) / n
    if kind == "all-gather":
        return given * (n - 1)
    if kind == "all-reduce":
        return 2 * given * share
    if kind in ("reduce-scatter", "all-to-all", "ragged-all-to-all"):
        return given * share
    return given
