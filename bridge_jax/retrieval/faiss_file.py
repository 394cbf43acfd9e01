"""Reads the vectors of a FAISS Flat index file, such as the ready e5_Flat.index of wiki-18, without FAISS and without loading it.

Layout of `faiss.write_index` (little-endian): four letters, IxFI (inner product) or IxF2 (L2); int32 d; int64 n; two int64 that are
not used; int8 "is trained"; int32 metric; uint64 count of floats, n * d; then the floats, row by row.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from bridge_jax.errors import UserError
from bridge_jax.retrieval.mapped import open_array

HEADER = struct.Struct("<4siqqqbiQ")
FLAT = {b"IxFI": 0, b"IxF2": 1}  # the letters and the metric that belongs to them


def open_flat(file: Path) -> np.memmap:
    """The [n, d] float32 vectors of a Flat index, memory-mapped.

    Raises:
      UserError: no such file, another kind of index, or a file that is cut off.
    """
    try:
        with open(file, "rb") as stream:
            head = stream.read(HEADER.size)
        size = file.stat().st_size
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror}); give a FAISS Flat index file") from None
    letters = head[:4]
    if letters not in FLAT:
        raise UserError(f"{file}: begins with {letters!r}, which is no Flat index; give an IndexFlatIP or IndexFlatL2 file")
    if len(head) < HEADER.size:
        raise UserError(f"{file}: is cut off in its header; fetch it again")
    _, dim, rows, _, _, _, metric, count = HEADER.unpack(head)
    if metric != FLAT[letters] or dim < 1 or rows < 1 or count != rows * dim:
        raise UserError(f"{file}: its header does not fit a Flat index ({rows:,} x {dim}, {count:,} values, metric {metric})")
    if size != HEADER.size + 4 * count:
        raise UserError(
            f"{file}: holds {size:,} bytes where {HEADER.size + 4 * count:,} belong; fetch it again (parts: put them together)"
        )
    return open_array(file, "<f4", HEADER.size, (rows, dim))
