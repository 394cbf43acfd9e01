"""The embedded set: real multi-hop questions and 12,000 Wikipedia passages, shipped in the package (2.8 MB; ATTRIBUTION.md).

Corpus rows, so that any prefix (`limit=`) is a smaller corpus that makes sense:

    rows     0 ..  1093   every gold passage of the HotpotQA questions
    rows  1094 ..  1792   every further gold passage of MuSiQue, then of 2WikiMultihopQA
    rows  1793 ..  6534   distractors that were collected for HotpotQA questions, ordered by hash
    rows  6535 .. 11999   distractors that were collected for MuSiQue and 2WikiMultihopQA questions, ordered by hash

A passage's id is NOT its row.

Questions by split. **The splits are ours, not the official ones**: few training questions have all their gold passages at hand, so
most of `train` comes from the sets' official development parts (each row says which in metadata.upstream_split). Never compare a
number measured here with a published one. `test`, then `validation`, are the dev questions with the smallest SHA-256 of the
question's text; no question is in two splits, gold passages may be shared.

    set               train                        validation   test
    hotpotqa          350 (80 train + 270 dev)     100          100
    musique           106 (68 train + 38 dev)       40           60
    2wikimultihopqa    42 (42 dev)                  30           40

Everything is made by tools/build_embedded.py; `manifest.json` holds the counts and the corpus's hash.
"""

from __future__ import annotations

import difflib
import gzip
import hashlib
import json
from pathlib import Path

from bridge_jax.data.cache import atomic_folder, cache_dir
from bridge_jax.errors import UserError

_HERE = Path(__file__).parent
MANIFEST = json.loads((_HERE / "manifest.json").read_text(encoding="utf-8"))

PASSAGES: int = MANIFEST["passages"]  # rows of the corpus
GOLD_HOTPOTQA: int = MANIFEST["gold_hotpotqa"]  # rows [0, this) hold every gold passage of HotpotQA
GOLD: int = MANIFEST["gold"]  # rows [0, this) hold every gold passage of the three sets
SETS: tuple[str, ...] = tuple(MANIFEST["questions"])
SPLITS = ("train", "validation", "test")


def corpus_path() -> Path:
    """The corpus as jsonl ({id, contents}), unpacked into the cache on first use: whole or not at all."""
    folder = cache_dir() / "embedded" / MANIFEST["corpus_sha256"][:16]
    path = folder / "corpus.jsonl"
    if not _is_whole(path):
        data = gzip.decompress((_HERE / "corpus.jsonl.gz").read_bytes())
        if hashlib.sha256(data).hexdigest() != MANIFEST["corpus_sha256"]:
            raise UserError("the embedded corpus is damaged; install bridge-jax again")
        with atomic_folder(folder) as fresh:
            (fresh / path.name).write_bytes(data)
        if not _is_whole(path):
            raise UserError(f"{path} is damaged; delete the folder {folder} and run again")
    return path


def _is_whole(path: Path) -> bool:
    return path.is_file() and path.stat().st_size == MANIFEST["corpus_bytes"]


def questions_path(name: str, split: str | None = None) -> Path:
    """The question file of a set; split None is "test"."""
    split = split or "test"
    if name not in SETS:
        near = difflib.get_close_matches(name, SETS, n=1)
        hint = f"did you mean 'embedded/{near[0]}'" if near else f"take one of {', '.join('embedded/' + s for s in SETS)}"
        raise UserError(f"no embedded question set '{name}'; {hint}")
    if split not in SPLITS:
        raise UserError(f"'embedded/{name}' has no split '{split}'; its splits are {', '.join(SPLITS)}")
    return _HERE / f"{name}_{split}.jsonl.gz"
