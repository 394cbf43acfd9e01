"""Evaluations on disk: shards, a kill at any point, changed settings; paired comparison; fused retrieval by hand."""

import itertools
import json
import re
from typing import NamedTuple

import numpy as np
import pytest
import scipy.stats

from bridge_jax.data.qa import Question
from bridge_jax.errors import UserError
from bridge_jax.evaluation import paired
from bridge_jax.evaluation.fusion import FusedRetriever, fuse
from bridge_jax.evaluation.store import Store, _cut_last_line, differing, find_result, read_result
from bridge_jax.evaluation.table import against_table
from bridge_jax.retrieval.corpus import Passage

SETS = {name: [Question(f"q{n}", f"Who {n}?", ("x",), (), name) for n in range(size)] for name, size in (("nq", 5), ("musique", 4))}
SETTINGS = {"template": {"style": "direct", "hash": "a"}, "limits": {"shown": 3}, "baseline": None, "golds": ("x",)}


def answer(store, name, questions):
    for question in questions:
        store.append(name, {"id": question.id, "text": "\u2028é", "em": 1.0, "trace": [question.id]})


def test_a_shard_answers_its_own_and_the_last_one_finds_all(tmp_path):
    for number in range(3):
        store = Store(tmp_path, "e", SETTINGS, SETS, (number, 3))
        with store.open():
            assert [q.id for q in store.pending("nq")] == [f"q{n}" for n in range(number, 5, 3)]
            for name in SETS:
                answer(store, name, store.pending(name))
            assert bool(store.missing()) == (number < 2)
    assert {name: [row["id"] for row in rows] for name, rows in store.records().items()} == {
        name: [q.id for q in questions] for name, questions in SETS.items()
    }
    assert all(row["seconds"] >= 0 for rows in store.records().values() for row in rows)
    path = store.write({"settings": store.settings, "datasets": {}})
    assert [p.name for p in tmp_path.iterdir()] == ["e.json"] and path == tmp_path / "e.json"
    assert not any("trace" in row for rows in store.records().values() for row in rows), "what is long is in the file alone"
    again = Store(tmp_path, "e", SETTINGS, SETS).finished()
    assert again["predictions"]["nq"][4]["text"] == "\u2028é"
    assert {name: [row["trace"] for row in rows] for name, rows in again["predictions"].items()} == {
        name: [[q.id] for q in questions] for name, questions in SETS.items()
    }


def test_a_kill_costs_one_question_and_another_number_of_shards_goes_on(tmp_path):
    store = Store(tmp_path, "e", SETTINGS, SETS)
    with store.open():
        answer(store, "nq", store.pending("nq")[:3])
    [file] = (tmp_path / "e.parts").glob("predictions.*")
    file.write_bytes(file.read_bytes()[:-9])  # in the middle of the third line
    store = Store(tmp_path, "e", SETTINGS, SETS, (0, 2))
    with store.open():
        assert [q.id for q in store.pending("nq")] == ["q2", "q4"]
    store = Store(tmp_path, "e", SETTINGS, SETS)
    with store.open():
        assert [q.id for q in store.pending("nq")] == ["q2", "q3", "q4"]
        answer(store, "nq", store.pending("nq"))
        with pytest.raises(UserError, match="another process"), Store(tmp_path, "e", SETTINGS, SETS).open():
            pass
    assert [json.loads(line)["record"]["id"] for line in file.read_text().split("\n")[:-1]] == ["q0", "q1", "q2", "q3", "q4"]
    file.write_text('{"set": "nq"}\n')
    with pytest.raises(UserError, match="line 1"), Store(tmp_path, "e", SETTINGS, SETS).open():
        pass


@pytest.mark.parametrize("lines", [b"", b"a\n", b"a\nbb", b"a" * 30, b"a\n" + b"b" * 30, b"a\nbb\n"])
def test_half_a_line_is_cut_off(tmp_path, lines):
    (tmp_path / "f").write_bytes(lines)
    _cut_last_line(tmp_path / "f", block=4)
    assert (tmp_path / "f").read_bytes() == lines[: lines.rfind(b"\n") + 1]


