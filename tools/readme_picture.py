"""The README's picture: python tools/readme_picture.py [--workdir=runs/demo]

Left, one search of a rollout in a group of four wrong ones (advantage 0: no outcome to learn from): the retriever's probability of
each candidate, and its responsibility for the gold answer. Right, what comes of it: exact match over the steps, from
benchmarks/results/ablation.json. With a run (`make demo`) the search is taken from it anew and kept in docs/readme_search.json.
Needs `pip install -e '.[bench]'`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

HOME = Path(__file__).resolve().parents[1]
SEARCH, PICTURE = HOME / "docs" / "readme_search.json", HOME / "docs" / "readme.png"
CANDIDATES = 12
METHODS = {
    "bridge": "BRIDGE",
    "rag_then_rl": "retriever first, then the policy",
    "decoupled_rag": "both at once, RAG loss alone",
    "rl_then_rag": "policy first, then the retriever",
    "vt_search": "the policy alone",
}


def taken_from(workdir: Path) -> dict:
    """The first search of a rollout without advantage or reward whose gold passage is not shown, and is found by credit alone."""
    for path in sorted(workdir.glob("rollouts/step_*.jsonl")):
        for row in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
            for turn in row["turns"] if row["advantage"] == 0.0 == row["reward"] else ():
                gold = [document for document in turn["documents"][3:CANDIDATES] if document["gold"]]
                if gold and gold[0]["w"] > 0.9 and gold[0]["p"] < 0.1:
                    kept = [{k: d[k] for k in ("id", "p", "w", "shown", "gold")} for d in turn["documents"][:CANDIDATES]]
                    return {"question": row["question"], "gold": row["golds"][0], "query": turn["query"], "documents": kept}
    raise SystemExit(f"{workdir}: no search with a gold passage that only credit finds")


def draw(search: dict, ablation: dict) -> None:
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 3.9), layout="constrained", width_ratios=(1.15, 1))
    documents = search["documents"]
    places = range(len(documents))
    left.barh([n - 0.2 for n in places], [d["p"] for d in documents], 0.38, color="#2457d6", label="p: retrieval probability")
    left.barh([n + 0.2 for n in places], [d["w"] for d in documents], 0.38, color="#d9771f", label="w: credit for the answer")
    names = [f"{d['id'].split('-', 2)[-1]}{'  (gold)' if d['gold'] else ''}" for d in documents]
    left.set_yticks(list(places), names, fontsize=8.5)
    for label, document in zip(left.get_yticklabels(), documents, strict=True):
        label.set_fontweight("bold" if document["gold"] else "normal")
    left.invert_yaxis()
    left.axhline(2.5, color="0.6", linewidth=0.8, linestyle=":")
    left.text(0.99, 2.4, "shown to the policy", ha="right", va="bottom", fontsize=8, color="0.4")
    left.set(xlim=(0, 1), xlabel=f"candidates of the search “{search['query']}”, best first")
    left.set_title("Four rollouts, all wrong: no reward, but credit", fontsize=11, loc="left")
    left.legend(loc="lower right", fontsize=8.5, frameon=False)
    for number, (name, label) in enumerate(METHODS.items()):
        curve = ablation["curves"][name]
        width = 2.6 if name == "bridge" else 1.5
        right.plot(curve["steps"], [100 * x for x in curve["overall"]], marker="o", ms=3, lw=width, color=f"C{number}", label=label)
    seeds = min(ablation["seeds"][name] for name in METHODS)
    right.set(
        xlabel="step (in two stages: one after the other)",
        ylabel="exact match on held-out questions, %",
        xticks=range(0, 41, 10),
        ylim=(15, 75),
    )
    right.set_title(f"The mini world, mean of {seeds} seeds or more", fontsize=11, loc="left")
    right.legend(fontsize=8.5, frameon=False, loc="center right", bbox_to_anchor=(1, 0.52))
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="x" if axis is left else "y", alpha=0.25)
    figure.savefig(PICTURE, dpi=120, metadata={"Software": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workdir", type=Path, help="a run of the mini world to take the search from")
    args = parser.parse_args()
    if args.workdir:
        SEARCH.write_text(json.dumps(taken_from(args.workdir), indent=1) + "\n", encoding="utf-8")
    ablation = json.loads((HOME / "benchmarks" / "results" / "ablation.json").read_text(encoding="utf-8"))
    draw(json.loads(SEARCH.read_text(encoding="utf-8")), ablation)
    print(PICTURE)


if __name__ == "__main__":
    main()
