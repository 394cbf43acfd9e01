"""Opens a corpus file twice, reads and checks it the first time, then reads rows at random: `index_parts.store`'s own process."""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import time

import numpy as np

with tempfile.TemporaryDirectory(dir=os.path.dirname(sys.argv[1])) as cache:
    os.environ["BRIDGE_JAX_CACHE"] = cache
    from bridge_jax.retrieval.corpus import Corpus

    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    file, rows = sys.argv[1], int(sys.argv[2])
    began = time.perf_counter()
    assert len(Corpus.open(file)) == rows
    read = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.perf_counter()
    corpus = Corpus.open(file)
    opened = time.perf_counter() - began
    chosen = np.random.default_rng(0).integers(0, rows, 20_000).tolist()
    began = time.perf_counter()
    for row in chosen:
        assert corpus[row].id == str(row)
    access = (time.perf_counter() - began) / len(chosen)
    began = time.perf_counter()
    for row in chosen[:5000]:
        assert corpus.row_of(str(row)) == row
    lookup = (time.perf_counter() - began) / 5000
    found = {
        "read_once_seconds": read,
        "rows_per_second": rows / read,
        "open_seconds": opened,
        "row_microseconds": 1e6 * access,
        "row_of_microseconds": 1e6 * lookup,
        "peak_bytes_over_imports": (peak - base) << 10,  # resident, the mapped file's pages included
    }
    print(json.dumps(found))
