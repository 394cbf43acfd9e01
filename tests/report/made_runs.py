"""Run folders as `train` leaves them, made of nothing: for the report and its page."""

import json
from pathlib import Path

EVIL = '<script>alert("x")</script> & <answer>'
# What a question, a passage or a policy may hold to break out of a page, or to turn the text around it.
HOSTILE = (
    """</script><script>document.title='broken'</script><img src=x onerror="document.title='broken'"> \u202eevil <!-- ' ` ${x}"""
)


def document(n, shown=False, gold=False, scored=True, title=None):
    found = {"id": f"p{n}", "title": title or f"Passage {n}", "score": 0.9 - n / 100, "p": 1 / (n + 2)}
    found |= {"l": -float(n) - 0.5, "w": 0.75 if gold else 0.01} if scored else {}
    return found | {"shown": shown, "gold": gold}


def rollout(step, question, sample, right, text=None, candidates=12, scored=True, dataset="two_hop"):
    """One search of `candidates` passages, of which the first 3 are shown and number 1 is gold."""
    text = text or f"Who wrote book {question}?"
    documents = [document(n, n < 3, n == 1, scored) for n in range(candidates)]
    answer = f"<answer> author {question} </answer>"
    return {
        "step": step,
        "id": f"q{question}",
        "dataset": dataset,
        "question": text,
        "golds": [f"author {question}"],
        "gold_passage_ids": ["p1"],
        "sample": sample,
        "reward": float(right),
        "reason": "correct" if right else "wrong answer",
        "answer": f"author {question}" if right else "nobody",
        "status": "answered",
        "advantage": 0.5 if right else -0.5,
        "generated_tokens": 20,
        "trace": [
            {"kind": "generated", "text": f"<think> I look it up </think>\n<search> book {question} </search>"},
            {"kind": "information", "text": f"<information>Doc 1(Title: Book) by author {question}.</information>"},
            {"kind": "generated", "text": answer if right else "<answer> nobody </answer>"},
        ],
        "turns": [
            {
                "query": f"book {question}",
                "error": None,
                "scored": scored,
                "credit": "answer" if scored else None,
                "span": None,
                "documents": documents,
            }
        ],
    }


def prediction(question, right, dataset="two_hop"):
    return {
        "id": f"e{question}",
        "dataset": dataset,
        "question": f"Where is town {question}?",
        "golds": ["here"],
        "prediction": "here" if right else None,
        "status": "answered" if right else "no_answer",
        "reason": "correct" if right else "no answer",
        "em": float(right),
        "turns": [{"query": f"town {question}", "ids": ["p1", "p2"], "scores": [0.5, 0.25], "shown": 1}],
        "gold_passage_ids": ["p2"],
        "trace": [{"kind": "generated", "text": f"<search> town {question} </search>"}],
    }


def metrics(em):
    row = {"n": 40, "em": em, "em_low": em - 0.1, "em_high": em + 0.1, "f1": em, "recall@3": None, "searches": 1.5}
    return row


def write_lines(path: Path, rows) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def run_folder(folder: Path, *, method="bridge", steps=(1, 2, 3), rollouts=None, predictions=4, group=2, name="two_hop"):
    """`rollouts`: {step: rows}; None: of every step two questions, the first sample right from step 2 on."""
    if rollouts is None:
        rollouts = {
            step: [rollout(step, 2 * step + q, s, right=step > 1 and s == 0) for q in range(2) for s in range(group)]
            for step in steps
        }
    folder.mkdir(parents=True)
    fields = {"method.name": method, "policy.model": EVIL, "train.seed": 0, "grpo.group_size": group, "credit.tau": 0.5}
    (folder / "config.json").write_text(json.dumps(fields))
    rows = [
        {"step": n, "reward/mean": n / 10, "policy/kl": None if n == 2 else 0.1, "time/rollout": 2.0, "time/step": 3.0}
        for n in steps
    ]
    write_lines(folder / "metrics.jsonl", rows)
    for step, em in ((0, 0.25), (steps[-1], 0.5)):
        row = metrics(em)
        found = {"step": step, "datasets": {name: row, "one_hop": row}, "averages": {"multi_hop": row, "overall": row}}
        found["predictions"] = {name: [prediction(q, right=step > 0 and q % 2 == 0, dataset=name) for q in range(predictions)]}
        write_lines(folder / f"eval/step_{step:06d}.json", [found])
    (folder / "eval/step_000003_other_test_all.json").write_text("{}")  # of the evaluate command: not one of the run's own
    for step, lines in rollouts.items():
        write_lines(folder / f"rollouts/step_{step:06d}.jsonl", lines)
    return folder
