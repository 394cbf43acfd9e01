"""Hostile inputs for everything that reads text from outside: parsers, observations, files, overrides, requests.

    python benchmarks/fuzz.py                         # 10 million inputs over all targets
    python benchmarks/fuzz.py --inputs=4000000 --seed=23
    python benchmarks/fuzz.py --inputs=100000 --only=inert,http
    python benchmarks/fuzz.py --quick                 # some thousand, no file written

Inputs are made by chance (seeded) of a target's own words, of what is nasty everywhere (`fuzz_words.py`), and of the inputs in
tests/fuzz_corpus, changed a little. What must hold of each is in `fuzz_targets.py`. An input that breaks a promise, or takes more
than SLOW seconds of the processor, is made as short as it can be and added to the corpus, which the tests replay; the exit code is
then 1.

Writes benchmarks/results/fuzz.json, which keeps the runs of other seeds, and prints it as its last line.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import fuzz_targets
import fuzz_words
from arguments import at_least, some_of
from fuzz_targets import TARGETS, Target
from machine import about

ROOT = Path(__file__).parent.parent
CORPUS = ROOT / "tests" / "fuzz_corpus"
RESULTS = ROOT / "benchmarks" / "results" / "fuzz.json"
INPUTS, QUICK, SEED = 10_000_000, 12_000, 0
# Inputs a second differ by a thousand: the share of all inputs that each target gets.
SHARES = {
    "parse": 30, "inert": 20, "em": 18, "value": 6, "wire": 12, "questions": 6, "passages": 3, "safetensors": 2, "answer": 6,
    "http": 1.2, "observation": 1.2, "prompt": 0.5, "config": 0.1,
}  # fmt: skip
SLOW = 2.0  # seconds of the processor; the longest inputs have some 100,000 characters
FAILURES = 3  # of a target, before it is left


def corpus(name: str) -> list[str]:
    """The committed inputs of a target."""
    file = CORPUS / f"{name}.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else []


def inputs(name: str, target: Target, seed: int) -> Iterator[str]:
    """An endless sequence, the same for a seed."""
    chance = random.Random(f"{name} {seed}")
    known = corpus(name)
    words = [*target.words * 3, *fuzz_words.COMMON, *(chr(chance.randrange(0x110000)) for _ in range(60))]
    while True:
        dice = chance.random()
        if known and dice < 0.4:
            text = chance.choice(known)
            for _ in range(chance.choice((1, 1, 2, 4))):
                text = changed(text, words, chance)
        else:
            text = "".join(chance.choices(words, k=1 + int(chance.expovariate(0.15))))
        if dice > 0.9998:  # one thing very often
            text = (text[:20] or "<") * chance.randrange(1, 5000)
        yield text


def changed(text: str, words: list[str], chance: random.Random) -> str:
    a, b = sorted((chance.randrange(len(text) + 1), chance.randrange(len(text) + 1)))
    kind = chance.randrange(5)
    if kind == 0:
        return text[:a] + text[min(b, a + 8) :]
    if kind == 1:
        return text[:b] + text[a:b][:200] + text[b:]
    if kind == 2:
        return text[:b]
    if kind == 3:
        return text[:a] + chance.choice(words) + text[a + 1 :]
    return text[:a] + chance.choice(words) + text[a:]


def failure(check: Callable[[str], None], text: str) -> str | None:
    """What is wrong with an input, None when nothing is. A RecursionError of the check is one of the code."""
    for _ in range(2):  # what is slow once may have met a halt of the machine
        began = time.process_time()  # by the clock on the wall a busy machine is slow at everything
        try:
            check(text)
        except Exception as error:
            return f"{type(error).__name__}: {error}"[:300].encode("utf-8", "replace").decode()
        took = time.process_time() - began
        if took <= SLOW:
            return None
    return f"Slow: {took:.1f} s"


def smallest(check: Callable[[str], None], text: str, why: str, tries: int = 2000) -> str:
    """A part of the input that fails in the same way. why: what was wrong with it; one that is slow might not be so once more."""
    kind = why.partition(":")[0]
    size = len(text) // 2
    while size and tries > 0:
        at = 0
        while at < len(text) and tries > 0:
            shorter = text[:at] + text[at + size :]
            tries -= 200 if kind == "Slow" else 1
            if (failure(check, shorter) or "").partition(":")[0] == kind:
                text = shorter
            else:
                at += size
        size //= 2
    return text


def run(name: str, count: int, seed: int, longest: float = float("inf")) -> dict:
    """Tries `count` inputs of a target, but for no longer than `longest` seconds -> how many, how fast, and what failed."""
    target, failed, tried = TARGETS[name], [], 0
    failure(target.check, "")  # what is imported or started on first use takes its time
    for text in corpus(name):
        if why := failure(target.check, text):
            failed.append({"input": text, "why": why})
    began = time.perf_counter()
    for text in inputs(name, target, seed):
        if tried >= count or len(failed) >= FAILURES or (tried % 256 == 0 and time.perf_counter() - began > longest):
            break
        tried += 1
        if why := failure(target.check, text):
            small = smallest(target.check, text, why)
            failed.append({"input": small, "why": failure(target.check, small) or why})
    seconds = time.perf_counter() - began
    return {"inputs": tried, "seconds": round(seconds, 1), "inputs_per_second": round(tried / max(seconds, 1e-9)), "failed": failed}


def remember(name: str, found: list[str]) -> None:
    """Adds inputs to the corpus."""
    texts = list(dict.fromkeys([*corpus(name), *found]))
    CORPUS.mkdir(exist_ok=True)
    (CORPUS / f"{name}.json").write_text(json.dumps(texts, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=at_least(1), default=INPUTS, help=f"over all targets (default {INPUTS:,})")
    parser.add_argument("--only", type=some_of(TARGETS), default=",".join(TARGETS), help="targets, with commas between them")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK:,} inputs; no file is written")
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)  # refusals and remarks by the million
    warnings.simplefilter("ignore", SyntaxWarning)
    names = args.only.split(",")
    total = QUICK if args.quick else args.inputs
    results = {}
    for name in names:
        results[name] = run(name, max(1, round(total * SHARES[name] / sum(SHARES[n] for n in names))), args.seed)
        print(f"{name}: {json.dumps(results[name])}", file=sys.stderr, flush=True)
        if results[name]["failed"] and not args.quick:
            remember(name, [case["input"] for case in results[name]["failed"] if len(case["input"]) < 10_000])
    fuzz_targets.close()
    failures = sum(len(result["failed"]) for result in results.values())
    done = {
        "machine": about(), "seed": args.seed, "inputs": sum(result["inputs"] for result in results.values()),
        "failures": failures, "targets": results,
    }  # fmt: skip
    keeps = not args.quick and len(names) == len(TARGETS)
    runs = [done]
    if keeps and RESULTS.exists():
        runs = [old for old in json.loads(RESULTS.read_text(encoding="utf-8"))["runs"] if old["seed"] != args.seed] + runs
    report = {
        "inputs": sum(one["inputs"] for one in runs), "failures": sum(one["failures"] for one in runs),
        "corpus": {name: len(corpus(name)) for name in names}, "runs": runs,
    }  # fmt: skip
    if keeps:
        RESULTS.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
