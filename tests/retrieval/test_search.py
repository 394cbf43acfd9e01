"""Both index kinds against FAISS and against plain NumPy: the same rows, the exact scores, one order."""

import dataclasses
import itertools
import json
import os
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from bridge_jax.errors import UserError
from bridge_jax.retrieval import scann_index
from bridge_jax.retrieval.corpus import Corpus
from bridge_jax.retrieval.device_index import DeviceIndex, layout, top_rows
from bridge_jax.retrieval.merged import MergedCorpus, MergedIndex
from bridge_jax.retrieval.scann_index import ScannIndex, ScannParameters, choose_parameters, tree_parameters
from bridge_jax.retrieval.vectors import Int8Vectors, exact_top, quantize

ROWS, DIM, K = 8000, 64, 40


def clustered(rows=ROWS, dim=DIM, seed=0):
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(60, dim))
    points = centres[rng.integers(0, 60, rows)] + 0.6 * rng.normal(size=(rows, dim))
    return (points / np.linalg.norm(points, axis=-1, keepdims=True)).astype(ml_dtypes.bfloat16)


@pytest.fixture(scope="module")
def vectors():
    return clustered()


@pytest.fixture(scope="module")
def queries():
    near = clustered()[::80].astype(np.float32) + 0.1 * np.random.default_rng(1).normal(size=(100, DIM))
    return (near / np.linalg.norm(near, axis=-1, keepdims=True)).astype(np.float32)


@pytest.fixture(scope="module")
def by_faiss(vectors, queries):
    faiss = pytest.importorskip("faiss")
    flat = faiss.IndexFlatIP(DIM)
    flat.add(vectors.astype(np.float32))
    return flat.search(queries, K)


def scann(vectors, folder, parameters):
    pytest.importorskip("scann")
    folder.mkdir()
    ScannIndex.build(vectors, folder, parameters)
    folder = folder.rename(folder.with_name("moved"))  # an index folder may be moved
    return ScannIndex.open(vectors, folder, dataclasses.asdict(parameters))


FORMS = {
    "brute_force": ScannParameters(),
    "hashed": ScannParameters(dims_per_block=2, reorder=400),
    "tree": tree_parameters(ROWS),
}


def test_device_index_against_faiss(vectors, queries, by_faiss):
    scores, rows = DeviceIndex(vectors).search(queries, K)
    assert scores.dtype == np.float32 and rows.dtype == np.int32
    np.testing.assert_allclose(scores, by_faiss[0], atol=2e-6)
    # Where FAISS's own rounding leaves two neighbours in another order, their scores must be that close.
    other = rows != by_faiss[1]
    assert other.mean() < 0.01
    own = np.einsum("bd,bkd->bk", queries, vectors[by_faiss[1]].astype(np.float32))
    np.testing.assert_allclose(scores[other], own[other], atol=2e-6)


def test_exact_search_in_blocks_on_the_host_against_faiss(vectors, queries, by_faiss):
    scores, rows = exact_top(vectors, queries, K, block=1000)
    np.testing.assert_allclose(scores, by_faiss[0], atol=2e-6)
    device = DeviceIndex(vectors).search(queries, K)
    np.testing.assert_array_equal(scores, device[0])
    np.testing.assert_array_equal(rows, device[1])


@pytest.mark.parametrize("store", ["bfloat16", "int8"])
@pytest.mark.parametrize("kind", ["exact", "approx"])
def test_what_accelerators_run_finds_the_same(vectors, queries, store, kind):
    """The program with bfloat16 products, which a CPU's DeviceIndex does not use."""
    stored = Int8Vectors(*quantize(vectors)) if store == "int8" else vectors
    placed = (stored.codes, stored.scales) if store == "int8" else (stored,)
    block, padded = layout(ROWS, 1)
    assert padded == ROWS
    rows = top_rows(placed, queries, count=K + 16, rows=ROWS, block=block, mesh=None, split=True, kind=kind)
    want = exact_top(stored, queries, K)[1]
    missed = [len(set(a) - set(b)) for a, b in zip(want, np.asarray(rows))]
    assert sum(missed) == 0, "the queries' low halves must count"
    index = DeviceIndex(stored, kind=kind)
    assert index.kind == kind
    np.testing.assert_array_equal(index.search(queries, K)[1], want)


