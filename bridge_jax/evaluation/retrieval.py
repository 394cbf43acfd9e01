"""`python -m bridge_jax.index eval`: a retriever alone on questions, the base encoder against its adapter and BM25."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from bridge_jax.errors import UserError

EXAMPLES = """
examples:
  python -m bridge_jax.index eval --index indexes/wiki --questions hotpotqa --limit 1000
  python -m bridge_jax.index eval --index indexes/wiki --questions dev.jsonl --adapter runs/mine/retriever --bm25 indexes/bm25
"""


def parser() -> argparse.ArgumentParser:
    """The arguments of evaluation."""
    p = argparse.ArgumentParser(
        "python -m bridge_jax.index eval",
        description="Search an index with questions: recall@k and MRR by passage id, and whether the answer is in what was found.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("--index", required=True, nargs="+", help="index folder; several, built with one encoder, are merged")
    p.add_argument("--questions", required=True, help="a question file or set")
    p.add_argument("--split", help="split of the set (default: the one that is published)")
    p.add_argument("--limit", type=int, help="the first so many questions only")
    p.add_argument("--adapter", help="query LoRA to compare with the base encoder, a folder in PEFT's format")
    p.add_argument("--bm25", metavar="FOLDER", help="a BM25 index of the same passages to compare with")
    p.add_argument("--topk", default="1,3,5,10,20,40", help="numbers of passages (default 1,3,5,10,20,40)")
    p.add_argument("--corpus", nargs="+", help="passages of each index (default: where the index was built from)")
    p.add_argument("--encoder", help="the encoder (default: the one the index was built with)")
    p.add_argument("--kind", choices=("auto", "scann", "exact", "approx"), help="default: as the index was built")
    p.add_argument("--out", metavar="FILE", help="write the figures as JSON")
    return p


def main(arguments: list[str]) -> int:
    args = parser().parse_args(arguments)
    try:
        ks = sorted({int(k) for k in args.topk.split(",")})
    except ValueError:
        ks = [0]
    if ks[0] < 1:
        raise UserError(f"--topk is {args.topk!r}; it must be numbers of at least 1, such as 1,3,40")
    # Imported late, as in bridge_jax/index.py.
    from bridge_jax.data.qa import load_questions
    from bridge_jax.models.lora import load_peft
    from bridge_jax.objectives.rewards import normalize_answer
    from bridge_jax.retrieval.bm25 import open_bm25
    from bridge_jax.retrieval.measure import measure
    from bridge_jax.retrieval.retriever import Retriever
    from bridge_jax.retrieval.serving import open_parts, with_adapter

    questions = load_questions(args.questions, args.split, args.limit)
    adapter = load_peft(args.adapter) if args.adapter else None
    encoder, index, corpus, _ = open_parts(args.index, args.corpus, args.encoder, args.kind)
    if ks[-1] > len(corpus):
        raise UserError(f"--topk asks for {ks[-1]} passages of a corpus of {len(corpus)}; ask for fewer")
    texts = [question.question for question in questions]
    found = {"base": Retriever(encoder, index, corpus).search(texts, ks[-1]).rows}
    if adapter is not None:
        tower, lora = with_adapter(encoder, adapter)
        found["adapter"] = Retriever(tower, index, corpus).search(texts, ks[-1], lora).rows
    if args.bm25:
        found["bm25"] = open_bm25(args.bm25, corpus).search(texts, ks[-1]).rows
    values = {name: measure(questions, rows, corpus, ks, normalize_answer) for name, rows in found.items()}
    result = summary(values) | {"questions": len(questions), "passages": len(corpus), "kind": index.kind}
    _show(values, result)
    if args.out:
        Path(args.out).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


def summary(values: dict[str, dict[str, np.ndarray]]) -> dict:
    """Means by retriever and metric, and each other's differences to the first with their paired 95 % bootstrap intervals."""
    from bridge_jax.evaluation.aggregate import interval
    from bridge_jax.retrieval.measure import means

    base, *others = values
    result: dict = {"means": {name: means(each) for name, each in values.items()}, "differences": {}}
    for other in others:
        result["differences"][other] = {}
        for metric, these in values[other].items():
            pairs = these - values[base][metric]
            pairs = pairs[~np.isnan(pairs)]
            if len(pairs):
                low, high = interval([pairs], seed=0)
                result["differences"][other][metric] = {"mean": float(pairs.mean()), "low": low, "high": high}
    counted = values[base]
    result["with_gold_ids"] = int((~np.isnan(counted["mrr"])).sum())
    result["with_answers"] = int((~np.isnan(next(v for name, v in counted.items() if name.startswith("answer")))).sum())
    return result


def _show(values: dict, result: dict) -> None:
    from rich.console import Console
    from rich.table import Table

    title = (
        f"{result['questions']:,} questions ({result['with_gold_ids']:,} with gold passages, {result['with_answers']:,} with an "
        f"answer but yes or no) over {result['passages']:,} passages, {result['kind']}"
    )
    table = Table(title=title)
    table.add_column("")
    base, *others = values
    for name in values:
        table.add_column(name, justify="right")
        if name != base:
            table.add_column(f"{name} - {base} (95 %)", justify="right")
    for metric in values[base]:
        cells = [_percent(result["means"][base][metric])]
        for other in others:
            found = result["differences"][other].get(metric)
            cells.append(_percent(result["means"][other][metric]))
            cells.append(f"{100 * found['mean']:+.1f} ({100 * found['low']:+.1f} to {100 * found['high']:+.1f})" if found else "-")
        table.add_row(metric, *cells)
    Console().print(table)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"
