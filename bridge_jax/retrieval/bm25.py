"""BM25 over a corpus, as a baseline retriever: words, no encoder, nothing to train. Needs pip install 'bridge-jax[bm25]'."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bridge_jax.errors import UserError
from bridge_jax.files import write_text
from bridge_jax.retrieval.corpus import Corpus
from bridge_jax.retrieval.manifest import of_corpus
from bridge_jax.retrieval.memory import refuse_too_big
from bridge_jax.retrieval.retriever import RetrievalResult

log = logging.getLogger(__name__)

BUILT = "bm25.json"  # written last
BYTES_A_ROW = 3000  # at the peak of a build over passages of 100 words: tokens as Python lists, then a sparse matrix
STOPWORDS = "en"


def _bm25s():
    try:
        import bm25s
    except ModuleNotFoundError:
        raise UserError("bm25s is not installed; pip install 'bridge-jax[bm25]'") from None
    return bm25s


def build_bm25(corpus: Corpus, out: str | os.PathLike, force: bool = False) -> BM25Retriever:
    """Indexes every passage's contents into the folder, or reuses what is there for the same corpus.

    Raises:
      UserError: the folder holds something else; bm25s is not installed; not enough memory.
    """
    bm25s, out = _bm25s(), Path(out).expanduser()
    if (out / BUILT).exists() and not force:
        return open_bm25(out, corpus)
    if out.exists() and any(out.iterdir()) and not (out / BUILT).exists():
        raise UserError(f"{out}: is not empty and holds no BM25 index; give a new or empty folder")
    refuse_too_big(f"{out}: building BM25", BYTES_A_ROW * len(corpus))
    tokens = bm25s.tokenize((corpus.contents(row) for row in range(len(corpus))), stopwords=STOPWORDS, show_progress=False)
    model = bm25s.BM25()
    model.index(tokens, show_progress=False)
    (out / BUILT).unlink(missing_ok=True)
    model.save(out)
    write_text(out / BUILT, json.dumps(of_corpus(corpus), indent=2) + "\n")
    return open_bm25(out, corpus)


def open_bm25(folder: str | os.PathLike, corpus: Corpus) -> BM25Retriever:
    """Opens what `build_bm25` wrote, memory-mapped. UserError when it is not there or of another corpus."""
    bm25s, folder = _bm25s(), Path(folder).expanduser()
    try:
        built = json.loads((folder / BUILT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise UserError(f"{folder}: holds no BM25 index; build it with python -m bridge_jax.index --kind bm25") from None
    if built != of_corpus(corpus):
        raise UserError(f"{folder}: the BM25 index was built from another corpus; open that one, or rebuild it with --force")
    return BM25Retriever(bm25s.BM25.load(folder, mmap=True), corpus)


class BM25Retriever:
    """`search` of retriever.Retriever by BM25. There are no query vectors, and an adapter changes nothing."""

    index = None

    def __init__(self, model, corpus: Corpus):
        self._model, self.corpus = model, corpus

    def search(self, queries: Sequence[str], k: int, lora=None) -> RetrievalResult:
        """The k best passages of each query: equal scores by row; passages without a word of the query follow with score 0.

        Raises:
          UserError: k is more than the corpus holds.
        """
        if not 1 <= k <= len(self.corpus):
            raise UserError(f"{k} passages asked for from a corpus of {len(self.corpus)}; ask for 1 to {len(self.corpus)}")
        scores, rows = np.zeros((len(queries), k), np.float32), np.zeros((len(queries), k), np.int32)
        tokens = _bm25s().tokenize(list(queries), stopwords=STOPWORDS, return_ids=False, show_progress=False)
        for i, words in enumerate(tokens):
            known = [word for word in words if word in self._model.vocab_dict]
            found = self._model.get_scores(known) if known else np.zeros(len(self.corpus), np.float32)
            best = np.argpartition(-found, k - 1)[:k]
            cut = found[best].min()
            # argpartition picks any of those that are equal at the cut: take the first rows of them.
            better = best[found[best] > cut]
            equal = np.flatnonzero(found == cut)[: k - len(better)]
            best = np.concatenate([better, equal])
            best = best[np.lexsort((best, -found[best]))]
            scores[i], rows[i] = found[best], best
        return RetrievalResult(np.zeros((len(queries), 0), np.float32), scores, rows)
