"""Retrievers alone: the measures against figures worked out by hand, BM25 against its formula, and `index eval`."""

import collections
import importlib.util
import json
import math
import re

import jax
import numpy as np
import pytest

from bridge_jax import index as command
from bridge_jax.data.formats import Question
from bridge_jax.errors import UserError
from bridge_jax.models import e5
from bridge_jax.models.lora import LoRAConfig, init_lora, save_peft
from bridge_jax.objectives.rewards import normalize_answer
from bridge_jax.retrieval.bm25 import build_bm25, open_bm25
from bridge_jax.retrieval.corpus import Corpus
from bridge_jax.retrieval.index import build_index
from bridge_jax.retrieval.measure import means, measure
from tests.retrieval.conftest import passages, write_jsonl

TEXTS = ["the Cat sat", "dogs bark", "yes indeed", "a cat; and Paris", "nothing"]


def questions():
    def make(name, golds, ids):
        return Question(id=name, question=name, golds=golds, gold_passage_ids=ids, dataset="d")

    return [
        make("found second and fourth", ("cat sat",), ("p2", "p0")),
        make("yes or no", ("Yes",), ("p1",)),
        make("no gold ids, second answer", ("Berlin", "paris"), ()),
        make("gold id that the corpus lacks", ("dogs",), ("p1", "gone")),
        make("not found", ("Rome",), ("p4",)),
    ]


def test_measures_by_hand(tmp_path):
    corpus = Corpus.open(write_jsonl(tmp_path / "c.jsonl", [{"id": f"p{i}", "contents": text} for i, text in enumerate(TEXTS)]))
    rows = np.array([[1, 2, 3, 0], [1, 0, 2, 3], [0, 1, 3, 2], [3, 2, 1, 0], [0, 1, 2, 3]])
    found = measure(questions(), rows, corpus, (1, 3, 4), normalize_answer)
    nan = np.nan
    expected = {
        "recall@1": [0, 1, nan, 0, 0], "recall@3": [0.5, 1, nan, 0.5, 0], "recall@4": [1, 1, nan, 0.5, 0],
        "mrr": [1 / 2, 1, nan, 1 / 3, 0],
        "answer@1": [0, nan, 0, 0, 0], "answer@3": [0, nan, 1, 1, 0], "answer@4": [1, nan, 1, 1, 0],
    }  # fmt: skip
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], np.float64(values), name)
    assert means(found)["mrr"] == pytest.approx((1 / 2 + 1 + 1 / 3) / 4) and means({"x": np.float64([nan])}) == {"x": None}


def test_bm25_is_its_formula_and_breaks_ties_by_row(tmp_path):
    pytest.importorskip("bm25s")
    rows = passages(120, seed=3) + [{"id": f"twin{i}", "contents": "unique twins here"} for i in range(5)]
    corpus = Corpus.open(write_jsonl(tmp_path / "c.jsonl", rows))
    build_bm25(corpus, tmp_path / "bm25")
    found = open_bm25(tmp_path / "bm25", corpus).search(["Word1 word7 nowhere", "twins", "the of and", ""], 125)
    words = [re.findall(r"\b\w\w+\b", row["contents"].lower()) for row in rows]
    mean = np.mean([len(line) for line in words])

    def score(query, line):  # Lucene's, k1 = 1.5, b = 0.75
        counts = collections.Counter(line)
        total = 0.0
        for word in query:
            df = sum(word in other for other in words)
            idf = math.log(1 + (len(words) - df + 0.5) / (df + 0.5))
            total += idf * counts[word] / (counts[word] + 1.5 * (0.25 + 0.75 * len(line) / mean))
        return total

    for i, query in enumerate((["word1", "word7"], ["twins"])):
        scores = np.array([score(query, line) for line in words])
        np.testing.assert_allclose(found.scores[i], np.sort(scores)[::-1], atol=1e-4)
        np.testing.assert_allclose(scores[found.rows[i]], found.scores[i], atol=1e-4)
    assert found.rows[1][:5].tolist() == [120, 121, 122, 123, 124]
    np.testing.assert_array_equal(found.rows[2:], [np.arange(125)] * 2)  # stop words, no word: nothing is better than another
    assert (found.scores[2:] == 0).all()
    with pytest.raises(UserError, match="126"):
        open_bm25(tmp_path / "bm25", corpus).search(["x"], 126)
    with pytest.raises(UserError, match="another corpus"):
        open_bm25(tmp_path / "bm25", Corpus.open(corpus.path, 100))
    with pytest.raises(UserError, match="holds no BM25 index"):
        open_bm25(tmp_path, corpus)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").touch()
    with pytest.raises(UserError, match="is not empty"):
        build_bm25(corpus, tmp_path / "other")


LORA = LoRAConfig(rank=2, targets=("query", "value"))


def test_the_eval_command_compares_the_adapter_with_the_base(tmp_path, capfd, corpus_file, encoder_folder):
    encoder = e5.load(encoder_folder, max_length=64, lora=LORA)
    build_index(corpus_file, encoder, tmp_path / "i", kind="exact")
    lora = jax.tree.map(lambda x: x + 0.3, init_lora(jax.random.key(1), encoder.params, LORA))
    save_peft(tmp_path / "adapter", lora, LORA, "bert", "tiny")
    rows = passages(300)
    asked = [
        {
            "id": str(i),
            "question": rows[i]["contents"],
            "golden_answers": ["word0" if i else "yes"],
            "metadata": {"gold_ids": [f"p{i}"]},
        }
        for i in range(0, 60, 3)
    ]
    write_jsonl(tmp_path / "questions.jsonl", asked)
    arguments = ["eval", "--index", tmp_path / "i", "--questions", tmp_path / "questions.jsonl", "--out", tmp_path / "out.json"]
    arguments = [*map(str, arguments), "--topk", "1,5"]
    extra = ["--adapter", str(tmp_path / "adapter")]
    if bm25 := importlib.util.find_spec("bm25s"):
        assert command.main(["--corpus", str(corpus_file), "--kind", "bm25", "--out", str(tmp_path / "bm25")]) == 0
        extra += ["--bm25", str(tmp_path / "bm25")]
    assert command.main(arguments + extra) == 0
    shown = capfd.readouterr().out
    result = json.loads((tmp_path / "out.json").read_text())
    assert (result["questions"], result["with_gold_ids"], result["with_answers"], result["passages"]) == (20, 20, 19, 300)
    base, other = result["means"]["base"], result["means"]["adapter"]
    assert base["recall@1"] == 1.0 and base["mrr"] == 1.0, "a passage as a question finds itself"
    assert other["mrr"] < 1.0, "the adapter must reach the ranking"
    difference = result["differences"]["adapter"]["mrr"]
    assert difference["mean"] == pytest.approx(other["mrr"] - 1.0) and difference["low"] <= difference["mean"] <= difference["high"]
    assert "recall@5" in shown and "adapter - base" in shown and ("bm25" in shown) == bool(bm25)
    for change, named in (
        (["--topk", "0,3"], "--topk is '0,3'"),
        (["--topk", "x"], "--topk is 'x'"),
        (["--topk", "301"], "300"),
        (["--questions", "/nowhere.jsonl"], "/nowhere.jsonl"),
        (["--adapter", "/nowhere"], "/nowhere"),
    ):
        assert command.main([*arguments, *change]) == 2
        assert named in capfd.readouterr().err
