"""1,000 questions through the baseline `direct`: ours against Hugging Face's batched `generate`; same weights, prompts and float32.

    python benchmarks/direct.py --data=../shared/data/qa7          # SmolLM2-135M-Instruct (configs/pocket.py), 1,000 questions
    python benchmarks/direct.py --data=../shared/data/qa7 --quick  # 48 questions

Both answer greedily with at most --new-tokens tokens and end at EOS or at the baseline's stop strings; Hugging Face is given the
token ids (ours tokenises itself), like lengths together, and is measured at each of --batches with EOS alone (its check of stop
strings is slow) and at the last of them with stop strings; `ratio_vs_hf` is our speed over its fastest setting. A round is one pass
over all questions; compilation does not count. `same_answers` is the share of answers that are the same text (float32 sums in
another order: now and then a near-tie falls the other way).
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import compare
import training_runs as runs

from bridge_jax.data.prompts import encode_message, fill, harmless
from bridge_jax.data.qa import load_questions
from bridge_jax.evaluation.baselines import baseline_of
from bridge_jax.models import hub, qwen2
from bridge_jax.rollout.generators import cut_at

NAME = "direct"
MODEL = "smollm2-135m-instruct"
SETS = ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")


def main() -> None:
    parser = compare.parser(__doc__, rounds=1)
    parser.add_argument("--data", type=Path, required=True, help="a folder with <set>/test.jsonl of the seven sets")
    parser.add_argument("--questions", type=int, default=1000)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--width", type=int, default=64, help="our rows in flight")
    parser.add_argument("--batches", default="16,64", help="Hugging Face's batch sizes")
    parser.add_argument("--model", default=MODEL)
    args = parser.parse_args()
    count = 48 if args.quick else args.questions
    width, batches = (16, [16]) if args.quick else (args.width, [int(part) for part in args.batches.split(",")])
    folder = hub.resolve(args.model)
    tokenizer = qwen2.load_tokenizer(folder)
    baseline = baseline_of(NAME)
    messages = [
        fill(baseline.prompt, question=question, passages="", history="", ending="") for question in drawn(args.data, count)
    ]
    prompts = [encode_message(harmless(message, tokenizer), tokenizer) for message in messages]
    engines = compare.Engines(args.peers_python, runs.root_of(args, NAME))
    common = {"folder": str(folder), "new_tokens": args.new_tokens, "eos_ids": list(qwen2.eos_ids(folder, tokenizer))}
    with tempfile.TemporaryDirectory() as scratch:
        jobs = {"ours": {"messages": messages, "stops": baseline.stops, "width": width, "prompt_tokens": max(map(len, prompts))}}
        for batch in batches:
            jobs[f"hf {batch}"] = {"prompts": prompts, "stops": [], "batch": batch}
        jobs[f"hf {batches[-1]}, stop strings"] = {"prompts": prompts, "stops": list(baseline.stops), "batch": batches[-1]}
        found, answers = {}, {}
        for name, job in jobs.items():  # one at a time: several at once would not fit every machine's memory
            out = Path(scratch) / "answers.json"
            engine = "ours" if name == "ours" else "hf"
            [measured] = engines.compare({engine: f"{engine}_direct"}, common | job | {"out": str(out)}, args.rounds).values()
            if "failed" in measured:
                found[name] = measured
                continue
            answers[name] = json.loads(out.read_text(encoding="utf-8"))
            found[name] = figures(measured, answers[name])
            runs.say(f"{name}: {found[name]['seconds']['median']:.1f} s, {found[name]['generated_tokens']:.1f} tokens a question")
    result = {"model": args.model, "questions": count, "new_tokens": args.new_tokens, "engines": found}
    fastest = min(
        (name for name in found if name != "ours" and "seconds" in found[name]), key=lambda name: seconds(found[name]), default=None
    )
    if fastest:
        result |= {"fastest_hf": fastest, "ratio_vs_hf": seconds(found[fastest]) / seconds(found["ours"])}
        texts = [cut_at(text, baseline.stops).strip() for text, *_ in answers[fastest]]
        result["same_answers"] = sum(a == text.strip() for a, (text, *_) in zip(texts, answers["ours"], strict=True)) / count
    result |= engines.conditions(args, args.rounds)
    runs.save(NAME, result, args)
    print(json.dumps(result))


def drawn(data: Path, count: int) -> list[str]:
    """The first questions of each set, about as many of each, until there are `count`."""
    sets = [[row.question for row in load_questions(data / name / "test.jsonl", limit=count)] for name in SETS]
    taken = [
        question
        for turn in zip(*(rows + [None] * (count - len(rows)) for rows in sets), strict=True)
        for question in turn
        if question
    ]
    return taken[:count]


def figures(measured: dict, answers: list) -> dict:
    times = [row["seconds"] for row in measured["rounds"]]
    return {
        "seconds": compare.spread(times),
        "peak_bytes": max(row["peak_bytes"] for row in measured["rounds"]),
        "generated_tokens": sum(tokens for _, tokens, _ in answers) / len(answers),
        "prompt_tokens": sum(read for *_, read in answers) / len(answers),
    }


def seconds(found: dict) -> float:
    return found["seconds"]["median"]


if __name__ == "__main__":
    main()
