"""What `config.index` makes a run search."""

import dataclasses

import numpy as np
import pytest

from bridge_jax import config as configuration
from bridge_jax.errors import UserError
from bridge_jax.models import e5
from bridge_jax.retrieval.index import build_index
from bridge_jax.training.search import open_corpus, open_retriever
from tests.retrieval.conftest import passages, write_jsonl


def configured(**fields):
    config = configuration.default()
    for name, value in fields.items():
        config.index[name] = value
    return config


@pytest.fixture(scope="module")
def encoder(encoder_folder):
    return e5.load(encoder_folder, max_length=64)


def test_several_corpora_are_merged(tmp_path, encoder, corpus_file):
    other = write_jsonl(tmp_path / "other.jsonl", [{**row, "id": f"o{i}"} for i, row in enumerate(passages(40, seed=5))])
    both = f"{corpus_file}, {other}"
    config = configured(corpus=both, kind="exact")
    corpus = open_corpus(config)
    assert len(corpus) == 340 and corpus[300].id == "o0" and corpus.row_of("o39") == 339 and corpus.row_of("p7") == 7
    assert corpus.contents(339) == corpus.document(339)["contents"] == passages(40, seed=5)[39]["contents"]
    with pytest.raises(IndexError):
        corpus[340]
    with pytest.raises(KeyError):
        corpus.row_of("nobody")
    queries = ["word1 word2", "word5"]
    found = open_retriever(config, encoder, corpus, None).search(queries, 50)
    ranked = open_retriever(configured(corpus=both, kind="exact", merge="rank"), encoder, corpus, None).search(queries, 50)
    assert ((ranked.rows >= 300).sum(1) == 25).all() and not np.array_equal(found.rows, ranked.rows)
    folders = [str(tmp_path / name) for name in "ab"]
    for folder, part in zip(folders, corpus.corpora):
        build_index(part, encoder, folder, kind="exact")
    again = open_retriever(configured(corpus=both, folder=",".join(folders), kind="approx"), encoder, corpus, None)
    assert again.index.indexes[0].kind == "approx"
    np.testing.assert_array_equal(again.search(queries, 50).rows, found.rows)
    for fields, named in (
        ({"corpus": both, "folder": folders[0]}, "names 1 folders, config.index.corpus 2 corpora"),
        ({"corpus": both, "kind": "bm25"}, "bm25 searches one corpus"),
        ({"corpus": both, "folder": f"{folders[1]},{folders[0]}"}, "number of passages 40"),
        ({"corpus": both, "folder": f"{folders[0]},{tmp_path / 'none'}"}, f"no index at {tmp_path / 'none'}: build it with"),
    ):
        with pytest.raises(UserError, match=named):
            open_retriever(configured(**fields), encoder, corpus, None)


def test_bm25_is_for_methods_that_leave_the_retriever_alone(encoder, corpus_file):
    pytest.importorskip("bm25s")
    config = configured(corpus=str(corpus_file), kind="bm25")
    corpus = open_corpus(config)
    for _ in range(2):  # built, then opened
        found = open_retriever(config, encoder, corpus, None).search([corpus.contents(7)], 3, lora={"layers": {}})
        assert found.rows[0, 0] == 7
    with pytest.raises(UserError, match=r"config\.index\.kind=bm25: method bridge trains an encoder"):
        configuration.validate(config)
    config.method.name = "vt_search"
    configuration.validate(config)
    config.index.server, config.index.folder = "http://localhost:1", "somewhere"
    with pytest.raises(UserError, match="are both set"):
        configuration.validate(config)


def test_a_server_that_is_not_there_is_told_before_anything_else(encoder, corpus_file, monkeypatch):
    monkeypatch.setattr("bridge_jax.retrieval.client.FIRST_WAIT", 0.001)
    config = configured(corpus=str(corpus_file), server="http://127.0.0.1:9")
    with pytest.raises(UserError, match="start one with python -m bridge"):
        open_retriever(config, dataclasses.replace(encoder), open_corpus(config), None)
