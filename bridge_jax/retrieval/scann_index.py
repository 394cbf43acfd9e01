"""ScaNN on the host: a tree of partitions, asymmetric hashing inside them, reordering; then exact rescoring."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bridge_jax.errors import UserError
from bridge_jax.retrieval.vectors import EmbeddingIndex, Int8Vectors, Vectors, vector_bytes

BRUTE_FORCE_BELOW = 20_000
TREE_ABOVE = 100_000
TRAINED_ON = 100  # passages a leaf
INPUT = "input.f32"
COPY_ROWS = 65_536


def available() -> bool:
    """ScaNN has wheels for Linux on x86-64 and a few others; everything else uses the device index."""
    return importlib.util.find_spec("scann") is not None


@dataclass(frozen=True)
class ScannParameters:
    """How the searcher is built, and (leaves_to_search, reorder) how it is searched: these two are tuned (retrieval/tuning.py).

    `leaves` 0: no tree. `dims_per_block` 0: brute force, no hashing.
    """

    leaves: int = 0
    leaves_to_search: int = 0
    dims_per_block: int = 0
    reorder: int = 0


def choose_parameters(rows: int, dim: int) -> ScannParameters:
    """The rule, from rows x dim.

    * below 20,000 rows: brute force. It takes under a millisecond and there is nothing to lose.
    * below 100,000 rows: asymmetric hashing over all rows, no tree: training partitions would cost more than it saves.
    * above: `tree_parameters`.

    Hashing takes 2 dimensions a block (4 bits each: dim / 4 bytes a row); the best 400 by hash are reordered, 10 times the 40
    candidates of a turn, because hashing to 4 bits blurs embeddings. Below 2 dimensions there is nothing to hash.
    """
    if rows < BRUTE_FORCE_BELOW or dim < 2:
        return ScannParameters()
    if rows < TREE_ABOVE:
        return ScannParameters(dims_per_block=2, reorder=400)
    return tree_parameters(rows)


def tree_parameters(rows: int) -> ScannParameters:
    """A tree of about 2 sqrt(rows) leaves (sqrt(rows)/2 passages each), of which a tenth, and at least 100, are searched."""
    leaves = round(2 * math.sqrt(rows))
    return ScannParameters(leaves, min(leaves, max(100, leaves // 10)), dims_per_block=2, reorder=400)


def build_bytes(rows: int, dim: int, store: str) -> int:
    """Memory at the peak of a build: ScaNN's float32 copy, its training samples, what it keeps. (Its input is a file's pages.)"""
    samples = 3 * min(rows, TRAINED_ON * choose_parameters(rows, dim).leaves) + 2 * min(rows, 100_000)
    return (rows + samples) * dim * 4 + load_bytes(rows, dim, store)


def load_bytes(rows: int, dim: int, store: str) -> int:
    """Memory of an open searcher: reordering copy, hashes. (The memory-mapped vectors are the page cache's.)"""
    return vector_bytes(rows, dim, store) + (rows * dim // 4 if rows >= BRUTE_FORCE_BELOW else 0)


class ScannIndex(EmbeddingIndex):
    """`search` of EmbeddingIndex over a ScaNN searcher. Use `build` and `open`."""

    kind = "scann"

    def __init__(self, embeddings: Vectors, searcher, parameters: ScannParameters):
        super().__init__(embeddings)
        self.parameters = parameters
        self._searcher = searcher

    @staticmethod
    def build(embeddings: Vectors, folder: Path, parameters: ScannParameters) -> None:
        """Trains a searcher on [N, D] vectors and serialises it into the (existing, empty) folder, its log to build.log there."""
        with _native_stderr_to(folder / "build.log"), _as_float32(embeddings, folder / INPUT) as vectors:
            from scann.scann_ops.py import scann_builder, scann_ops_pybind

            order = scann_builder.ReorderType
            quantize = order.INT8 if isinstance(embeddings, Int8Vectors) else order.BFLOAT16
            builder = scann_ops_pybind.builder(vectors, 40, "dot_product")
            if parameters.leaves:
                builder = builder.tree(
                    parameters.leaves,
                    parameters.leaves_to_search,
                    training_sample_size=min(len(embeddings), TRAINED_ON * parameters.leaves),
                )
            if parameters.dims_per_block:
                builder = builder.score_ah(parameters.dims_per_block, anisotropic_quantization_threshold=0.2)
                builder = builder.reorder(parameters.reorder, quantize=quantize)
            else:
                builder = builder.score_brute_force(quantize=quantize)
            # Relative paths: the folder may be moved, or copied to another machine.
            builder.build().serialize(str(folder), relative_path=True)

    @classmethod
    def open(cls, embeddings: Vectors, folder: Path, parameters: dict) -> ScannIndex:
        """Reopens what `build` wrote."""
        from scann.scann_ops.py import scann_ops_pybind

        try:
            searcher = scann_ops_pybind.load_searcher(str(folder), assets_backcompat_shim=False)
        except Exception as error:
            raise UserError(f"{folder}: ScaNN cannot read its files ({error}); rebuild the index with --force") from None
        if searcher.size() != len(embeddings):
            raise UserError(
                f"{folder}: holds {searcher.size()} vectors where {len(embeddings)} belong; rebuild the index with --force"
            )
        return cls(embeddings, searcher, ScannParameters(**parameters))

    def with_search(self, leaves_to_search: int, reorder: int) -> ScannIndex:
        """The same searcher, searched otherwise."""
        parameters = dataclasses.replace(self.parameters, leaves_to_search=leaves_to_search, reorder=reorder)
        return ScannIndex(self.embeddings, self._searcher, parameters)

    def describe(self) -> dict:
        """The parameters, for the manifest."""
        return dataclasses.asdict(self.parameters)

    def _candidates(self, queries: np.ndarray, count: int) -> np.ndarray:
        p = self.parameters
        reorder = min(max(p.reorder, count), len(self)) if p.dims_per_block else None
        leaves = p.leaves_to_search if p.leaves else None
        rows, scores = self._search(queries, count, reorder, leaves)
        rows = rows.astype(np.int64)
        # Leaves that hold fewer than `count` passages leave places filled with row 0 and NaN: search more leaves for those queries.
        while (short := np.flatnonzero(np.isnan(scores).any(-1))).size and (leaves or 0) < p.leaves:
            leaves = min(2 * leaves, p.leaves)
            found, scores[short] = self._search(queries[short], count, max(reorder, 4 * count), leaves)
            rows[short] = found
        return rows

    def _search(self, queries: np.ndarray, count: int, reorder: int | None, leaves: int | None):
        # ScaNN gives each thread whole batches of 256 by default: fewer queries than that would keep one core busy.
        share = -(-len(queries) // (os.cpu_count() or 1))
        return self._searcher.search_batched_parallel(queries, count, reorder, leaves, batch_size=max(1, min(256, share)))


@contextlib.contextmanager
def _as_float32(embeddings: Vectors, file: Path) -> Iterator[np.ndarray]:
    """The vectors in the form ScaNN reads, in a file: it copies them, and two copies in memory would be one too many."""
    vectors = np.memmap(file, np.float32, "w+", 0, embeddings.shape)
    for at in range(0, len(embeddings), COPY_ROWS):
        vectors[at : at + COPY_ROWS] = embeddings[at : at + COPY_ROWS]
    try:
        yield vectors
    finally:
        del vectors
        file.unlink()


@contextlib.contextmanager
def _native_stderr_to(file: Path) -> Iterator[None]:
    """ScaNN's C++ side writes progress to file descriptor 2, whatever Python's sys.stderr is."""
    saved = os.dup(2)
    with open(file, "wb") as log:
        os.dup2(log.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(saved, 2)
            os.close(saved)