def test_two_shards_that_finish_at_the_same_time_leave_one_result(tmp_path):
    first, second = (Store(tmp_path, "e", SETTINGS, SETS, (number, 2)) for number in range(2))
    with first.open(), second.open():
        for store in (first, second):
            for name in SETS:
                answer(store, name, store.pending(name))
        assert not first.missing() and not second.missing()
        written = first.write({"settings": first.settings, "datasets": {}}).read_bytes()
        assert second.write({"settings": second.settings, "datasets": {}}).read_bytes() == written
        assert not second.missing()
    assert [p.name for p in tmp_path.iterdir()] == ["e.json"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"limits": {"shown": 5}}, "limits.shown was 3, now 5"),
        ({"baseline": "rag"}, 'baseline was null, now "rag"'),
        ({"new": 1}, "new was null, now 1"),
    ],
)
def test_a_changed_setting_is_named(tmp_path, change, words):
    with Store(tmp_path, "e", SETTINGS, SETS).open():
        pass
    with pytest.raises(UserError, match=re.escape(words)), Store(tmp_path, "e", SETTINGS | change, SETS).open():
        pass
    with Store(tmp_path, "e", SETTINGS, SETS).open() as store:
        for name in SETS:
            answer(store, name, store.pending(name))
        store.write({"settings": store.settings, "datasets": {}})
    with pytest.raises(UserError, match=re.escape(words)):
        Store(tmp_path, "e", SETTINGS | change, SETS).finished()
    assert Store(tmp_path, "other", SETTINGS | change, SETS).finished() is None


def test_differing():
    assert differing({"a": 1, "b": {"c": [1]}}, {"b": {"c": [2]}, "d": 0}) == [("a", 1, None), ("b.c", [1], [2]), ("d", None, 0)]


def test_finding_the_other_result(tmp_path):
    folder = tmp_path / "run" / "eval"
    folder.mkdir(parents=True)
    with pytest.raises(UserError, match="no result there"):
        find_result(str(tmp_path / "run"), "e")
    (folder / "e.json").write_text("{}")
    assert find_result(str(tmp_path / "run"), "e") == find_result(str(folder / "e.json"), "z") == folder / "e.json"
    (folder / "f.json").write_text("{}")
    assert find_result(str(tmp_path / "run"), "f").name == "f.json"
    with pytest.raises(UserError, match=r"e\.json, f\.json"):
        find_result(str(tmp_path / "run"), "g")
    with pytest.raises(UserError, match="not the result"):
        read_result(folder / "e.json")
    with pytest.raises(UserError, match="cannot read"):
        read_result(folder / "none.json")


# ---- paired ----------------------------------------------------------------------------------------------------------------------


def result(ems, name="nq", **settings):
    rows = [{"id": f"q{n}", "em": float(em), "f1": float(em), "sub_em": None, "recall@3": None} for n, em in enumerate(ems)]
    return {"predictions": {name: rows}, "settings": settings}


def test_paired_differences():
    rng = np.random.default_rng(0)
    b = rng.random(400) < 0.4
    a = np.where(rng.random(400) < 0.15, ~b, b) | (rng.random(400) < 0.05)
    got = paired.compare(result(a, policy="x", same=1), result(b, policy="y", same=1))
    row = got["datasets"]["nq"]["em"]
    gap = a.astype(float) - b
    assert row["difference"] == pytest.approx(gap.mean()) and got["settings"] == ["policy"]
    resampled = [gap[rng.integers(400, size=400)].mean() for _ in range(4000)]
    np.testing.assert_allclose([row["low"], row["high"]], np.quantile(resampled, [0.025, 0.975]), atol=0.008)
    wins, losses = int((gap > 0).sum()), int((gap < 0).sum())
    assert (row["wins"], row["losses"]) == (wins, losses)
    tail = sum(scipy.stats.binom.pmf(k, wins + losses, 0.5) for k in range(min(wins, losses) + 1))
    assert row["p"] == pytest.approx(min(1.0, 2 * tail))
    # pairing is what makes the interval narrow
    unpaired = np.sqrt(a.var() / 400 + b.var() / 400) * 2 * 1.96
    assert row["high"] - row["low"] < 0.8 * unpaired
    assert got["datasets"]["nq"]["recall@3"] is None