@pytest.mark.parametrize("form", FORMS)
def test_scann_recall_and_exact_scores(tmp_path, vectors, queries, by_faiss, form):
    index = scann(vectors, tmp_path / "s", FORMS[form])
    scores, rows = index.search(queries, K)
    recall = np.mean([len(set(a) & set(b)) / K for a, b in zip(rows, by_faiss[1])])
    assert recall >= (1.0 - 1e-3 if form == "brute_force" else 0.98)
    exact = np.einsum("bd,bkd->bk", queries, vectors[rows].astype(np.float32))
    np.testing.assert_array_equal(scores, exact)
    assert (np.diff(scores, axis=-1) <= 0).all()
    assert all(len(set(row)) == K for row in rows)
    again, _ = index.search(queries, K)
    np.testing.assert_array_equal(scores, again)
    np.testing.assert_array_equal(index.vectors(rows), vectors[rows].astype(np.float32))


def test_scann_leaves_too_small_for_k_give_no_invented_rows(tmp_path, vectors, queries):
    index = scann(vectors, tmp_path / "s", ScannParameters(leaves=400, leaves_to_search=1, dims_per_block=2, reorder=100))
    scores, rows = index.search(queries, K)
    assert np.isfinite(scores).all() and all(len(set(row)) == K for row in rows)
    everything, _ = index.search(queries[:3], len(vectors))
    assert np.isfinite(everything).all()


@pytest.mark.parametrize("kind", ["exact", "scann"])
def test_equal_scores_are_ordered_by_row_and_neighbours_change_nothing(tmp_path, kind):
    base = clustered(50)
    vectors = np.concatenate([base, base[::-1], base])
    index = DeviceIndex(vectors) if kind == "exact" else scann(vectors, tmp_path / "s", ScannParameters())
    queries = base.astype(np.float32)
    scores, rows = index.search(queries, 12)
    # Three copies of each passage: i, 99 - i, 100 + i.
    np.testing.assert_array_equal(rows[:, :3], [[i, 99 - i, 100 + i] for i in range(50)])
    for i in (0, 17, 49):
        alone = index.search(queries[i : i + 1], 12)
        np.testing.assert_array_equal(alone[0][0], scores[i])
        np.testing.assert_array_equal(alone[1][0], rows[i])


def test_merged_by_score_is_one_index_over_all_and_by_rank_takes_turns(vectors, queries):
    cuts = [0, 3000, 3010, ROWS]
    parts = [DeviceIndex(vectors[a:b]) for a, b in itertools.pairwise(cuts)]
    one, merged = DeviceIndex(vectors), MergedIndex(parts)
    assert (len(merged), merged.dim) == (ROWS, DIM)
    for a, b in zip(one.search(queries, K), merged.search(queries, K)):
        np.testing.assert_array_equal(a, b)
    rows = np.array([[0, 3009, 7999], [2999, 3000, 3010]])
    np.testing.assert_array_equal(merged.vectors(rows), one.vectors(rows))
    scores, rows = MergedIndex(parts, "rank").search(queries, 36)  # the second has 10 passages only
    owner = np.searchsorted(cuts, rows, side="right") - 1
    for line in owner:
        assert all(set(line[3 * i : 3 * i + 3]) == {0, 1, 2} for i in range(10)) and set(line[30:]) == {0, 2}
    np.testing.assert_array_equal(scores, np.einsum("bd,bkd->bk", queries, one.vectors(rows)))
    assert (np.diff(scores[:, :3]) <= 0).all(), "equal ranks: by score"
    for part, (start, stop) in enumerate(itertools.pairwise(cuts)):
        own = [line[found == part] - start for line, found in zip(rows, owner)]
        np.testing.assert_array_equal(own, parts[part].search(queries, min(len(own[0]), stop - start))[1])
    twice = MergedIndex([parts[1], parts[1]])
    _, rows = twice.search(queries, 20)
    np.testing.assert_array_equal(rows[:, ::2] + 10, rows[:, 1::2])  # equal scores: by row, the first corpus first
    with pytest.raises(UserError, match="not by 'votes'"):
        MergedIndex(parts, "votes")
    with pytest.raises(UserError, match="64, 32 dimensions"):
        MergedIndex([parts[0], DeviceIndex(vectors[:, :32])])


