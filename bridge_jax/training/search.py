"""What a run searches: its corpus, its index (a folder, a server, or built on first use), and the retriever over them."""

from __future__ import annotations

import hashlib
from pathlib import Path

from jax.sharding import Mesh
from ml_collections import ConfigDict

from bridge_jax.data import corpora
from bridge_jax.data.cache import cache_dir
from bridge_jax.errors import UserError
from bridge_jax.files import AnyPath, is_remote, local_copy
from bridge_jax.models import e5
from bridge_jax.plugins import load_function
from bridge_jax.retrieval import manifest as manifests
from bridge_jax.retrieval.bm25 import BM25Retriever, build_bm25, open_bm25
from bridge_jax.retrieval.client import Client, RemoteIndex
from bridge_jax.retrieval.corpus import Corpus
from bridge_jax.retrieval.index import build_index, open_index
from bridge_jax.retrieval.merged import MergedCorpus, MergedIndex
from bridge_jax.retrieval.retriever import Retriever
from bridge_jax.training.methods import method_of


def open_corpus(config: ConfigDict) -> Corpus | MergedCorpus:
    """The passages of `config.index.corpus`; several names make a merged corpus."""
    opened = [Corpus.open(corpora.corpus_path(name), config.index.limit or None) for name in _names(config.index.corpus)]
    return opened[0] if len(opened) == 1 else MergedCorpus(opened)


def open_retriever(
    config: ConfigDict, encoder: e5.Encoder, corpus: Corpus | MergedCorpus, mesh: Mesh | None
) -> Retriever | BM25Retriever:
    """The retriever of a run; what is missing is built where it can be (`open_or_build`).

    `config.index.function` may give another one: called with the corpus and a function that opens the run's own. Where a method
    trains the retriever, it needs the passages' vectors in an `index` (`Retriever.index`).

    Raises:
      UserError: no such index or server, or one of another encoder or corpus; a retriever of one's own that does not do.
    """
    function = load_function(config.index.function, "index.function")
    if function is None:
        return _open_own(config, encoder, corpus, mesh)
    retriever = function(corpus, lambda: _open_own(config, encoder, corpus, mesh))
    wanted = ["search", "corpus"] + ["index"] * method_of(config).trains_retriever
    missing = [name for name in wanted if getattr(retriever, name, None) is None]
    if missing:
        raise UserError(
            f"config.index.function={config.index.function!r}: what it gives has no {' and no '.join(missing)}; method "
            f"{config.method.name} needs {', '.join(wanted)} (docs/extending.md)"
        )
    return retriever


def _open_own(config: ConfigDict, encoder: e5.Encoder, corpus: Corpus | MergedCorpus, mesh: Mesh | None):
    c = config.index
    if c.kind == "bm25":
        if isinstance(corpus, MergedCorpus):
            raise UserError(f"config.index.corpus={c.corpus!r}: bm25 searches one corpus; give one")
        folder = cache_dir() / "indexes" / f"bm25-{corpus.fingerprint[:16]}"
        return open_bm25(c.folder, corpus) if c.folder else build_bm25(corpus, folder)
    if c.server:
        return Retriever(encoder, RemoteIndex(Client(c.server), encoder, corpus), corpus)
    parts = corpus.corpora if isinstance(corpus, MergedCorpus) else [corpus]
    folders = _names(c.folder) or [""] * len(parts)
    if len(folders) != len(parts):
        raise UserError(f"config.index.folder names {len(folders)} folders, config.index.corpus {len(parts)} corpora; give as many")
    indexes = [open_or_build(config, encoder, part, folder, mesh) for part, folder in zip(parts, folders)]
    return Retriever(encoder, indexes[0] if len(indexes) == 1 else MergedIndex(indexes, c.merge), corpus)


def open_or_build(config: ConfigDict, encoder: e5.Encoder, corpus: Corpus, folder: str, mesh: Mesh | None):
    """The index that fits encoder and corpus: `folder`, else one in the cache, built on first use (resumable)."""
    kind = config.index.kind
    if folder:
        folder = local_copy(folder, cache_dir())
        if not (folder / "manifest.json").is_file():
            path = corpus.path if isinstance(corpus.path, Path) else " ".join(map(str, corpus.path))
            raise UserError(
                f"no index at {folder}: build it with python -m bridge_jax.index --corpus={path} "
                f"--encoder={config.retriever.encoder} --out={folder}, or pass --config.index.folder= to have one in the cache"
            )
        return open_index(folder, encoder, corpus, None if kind == "auto" else kind, mesh)
    what = (encoder.fingerprint, encoder.max_length, encoder.query_prefix, encoder.passage_prefix, corpus.fingerprint, kind)
    if encoder.pooling != "mean":  # that of older names
        what += (encoder.pooling, encoder.append_eos)
    name = f"{Path(config.retriever.encoder).name}-{hashlib.sha256(repr(what).encode()).hexdigest()[:16]}"
    return _built(kind, encoder, corpus, cache_dir() / "indexes" / name, mesh)


def _built(kind: str, encoder: e5.Encoder, corpus: Corpus, folder: Path, mesh: Mesh | None):
    index = build_index(corpus, encoder, folder, "exact" if kind == "approx" else kind)
    if mesh is None and kind != "approx":
        return index
    return open_index(folder, encoder, corpus, kind if kind == "approx" else None, mesh)


def open_trained(config: ConfigDict, encoder: e5.Encoder, corpus: Corpus | MergedCorpus, folder: AnyPath, mesh: Mesh | None):
    """The retriever of an encoder that the run has trained: its index in `folder` (several corpora: folder/0, /1, ...), built there
    on first use. That of another corpus than the run's, or of a run in a bucket, is kept in the cache."""
    parts, indexes = corpus.corpora if isinstance(corpus, MergedCorpus) else [corpus], []
    for n, part in enumerate(parts):
        place = folder if len(parts) == 1 else folder / str(n)
        have = None if is_remote(folder) else manifests.read(place)
        if is_remote(folder) or (have is not None and have.corpus_fingerprint != part.fingerprint):
            indexes.append(open_or_build(config, encoder, part, "", mesh))
        else:
            indexes.append(_built(config.index.kind, encoder, part, place, mesh))
    return Retriever(encoder, indexes[0] if len(indexes) == 1 else MergedIndex(indexes, config.index.merge), corpus)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]
