"""Two small policies under every inference baseline, and with the search protocol: open-domain and medical sets, one command a row.

    python benchmarks/evaluation.py --data=../shared/data                       # 100 questions a set: hours on 2 cores
    python benchmarks/evaluation.py --data=../shared/data --only=pocket --rows=qa/direct,qa/rag
    python benchmarks/evaluation.py --data=../shared/data --quick               # two questions a set: does it run?

--data holds qa7/<set>/test.jsonl (the seven open-domain sets), wiki_multihop/corpus.jsonl (their passages, as far as it has them),
mirage/benchmark.json and mirage/pubmed_snippets.jsonl. Every row is `python -m bridge_jax.evaluate` in runs/evaluation/<policy>,
with its command in the result. Stopped, it goes on where it was, question by question. Recall and EM depend on this small corpus:
the rows compare with each other, not with published numbers. Writes benchmarks/results/evaluation.json, of which
`results_page.py` makes docs/results.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import training_runs as runs
from machine import about

from bridge_jax.evaluation import paired

NAME = "evaluation"
HOME = Path(__file__).parent.parent
QA = ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")
BASELINES = ("direct", "cot", "rag", "ircot", "search_o1", "react")
POLICIES = {
    "pocket": ["--config=configs/pocket.py", "--config.policy.model=smollm2-135m-instruct"],
    "qwen-0.5b": ["--config=configs/pocket.py", "--config.policy.model=qwen2.5-coder-0.5b-instruct"],
}
# What a policy reads and writes: the pocket configuration's, with room for medical questions and for reasoning.
COMMON = [
    "--checkpoint=start", "--config.policy.warmstart=", "--config.rollout.candidates=40", "--config.rollout.max_prompt_tokens=640",
    "--config.rollout.batch_groups=8",
]  # fmt: skip
SHORT, LONG = ["--config.rollout.max_new_tokens=24"], ["--config.rollout.max_new_tokens=96"]
TOKENS = {"direct": SHORT, "rag": SHORT}
METRICS = (
    "n", "em", "em_low", "em_high", "f1", "sub_em", "recall@3", "recall@40", "recall_by", "searches", "generated_tokens",
    "prompt_tokens", "latency", "accuracy", "standard_error", "unparseable", "no_search", "statuses", "reasons",
)  # fmt: skip


def rows(data: Path, warmed: Path | None) -> dict[str, list[str]]:
    """{row: the words of its command}, policy left out."""
    made = {}
    for kind, sets, corpus in (
        ("qa", ",".join(str(data / "qa7" / name / "test.jsonl") for name in QA), data / "wiki_multihop" / "corpus.jsonl"),
        ("medical", str(data / "mirage" / "benchmark.json"), data / "mirage" / "pubmed_snippets.jsonl"),
    ):
        common = [*COMMON, f"--datasets={sets}", f"--config.index.corpus={corpus}"]
        for name in (*BASELINES, *(["medrag"] if kind == "medical" else [])):
            made[f"{kind}/{name}"] = [*common, *TOKENS.get(name, LONG), f"--baseline={name}"]
        # 32 snippets in a context of 1,024 tokens, as MedRAG itself cuts them for models of 2,048.
        made["medical/medrag"] = [*made.get("medical/medrag", []), "--context-tokens=1024", "--config.rollout.max_passage_tokens=0"]
        made[f"{kind}/search"] = [*common, *LONG, "--config.rollout.max_response_tokens=768"]
        if warmed:
            made[f"{kind}/search_warmstart"] = [*made[f"{kind}/search"], f"--config.policy.warmstart={warmed}"]
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--data", type=Path, required=True, help="see above")
    parser.add_argument("--limit", type=int, default=100, help="questions a set")
    parser.add_argument("--only", default=",".join(POLICIES), help=f"of {', '.join(POLICIES)}")
    parser.add_argument("--rows", default="", help="such as qa/direct,medical/medrag (default: all)")
    parser.add_argument(
        "--pocket-run", type=Path, default=HOME / "runs" / "pocket", help="its warm start is a further row of pocket"
    )
    parser.add_argument("--quick", action="store_true", help="two questions a set (result under runs/)")
    parser.add_argument("--root", type=Path)
    args = parser.parse_args()
    data, limit = args.data.resolve(), 2 if args.quick else args.limit
    root, wanted = runs.root_of(args, NAME), [row for row in args.rows.split(",") if row]
    failures = []
    for policy in args.only.split(","):
        warmed = args.pocket_run / "warmstart"
        known = rows(data, warmed if policy == "pocket" and (warmed / "config.json").is_file() else None)
        for row in wanted or known:
            words = [f"--workdir={root / policy}", f"--name={row.replace('/', '_')}_{limit}", f"--limit={limit}"]
            command = [sys.executable, "-m", "bridge_jax.evaluate", *POLICIES[policy], *words, *known[row]]
            runs.say(f"{policy} {row}")
            if subprocess.run(command, cwd=HOME, stdout=sys.stderr, env=runs.environment(root)).returncode:
                failures.append(f"{policy} {row}")
            result = collect(root, data, limit)
            runs.save(NAME, result, args)
    print(json.dumps({name: {row: one["averages"] for row, one in found.items()} for name, found in result["policies"].items()}))
    runs.conclude(failures)


def collect(root: Path, data: Path, limit: int) -> dict:
    """What is finished: metrics, averages, settings and the command of every row, and `rag` against `direct`, paired."""
    policies: dict[str, dict] = {}
    for policy, words in POLICIES.items():
        found = {}
        for path in sorted((root / policy / "eval").glob(f"*_{limit}.json")):
            result = json.loads(path.read_text(encoding="utf-8"))
            found[path.stem.removesuffix(f"_{limit}").replace("_", "/", 1)] = result
        if not found:
            continue
        policies[policy] = {
            row: {
                "datasets": {name: {key: one[key] for key in METRICS if key in one} for name, one in result["datasets"].items()},
                "averages": result["averages"],
                "seconds": result["seconds"],
                "settings": result["settings"],
                "command": command(policy, words, row, limit),
            }
            for row, result in found.items()
        }
        for kind in ("qa", "medical"):
            for row, result in found.items():
                direct = found.get(f"{kind}/direct")
                if row.startswith(kind) and direct is not None and row != f"{kind}/direct":
                    overall = paired.compare(result, direct)["averages"]["overall"]
                    policies[policy][row]["minus_direct"] = overall["em"] | {"n": overall["n"]}
    return {"machine": about(), "limit": limit, "policies": policies}


def command(policy: str, words: list[str], row: str, limit: int) -> str:
    """As one would type it, with DATA for the folder."""
    known = rows(Path("DATA"), Path("runs/pocket/warmstart") if policy == "pocket" else None)
    return " ".join(["python -m bridge_jax.evaluate", *words, f"--workdir=runs/{policy}", f"--limit={limit}", *known.get(row, [])])


if __name__ == "__main__":
    main()
