"""Real questions over real Wikipedia passages with a real encoder."""

import numpy as np
import pytest

from bridge_jax.retrieval.corpus import Corpus
from bridge_jax.retrieval.retriever import recall_at


@pytest.mark.real
def test_minilm_finds_gold_passages_of_hotpotqa(tmp_path, monkeypatch):
    monkeypatch.delenv("BRIDGE_JAX_CACHE")  # the pocket model stays where other runs find it
    from bridge_jax.data import embedded
    from bridge_jax.data.qa import load_questions
    from bridge_jax.models import e5
    from bridge_jax.retrieval.index import build_index
    from bridge_jax.retrieval.retriever import Retriever

    limit = 160
    corpus = Corpus.open(embedded.corpus_path(), limit)
    encoder = e5.load("minilm-l6-v2", max_length=128)
    retriever = Retriever(encoder, build_index(corpus.path, encoder, tmp_path / "index", limit=limit), corpus)
    here = {passage.id: row for row, passage in enumerate(corpus)}
    golds = {}
    for split in ("train", "validation", "test"):
        for question in load_questions("embedded/hotpotqa", split):
            rows = [here[i] for i in question.gold_passage_ids if i in here]
            if rows:
                golds[question.question] = rows
    assert len(golds) >= 40
    found = retriever.search(list(golds), 10)
    at_3, at_10 = (recall_at(found.rows, list(golds.values()), k).mean() for k in (3, 10))
    chance = 10 / limit
    assert at_3 > 0.7 and at_10 > 0.85 > 5 * chance, (at_3, at_10)
    assert (np.diff(found.scores, axis=-1) <= 0).all() and (np.abs(found.scores) <= 1.01).all()
    print(f"recall@3 {at_3:.3f}, recall@10 {at_10:.3f} over {len(golds)} questions and {limit} passages")
