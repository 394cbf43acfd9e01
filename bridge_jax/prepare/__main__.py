"""`python -m bridge_jax.prepare`: documents and a table of questions -> corpus, train and dev questions, a config file."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from bridge_jax.errors import UserError, main_guard
from bridge_jax.files import write_text

EXAMPLES = """
examples:
  python -m bridge_jax.prepare --corpus=handbook --questions=questions.csv --out=data/handbook
  python -m bridge_jax.prepare --corpus=wiki.jsonl --questions=qa.jsonl --out=data/wiki --words=150 --dev=200
  python -m bridge_jax.prepare --corpus=papers --questions=qa.csv --out=data/papers \\
      --policy=Qwen/Qwen2.5-0.5B-Instruct --encoder=intfloat/e5-small-v2
  then: python -m bridge_jax.train --config=data/handbook/config.py --workdir=runs/handbook

The corpus: a folder (and the folders in it) of .txt, .md, .html and .pdf files, or JSON lines {"id", "title", "text"} as the index
reads them. Markdown, HTML and PDF need pip install 'bridge-jax[prepare]'.
The questions: a table (.csv, .tsv) or JSON lines with question and answer; several answers in a column answers, in a table with |
between them; optional id, and gold: the file or passage that holds the answer (recall and the warm start need it).
Exit codes: 0 written; 1 documents that cannot be read, all of them named; 2 something else that is given is wrong.
"""
FILES = ("corpus.jsonl", "train.jsonl", "dev.jsonl", "config.py", "report.json")
SHOWN = 8  # of each kind of finding on the terminal; report.json has all
FAULTS = 20  # documents that cannot be read, on the terminal


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        "python -m bridge_jax.prepare",
        description="Turn your documents and questions into a corpus, a train/dev split and a configuration that train runs.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    p.add_argument("--corpus", required=True, type=Path, metavar="PATH", help="a folder of documents, or a file")
    p.add_argument("--questions", required=True, type=Path, metavar="FILE", help=".csv, .tsv, .jsonl or .parquet")
    p.add_argument("--out", required=True, type=Path, metavar="FOLDER", help="gets " + ", ".join(FILES))
    p.add_argument("--words", type=int, default=100, help="of a passage, about (default: 100, as in Wikipedia's wiki-18)")
    p.add_argument("--dev", type=int, help="questions kept for evaluation (default: a fifth, at most 200)")
    p.add_argument(
        "--gold",
        default="column",
        choices=("column", "answer"),
        help="gold passages: those the column gold names (default), or guessed: of the passages that hold the answer the one with "
        "most words of the question",
    )
    p.add_argument("--policy", help="policy.model of the configuration (default: smollm2-135m-instruct, for a laptop)")
    p.add_argument("--encoder", help="retriever.encoder of the configuration (default: minilm-l6-v2, for a laptop)")
    p.add_argument("--force", action="store_true", help="write over what an earlier prepare left in the folder")
    return p


@main_guard
def main(arguments: Sequence[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    if not 10 <= args.words <= 300:
        raise UserError(f"--words={args.words}: must be 10 to 300 (encoders read at most 512 tokens)")
    if args.out.exists() and not args.out.is_dir():
        raise UserError(f"--out={args.out}: is a file; give a folder")
    there = [name for name in FILES if (args.out / name).exists()]
    if there and not args.force:
        raise UserError(f"--out={args.out}: holds {', '.join(there)} already; give another folder, or --force to write over them")
    # Imported late: --help and a mistyped option should answer at once.
    from bridge_jax.prepare import questions as asking
    from bridge_jax.prepare.settings import ENCODER, POLICY, config_file, settings

    passages, corpus_report, parts, faults = prepare_corpus(args.corpus, args.words, (args.questions, args.out))
    if faults:
        print(complaint(args.corpus, faults), file=sys.stderr)
        return 1
    rows = asking.read_questions(args.questions)
    read = len(rows)
    rows, duplicates = asking.merge_duplicates(rows)
    if len(rows) < 2:
        raise UserError(f"{args.questions}: one question; at least two are needed, one to train on and one held out")
    dev = min(200, max(1, len(rows) // 5)) if args.dev is None else args.dev
    if not 1 <= dev < len(rows):
        raise UserError(f"--dev={dev} of {len(rows)} different questions: both parts need at least one")
    finder = asking.AnswerFinder(passages, rows)
    held = {row.line: finder.holding(row.question) for row in rows}
    ids = [passage.id for passage in passages]
    guess = (lambda row: finder.likeliest(row.question)) if args.gold == "answer" else (lambda row: None)
    records = {}
    for row in rows:
        question = asking.resolve_golds(row, args.questions, parts, ids, held[row.line])
        golds, guessed = list(question.gold_passage_ids), guess(row)
        if not golds and guessed is not None:
            golds = [ids[guessed]]
        record = {"id": question.id, "question": question.question, "golden_answers": list(question.golds)}
        records[row.line] = record | ({"metadata": {"gold_ids": golds}} if golds else {})
    missing = [row for row in rows if held[row.line] == []]
    train_rows, dev_rows = asking.split(rows, dev)
    report = {
        **corpus_report,
        "questions": read,
        "question_duplicates": [{"line": line, "same_as_line": first} for line, first in duplicates],
        "train": len(train_rows),
        "dev": len(dev_rows),
        "with_gold_passages": sum("metadata" in record for record in records.values()),
        "answers_looked_for": sum(found is not None for found in held.values()),
        "answers_not_in_corpus": [
            {"line": row.line, "question": row.question.question, "answers": list(row.question.golds)} for row in missing
        ],
    }
    longest_question = max(len(row.question.question.split()) for row in rows)
    longest_passage = max(len(f"{passage.title} {passage.text}".split()) for passage in passages)
    values = settings(args.policy or POLICY, args.encoder or ENCODER, longest_passage, longest_question, len(passages), dev)
    lines = [{"id": passage.id, "title": passage.title, "text": passage.text} for passage in passages]
    write_text(args.out / "corpus.jsonl", _json_lines(lines))
    write_text(args.out / "train.jsonl", _json_lines([records[row.line] for row in train_rows]))
    write_text(args.out / "dev.jsonl", _json_lines([records[row.line] for row in dev_rows]))
    said = f"{len(train_rows)} training and {len(dev_rows)} held-out questions over {len(passages):,} passages of one's own."
    write_text(args.out / "config.py", config_file(values, said))
    write_text(args.out / "report.json", json.dumps(report, ensure_ascii=False, indent=1) + "\n")
    print("\n".join([*summary(report, args.questions), *next_steps(args.out, report)]))
    return 0


def prepare_corpus(corpus: Path, words: int, but: Sequence[Path] = ()):
    """-> (passages without duplicates, what is told of them, {document name or passage id: rows of its passages}, a line for each
    file that cannot be read).

    but: as in `files_of`.
    """
    from bridge_jax.objectives.rewards import normalize_answer
    from bridge_jax.prepare.chunks import passages_of
    from bridge_jax.prepare.documents import files_of, read_documents

    passages, parts, kinds, empty = [], {}, Counter(), []
    seen: dict[str, int] = {}
    whole: dict[tuple, str] = {}  # the first document of each text
    duplicates, copies, damaged, faults = [], [], [], []
    files, others = files_of(corpus, but)
    for document in read_documents(corpus, files, faults):
        kinds[document.kind] += 1
        found = passages_of(document, words)
        if not found:
            empty.append(document.name)
        if document.name in parts:
            faults.append(f"--corpus={corpus}: the passage id {document.name!r} occurs twice; make ids unique")
            continue
        if document.remarks:
            damaged.append({"document": document.name, "remarks": list(document.remarks)})
        first = whole.setdefault(document.sections, document.name) if found and document.kind != "passage" else document.name
        if first != document.name:
            copies.append({"document": document.name, "same_as": first})
        places = []
        for passage in found:
            # Titles are looked at, too: two sections that say the same about different things are both wanted.
            key = normalize_answer(f"{passage.title} {passage.text}")
            if key in seen and first == document.name:
                duplicates.append({"passage": passage.id, "same_as": passages[seen[key]].id})
            elif key not in seen:
                seen[key] = len(passages)
                passages.append(passage)
            places.append(seen[key])
            parts[passage.id] = [seen[key]]
        parts[document.name] = places
    if faults:
        return [], {}, {}, faults
    if not passages:
        raise UserError(f"--corpus={corpus}: no text in {', '.join(empty[:3])}; scanned pages need OCR first")
    lengths = [len(passage.text.split()) for passage in passages]
    report = {
        "documents": dict(kinds),
        "passed_over": [path.relative_to(corpus).as_posix() for path in others],
        "without_text": empty,
        "passages": len(passages),
        "words": sum(lengths),
        "passage_duplicates": duplicates,
        "document_copies": copies,
        "damaged": damaged,
        "words_a_passage": histogram(lengths, words),
    }
    return passages, report, parts, faults


def complaint(corpus: Path, faults: Sequence[str]) -> str:
    """What the terminal says where documents cannot be read: a line for each, FAULTS at most."""
    lines = [f"error: --corpus={corpus}: {len(faults):,} faults in its documents, nothing was written:"]
    lines += [f"  {fault}" for fault in faults[:FAULTS]]
    return "\n".join(lines + [f"  ... and {len(faults) - FAULTS:,} more"] * (len(faults) > FAULTS))


def histogram(lengths: Sequence[int], words: int) -> dict[str, int]:
    """{"0-24": passages} in steps of a quarter of `words`; all above twice `words` together."""
    step = max(1, words // 4)
    counts = Counter(min(length, 2 * words) // step for length in lengths)
    last = 2 * words // step
    return {
        (f"{bin * step}-{(bin + 1) * step - 1}" if bin < last else f"{bin * step}+"): counts[bin]
        for bin in range(min(counts), max(counts) + 1)
    }


def summary(report: dict, questions: Path) -> list[str]:
    """What the terminal says."""
    kinds = ", ".join(f"{count} {kind}" for kind, count in report["documents"].items())
    documents = f"{sum(report['documents'].values()):,} documents ({kinds})"
    lines = [f"corpus      {documents}, {report['passages']:,} passages, {report['words']:,} words"]
    lines += _findings("passed over", report["passed_over"], lambda name: f"{name} (no kind of document that is read)")
    lines += _findings(
        "no text in",
        report["without_text"],
        lambda name: f"{name}{' (a scan? it needs OCR)' if name.lower().endswith('.pdf') else ''}",
    )
    lines += _findings("damaged", report["damaged"], _damage)
    copy = "delete one that is a mere copy"
    lines += _findings("same text", report["document_copies"], lambda d: f"{d['document']} and {d['same_as']}; {copy}")
    lines += _findings("left out", report["passage_duplicates"], lambda d: f"{d['passage']} says the same as {d['same_as']}")
    most = max(report["words_a_passage"].values())
    lines.append("words a passage")
    lines += [f"  {name:>9} {'█' * round(40 * count / most)} {count:,}" for name, count in report["words_a_passage"].items()]
    lines.append(f"questions   {report['questions']:,}: {report['train']:,} to train on, {report['dev']:,} held out")
    if report["dev"] == 1:
        lines.append("  one question is held out: an evaluation can only be 0 or 100 %; give more questions, or --dev=N")
    lines += _findings(
        "merged",
        report["question_duplicates"],
        lambda d: f"line {d['line']} asks what line {d['same_as_line']} asks; the answers of both count",
    )
    looked, missing = report["answers_looked_for"], report["answers_not_in_corpus"]
    if looked:
        share = 100 * (looked - len(missing)) / looked
        others = report["train"] + report["dev"] - looked
        aside = f" ({others} yes or no questions are not counted)" if others else ""
        lines.append(f"answers     {share:.0f} % occur in the corpus{aside}")
        lines += _findings(
            "not found", missing, lambda m: f"{questions.name}, line {m['line']}: {m['question']} -> {' | '.join(m['answers'])}"
        )
    if report["with_gold_passages"]:
        lines.append(f"gold        {report['with_gold_passages']:,} questions name the passages that hold their answer")
    else:
        lines.append("gold        no question names its passages: no recall, no warm start (add a column gold, or --gold=answer)")
    return lines


def _damage(found: dict) -> str:
    more = f", and {len(found['remarks']) - 1} more" if len(found["remarks"]) > 1 else ""
    return f"{found['document']} was read all the same ({' '.join(found['remarks'][0].split())}{more}): look at its passages"


def _findings(label: str, found: Sequence, say) -> list[str]:
    lines = [f"  {label}: {say(one)}" for one in found[:SHOWN]]
    return lines + ([f"  {label}: {len(found) - SHOWN:,} more, see report.json"] if len(found) > SHOWN else [])


def next_steps(out: Path, report: dict) -> list[str]:
    workdir = Path("runs") / out.name
    workdir = workdir.with_name(f"{out.name}-run") if workdir.resolve() == out.resolve() else workdir
    where = f"--config={out / 'config.py'} --workdir={workdir}"
    lines = [f"written to {out}: {', '.join(FILES)}. Next:"]
    if not report["with_gold_passages"]:
        return [*lines, f"  python -m bridge_jax.train {where}"]
    return [
        *lines,
        f"  python -m bridge_jax.train {where}",
        "or, as a small policy has to learn the tags first:",
        f"  python -m bridge_jax.warmstart {where}",
        f"  python -m bridge_jax.train {where} --config.policy.warmstart=auto",
    ]


def _json_lines(rows: Sequence[dict]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


if __name__ == "__main__":
    sys.exit(main())
