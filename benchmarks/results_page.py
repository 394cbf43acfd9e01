"""docs/results.md from result files: the tables of the paper with our cells where we have measured them, "not measured" elsewhere.

    python benchmarks/results_page.py                                        # from benchmarks/results/*.json
    python benchmarks/results_page.py --results=runs/3b/eval/full.json,...   # and these results of `evaluate` (and their judges')
    python benchmarks/results_page.py --check                                # exit with 1 where the page differs

A result of `evaluate` fills a cell by its policy's model and method; so do the rows of benchmarks/results/evaluation.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from replication import HOME, RESULTS, table

from bridge_jax.files import write_text

DOCUMENT = HOME / "docs" / "results.md"
NOT = "not measured"
SIZES = {
    "nq": 3610, "triviaqa": 11313, "popqa": 14267, "hotpotqa": 7405, "2wikimultihopqa": 12576, "musique": 2417, "bamboogle": 125,
}  # fmt: skip
QA = tuple(SIZES)
MEDICAL = ("mmlu", "medqa", "medmcqa", "pubmedqa", "bioasq")

# The paper's EM at full scale (METHOD.md 6): NQ TriviaQA PopQA | HotpotQA 2Wiki MuSiQue Bamboogle || multi-hop average, average.
PAPER_EM = {
    ("Qwen/Qwen2.5-3B-Instruct", "bridge"): (46.3, 61.6, 44.7, 42.3, 41.4, 16.8, 37.6, 34.5, 41.5),
    ("Qwen/Qwen2.5-7B", "bridge"): (50.1, 66.3, 48.4, 48.9, 49.9, 22.7, 51.2, 43.2, 48.2),
    ("Qwen/Qwen2.5-3B-Instruct", "vt_search"): (None, None, 48.1, *(None,) * 6),
    ("Qwen/Qwen2.5-7B", "vt_search"): (None, None, 50.2, *(None,) * 6),
}
PAPER_ABLATION = {
    "vt_search": 21.7, "decoupled_rl": 22.5, "decoupled_rag": 23.0, "rl_then_rag": 23.3, "rag_then_rl": 23.8, "bridge": 31.3,
}  # fmt: skip
PAPER_MEDICAL = {"bridge": (72.27, 70.72), "vt_search": (69.97, 69.13), "medrag": (69.19, 68.61)}  # quality, accuracy


def page(results: Mapping[str, dict], runs: Sequence[dict]) -> str:
    """results: {stem: a file of benchmarks/results}. runs: results of `evaluate`, each with "judge" where it was judged."""
    parts = [
        "# Results: the paper's tables, and what has been measured here",
        "Written by `python benchmarks/results_page.py` from result files; not edited by hand. Of a pair, the first figure is the "
        f'paper\'s and the second ours. "{NOT}" means that: nobody has run it with this code. What is of a small scale says so; '
        "claims are gone through one by one in [replication.md](replication.md), the commands behind rows in "
        "[evaluation.md](evaluation.md).",
        "## Exact match at full scale",
        full_scale(runs),
        "## Ablation, 3B-base, G = 8: multi-hop average EM",
        ablation(results.get("ablation"), runs),
        "## Cost",
        cost(results),
        "## Estimator fidelity against the two-state gradient",
        fidelity(results.get("fidelity")),
        "## Medical, 7B-base: reasoning quality / answer accuracy",
        medical(runs),
        "## Inference baselines on small policies",
        *small(results.get("evaluation")),
        "## `direct` against Hugging Face's batched `generate`",
        direct(results.get("direct")),
        "## A real OpenAI-compatible server",
        server(results.get("endpoint_server")),
    ]
    return "\n\n".join(parts) + "\n"


def pair(paper: float | None, ours: float | None, digits: int = 1) -> str:
    left = "-" if paper is None else f"{paper:.{digits}f}"
    return f"{left} / {NOT if ours is None else f'{ours:.{digits}f}'}"


def full_scale(runs: Sequence[dict]) -> str:
    rows = []
    for (model, method), paper in PAPER_EM.items():
        found = _run(runs, model, method, QA)
        cells = [pair(value, None) for value in paper]
        if found:
            groups = (found["averages"].get(group) for group in ("multi_hop", "overall"))
            measured = [*((found["datasets"].get(name), SIZES[name]) for name in QA)]
            measured += [(row, sum(SIZES[name] for name in row["datasets"]) if row else 0) for row in groups]
            cells = [_cell(value, row, size) for value, (row, size) in zip(paper, measured, strict=True)]
        rows.append([model, f"`{method}`", *cells])
    return table(["policy", "method", *QA, "multi-hop avg", "average"], rows)


def ablation(mini: Mapping | None, runs: Sequence[dict]) -> str:
    rows = []
    for method, paper in PAPER_ABLATION.items():
        found = _run(runs, "Qwen/Qwen2.5-3B", method, ())
        small = mini["table"].get(method) if mini else None
        row = f"{100 * small['em']['multi_hop']['mean']:.1f}" if small else NOT
        rows.append([f"`{method}`", pair(paper, _em(found["averages"].get("multi_hop")) if found else None), row])
    return table(["method", "3B-base", "ours, mini world (1.2 M parameters; its own sets)"], rows)


def cost(results: Mapping[str, dict]) -> str:
    small, large = results.get("method_cost"), results.get("paper_scale")

    def saved(name: str) -> str:
        return f"{-100 * small[name]:+.1f} %" if small else NOT

    def times(measured: Mapping | None, how: str = "") -> str:
        return f"{measured['bridge_over_vt_search']:.2f}x{how}" if measured else NOT

    rows = [
        ["a bridge step over a vt_search step, time", "2.07x", times(small), times(large, " (counted)")],
        ["one retriever state against two, memory", "-49.7 %", saved("one_state_memory_saving"), NOT],
        ["one retriever state against two, time", "-55.8 %", saved("one_state_time_saving"), NOT],
    ]
    return table(["what", "paper", "ours, mini world", "ours, 3B at the paper's lengths"], rows)


def fidelity(found: Mapping | None) -> str:
    rows = []
    for name, label, paper in (("one_state", "bridge", (0.998, 0.048)), ("drop", "drop", (0.183, 14.756))):
        ours = found["checkpoints"]["late"]["training"].get("0.02") if found else None
        cosine, error = (ours[name][key]["mean"] if ours else None for key in ("cosine", "relative_error"))
        rows.append([f"`{label}`", pair(paper[0], cosine, 3), pair(paper[1], error, 3)])
    note = "Ours: mini world, late checkpoint, gamma = 0.02, lower levels as training leaves them."
    return f"{note}\n\n{table(['estimator', 'cosine', 'relative error'], rows)}"


def medical(runs: Sequence[dict]) -> str:
    rows = []
    for method, (quality, accuracy) in PAPER_MEDICAL.items():
        found = _run(runs, "Qwen/Qwen2.5-7B", method, MEDICAL)
        judged = found.get("judge") if found else None
        ours = judged["averages"]["medical"]["quality"] if judged else None
        rows.append(
            [f"`{method}`", pair(quality, ours, 2), pair(accuracy, _em(found["averages"].get("medical")) if found else None, 2)]
        )
    return table(["method", "reasoning quality", "accuracy"], rows)


def small(found: Mapping | None) -> list[str]:
    """The rows of benchmarks/results/evaluation.json."""
    if not found:
        return [f"{NOT.capitalize()} yet: `python benchmarks/evaluation.py`."]
    intro = (
        f"`benchmarks/evaluation.py`, up to {found['limit']} questions a set, greedy, retrieval over a small corpus (29,814 "
        "Wikipedia passages that hold the evidence of a part of the questions; 370 PubMed abstracts): rows compare with each other "
        "and not with published numbers. 95 % intervals over questions; the last column is paired with `direct`."
    )
    parts = [intro]
    for policy, rows in found["policies"].items():
        for kind, sets, title in (("qa", QA, "EM"), ("medical", MEDICAL, "accuracy (standard error)")):
            own = {row.split("/", 1)[1]: one for row, one in rows.items() if row.startswith(f"{kind}/")}
            if own:
                present = [name for name in sets if any(name in one["datasets"] for one in own.values())]
                head = ["method", *present, "average", "recall@3", "searches", "tokens", "s a question", "minus direct"]
                parts.append(f"**{policy}**, {title}")
                parts.append(table(head, [small_row(name, one, present) for name, one in own.items()]))
    return parts


def small_row(name: str, one: Mapping, sets: Sequence[str]) -> list[str]:
    cells, average = [f"`{name}`"], one["averages"]["overall"]
    for each in sets:
        row = one["datasets"].get(each)
        error = f" ({100 * row['standard_error']:.1f})" if row and "standard_error" in row else ""
        cells.append(f"{100 * row['em']:.1f}{error}" if row else NOT)
    cells.append(f"{100 * average['em']:.1f} ({100 * average['em_low']:.1f} to {100 * average['em_high']:.1f})")
    cells.append("-" if average["recall@3"] is None else f"{100 * average['recall@3']:.1f}")
    n = sum(row["n"] for row in one["datasets"].values())
    cells += [f"{average['searches']:.2f}", f"{average['generated_tokens']:.0f}", f"{one['seconds'] / n:.1f}"]
    gap = one.get("minus_direct")
    cells.append(f"{100 * gap['difference']:+.1f} ({100 * gap['low']:+.1f} to {100 * gap['high']:+.1f})" if gap else "-")
    return cells


def direct(found: Mapping | None) -> str:
    if not found:
        return f"{NOT.capitalize()} yet: `python benchmarks/direct.py`."
    rows = [
        [name, f"{one['seconds']['median']:.1f}", f"{one['generated_tokens']:.1f}", f"{one['peak_bytes'] / 2**20:.0f}"]
        for name, one in found["engines"].items()
        if "seconds" in one
    ]
    text = (
        f"{found['questions']:,} questions, {found['model']}, at most {found['new_tokens']} tokens: {found['ratio_vs_hf']:.2f} "
        f"times the speed of Hugging Face's fastest setting; {100 * found['same_answers']:.1f} % of the answers are the same text."
    )
    return f"{text}\n\n{table(['engine', 'seconds', 'tokens a question', 'MiB'], rows)}"


def server(found: Mapping | None) -> str:
    if not found:
        return f"{NOT.capitalize()} yet: `python benchmarks/endpoint_server.py`."
    rows = [
        [
            f"`{name}`",
            str(one["n"]),
            f"{100 * one['em']:.1f}",
            f"{one['searches']:.2f}",
            str(one["endpoint"]["requests"]),
            str(one["endpoint"]["retries"]),
            f"{one['prompt_tokens']:.0f}",
            f"{one['generated_tokens']:.0f}",
        ]
        for name, one in found["baselines"].items()
    ]
    killed, judge = found["killed"], found["judge"]
    text = (
        f"`transformers serve` ({found['server']}) with {found['model']}: the client's rows below. One evaluation was ended with "
        f"`kill -9` after {killed['answered_before_the_kill']} of {found['limit']} questions; started again it asked "
        f"{killed['after']['requests']} times and gave {'the same' if killed['same_as_unbroken'] else 'other'} predictions as an "
        f'unbroken one. With the server gone the command ends with "{found["without_server"]["says"]}". Judging: '
        f"{judge['overall']['unjudged']} of {judge['overall']['n']} traces got no verdict in JSON (it is the same small model). "
        f"{100 * found['direct_same_as_own_engine']:.0f} % of the `direct` answers are those of our own engine."
    )
    head = ["baseline", "questions", "EM", "searches", "requests", "retries", "tokens read", "tokens written"]
    return f"{text}\n\n{table(head, rows)}"


def _cell(paper: float | None, row: Mapping | None, size: int) -> str:
    """A figure of fewer questions than the set has says so."""
    part = f" (n = {row['n']:,})" if row and row["n"] != size else ""
    return pair(paper, _em(row)) + part


def _em(row: Mapping | None) -> float | None:
    return None if row is None else 100 * row["em"]


def _run(runs: Sequence[dict], model: str, method: str, sets: Sequence[str]) -> dict | None:
    """The result of this policy and method that has the most of these sets; None: there is none."""
    own = [run for run in runs if _who(run) == (model, method) and (not sets or any(name in run["datasets"] for name in sets))]
    return max(own, key=lambda run: sum(row["n"] for row in run["datasets"].values()), default=None)


def _who(run: Mapping) -> tuple[str, str]:
    settings = run["settings"]
    model = settings["endpoint"]["model"] if "endpoint" in settings else settings["policy"]["model"]
    return model, settings["baseline"] or run["config"]["method.name"]


def load(folder: Path, files: Sequence[Path]) -> tuple[dict[str, dict], list[dict]]:
    results = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}
    runs = []
    for file in files:
        run = json.loads(file.read_text(encoding="utf-8"))
        for judge in sorted(file.parent.glob(f"{file.stem}.judge-*.json")):
            run["judge"] = json.loads(judge.read_text(encoding="utf-8"))
        runs.append(run)
    return results, runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--results", default="", metavar="A,B", help="results of `evaluate`")
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 where the page differs")
    args = parser.parse_args()
    text = page(*load(RESULTS, [Path(part) for part in args.results.split(",") if part]))
    if args.check:
        sys.exit(
            0 if DOCUMENT.exists() and DOCUMENT.read_text(encoding="utf-8") == text else f"{DOCUMENT.name} differs: run this again"
        )
    write_text(DOCUMENT, text)
    print(json.dumps({"document": str(DOCUMENT.relative_to(HOME)), "cells_not_measured": text.count(NOT)}))


if __name__ == "__main__":
    main()
