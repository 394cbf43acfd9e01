"""One measurement of `index.py`, in a process of its own: an engine builds or searches. Reads a JSON object from the arguments,
prints one as its last line.

Memory is anonymous resident memory over what the interpreter and the libraries hold, the most that a look every 20 ms sees: files
that are mapped (our vectors, the corpus) belong to the page cache and go when memory is short.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import threading
import time
from pathlib import Path

import numpy as np
import watch

TARGETS_TRIED = 12


class Memory:
    """`peak` and `now` of this process's anonymous memory, over `base`."""

    def __init__(self):
        gc.collect()
        self.base = self.peak_seen = _anonymous()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            self.peak_seen = max(self.peak_seen, _anonymous())
            time.sleep(0.02)

    def peak(self) -> int:
        return self.peak_seen - self.base

    def now(self) -> int:
        gc.collect()
        return _anonymous() - self.base


def _anonymous() -> int:
    return watch.status("self").get("RssAnon", 0)


class Case:
    """What an engine is given: vectors [N, D] bfloat16 mapped, queries [B, D] float32, the exact scores, a folder of its own."""

    def __init__(self, job: dict):
        from bridge_jax.retrieval.vectors import BFLOAT16

        self.rows, self.dim, self.k, self.target = job["rows"], job["dim"], job["k"], job["target"]
        self.vectors = np.memmap(job["vectors"], BFLOAT16, "r", 0, (self.rows, self.dim))
        self.queries = np.load(job["queries"])
        self.truth = np.load(job["truth"])
        self.folder = Path(job["folder"])
        self.folder.mkdir(parents=True, exist_ok=True)

    def float32(self) -> np.ndarray:
        return np.asarray(self.vectors).astype(np.float32)

    def recall(self, rows: np.ndarray, which: slice = slice(None)) -> float:
        """Share of the exact best k whose scores are reached; scores are computed here, whatever the engine says."""
        found = np.asarray(self.vectors[np.maximum(rows, 0)]).astype(np.float32)
        scores = np.where(rows < 0, -np.inf, np.einsum("bd,bkd->bk", self.queries[which], found))
        return float((scores >= self.truth[which][:, -1:] - 1e-5).mean())

    def cheapest(self, options, search) -> dict:
        """The fastest option that reaches the target on the even queries, else the one with the best recall."""
        tried, half = [], self.queries[::2]
        for option in options:
            began = time.perf_counter()
            rows = search(half, option)
            seconds = time.perf_counter() - began
            tried.append((self.recall(rows, slice(None, None, 2)), -seconds, option))
        good = [entry for entry in tried if entry[0] >= self.target]
        return max(good, key=lambda entry: entry[1])[2] if good else max(tried, key=lambda entry: entry[0])[2]


# Engines: build(case) leaves files in case.folder; open(case) -> (search(queries) -> rows [B, k], what it is set to). -------------


def build_scann(case: Case) -> dict:
    import dataclasses

    from bridge_jax.retrieval.scann_index import ScannIndex, choose_parameters

    parameters = choose_parameters(case.rows, case.dim)
    ScannIndex.build(case.vectors, case.folder, parameters)
    (case.folder / "parameters.json").write_text(json.dumps(dataclasses.asdict(parameters)))
    return dataclasses.asdict(parameters)


def open_scann(case: Case):
    from bridge_jax.retrieval.scann_index import ScannIndex
    from bridge_jax.retrieval.tuning import tune

    index = ScannIndex.open(case.vectors, case.folder, json.loads((case.folder / "parameters.json").read_text()))
    settings = index.describe()
    if settings["dims_per_block"]:
        index, settings = tune(index, case.queries, case.target, case.k)
    return (lambda queries: index.search(queries, case.k)[1]), settings


def open_numpy(case: Case):
    vectors = case.float32()  # held in float32, as a simple exact search would

    def search(queries):
        from bridge_jax.retrieval.vectors import exact_top

        return exact_top(vectors, queries, case.k)[1]

    return search, {}


def open_jax(case: Case):
    from bridge_jax.retrieval.device_index import DeviceIndex

    index = DeviceIndex(case.vectors)
    return (lambda queries: index.search(queries, case.k)[1]), {}


def _faiss_added(case: Case, index) -> None:
    for at in range(0, case.rows, 65_536):
        index.add(np.asarray(case.vectors[at : at + 65_536]).astype(np.float32))


def _faiss_write(case: Case, index) -> dict:
    import faiss

    faiss.write_index(index, str(case.folder / "faiss.index"))
    return {}


def _faiss_read(case: Case):
    import faiss

    return faiss.read_index(str(case.folder / "faiss.index"))


