"""Where the mini world starts: exact match and recall of the warm-started policy, and its answers with a perfect retriever.

    python benchmarks/mini_world.py              # all test questions, minutes
    python benchmarks/mini_world.py --quick      # 50 a set

Writes benchmarks/results/mini_world.json and prints it as its last line. The perfect retriever puts the passage that a query asks
for first, by the words of the query; everything else stays as the base encoder ranks it. Recall is also measured deeper than the 20
candidates that `configs/mini.py` scores: 40 are asked for, which changes nothing that the policy sees.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import training_runs as runs
from machine import about

from bridge_jax import config as configuration
from bridge_jax.data.mini.language import ASPECTS
from bridge_jax.data.mini.world import make_world, passage_id
from bridge_jax.errors import main_guard
from bridge_jax.evaluation.run import evaluate_sets, load_sets
from bridge_jax.training.assets import load_assets

SHOWN = ("n", "em", "em_low", "em_high", "f1", "recall@3", "recall@20", "recall@40", "searches")
DEEPEST = 40


class PerfectRetriever:
    """The retriever's interface over a real one."""

    def __init__(self, retriever):
        self._retriever, self.corpus = retriever, retriever.corpus
        self._rows = {retriever.corpus[row].id: row for row in range(len(retriever.corpus))}
        self._names = {entity.name: entity for entity in make_world(0).entities.values()}

    def search(self, queries, k: int, lora=None):
        found = self._retriever.search(queries, k, lora)
        rows = np.array(found.rows)
        for ranked, query in zip(rows, queries):
            wanted = self._wanted(query)
            if wanted is not None:
                ranked[:] = [wanted, *[row for row in ranked if row != wanted]][:k]
        return found._replace(rows=rows)

    def _wanted(self, query: str) -> int | None:
        words = query.split()
        for first, second in itertools.pairwise(words):
            entity = self._names.get(f"{first} {second}")
            if entity is not None:
                for aspect in ASPECTS[entity.kind]:
                    if set(aspect.nouns) & set(words):
                        return self._rows[passage_id(entity.id, aspect.name)]
        return None


def measure(assets, sets) -> dict:
    result = evaluate_sets(assets, {"params": assets.base_params}, sets, progress=False)
    at_20 = {name: float(np.mean([recall(row, 20) for row in rows])) for name, rows in result["predictions"].items()}
    for name, part in result["datasets"].items():
        part["recall@20"] = at_20[name]
    for part in result["averages"].values():
        part["recall@20"] = float(np.mean([at_20[name] for name in part["datasets"]]))
    return {name: {key: part[key] for key in SHOWN} for name, part in {**result["datasets"], **result["averages"]}.items()}


def recall(row: dict, k: int) -> float:
    """Share of a prediction's gold passages among the first k results of its searches."""
    golds, found = set(row["gold_passage_ids"]), {name for turn in row["turns"] for name in turn["ids"][:k]}
    return len(golds & found) / len(golds)


@main_guard
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--split", default="test")
    parser.add_argument("--quick", action="store_true", help="50 questions a set (the result lies under runs/)")
    parser.set_defaults(root=None)
    overrides, rest = configuration.split_overrides(sys.argv[1:])
    args = parser.parse_args(rest)
    own = [f"data.eval_limit={50 if args.quick else 0}", f"rollout.candidates={DEEPEST}"]
    config = configuration.load(runs.HOME / "configs" / "mini.py", [*own, *overrides])
    sets = load_sets(config, split=args.split)
    with tempfile.TemporaryDirectory() as workdir:
        assets = load_assets(config, Path(workdir))
    perfect = dataclasses.replace(assets, retriever=PerfectRetriever(assets.retriever))
    summary = {
        "machine": about(),
        "split": args.split,
        "start": measure(assets, sets),
        "perfect_retriever": measure(perfect, sets),
    }
    runs.save("mini_world", summary, args)
    print(json.dumps(summary))


if __name__ == "__main__":
    sys.exit(main())
