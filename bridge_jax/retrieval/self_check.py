"""What an index must show when it is opened."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np

from bridge_jax.errors import UserError
from bridge_jax.models import e5
from bridge_jax.retrieval.corpus import Corpus
from bridge_jax.retrieval.vectors import EmbeddingIndex

log = logging.getLogger(__name__)

COUNTED = 1024  # vectors looked at for zeros and NaN
CHECKED = 8  # passages that must retrieve themselves
ENCODED = 4  # of which so many are encoded anew, where the encoder is at hand
SAME_VECTOR = 0.98  # least inner product of a stored vector with the same passage encoded anew (bfloat16 compute: about 0.999)
MEND = "delete the folder or rebuild with --force"


def self_check(index: EmbeddingIndex, folder: Path, encoder=None, corpus: Corpus | None = None, unusable: int = 0) -> None:
    """A few passages must retrieve themselves (or something as near); encoded anew, they must give the stored vectors.

    Vectors that are zero or not finite are counted in a sample of COUNTED rows; `unusable` ones are known (they were imported so).

    Raises:
      UserError: naming the folder, the row and the mend.
    """
    rows = _spread(len(index), COUNTED)
    vectors = index.vectors(rows)
    bad = ~np.isfinite(vectors).all(-1) | ~vectors.any(-1)
    if bad.any() and not unusable:
        raise UserError(
            f"{folder}: {bad.sum()} of {len(rows)} sampled vectors are zero or not finite, first row {rows[np.argmax(bad)]}; {MEND}"
        )
    if unusable:
        log.warning(
            "%s: %d of %d vectors are zero or were not finite: their passages cannot be found", folder, unusable, len(index)
        )
    sound = np.flatnonzero(~bad)
    chosen = sound[_spread(len(sound), CHECKED)] if len(sound) else sound
    rows, queries = rows[chosen], vectors[chosen]
    own = np.einsum("bd,bd->b", queries, queries)
    bad = ~(np.abs(own - 1) < 0.02)
    if bad.any():
        raise UserError(f"{folder}: the vector of row {rows[np.argmax(bad)]} has not unit length; {MEND}")
    scores, _ = index.search(queries, 1)
    bad = ~(scores[:, 0] >= own - 1e-3)
    if bad.any():
        raise UserError(f"{folder}: passage in row {rows[np.argmax(bad)]} does not retrieve itself; {MEND}")
    if encoder is None or corpus is None:
        return
    chosen = _spread(len(rows), ENCODED)
    texts = [corpus.contents(int(row)) for row in rows[chosen]]
    same = np.einsum("bd,bd->b", e5.embed(encoder, texts, kind="passage"), queries[chosen])
    if not (same >= SAME_VECTOR).all():
        row = int(rows[chosen][np.argmin(same)])
        raise UserError(f"{folder}: passage {corpus[row].id!r} encodes to another vector; {MEND}")


def _spread(count: int, most: int) -> np.ndarray:
    return np.unique(np.linspace(0, count - 1, most).astype(np.int64))