def test_only_shared_questions_are_compared():
    ours, theirs = result([1, 1, 0]), result([0, 1])
    ours["predictions"]["musique"] = result([1, 0])["predictions"]["nq"]
    theirs["predictions"]["musique"] = result([1, 0])["predictions"]["nq"]
    got = paired.compare(ours, theirs)
    assert (got["only_ours"], got["only_theirs"], got["datasets"]["nq"]["n"]) == (1, 0, 2)
    assert got["averages"]["overall"]["em"]["difference"] == pytest.approx((0.5 + 0) / 2)
    assert paired.mcnemar(0, 0)["p"] == 1.0
    table = against_table(got)
    assert table.row_count == 5  # two sets, single-hop, multi-hop, all
    with pytest.raises(UserError, match="share no question"):
        paired.compare(result([1]), result([1], "musique"))


# ---- fusion ----------------------------------------------------------------------------------------------------------------------


class Found(NamedTuple):
    query_vectors: np.ndarray
    scores: np.ndarray
    rows: np.ndarray


class ByVectors:
    """Exact inner products with vectors of its own."""

    def __init__(self, corpus, seed):
        self.corpus, self.seed = corpus, seed
        self.vectors = np.random.default_rng(seed).normal(size=(len(corpus), 8)).astype(np.float32)
        self.asked = []

    def search(self, queries, k, lora=None):
        self.asked.append((k, lora))
        queries = np.stack([np.random.default_rng([self.seed, len(q)]).normal(size=8) for q in queries]).astype(np.float32)
        scores = queries @ self.vectors.T
        rows = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        return Found(queries, np.take_along_axis(scores, rows, 1), rows.astype(np.int32))


class Pages(list):
    def __init__(self, count, fingerprint="pages"):
        super().__init__(Passage(str(n), "", f"text {n}") for n in range(count))
        self.fingerprint = fingerprint


def test_two_encoders_fuse_by_reciprocal_rank():
    pages = Pages(150)
    parts = [ByVectors(pages, 1), ByVectors(pages, 2)]
    fused = FusedRetriever(parts)
    got = fused.search(["one", "three"], 10, lora="L")
    for n, query in enumerate(["one", "three"]):
        scores = {}
        for part in parts:  # MedRAG's merge, written out: 1 / (100 + rank)
            for rank, row in enumerate(part.search([query], 100).rows[0].tolist(), start=1):
                scores[row] = scores.get(row, 0) + 1 / (100 + rank)
        best = sorted(scores, key=lambda row: -scores[row])[:10]
        np.testing.assert_allclose(got.scores[n], [scores[row] for row in best], rtol=1e-6)
        assert got.rows[n].tolist() == best
    assert [part.asked[0] for part in parts] == [(100, "L"), (100, None)] and fused.corpus is pages
    np.testing.assert_array_equal(got.query_vectors, parts[0].search(["one", "three"], 1).query_vectors)
    few = FusedRetriever([ByVectors(Pages(4), seed) for seed in (1, 2)])
    assert sorted(few.search(["one"], 6).rows[0].tolist()) == [-1, -1, 0, 1, 2, 3]
    with pytest.raises(UserError, match="same corpora"):
        FusedRetriever([parts[0], ByVectors(Pages(150, "others"), 1)])


def test_fuse_by_hand():
    scores, rows = fuse([np.asarray([4, 2, -1]), np.asarray([2, 7])], 4, rrf_k=1)
    assert rows.tolist() == [2, 4, 7, -1] and scores.tolist() == pytest.approx([1 / 3 + 1 / 2, 1 / 2, 1 / 3, -np.inf])
    assert fuse([np.asarray([5])], 1)[1].tolist() == [5]
    # Equal scores: by the first list, then by the second. Three ranks have one sum, in whatever order they are added.
    lists = [np.asarray(order) for order in ([0, 1, 2, 3], [1, 2, 0, 4], [2, 0, 1, 5])]
    for turn in itertools.permutations(lists):
        scores, rows = fuse(turn, 6)
        assert rows.tolist() == [row for row in turn[0] if row < 3] + [int(one[3]) for one in turn] and len(set(scores[:3])) == 1
    for order in itertools.permutations(range(4)):  # one list is its own fusion
        assert fuse([np.asarray(order)], 4)[1].tolist() == list(order)
