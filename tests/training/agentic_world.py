"""A corner of the mini world: the shipped policy and encoder, 500 passages, questions that these can answer. Made in a second."""

import json
from pathlib import Path

from bridge_jax.data.corpora import corpus_path
from bridge_jax.data.qa import load_questions

PASSAGES = 500

CONFIG = """
import importlib.util

spec = importlib.util.spec_from_file_location("mini", {mini!r})
mini = importlib.util.module_from_spec(spec)
spec.loader.exec_module(mini)


def get_config():
    c = mini.get_config()
    c.index.corpus = {corpus!r}
    c.data.train = ({questions!r},)
    c.data.weights = ()
    c.data.eval = ({questions!r},)
    c.data.eval_limit = 8
    c.rollout.batch_groups = 4
    c.grpo.group_size = 2
    c.grpo.minibatch_questions = 4
    c.grpo.microbatch = 8
    c.agentic.questions = 16
    c.agentic.candidates = 6
    c.agentic.negatives = 4
    c.agentic.batch = 4
    c.agentic.microbatch = 4
    c.agentic.epochs = 2
    c.credit.turns_per_batch = 8
    c.train.questions = 4
    c.train.steps = 2
    c.train.checkpoint_every = 1
    c.train.log_rollouts_every = 1
    return c
"""


def write(folder: Path) -> Path:
    """corpus.jsonl, questions.jsonl and config.py; returns the config's path."""
    lines = Path(corpus_path("mini")).read_text(encoding="utf-8").split("\n")[:PASSAGES]
    (folder / "corpus.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    known = {json.loads(line)["id"] for line in lines}
    chosen = [
        question
        for name in ("one_hop", "two_hop")
        for question in [q for q in load_questions(f"mini/{name}", "train") if set(q.gold_passage_ids) <= known][:20]
    ]
    with (folder / "questions.jsonl").open("w", encoding="utf-8") as file:
        for q in chosen:
            row = {"id": q.id, "question": q.question, "golden_answers": list(q.golds)}
            file.write(json.dumps(row | {"metadata": {"gold_ids": list(q.gold_passage_ids)}}) + "\n")
    path = folder / "config.py"
    parts = {"corpus": folder / "corpus.jsonl", "questions": folder / "questions.jsonl"}
    parts["mini"] = Path(__file__).parents[2] / "configs" / "mini.py"
    path.write_text(CONFIG.format(**{name: str(part) for name, part in parts.items()}), encoding="utf-8")
    return path
