"""Encoders against sentence-transformers: the same vectors from the same folders, and passages a second.

    python3 -m venv peers && peers/bin/python -m pip install sentence-transformers torch==2.13.0
    python benchmarks/encoders.py --peers-python=peers/bin/python          # an idle machine; minutes

vectors: the real MiniLM, and tiny random models of other families (those of tests/models/test_encoders.py: first-token, mean and
last-token pooling, prompts before queries and passages), each as its folder was made, as `e5.save` wrote it again (read by
sentence-transformers), and as sentence-transformers wrote it (read by us): the largest difference of a vector's entry.
speed: MiniLM on passages that come with the package, both in turns (`index_parts.encode`); `ratio` above 1: ours is faster.
Writes results/encoders.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import compare
import index_parts
import numpy as np
import training_runs as runs
from arguments import some_of
from machine import about

from bridge_jax.data.corpora import corpus_path
from bridge_jax.data.qa import load_questions
from bridge_jax.models import e5, hub
from bridge_jax.retrieval.corpus import Corpus

NAME = "encoders"
PARTS = ("vectors", "speed")
TEXTS = 64
TINY_LENGTH = 40
sys.path[:0] = [str(runs.HOME / "tests" / "models")]
import test_encoders as families  # noqa: E402


def main() -> None:
    parser = compare.parser(__doc__, rounds=5)
    parser.add_argument("--parts", type=some_of(PARTS), default=",".join(PARTS), help="with commas; the other's result is kept")
    parser.set_defaults(seed=4)  # of the results: which random texts the tiny models are given
    args = parser.parse_args()
    args.corpus = "embedded"
    root = runs.root_of(args, NAME)
    root.mkdir(parents=True, exist_ok=True)
    runs.share_programs(root)
    path = (root if args.quick else runs.RESULTS) / f"{NAME}.json"
    result = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if "vectors" in args.parts:
        with tempfile.TemporaryDirectory(prefix="encoders-") as folder:
            result["vectors"] = {"machine": about(), **vectors(args, Path(folder))}
        runs.save(NAME, result, args)
    if "speed" in args.parts:
        result["speed"] = index_parts.encode(args, root)
        runs.save(NAME, result, args)
    print(json.dumps(result))


def vectors(args: argparse.Namespace, folder: Path) -> dict:
    tiny = {"bge": (families.tiny_bert, "cls"), "xlmr": (families.tiny_xlmr, "mean"), "decoder": (families.tiny_qwen3, "last")}
    made = {}
    for name, (make, pooling) in tiny.items():
        make(folder / name)
        families.declare(folder / name, pooling, {"query": "who : ", "document": "a : "})
        made[name] = folder / name
    words = families.random_texts(TEXTS, seed=args.seed, longest=50)
    corpus = Corpus.open(corpus_path(args.corpus), TEXTS)
    questions = [question.question for question in load_questions("embedded/hotpotqa")[:TEXTS]]
    found = differences(args, folder / "tiny", made, words, words, TINY_LENGTH)
    real = {"minilm": hub.resolve(index_parts.ENCODER)}
    passages = [corpus.contents(row) for row in range(TEXTS)]
    found |= differences(args, folder / "real", real, questions, passages, index_parts.MAX_LENGTH)
    return found


def differences(args: argparse.Namespace, out: Path, folders: dict[str, Path], queries, passages, max_length: int) -> dict:
    """{name: {"read", "read_what_we_wrote", "we_read_what_it_wrote"}}: the largest difference from our vectors of the folder."""
    out.mkdir()
    texts, ours, asked = {"query": queries, "passage": passages}, {}, {}
    for name, folder in folders.items():
        encoder = e5.load(folder, max_length=max_length)
        ours[name] = {kind: e5.embed(encoder, lines, kind=kind) for kind, lines in texts.items()}
        e5.save(out / f"{name}-saved", encoder)
        asked |= {name: str(folder), f"{name}-saved": str(out / f"{name}-saved")}
    theirs = out / "theirs"
    theirs.mkdir()
    job = {"folders": asked, "queries": queries, "passages": passages, "max_length": max_length, "out": str(theirs)}
    script = Path(__file__).parent / "peers" / "st_vectors.py"
    done = subprocess.run([args.peers_python, str(script), json.dumps(job)], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"sentence-transformers failed: {done.stderr[-2000:]}")
    found: dict = {"versions": json.loads(done.stdout.strip().splitlines()[-1])}
    for name in folders:
        again = e5.load(theirs / name, max_length=max_length)
        own = {kind: e5.embed(again, lines, kind=kind) for kind, lines in texts.items()}
        found[name] = {
            "read": largest(ours[name], np.load(theirs / f"{name}.npz")),
            "read_what_we_wrote": largest(ours[name], np.load(theirs / f"{name}-saved.npz")),
            "we_read_what_it_wrote": largest(ours[name], own),
        }
    return found


def largest(ours, theirs) -> float:
    return max(float(np.abs(ours[kind] - theirs[kind]).max()) for kind in ("query", "passage"))


if __name__ == "__main__":
    main()
