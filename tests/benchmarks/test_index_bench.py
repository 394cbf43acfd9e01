"""The parts of benchmarks/index.py that decide what its figures mean."""

import types

import index as bench
import index_case
import index_parts
import ml_dtypes
import numpy as np
import pytest

from bridge_jax.retrieval.vectors import exact_top, open_vectors


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def test_made_vectors_are_unit_near_real_ones_and_follow_them(tmp_path):
    real = unit(np.random.default_rng(0).normal(size=(200, 32))).astype(ml_dtypes.bfloat16)
    bench.more(real, tmp_path, 1000, seed=0)
    made = open_vectors(tmp_path, 1000, 32)
    np.testing.assert_array_equal(made[:200], real)
    values = made.astype(np.float32)
    np.testing.assert_allclose(np.linalg.norm(values, axis=-1), 1, atol=0.01)
    nearest = (values[200:] @ values[:200].T).max(-1)
    assert 0.6 < nearest.mean() < 0.99 and len(np.unique(values, axis=0)) == 1000


def test_recall_is_of_scores_and_the_cheapest_option_reaches_the_target(tmp_path):
    vectors = unit(np.random.default_rng(1).normal(size=(100, 16))).astype(ml_dtypes.bfloat16)
    queries = unit(np.random.default_rng(2).normal(size=(10, 16))).astype(np.float32)
    scores, rows = exact_top(vectors, queries, 5)
    case = types.SimpleNamespace(vectors=vectors, queries=queries, truth=scores, target=0.9)
    case.recall = types.MethodType(index_case.Case.recall, case)
    assert case.recall(rows) == 1.0
    missing = np.where(np.arange(5) < 4, rows, -1)  # what an engine leaves empty is not found
    assert case.recall(missing) == pytest.approx(0.8)
    assert case.recall(missing[1::2], slice(1, None, 2)) == pytest.approx(0.8)
    found = {"exact": rows, "most": missing}
    assert index_case.Case.cheapest(case, ["most", "exact"], lambda half, option: found[option][::2]) == "exact"
    assert index_case.Case.cheapest(case, ["most"], lambda half, option: found[option][::2]) == "most"


def test_the_prediction_and_the_keys():
    def case(engine, rows, dim):
        return {"search": {"queries_per_second": 1e6 / rows if engine == "numpy" else 1e3 / rows**0.5, "recall": 0.99}}

    found = bench.scaling(types.SimpleNamespace(case=case), 768, [10_000, 100_000, 1_000_000, 4_000_000])
    assert found["predicted"]["numpy"]["exponent"] == pytest.approx(1) and found["predicted"]["scann"]["exponent"] == pytest.approx(
        0.5
    )
    assert found["predicted"]["numpy"]["milliseconds"] == pytest.approx(bench.WIKI / 1e3)
    search = {
        f"{rows} x 768": {engine: case(engine, rows, 768) for engine in bench.ENGINES} for rows in (10_000, 1_000_000, 5_000_000)
    }
    keys = bench.headline({"search": search})
    assert keys == {"recall_at_40": 0.99, "qps_ratio_vs_exact": pytest.approx(1.0), "headline": "1000000 x 768"}
    assert bench.headline({}) == {"recall_at_40": None, "qps_ratio_vs_exact": None}
    shares = index_parts.steps({"768": found})
    assert shares["paper scale"]["queries"] == 6144 and 0 < shares["pocket"]["share"] < 0.01
