"""Our encoding of passages, as `python -m bridge_jax.index` does it: a shard's texts to vectors on disk."""

import tempfile
from pathlib import Path

from serve import Memory, serve, versions

from bridge_jax.models import e5
from bridge_jax.retrieval.corpus import Corpus
from bridge_jax.retrieval.embed import encode_shards


def setup(job: dict, memory: Memory):
    """job: folder (the encoder), corpus, rows, max_length."""
    memory.imported()
    encoder = e5.load(job["folder"], max_length=job["max_length"])
    corpus = Corpus.open(job["corpus"], job["rows"])

    def run() -> None:
        with tempfile.TemporaryDirectory() as out:
            encode_shards(encoder, corpus, Path(out))

    run()
    return run, {"versions": versions(["jax"])}


serve(setup)