def build_faiss_flat(case: Case) -> dict:
    import faiss

    index = faiss.IndexFlatIP(case.dim)
    _faiss_added(case, index)
    return _faiss_write(case, index)


def open_faiss_flat(case: Case):
    index = _faiss_read(case)
    return (lambda queries: index.search(queries, case.k)[1]), {}


def build_faiss_hnsw(case: Case) -> dict:
    import faiss

    index = faiss.IndexHNSWFlat(case.dim, 32, faiss.METRIC_INNER_PRODUCT)
    index.hnsw.efConstruction = 100
    _faiss_added(case, index)
    return {"M": 32, "efConstruction": 100} | _faiss_write(case, index)


def open_faiss_hnsw(case: Case):
    index = _faiss_read(case)

    def search(queries, ef):
        index.hnsw.efSearch = ef
        return index.search(queries, case.k)[1]

    chosen = case.cheapest([int(64 * 1.5**i) for i in range(TARGETS_TRIED)], search)
    return (lambda queries: search(queries, chosen)), {"efSearch": chosen}


def build_faiss_ivfpq(case: Case) -> dict:
    import faiss

    lists = max(16, round(4 * case.rows**0.5 / 2))
    name = f"IVF{lists},PQ{case.dim // 2}x4fs,Refine(SQfp16)"
    index = faiss.index_factory(case.dim, name, faiss.METRIC_INNER_PRODUCT)
    sample = np.sort(np.random.default_rng(0).choice(case.rows, min(case.rows, 64 * lists), replace=False))
    index.train(np.asarray(case.vectors[sample]).astype(np.float32))
    _faiss_added(case, index)
    return {"factory": name} | _faiss_write(case, index)


def open_faiss_ivfpq(case: Case):
    import faiss

    index = _faiss_read(case)
    lists = faiss.extract_index_ivf(index).nlist

    def search(queries, option):
        faiss.ParameterSpace().set_index_parameter(index, "nprobe", option[0])
        index.k_factor = option[1]
        return index.search(queries, case.k)[1]

    probes = sorted({max(1, min(lists, round(lists * 0.002 * 1.8**i))) for i in range(TARGETS_TRIED)})
    chosen = case.cheapest([(probe, factor) for factor in (5.0, 10.0, 20.0) for probe in probes], search)
    return (lambda queries: search(queries, chosen)), {"nprobe": chosen[0], "reorder": chosen[1] * case.k}


BUILDS = {"scann": build_scann, "faiss_flat": build_faiss_flat, "faiss_hnsw": build_faiss_hnsw, "faiss_ivfpq": build_faiss_ivfpq}
OPENS = {
    "scann": open_scann,
    "numpy": open_numpy,
    "jax": open_jax,
    "faiss_flat": open_faiss_flat,
    "faiss_hnsw": open_faiss_hnsw,
    "faiss_ivfpq": open_faiss_ivfpq,
}


def run_build(case: Case, engine: str) -> dict:
    memory = Memory()
    began = time.perf_counter()
    settings = BUILDS[engine](case)
    seconds = time.perf_counter() - began
    disk = sum(file.stat().st_size for file in case.folder.rglob("*") if file.is_file())
    return {"seconds": seconds, "peak_bytes": memory.peak(), "disk_bytes": disk, "settings": settings}


def run_search(case: Case, engine: str, rounds: int) -> dict:
    memory = Memory()
    began = time.perf_counter()
    search, settings = OPENS[engine](case)
    opened = time.perf_counter() - began
    held = memory.now()
    recall = case.recall(search(case.queries)[1::2], slice(1, None, 2))  # also the first call; the odd queries chose nothing
    seconds, single = [], []
    for _ in range(rounds):
        began = time.perf_counter()
        search(case.queries)
        seconds.append(time.perf_counter() - began)
    for query in case.queries[:20]:
        began = time.perf_counter()
        search(query[None])
        single.append(time.perf_counter() - began)
    rates = sorted(len(case.queries) / s for s in seconds)
    return {
        "recall": recall,
        "queries_per_second": rates[len(rates) // 2],
        "queries_per_second_min_max": [rates[0], rates[-1]],
        "one_query_milliseconds": 1e3 * float(np.median(single)),
        "open_seconds": opened,
        "held_bytes": held,
        "peak_bytes": memory.peak(),
        "settings": settings,
    }


def main() -> None:
    job = json.loads(sys.argv[1])
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # where memory runs out, it is this process's fault
    case = Case(job)
    if job["stage"] == "build":
        import scann  # noqa: F401 (libraries are not what an index takes)

        found = run_build(case, job["engine"])
    else:
        found = run_search(case, job["engine"], job["rounds"])
    sys.stdout.flush()
    os.write(1, (json.dumps(found) + "\n").encode())


if __name__ == "__main__":
    main()
