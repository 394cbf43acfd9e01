"""The passage index: build time, memory, queries/s and recall@40 of ScaNN (ours), exact search and FAISS, on real vectors.

    python benchmarks/index.py --quick
    python benchmarks/index.py --corpus=wiki_multihop/corpus.jsonl --questions=wiki_multihop/nq/test.jsonl,...
        (hours on 2 cores; stop and start it as you like: what is measured lies under runs/index/ and is not measured again)

Vectors: MiniLM's of a corpus and of real questions. 384 dimensions: a passage as it is. 768: its two halves, one behind the other,
and a question twice, so that all 768 are real. More rows than passages are made from those: a passage moved part of the way to one
of its nearest neighbours, and along the difference of two other neighbours: they stay where passages are, and have near ones as
passages have. Every engine is asked for recall@40 of `--target` of exact search, on half of the questions; the figures are of all
of them in one batch, recall of the other half. Each build and each search is a process of its own; what does not fit is named.

Parts: search (engines by rows), scaling (cost against rows, predicted for 21,015,324), encode (against sentence-transformers, which
the interpreter --peers-python has), store (a corpus of --store-rows rows: opening, reading), serve (200 clients at once), steps
(search and query encoding as a share of a training step).
Keys: recall_at_40 and qps_ratio_vs_exact (over the faster of NumPy and JAX), at 768 dimensions and the most rows up to 1,000,000.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import compare
import index_parts
import numpy as np
import plots
import training_runs as runs
from machine import about

from bridge_jax.files import write_text
from bridge_jax.retrieval.memory import free_memory, shown_size
from bridge_jax.retrieval.vectors import VectorWriter, exact_top, open_vectors

NAME = "index"
K = 40
QUERIES = 512
WIKI = 21_015_324
ENGINES = ("scann", "numpy", "jax", "faiss_flat", "faiss_ivfpq", "faiss_hnsw")
# Rows of every engine, and of those whose cost is drawn against rows, by dimensions.
SIZES = (
    {384: [29_814, 1_000_000, 5_000_000], 768: [1_000_000, 5_000_000]},
    {
        384: [10_000, 30_000, 100_000, 300_000, 1_000_000, 5_000_000],
        768: [10_000, 30_000, 100_000, 300_000, 1_000_000],
    },
)
QUICK_SIZES = ({384: [10_000], 768: [30_000]}, {384: [10_000, 30_000, 120_000]})
HNSW_ROWS = 1_000_000  # beyond, its build takes many hours
SCALING = ("scann", "numpy", "jax")
PARTS = ("search", "scaling", "encode", "store", "serve", "steps")
NEIGHBOURS = 20


def main() -> None:
    args = parser().parse_args()
    root = runs.root_of(args, NAME)
    root.mkdir(parents=True, exist_ok=True)
    runs.share_programs(root)
    sizes, steps = QUICK_SIZES if args.quick else SIZES
    bench = Bench(args, root)
    result: dict = {"target": args.target, "k": K, "queries": QUERIES, "corpus": Path(args.corpus).name, "machine": about()}
    if "search" in args.parts:
        result["search"] = {
            f"{rows} x {dim}": {engine: bench.case(engine, rows, dim) for engine in ENGINES} for dim in sizes for rows in sizes[dim]
        }
    if "scaling" in args.parts:
        result["scaling"] = {str(dim): scaling(bench, dim, steps[dim]) for dim in steps}
        plot(result["scaling"], runs.root_of(args, NAME) if args.quick else runs.RESULTS)
    others = {
        "encode": lambda: index_parts.encode(args, root),
        "store": lambda: index_parts.store(root, 200_000 if args.quick else args.store_rows),
        "serve": lambda: index_parts.serve(bench, 20 if args.quick else 200),
    }
    for name, measure in others.items():
        if name in args.parts:
            result[name] = bench.kept(name, measure)
    if "steps" in args.parts:
        result["steps"] = index_parts.steps(result.get("scaling", {}))
    result |= headline(result)
    runs.save(NAME, result, args)
    print(json.dumps(result))


def parser() -> argparse.ArgumentParser:
    made = compare.parser(__doc__, rounds=5)
    made.add_argument("--corpus", default="embedded", help="passages (default: those that come with the package)")
    made.add_argument(
        "--questions", default="embedded/hotpotqa,embedded/musique,embedded/2wikimultihopqa", help="files or sets, with commas"
    )
    made.add_argument("--target", type=float, default=0.98, help="recall@40 that every engine is set to")
    made.add_argument("--store-rows", type=int, default=WIKI)
    made.add_argument("--parts", default=PARTS, type=lambda text: tuple(text.split(",")), help=f"with commas, of {','.join(PARTS)}")
    return made


class Bench:
    """Runs cases, once each: what was measured is kept in `root`."""

    def __init__(self, args: argparse.Namespace, root: Path):
        self.args, self.root, self._real = args, root, None

    def kept(self, name: str, measure) -> dict:
        """`measure()`, or what it gave before."""
        file = self.root / "cases" / f"{name}.json"
        if file.exists():
            return json.loads(file.read_text(encoding="utf-8"))
        runs.say(f"{time.strftime('%H:%M:%S')} {name}")
        found = measure()
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, json.dumps(found, indent=1) + "\n")
        return found

    def case(self, engine: str, rows: int, dim: int) -> dict:
        """{"build": ..., "search": ...} of an engine, or {"left_out": why}."""
        if engine == "faiss_hnsw" and rows > HNSW_ROWS:
            return {"left_out": "its build takes too long"}
        needed = rows * dim * {"jax": 4, "numpy": 4, "faiss_flat": 4, "faiss_hnsw": 5, "faiss_ivfpq": 4, "scann": 7}[engine]
        name = f"{engine}-{rows}x{dim}"
        if not (self.root / "cases" / f"{name}.json").exists() and needed > (free_memory() or needed):
            return {"left_out": f"needs {shown_size(needed)} of memory, {shown_size(free_memory())} are free"}
        return self.kept(name, lambda: self._measure(engine, rows, dim))

    def _measure(self, engine: str, rows: int, dim: int) -> dict:
        queries, truth = self.truth(rows, dim)
        work = self.root / "built" / f"{engine}-{rows}x{dim}"
        job = {"engine": engine, "rows": rows, "dim": dim, "k": K, "target": self.args.target, "folder": str(work)}
        job |= {"vectors": str(self.vectors(rows, dim)), "queries": str(queries), "truth": str(truth)}
        found = {}
        if engine not in ("numpy", "jax"):
            found["build"] = self._run(job | {"stage": "build"})
        found["search"] = self._run(job | {"stage": "search", "rounds": 1 if self.args.quick else self.args.rounds})
        subprocess.run(["rm", "-rf", str(work)], check=True)
        return found

    def _run(self, job: dict) -> dict:
        command = [sys.executable, str(Path(__file__).with_name("index_case.py")), json.dumps(job)]
        done = subprocess.run(command, capture_output=True, text=True, env=runs.environment(self.root), cwd=runs.HOME)
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [""]
            return {"failed": f"ended with {done.returncode}: {lines[-1][:300]}"}
        return json.loads(done.stdout.strip().splitlines()[-1])

    def truth(self, rows: int, dim: int) -> tuple[Path, Path]:
        """Files of the queries and of their exact best scores [B, K]."""
        queries = self.real()["queries"][dim]
        file = self.root / "vectors" / f"truth-{rows}x{dim}.npy"
        if not file.exists():
            vectors = np.memmap(self.vectors(rows, dim), open_vectors(self.base(dim), *self.shape(dim)).dtype, "r", 0, (rows, dim))
            np.save(file, exact_top(vectors, np.load(queries), K)[0])
        return queries, file

    def real(self) -> dict:
        """`index_parts.encoded`."""
        if self._real is None:
            self._real = index_parts.encoded(self.args, self.root)
        return self._real

    def base(self, dim: int) -> Path:
        return self.real()["folders"][dim]

    def shape(self, dim: int) -> tuple[int, int]:
        return self.real()["rows"], dim

    def vectors(self, rows: int, dim: int) -> Path:
        """A bfloat16 file with at least so many rows, the real ones first."""
        real = self.base(dim) / "embeddings.bf16"
        if rows <= self.shape(dim)[0]:
            return real
        most = max(rows, 120_000 if self.args.quick else 1_000_000)
        folder = self.root / "vectors" / f"{most}x{dim}"
        if not (folder / "embeddings.bf16").exists():
            folder.mkdir(parents=True, exist_ok=True)
            more(open_vectors(self.base(dim), *self.shape(dim)), folder, most, self.args.seed)
        return folder / "embeddings.bf16"


def more(real: np.ndarray, folder: Path, rows: int, seed: int) -> None:
    """Writes `rows` vectors: the real ones, then ones made from them (the module's text says how)."""
    count, dim = real.shape
    base = np.asarray(real).astype(np.float32)
    near = exact_top(real, base, NEIGHBOURS + 1)[1][:, 1:]
    writer = VectorWriter(folder, dim, "bfloat16", 0)
    writer.append(base)
    rng = np.random.default_rng(seed)
    while writer.rows < rows:
        n = min(65_536, rows - writer.rows)
        i, k = rng.integers(0, count, (2, n))
        to, one, other = (base[near[which, rng.integers(0, NEIGHBOURS, n)]] for which in (i, k, k))
        part = rng.uniform(0.1, 0.5, (n, 1)).astype(np.float32)
        made = base[i] + part * (to - base[i]) + 0.5 * (one - other)
        writer.append(made / np.linalg.norm(made, axis=-1, keepdims=True))
    writer.close()


def scaling(bench: Bench, dim: int, sizes: list[int]) -> dict:
    """Milliseconds a query by rows, and what to expect at wiki-18's: a straight line in logarithms through the last three sizes."""
    found: dict = {"milliseconds": {}, "predicted": {}}
    for engine in SCALING:
        points = {}
        for rows in sizes:
            search = bench.case(engine, rows, dim).get("search", {})
            if "queries_per_second" in search:
                points[rows] = 1e3 / search["queries_per_second"]
        found["milliseconds"][engine] = points
        if len(points) >= 3:
            x, y = (np.log(np.asarray(list(values)[-3:])) for values in (points, points.values()))
            slope, offset = np.polyfit(x, y, 1)
            found["predicted"][engine] = {"exponent": slope, "milliseconds": float(np.exp(offset + slope * np.log(WIKI)))}
    return found


def plot(found: dict, folder: Path) -> None:
    panels = {
        f"{dim} dimensions": {
            engine: (list(points), list(points.values())) for engine, points in each["milliseconds"].items() if points
        }
        for dim, each in found.items()
    }
    for dim, each in found.items():
        for engine, predicted in each["predicted"].items():
            xs, ys = panels[f"{dim} dimensions"][engine]
            panels[f"{dim} dimensions"][f"{engine}, predicted"] = ([xs[-1], WIKI], [ys[-1], predicted["milliseconds"]])
    plots.lines(folder / "index_scaling.png", panels, "passages", "milliseconds a query", logx=True, logy=True)


def headline(result: dict) -> dict:
    """The two keys; None where they were not measured."""
    for name, engines in reversed(result.get("search", {}).items()):
        rows, dim = map(int, name.split(" x "))
        found = {engine: each["search"] for engine, each in engines.items() if "recall" in each.get("search", {})}
        if dim == 768 and rows <= 1_000_000 and {"scann", "numpy", "jax"} <= found.keys():
            exact = max(found[engine]["queries_per_second"] for engine in ("numpy", "jax"))
            return {
                "recall_at_40": found["scann"]["recall"],
                "qps_ratio_vs_exact": found["scann"]["queries_per_second"] / exact,
                "headline": name,
            }
    return {"recall_at_40": None, "qps_ratio_vs_exact": None}


if __name__ == "__main__":
    main()
