"""What a command needs that searches index folders: the encoder, the corpora and the indexes, found from the manifests."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from bridge_jax.errors import UserError
from bridge_jax.models import e5
from bridge_jax.models.lora import LoRAConfig
from bridge_jax.retrieval.corpus import Corpus
from bridge_jax.retrieval.index import open_index, read_manifest
from bridge_jax.retrieval.manifest import Manifest
from bridge_jax.retrieval.merged import MergedCorpus, MergedIndex


def with_adapter(encoder: e5.Encoder, adapter: tuple[dict, LoRAConfig]) -> tuple[e5.Encoder, dict]:
    """-> (the encoder that computes with the adapter's scale, the adapter's tree), from what `lora.load_peft` gives."""
    tree, config = adapter
    return dataclasses.replace(encoder, module=encoder.module.clone(lora=config)), tree


def open_parts(
    folders: Sequence[str],
    corpora: Sequence[str] | None = None,
    encoder: str | None = None,
    kind: str | None = None,
    how: str = "score",
) -> tuple[e5.Encoder, object, Corpus | MergedCorpus, Manifest]:
    """-> (encoder, index, corpus, manifest) of one index folder, or of several that are merged (`how`: as MergedIndex).

    Args:
      corpora: the passages of each; None: where each was built from. encoder: None: the one the first was built with.

    Raises:
      UserError: what is missing, or does not belong together.
    """
    manifests = [read_manifest(Path(folder).expanduser()) for folder in folders]
    if corpora is not None and len(corpora) != len(folders):
        raise UserError(f"{len(corpora)} corpora for {len(folders)} indexes; give one for each")
    opened = []
    for i, manifest in enumerate(manifests):
        try:
            opened.append(Corpus.open(corpora[i] if corpora else manifest.corpus_path, manifest.limit))
        except UserError as error:
            hint = "" if corpora else " (that is where the index was built from: name another place with --corpus)"
            raise UserError(f"{error}{hint}") from None
    first = manifests[0]
    tower = e5.load(
        encoder or first.encoder_name,
        query_prefix=first.query_prefix,
        passage_prefix=first.passage_prefix,
        max_length=first.max_length,
        pooling=first.pooling,
    )
    indexes = [open_index(folder, tower, corpus, kind) for folder, corpus in zip(folders, opened)]
    if len(indexes) == 1:
        return tower, indexes[0], opened[0], first
    corpus = MergedCorpus(opened)
    merged = dataclasses.replace(
        first,
        corpus_path=[str(manifest.corpus_path) for manifest in manifests],
        corpus_fingerprint=corpus.fingerprint,
        rows=len(corpus),
        kind="merged",
        limit=None,
        scann=None,
        tuned=None,
    )
    return tower, MergedIndex(indexes, how), corpus, merged
