"""Agentic-R killed with SIGKILL in one stage after the other: does it go on to the same files, numbers and weights?

    python benchmarks/agentic_kill.py      # some four minutes of two idle cores

A run in miniature (the mini world's policy and encoder, 500 of its passages, two rounds) to its end; then a second one that is
killed as soon as it has written something of each stage named in SIGNS, and started again with the same command. Compared: every
file of both rounds (seconds aside), the metrics of all steps (clocks aside), the exported policy and encoder, byte for byte. Writes
results/agentic_kill.json.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from machine import about

from bridge_jax.data.corpora import corpus_path
from bridge_jax.data.qa import load_questions
from bridge_jax.errors import main_guard
from bridge_jax.files import write_text
from bridge_jax.training.metrics import read_metrics

HOME = Path(__file__).parent.parent
PASSAGES = 500
OVERRIDES = {
    "method.name": "agentic_r", "data.weights": "()", "data.eval_limit": 8, "rollout.batch_groups": 4, "grpo.group_size": 2,
    "grpo.minibatch_questions": 4, "grpo.microbatch": 8, "agentic.questions": 16, "agentic.candidates": 6, "agentic.negatives": 4,
    "agentic.batch": 4, "agentic.microbatch": 4, "agentic.epochs": 2, "credit.turns_per_batch": 8, "train.questions": 4,
    "train.steps": 2, "train.checkpoint_every": 1, "train.log_rollouts_every": 1,
}  # fmt: skip
ROUND_1, ROUND_2 = "agentic_r/round_1", "agentic_r/round_2"
# In order of time: (stage, one of these is there). A stage that ends between two looks is killed right behind its end.
SIGNS = (
    ("local", (f"{ROUND_1}/local.parts/000000.json", f"{ROUND_1}/local.jsonl")),
    ("global", (f"{ROUND_1}/global.parts/000001.json", f"{ROUND_1}/global.jsonl")),
    ("encoder training", (f"{ROUND_1}/encoder_training/metrics.jsonl",)),
    ("index", (f"{ROUND_1}/index/building.json", f"{ROUND_1}/index/manifest.json")),
    ("agent training", ("rollouts/step_000001.jsonl",)),
    ("round 2, global", (f"{ROUND_2}/global.parts/000000.json", f"{ROUND_2}/global.jsonl")),
)
CLOCKS = ("time/", "goodput/", "compilations/", "rollout/compilations", "rollout/tokens_per_second")


def write_world(folder: Path) -> dict[str, str]:
    """corpus.jsonl and questions.jsonl, with gold passages in the corpus -> the overrides that use them."""
    lines = Path(corpus_path("mini")).read_text(encoding="utf-8").split("\n")[:PASSAGES]
    corpus, questions = folder / "corpus.jsonl", folder / "questions.jsonl"
    corpus.write_text("\n".join(lines) + "\n", encoding="utf-8")
    known = {json.loads(line)["id"] for line in lines}
    with questions.open("w", encoding="utf-8") as file:
        for name in ("one_hop", "two_hop"):
            for q in [q for q in load_questions(f"mini/{name}", "train") if set(q.gold_passage_ids) <= known][:20]:
                row = {"id": q.id, "question": q.question, "golden_answers": list(q.golds)}
                file.write(json.dumps(row | {"metadata": {"gold_ids": list(q.gold_passage_ids)}}) + "\n")
    return {"index.corpus": str(corpus), "data.train": str(questions), "data.eval": str(questions)}


class Run:
    """A command that can be killed and started again."""

    def __init__(self, folder: Path, name: str, overrides: dict):
        self.workdir, self.log = folder / name, folder / f"{name}.log"
        words = [f"--config.{field}={value}" for field, value in overrides.items()]
        self.command = [sys.executable, "-m", "bridge_jax.train", "--config=configs/mini.py", f"--workdir={self.workdir}", *words]
        self.environment = {
            "BRIDGE_JAX_CACHE": str(folder / "cache"),
            "JAX_COMPILATION_CACHE_DIR": str(folder / "jax"),
        } | os.environ

    def start(self) -> subprocess.Popen:
        with self.log.open("a") as log:
            return subprocess.Popen(self.command, cwd=HOME, env=self.environment, stdout=log, stderr=log)

    def kill_at(self, paths: tuple[str, ...]) -> None:
        process = self.start()
        while not any((self.workdir / path).exists() for path in paths):
            if process.poll() is not None:
                raise SystemExit(f"{self.workdir.name} ended before {paths[0]}\n{self.log.read_text()[-3000:]}")
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.wait()

    def finish(self) -> None:
        if self.start().wait():
            raise SystemExit(f"{self.workdir.name} failed\n{self.log.read_text()[-3000:]}")

    def contents(self) -> dict[str, object]:
        """What must be the same, by name."""
        found: dict[str, object] = {}
        for path in sorted(self.workdir.rglob("*")):
            name = str(path.relative_to(self.workdir))
            if not path.is_file() or not name.startswith(("agentic_r/", "policy/", "retriever/")) or name.endswith(".lock"):
                continue
            if name.endswith("summary.json"):
                stages = json.loads(path.read_text())
                found[name] = {stage: {k: v for k, v in facts.items() if k != "seconds"} for stage, facts in stages.items()}
            elif not name.endswith(("config.json", "manifest.json")):  # these name the folder
                found[name] = path.read_bytes()
        for row in read_metrics(self.workdir / "metrics.jsonl"):
            found[f"metrics of step {row['step']}"] = {k: v for k, v in row.items() if not k.startswith(CLOCKS)}
        return found


@main_guard
def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="agentic-kill-") as folder:
        overrides = OVERRIDES | write_world(Path(folder))
        whole, killed = (Run(Path(folder), name, overrides) for name in ("whole", "killed"))
        whole.finish()
        for stage, paths in SIGNS:
            killed.kill_at(paths)
            print(f"killed in: {stage}", file=sys.stderr, flush=True)
        killed.finish()
        a, b = whole.contents(), killed.contents()
        differ = sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))
        summary = json.loads((whole.workdir / ROUND_1 / "summary.json").read_text())
    result = {
        "machine": about(),
        "killed_in": [stage for stage, _ in SIGNS],
        "compared": len(a),
        "differ": differ,
        "turns": summary["candidates"]["rows"],
        "completions": summary["global"]["completions"],
        "pairs": summary["encoder_training"]["pairs"],
        "seconds": time.monotonic() - began,
    }
    write_text(HOME / "benchmarks" / "results" / "agentic_kill.json", json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    if differ:
        raise SystemExit(f"not the same: {', '.join(differ)}")


if __name__ == "__main__":
    sys.exit(main())
