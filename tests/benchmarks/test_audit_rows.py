"""The audit of logged rollouts is the audit of the rollouts themselves."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from audit_rows import rows_of
from credit_audit import over_seeds

from bridge_jax.training.credit_audit import audit, summarise
from bridge_jax.training.episode_metrics import rollout_rows
from bridge_jax.training.next_action import TurnCredit

TAU = 0.5


class Corpus:
    def __getitem__(self, row):
        return SimpleNamespace(id=f"p{row}", title=f"title {row}")

    def row_of(self, passage_id):
        return int(passage_id[1:])


def make(seed, golds, gold_ids, turns):
    rng = np.random.default_rng(seed)
    question = SimpleNamespace(id=f"q{seed}", dataset="d", question="?", golds=golds, gold_passage_ids=gold_ids)
    made = []
    for _ in range(turns):
        rows, scores = rng.permutation(9)[:6].astype(np.int32), np.sort(rng.normal(size=6).astype(np.float32))[::-1]
        rows[5] = -1
        made.append(SimpleNamespace(query="q", rows=rows, scores=scores, shown=3, error=None))
    empty = {"sample": 0, "answer": "a", "status": "answered", "generated": np.ones(3, bool), "trace": []}
    return SimpleNamespace(question=question, turns=made, **empty)


def test_logged_rows_equal_the_audit():
    cases = [(("Oslo",), ("p1", "p2"), 2), (("x",), ("p8",), 0)]
    cases += [(("yes",), ("p3", "p4"), 2), (("No.",), ("p0",), 1), (("x",), (), 2)]
    episodes = [make(seed, *case) for seed, case in enumerate(cases * 4)]
    rng, credits = np.random.default_rng(1), []
    for i, episode in enumerate(episodes):
        for t, turn in enumerate(episode.turns):
            kind = ["answer", "next_action", "both", "masked", None][(i + t) % 5]
            if kind is not None:
                likelihood = None if kind == "masked" else np.where(turn.rows >= 0, rng.normal(size=6), -np.inf).astype(np.float32)
                author = "own" if kind == "both" else "sibling" if kind == "next_action" else None
                credits.append(TurnCredit(i, t, turn, kind, None, author, likelihood))
    advantages = np.where(np.arange(len(episodes)) % 3 == 0, 0.0, 0.5).astype(np.float32)
    scores, reasons = np.zeros(len(episodes)), [""] * len(episodes)
    by_turn = {(credit.episode, credit.number): credit for credit in credits}
    logged = rollout_rows(7, episodes, scores, reasons, advantages, Corpus(), by_turn, TAU)
    found = rows_of([json.loads(json.dumps(row)) for row in logged])
    wanted = audit(episodes, SimpleNamespace(credits=credits), advantages, Corpus(), TAU)
    assert len(found) == len(wanted) > 15
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.pop("step") == 7
        assert ours == pytest.approx(theirs, rel=1e-5, nan_ok=True)


def test_means_over_seeds_keep_what_every_seed_has():
    row = {"turn": 1, "yes_no": 0, "hop": 0, "golds": 0} | dict.fromkeys(
        ("credit_answer", "credit_next_action", "masked", "own_span", "sibling_span"), 0
    )
    measures = (
        "zero_advantage", "p_entropy", "p_max", "w_max", "gold_in_candidates", "p_gold", "w_gold", "argmax_p_gold", "argmax_l_gold",
        "argmax_w_gold",
    )  # fmt: skip
    one, two = ({**row, **dict.fromkeys(measures, value)} for value in (0.0, 1.0))
    found = over_seeds([summarise([one]), summarise([two, {**two, "turn": 2}])])
    assert set(found) == {"all", "turn1", "other_answers"}
    assert found["all"]["turns"] == 3
    assert found["all"]["w_max"] == {"mean": 0.5, "min": 0.0, "max": 1.0}
