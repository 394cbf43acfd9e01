"""What a run's report costs to write, and how its page behaves: `python benchmarks/report_page.py`.

A made-up run of the paper's shape: 3 searches of 40 candidates a rollout, titles and texts of the embedded Wikipedia passages, 200
steps. Writes results/report_page.json: seconds and bytes of the light and of the whole page; in headless Chromium (on the PATH,
with its driver) the seconds until the rollouts can be used, and of filtering, of opening one, of comparing two.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import resource
import statistics
import tempfile
import time
from pathlib import Path

import chromium
from arguments import at_least
from machine import about

from bridge_jax.data import embedded
from bridge_jax.report import page

RESULTS = Path(__file__).parent / "results" / "report_page.json"
STEPS, GROUP, SEARCHES, CANDIDATES = 200, 5, 3, 40
KEYED = """
const began = performance.now(), words = document.querySelector("[name=words]");
words.value = arguments[0];
words.dispatchEvent(new Event("input", {bubbles: true}));
return performance.now() - began;
"""


def passages() -> list[tuple[str, str, str]]:
    """(id, title, text)"""
    with gzip.open(Path(embedded.__file__).parent / "corpus.jsonl.gz", "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    return [(row["id"], *(part.strip('"') for part in row["contents"].split("\n", 1))) for row in rows]


def rollout(step: int, question: int, sample: int, known: list, draw: random.Random) -> dict:
    """Candidates of a group's rollouts are the same for the most part, as queries about one question find them."""
    pool = random.Random(f"{step}-{question}").sample(known, 3 * CANDIDATES)
    turns, trace = [], []
    for search in range(SEARCHES):
        found = draw.sample(pool[search * 20 : search * 20 + 2 * CANDIDATES], CANDIDATES)
        query = " ".join(draw.choice(found)[2].split()[:8])
        p, w = (sorted((draw.random() ** 6 for _ in found), reverse=True) for _ in range(2))
        documents = [
            {"id": id, "title": title, "score": 0.9 - draw.random() / 3, "p": a / sum(p), "l": -40 * draw.random(), "w": b / sum(w)}
            | {"shown": rank < 3, "gold": rank == 1}
            for rank, ((id, title, _), a, b) in enumerate(zip(found, p, w, strict=True))
        ]
        turns.append({"query": query, "error": None, "scored": True, "credit": "answer", "span": None, "documents": documents})
        thought = " ".join(draw.choice(known)[2].split()[:40])
        read = "\n".join(f"Doc {n + 1}(Title: {title}) {text}" for n, (_, title, text) in enumerate(found[:3]))
        trace.append({"kind": "generated", "text": f"<think> {thought} </think>\n<search> {query} </search>"})
        trace.append({"kind": "information", "text": f"\n\n<information>{read}</information>\n\n"})
    right = draw.random() < 0.4
    trace.append({"kind": "generated", "text": f"<think> I know it. </think>\n<answer> {pool[0][1]} </answer>"})
    return {
        "step": step,
        "id": f"{step}-{question}",
        "dataset": ("nq", "hotpotqa")[question % 2],
        "question": f"What about {pool[0][1]} in {step}-{question}?",
        "golds": [pool[0][1]],
        "sample": sample,
        "reward": float(right),
        "reason": "correct" if right else "wrong answer",
        "answer": pool[0][1],
        "advantage": draw.gauss(0, 1),
        "trace": trace,
        "turns": turns,
    }


def write_run(folder: Path, rollouts: int) -> int:
    """A run of so many rollouts; returns the bytes of their files."""
    known, draw = passages(), random.Random(0)
    (folder / "rollouts").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"method.name": "bridge", "grpo.group_size": GROUP}))
    names = {name for lines in page.CHARTS.values() for name in lines.values()} | {"time/step"}
    rows = [{"step": step, **{name: draw.random() for name in names}} for step in range(1, STEPS + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    questions, size = max(1, rollouts // STEPS // GROUP), 0
    for step in range(1, STEPS + 1):
        lines = [rollout(step, q, s, known, draw) for q in range(questions) for s in range(GROUP)]
        path = folder / "rollouts" / f"step_{step:06d}.jsonl"
        path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
        size += path.stat().st_size
    return size


def timed(work) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began


def in_browser(path: Path) -> dict:
    if chromium.missing():
        return {"left out": chromium.missing()}
    with chromium.Page() as window:
        usable = [window.open(path) for _ in range(3)]
        filtered = [window.do(KEYED, words) for words in ("19", "hotpotqa 7", "what about", "")]
        opened = []
        for key in ("G", "g", "j"):
            number = window.do("return document.querySelector('.episode').dataset.number")
            began = time.monotonic()
            window.do("document.activeElement.blur()")
            window.press(key)
            window.until(f"return document.querySelector('.episode').dataset.number !== '{number}'")
            opened.append(time.monotonic() - began)
        compared = timed(lambda: (window.press("c"), window.until("return document.querySelectorAll('.episode').length === 2")))
        heap = window.do("return performance.memory.usedJSHeapSize")
        return {
            "seconds until usable": round(statistics.median(usable), 2),
            "milliseconds to filter, most": round(max(filtered), 1),
            "seconds to open another, most": round(max(opened), 2),
            "seconds to compare": round(compared, 2),
            "MB of JavaScript's heap": round(heap / 2**20),
            "console": window.console(),
        }


def measure(rollouts: int) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        raw = write_run(run, rollouts)
        light = statistics.median(timed(lambda: page.write_report(run, light=True)) for _ in range(5))
        light_bytes = (run / "report.html").stat().st_size
        whole = timed(lambda: page.write_report(run))
        text = (run / "report.html").read_text(encoding="utf-8")
        return {
            "rollouts": rollouts,
            "MB of their files": round(raw / 2**20, 1),
            "light page": {"milliseconds": round(1000 * light, 1), "kB": round(light_bytes / 1000)},
            "whole page": {
                "seconds": round(whole, 1),
                "MB": round(len(text.encode()) / 2**20, 1),
                "left out": "are here, chosen evenly" in text,
            },
            "browser": in_browser(run / "report.html"),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rollouts", type=at_least(STEPS * GROUP), nargs="+", default=[10_000, 40_000], metavar="N")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    cases = [measure(rollouts) for rollouts in args.rollouts]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    found = {
        "machine": about(),
        "steps": STEPS,
        "searches": SEARCHES,
        "candidates": CANDIDATES,
        "cases": cases,
        "MB at most": round(peak),
    }
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