def test_several_corpora_are_one(tmp_path):
    parts = []
    for name, size in (("a", 30), ("b", 5), ("c", 12)):
        lines = [json.dumps({"id": f"{name}{n}", "contents": f'"{name}"\n{name} {n}'}) for n in range(size)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
        parts.append(Corpus.open(tmp_path / f"{name}.jsonl"))
    merged = MergedCorpus(parts)
    assert len(merged) == 47 and [passage.id for passage in merged] == [p.id for part in parts for p in part]
    for row in (0, 29, 30, 34, 35, 46):
        passage = merged[row]
        assert merged.row_of(passage.id) == row and merged.contents(row) == f'"{passage.title}"\n{passage.text}'
    for row in (-1, 47):
        with pytest.raises(IndexError):
            merged[row]
    with pytest.raises(KeyError):
        merged.row_of("z")


@pytest.mark.parametrize("kind", ["exact", "scann"])
def test_wrong_calls(tmp_path, kind):
    vectors = clustered(30)
    index = DeviceIndex(vectors) if kind == "exact" else scann(vectors, tmp_path / "s", ScannParameters())
    query = vectors[:1].astype(np.float32)
    for k in (0, 31):
        with pytest.raises(UserError, match="1 to 30"):
            index.search(query, k)
    assert set(index.search(query, 30)[1][0]) == set(range(30))
    for bad in (query[0], query[:, :-1], np.full_like(query, np.nan)):
        with pytest.raises(ValueError):
            index.search(bad, 3)
    assert index.search(query[:0], 3)[1].shape == (0, 3)


def test_the_rule():
    assert choose_parameters(19_999, 768) == ScannParameters()
    assert choose_parameters(50_000, 768).leaves == 0 and choose_parameters(50_000, 768).dims_per_block == 2
    wiki = choose_parameters(21_015_324, 768)
    assert 4_000 < wiki.leaves < 20_000 and wiki.leaves_to_search * 10 <= wiki.leaves
    built, loaded = (count(21_015_324, 768, "bfloat16") for count in (scann_index.build_bytes, scann_index.load_bytes))
    assert built > loaded > 21_015_324 * 768 * 2 and scann_index.load_bytes(21_015_324, 768, "int8") < loaded


MESH = """
import jax, numpy as np
from jax.sharding import AxisType
from bridge_jax.retrieval import device_index
from tests.retrieval.test_search import clustered
device_index.BLOCK = 64
assert jax.device_count() == 8
mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
for rows, k in ((5, 5), (333, 40), (2048, 40)):
    vectors = np.concatenate([clustered(rows), clustered(rows)[::-1]])  # ties across shards
    queries = clustered(37, seed=3).astype(np.float32)
    one = device_index.DeviceIndex(vectors).search(queries, k)
    many = device_index.DeviceIndex(vectors, mesh).search(queries, k)
    for a, b in zip(one, many):
        np.testing.assert_array_equal(a, b)
print("same")
"""


def test_device_index_on_a_mesh_of_8_equals_one_device(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    done = subprocess.run([sys.executable, "-c", MESH], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "same", done.stderr
