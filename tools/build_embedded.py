"""Select the corpus and the questions shipped in the package: python tools/build_embedded.py SOURCE [OUT]

SOURCE holds corpus.jsonl ({id, contents}) and <set>/<split>.jsonl (FlashRAG rows with metadata.gold_ids). Nothing is random: the
same source gives the same files. What is chosen, and in which order, is documented in bridge_jax/data/embedded/__init__.py.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import sys
from pathlib import Path

OUT = Path(__file__).resolve().parents[1] / "bridge_jax" / "data" / "embedded"
PASSAGES = 12_000
# Passages of the source corpus by the pool they were collected for (row ranges): HotpotQA's own distractor paragraphs and retrieved
# ones; then MuSiQue's and 2WikiMultihopQA's. What follows belongs to other sets and is left out.
HOTPOTQA_POOL = range(0, 5585)
OTHER_POOLS = range(5585, 18893)
SOURCES = {"hotpotqa": ("train", "dev"), "musique": ("train", "dev"), "2wikimultihopqa": ("dev",)}
HELD_OUT = {"hotpotqa": (100, 100), "musique": (40, 60), "2wikimultihopqa": (30, 40)}  # validation, test


def rank(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def lines(rows: list[dict]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode("utf-8")


def write(path: Path, rows: list[dict]) -> bytes:
    data = lines(rows)
    path.write_bytes(gzip.compress(data, compresslevel=9, mtime=0))
    return data


def split_questions(name: str, by_source: dict[str, list[dict]]) -> dict[str, list[dict]]:
    """Validation and test: the dev questions with the smallest hashes; train: the source's train and the other dev questions."""
    validation, test = HELD_OUT[name]
    dev = sorted(by_source["dev"], key=lambda row: rank(row["question"]))
    return {
        "train": by_source.get("train", []) + dev[validation + test :],
        "validation": dev[test : test + validation],
        "test": dev[:test],
    }


def main(source: Path, out: Path = OUT) -> None:
    corpus = read(source / "corpus.jsonl")
    row_of = {passage["id"]: row for row, passage in enumerate(corpus)}
    counts: dict[str, dict[str, int]] = {}
    gold: list[int] = []
    gold_after: dict[str, int] = {}
    for name, sources in SOURCES.items():
        by_source = {}
        for split in sources:
            by_source[split] = read(source / name / f"{split}.jsonl")
            for row in by_source[split]:
                row["metadata"]["upstream_split"] = split
        gold += sorted({row_of[i] for rows in by_source.values() for row in rows for i in row["metadata"]["gold_ids"]})
        gold = list(dict.fromkeys(gold))
        gold_after[name] = len(gold)
        splits = split_questions(name, by_source)
        counts[name] = {split: len(rows) for split, rows in splits.items()}
        for split, rows in splits.items():
            write(out / f"{name}_{split}.jsonl.gz", rows)
    chosen = set(gold)
    near, far = ([r for r in pool if r not in chosen] for pool in (HOTPOTQA_POOL, OTHER_POOLS))
    order = gold + sorted(near, key=lambda r: rank(corpus[r]["contents"])) + sorted(far, key=lambda r: rank(corpus[r]["contents"]))
    data = write(out / "corpus.jsonl.gz", [corpus[r] for r in order[:PASSAGES]])
    manifest = {
        "passages": PASSAGES,
        "gold_hotpotqa": gold_after["hotpotqa"],
        "gold": len(gold),
        "hotpotqa_pool_end": len(gold) + len(near),
        "corpus_bytes": len(data),
        "corpus_sha256": hashlib.sha256(data).hexdigest(),
        "questions": counts,
    }
    (out / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(manifest, indent=2))
    print("compressed bytes:", sum(path.stat().st_size for path in out.glob("*.gz")))


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    main(*map(Path, sys.argv[1:]))
